"""`specgen chat`: a conversation on a terminal.

Knows: the order of things (flags, transcript, model, lines in, replies out). Does not know: how any is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from specgen.cli.console import Console, is_terminal
from specgen.cli.flags import DecodingFlags, ModelFlags, SamplingFlags, on_command_line
from specgen.cli.prompt import argument_text
from specgen.cli.run import (
    apply_output_flags,
    check_draft,
    find_draft,
    find_model,
    load_options,
    load_session,
    run_options,
    sampling_choices,
)
from specgen.cli.shape import ConstraintFlags, Shape, ThinkFlags, reads_stdin
from specgen.errors import ExitCode, SpecgenError, UsageError
from specgen.options import RunOptions, SamplingOptions, check_choice
from specgen.paths import data_dir

if TYPE_CHECKING:
    from specgen.chat.chat import OnFull
    from specgen.chat.records import Record
    from specgen.chat.transcript import Transcript
    from specgen.cli.lines import LineReader
    from specgen.cli.talk import Talk
    from specgen.registry import ModelRef
    from specgen.session import Session

ON_FULL = ("stop", "slide", "summarise-oldest")
_chat = partial(typer.Option, rich_help_panel="Conversation", show_default=False)
_output = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """Which conversation, and how it goes."""

    system: Annotated[str | None, _chat("--system", metavar="TEXT", help="System message.")] = None
    resume: Annotated[bool, _chat("--continue", help="Go on with the latest conversation.")] = False
    session: Annotated[
        str | None, _chat("--session", metavar="NAME", help="Go on with that conversation, or begin it.")
    ] = None
    on_full: Annotated[
        str,
        _chat(
            "--on-full",
            metavar="|".join(ON_FULL),
            help="When the context is full: end there, leave out the oldest messages, or a summary in their place.",
        ),
    ] = "stop"
    markdown: Annotated[
        bool, _chat("--markdown", help="Show replies when they are complete, with Markdown rendered.")
    ] = False


@dataclass(frozen=True, slots=True)
class DisplayFlags:
    """How it looks."""

    quiet: Annotated[bool, _output("--quiet/--no-quiet", "-q", help="No status line, summary, notes, highlights.")] = (
        False
    )
    color: Annotated[
        str, _output("--color", metavar="auto|always|never", help="auto: on a terminal without NO_COLOR.")
    ] = "auto"
    debug: Annotated[bool, _output("--debug", help="Show the traceback of an error.")] = False


def chat(
    context: typer.Context,
    chat: ChatFlags,
    model: ModelFlags,
    sampling: SamplingFlags,
    decoding: DecodingFlags,
    constraint: ConstraintFlags,
    think: ThinkFlags,
    display: DisplayFlags,
) -> int:
    """Talk with a model; the conversation is kept and can be resumed.

    specgen chat
    specgen chat --continue
    specgen chat --session recipes --system "You are a cook."
    specgen chat -m qwen3-4b-awq --think hide --on-full slide
    """
    console = Console.of(context)
    apply_output_flags(console, display)
    _check_terminal(console)
    check_choice("--on-full", chat.on_full, ON_FULL)
    if reads_stdin(constraint):
        raise UsageError("a chat reads standard input itself", hint="put the schema into a file")
    chosen = sampling_choices(sampling)
    shape = Shape.of(constraint, think, None)
    wanted = shape.applied(run_options(decoding, SamplingOptions(**chosen)))  # a bad value is told before all else
    system = None if chat.system is None else argument_text("--system", chat.system)
    transcript, records = _saved(chat)
    try:
        ref = find_model(_resumed_model(model, records))
        options = replace(wanted, sampling=SamplingOptions(**{**ref.entry.sampling, **chosen}))
        draft = find_draft(model, ref)
        check_draft(context, options, draft, load_options(model))
        session = load_session(console, ref, load_options(model), draft)
    except BaseException:
        transcript.close(remove=not records)
        raise
    begin = _Begin(chat, model, options, _explicit(context, constraint), model_word(ref))
    talk = begin.talk(console, session, (transcript, records))
    if system is not None and system != talk.chat.conversation.system:
        talk.chat.set_system(system)
    try:
        return _talk(talk, bool(records))
    finally:
        talk.chat.close()


def _check_terminal(console: Console) -> None:
    if not (is_terminal(console.stdin) and is_terminal(console.stdout)):
        raise UsageError("a chat needs a terminal", hint='for a pipe use `specgen run`, e.g. specgen run -p "Hello"')


def _saved(flags: ChatFlags) -> tuple[Transcript, list[Record]]:
    from specgen.chat.transcript import Transcript, path_of, saved_names

    if flags.session is not None and flags.resume:
        raise UsageError("--continue and --session exclude each other", hint="--session NAME resumes NAME")
    if flags.session is not None:
        return Transcript.open(path_of(flags.session))
    if flags.resume:
        names = saved_names()
        if not names:
            raise UsageError("there is no conversation to continue", hint="begin one with `specgen chat`")
        return Transcript.open(path_of(names[0]))
    name = time.strftime("%Y-%m-%d-%H%M%S")
    taken = set(saved_names())
    names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 3))]
    return Transcript.open(path_of(next(one for one in names if one not in taken)))


def _resumed_model(flags: ModelFlags, records: list[Record]) -> ModelFlags:
    """The conversation's own model, unless another one is asked for."""
    from specgen.chat.conversation import Conversation

    known = Conversation.of(records).model
    return replace(flags, model=known) if flags.model is None and known else flags


def _explicit(context: typer.Context, constraint: ConstraintFlags) -> frozenset[str]:
    """Settings that this command line gives, which win over those of a resumed conversation."""
    from specgen.chat.settings import KEPT

    given = {name for name in KEPT if on_command_line(context, name)}
    return frozenset(given | ({"constraint"} if constraint != ConstraintFlags() else set()))


def model_word(ref: ModelRef) -> str:
    """What --model would say for it, from any folder."""
    if ref.registered:
        return ref.name
    path = Path(ref.entry.name).expanduser()
    return str(path.absolute()) if path.exists() else ref.entry.name


@dataclass(frozen=True, slots=True)
class _Begin:
    """What a talk is begun with."""

    chat: ChatFlags
    model: ModelFlags
    options: RunOptions
    explicit: frozenset[str]
    word: str

    def talk(self, console: Console, session: Session, saved: tuple[Transcript, list[Record]]) -> Talk:
        from specgen.chat.chat import Chat, Setup
        from specgen.cli.talk import Talk

        setup = Setup(self.options, cast("OnFull", self.chat.on_full), self.word, self.explicit)
        begun = Chat.begin(session, saved, setup, console.note)
        talk = Talk(console, begun, partial(self._load, console), self.chat.markdown)
        begun.notes = talk.note
        return talk

    def _load(self, console: Console, name: str) -> tuple[Session, str]:
        flags = replace(self.model, model=name, draft=None)
        ref = find_model(flags)
        return load_session(console, ref, load_options(flags), find_draft(flags, ref)), model_word(ref)


def _talk(talk: Talk, resumed: bool) -> int:
    """Lines in, replies out, until the user leaves."""
    from specgen.cli.chat_commands import COMMANDS
    from specgen.cli.lines import CommandCompleter, LineReader, PrivateHistory

    completer = CommandCompleter(list(COMMANDS), {name: command.words for name, command in COMMANDS.items()})
    reader = LineReader(PrivateHistory(data_dir() / "chat_history"), completer)
    if resumed:
        talk.recall()
    else:
        talk.note(f"{talk.chat.session.loaded.name}: /help lists commands, Ctrl-D leaves")
    interrupted = False
    while not talk.leaving:
        try:
            line = _read(talk, reader)
        except EOFError:
            break
        except KeyboardInterrupt:
            if interrupted:
                return int(ExitCode.INTERRUPTED)
            interrupted = True
            talk.note("Ctrl-C again leaves; the conversation is saved")
            continue
        interrupted = False
        _obey(talk, line)
    return int(ExitCode.OK)


def _read(talk: Talk, reader: LineReader) -> str:
    draft, talk.draft = talk.draft, ""
    line = reader.read(draft)
    if reader.history.trouble is not None:
        talk.once(f"lines are not remembered: {reader.history.trouble}")
    return line


def _obey(talk: Talk, line: str) -> None:
    from specgen.cli.chat_commands import perform

    if not line.strip():
        return
    try:
        if line.startswith("/"):
            perform(talk, line)
        else:
            talk.say(line)
    except SpecgenError as error:
        talk.console.error(error.message, error.hint)

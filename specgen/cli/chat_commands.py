"""The slash commands of `specgen chat`.

Knows: their names, what they take, what they do to a talk. Does not know: how lines are read or replies shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.chat import settings
from specgen.chat.chat import Chat, Setup
from specgen.chat.export import FORMATS, exported
from specgen.chat.transcript import Transcript, path_of, saved_names
from specgen.cli.outfile import OutFile
from specgen.cli.prompt import read_file
from specgen.cli.report import stats_tables, table
from specgen.cli.talk import Talk
from specgen.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    act: Callable[[Talk, str], None]  # with what stands behind the name
    words: Callable[[str], Sequence[str]] = lambda before: ()  # for completion

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def perform(talk: Talk, line: str) -> None:
    """One line that begins with a slash. UsageError for a command that does not exist or cannot be done."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(f"there is no command {name}", hint=nearest(name, COMMANDS) or "/help lists them")
    command.act(talk, argument.strip())


def _help(talk: Talk, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    keys = "Enter sends, Alt-Enter or a backslash before Enter begins a new line. Ctrl-C stops a reply and keeps it;"
    talk.show("\n".join([*lines, "", keys, "twice at the prompt it leaves, as Ctrl-D does."]))


def _system(talk: Talk, argument: str) -> None:
    if not argument:
        talk.show(talk.chat.conversation.system or "there is no system message")
        return
    talk.chat.set_system(None if argument == "none" else argument)


def _set(talk: Talk, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not argument:
        talk.show("\n".join(f"{one} {settings.shown(talk.chat.options, one)}" for one in settings.NAMES))
    elif not value.strip():
        talk.show(f"{name} {settings.shown(talk.chat.options, settings.known(name))}")
    else:
        talk.chat.use(settings.changed(talk.chat.options, name, value.strip()))


def _set_words(before: str) -> Sequence[str]:
    return settings.words_of(before) if before else settings.NAMES


def _stats(talk: Talk, argument: str) -> None:
    used, limit = talk.chat.context_tokens
    console = talk.console.rich()
    if talk.outcome is not None:
        for one in stats_tables(talk.outcome):
            console.print(one)
    rows = {
        f"turn {number}": f"{turn.prefilled} read, {turn.reused} reused, {turn.completed} written"
        for number, turn in enumerate(talk.turns, start=1)
    }
    console.print(table("Conversation, in tokens", {**rows, "context": f"{used} of {limit}"}))


def _undo(talk: Talk, argument: str) -> None:
    talk.note(f"taken back: {_short(talk.chat.undo().user)}")


def _retry(talk: Talk, argument: str) -> None:
    talk.reply(talk.chat.retry)


def _edit(talk: Talk, argument: str) -> None:
    last = talk.chat.undo()
    if argument:
        talk.say(argument)
    else:
        talk.draft = last.user


def _save(talk: Talk, argument: str) -> None:
    if argument:
        talk.chat.transcript.rename(path_of(argument))
    talk.note(f"saved as it grows, in {talk.chat.transcript.path}")


def _load(talk: Talk, argument: str) -> None:
    if not argument:
        talk.show("\n".join(saved_names()) or "nothing is saved yet")
        return
    path = path_of(argument)
    if not path.exists():
        raise UsageError(f"there is no conversation {argument!r}", hint=nearest(argument, saved_names()))
    chat = talk.chat
    setup = Setup(chat.options, chat.on_full, chat.conversation.model)
    saved = Transcript.open(path)
    talk.chat = Chat.begin(chat.session, saved, setup, talk.note)
    chat.close()
    talk.turns.clear()
    talk.outcome = None
    talk.recall()


def _export(talk: Talk, argument: str) -> None:
    if not argument:
        raise UsageError("/export wants a file name", hint=f"it ends in {' or '.join(FORMATS)}")
    path = Path(argument).expanduser()
    text = exported(talk.chat.conversation, path.suffix)
    if path.exists():
        raise UsageError(f"{path} exists", hint="choose another name")
    OutFile(str(path)).write(text.encode("utf-8", "replace"))
    talk.note(f"written to {path}")


def _model(talk: Talk, argument: str) -> None:
    if not argument:
        talk.show(talk.chat.conversation.model)
        return
    session, model = talk.load(argument)
    talk.chat.use_model(session, model)


def _file(talk: Talk, argument: str) -> None:
    if not argument:
        raise UsageError("/file wants the path of a text file")
    path = Path(argument).expanduser()
    text = read_file(str(path), "the file")
    talk.attached.append(f"{path.name}:\n\n{text}")
    talk.note(f"{path.name} ({len(text)} characters) goes before the next message")


def _file_words(before: str) -> Sequence[str]:
    return sorted(f"{path}/" if path.is_dir() else str(path) for path in Path().iterdir())[:200]


def _clear(talk: Talk, argument: str) -> None:
    talk.chat.clear()
    talk.attached.clear()
    talk.note("a new conversation, with the same model and settings")


def _quit(talk: Talk, argument: str) -> None:
    talk.leaving = True


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _names(before: str) -> Sequence[str]:
    return saved_names()


COMMANDS = {
    command.name: command
    for command in (
        Command("/help", "what can be said here", _help),
        Command("/system [TEXT|none]", "show, set or remove the system message", _system),
        Command("/set [NAME [VALUE]]", "show or change sampling, gamma, proposer, accept, think", _set, _set_words),
        Command("/stats", "the last reply, and tokens read in each turn", _stats),
        Command("/undo", "take the last message and its reply back", _undo),
        Command("/retry", "another reply to the last message", _retry),
        Command("/edit [TEXT]", "change the last message and ask again", _edit),
        Command("/save [NAME]", "where it is kept; under a name of your own", _save),
        Command("/load [NAME]", "go on with a saved conversation", _load, _names),
        Command("/export FILE", "write it as Markdown (.md) or JSON lines (.jsonl)", _export),
        Command("/model [NAME|PATH]", "go on with another model", _model),
        Command("/file PATH", "put a text file before the next message", _file, _file_words),
        Command("/clear", "forget the conversation", _clear),
        Command("/quit", "leave (so does Ctrl-D)", _quit),
    )
}

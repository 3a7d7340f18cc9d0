"""What an answer must look like: the flags of constraints and of reasoning, and how their files are read.

Knows: flags, files, standard input. Does not know: grammars (`specgen.text.grammar` checks them, before any model).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, TextIO, cast, get_args

import typer

from specgen.cli.prompt import STDIN, argument_text, read_source
from specgen.errors import UsageError
from specgen.options import ConstraintKind, ConstraintOptions, RunOptions, ThinkName, check_choice

_shape = partial(typer.Option, rich_help_panel="Shape of the answer", show_default=False)


@dataclass(frozen=True, slots=True)
class ConstraintFlags:
    """At most one of them."""

    json_schema: Annotated[
        str | None, _shape("--json-schema", metavar="FILE|-", help="Only JSON that this schema allows, on one line.")
    ] = None
    json_object: Annotated[bool, _shape("--json-object", help="Only a JSON object, whatever is in it.")] = False
    regex: Annotated[
        str | None, _shape("--regex", metavar="TEXT", help="Only text that this regular expression matches as a whole.")
    ] = None
    grammar: Annotated[
        str | None, _shape("--grammar", metavar="FILE", help="Only text of this grammar, in Lark's or GBNF's notation.")
    ] = None


@dataclass(frozen=True, slots=True)
class ThinkFlags:
    """What becomes of a reasoning model's thoughts."""

    think: Annotated[
        str,
        _shape(
            "--think",
            metavar="|".join(get_args(ThinkName)),
            help="Reasoning models: ask for thoughts (on) or for none (off), print them (show), say nothing of them "
            "(hide); auto leaves it to the model, and only `show` prints them.",
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the flags ask for."""

    constraint: ConstraintOptions | None
    think: ThinkName

    @classmethod
    def of(cls, constraint: ConstraintFlags, think: ThinkFlags, stdin: TextIO | None) -> Shape:
        """Files are read, and the grammar checked; UsageError says what is wrong."""
        check_choice("--think", think.think, get_args(ThinkName))
        chosen = _constraint(constraint, stdin)
        if chosen is not None:
            from specgen.text.grammar import compile_grammar

            compile_grammar(chosen)
        return cls(chosen, cast("ThinkName", think.think))

    def applied(self, options: RunOptions) -> RunOptions:
        return replace(options, constraint=self.constraint, think=self.think)


def reads_stdin(flags: ConstraintFlags) -> bool:
    """Whether standard input is the schema, so that no prompt can come from there."""
    return flags.json_schema == STDIN


def _constraint(flags: ConstraintFlags, stdin: TextIO | None) -> ConstraintOptions | None:
    given: list[tuple[ConstraintKind, str]] = []
    if flags.json_schema is not None:
        given.append(("json-schema", flags.json_schema))
    if flags.json_object:
        given.append(("json-object", ""))
    if flags.regex is not None:
        given.append(("regex", argument_text("--regex", flags.regex)))
    if flags.grammar is not None:
        given.append(("grammar", flags.grammar))
    if not given:
        return None
    if len(given) > 1:
        raise UsageError(f"--{given[0][0]} and --{given[1][0]} exclude each other", hint="leave one of them out")
    kind, value = given[0]
    source = read_source(f"--{kind}", value, stdin) if kind in ("json-schema", "grammar") else value
    return ConstraintOptions(kind, source)

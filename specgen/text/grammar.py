"""JSON schemas, regular expressions and grammars, as the library that enforces them wants them (llguidance).

Knows: what a user may write, and how to check it before any model is loaded. Does not know: tokens (`text.constrained`
does), torch.

JSON is written on one line, with a space after commas and colons as Python writes it: white space without bounds lets a
small model put newlines for ever. A schema may choose otherwise (`"x-guidance": {"whitespace_flexible": true,
"item_separator": ",", "key_separator": ":"}`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from specgen.errors import UsageError
from specgen.options import ConstraintOptions

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_CHARS = 1 << 20
MAX_JSON_DEPTH = 200
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = '{"type": "object"}'
_FLAGS = {"json-schema": "--json-schema", "json-object": "--json-object", "regex": "--regex", "grammar": "--grammar"}
_NEEDS_TOKENIZER = "no tokenizer"


class GrammarError(UsageError):
    """A schema, expression or grammar that cannot be used."""


def compile_grammar(options: ConstraintOptions) -> str:
    """The grammar in llguidance's own form; needs no model. GrammarError says where it is wrong."""
    flag = _FLAGS[options.kind]
    if len(options.source) > MAX_SOURCE_CHARS:
        raise GrammarError(f"{flag} has more than {MAX_SOURCE_CHARS} characters")
    grammar = _translated(options, flag)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed and _NEEDS_TOKENIZER not in messages[0]:
        raise GrammarError(f"{flag} cannot be used: {short_message(messages[0])}", hint=_hint(options))
    return grammar


def _translated(options: ConstraintOptions, flag: str) -> str:
    match options.kind:
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(options.source)
        case "grammar":
            try:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(options.source))
            except (GbnfToLarkError, RecursionError) as error:
                raise GrammarError(
                    f"{flag} cannot be used: {short_message(str(error))}", hint=_hint(options)
                ) from error
        case "json-object":
            return llguidance.LLMatcher.grammar_from_json_schema(_ANY_OBJECT, _JSON_STYLE)
        case "json-schema":
            return llguidance.LLMatcher.grammar_from_json_schema(_checked_schema(options.source, flag), _JSON_STYLE)


def _checked_schema(source: str, flag: str) -> str:
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise GrammarError(f"{flag} is not JSON: {error}") from error
    except RecursionError as error:
        raise GrammarError(f"{flag} is nested too deeply") from error
    if not isinstance(schema, dict):
        raise GrammarError(f"{flag} is no JSON object", hint='for example {"type": "object", "properties": {…}}')
    if _depth(schema) > MAX_JSON_DEPTH:
        raise GrammarError(f"{flag} is nested deeper than {MAX_JSON_DEPTH} levels")
    return source


def _depth(value: object) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        inner = [one for one in level if isinstance(one, dict | list)]
        level = [child for one in inner for child in (one.values() if isinstance(one, dict) else one)]
    return depth


def short_message(message: str) -> str:
    """A library's message of many lines as one: what is wrong, without the picture of where."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "|" not in line[:8]]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(told or lines)[:300]


def _hint(options: ConstraintOptions) -> str | None:
    if options.kind == "grammar":
        return "Lark begins at the rule `start`, GBNF at `root`; see llguidance's docs/syntax.md"
    return None

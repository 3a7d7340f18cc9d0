"""Values of the command line without pydantic.

Typer (0.29 on) reads every text and number through pydantic, whose import and schemas take 0.1 s: half of a warm
`specgen run`. Our flags are texts, whole numbers, fractions and lists of texts, which Python itself reads.

Knows: Typer's parameters. Does not know: what flags mean. Other versions of Typer, which have none of this, are left
as they are, and so are parameters of any other type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperCommand

_NAMES = {int: "whole number", float: "number", bool: "yes or no"}


@dataclass(frozen=True, slots=True)
class _Plain:
    """What Typer asks to turn a parameter's text into its value."""

    kind: type

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if param.multiple or param.nargs == -1:
            return () if value is None else [self._read(item, param, ctx) for item in value]
        return None if value is None else self._read(value, param, ctx)

    def _read(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            # A flag is true or false already (Typer reads it by its presence); any other text is none.
            return _flag(value) if self.kind is bool else self.kind(value)
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not a {_NAMES[self.kind]}.", ctx=ctx, param=param) from None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


class PlainCommand(TyperCommand):
    """A command whose values are read by Python."""

    def get_params(self, ctx: Any) -> Any:
        return read_plainly(super().get_params(ctx))


def read_plainly(params: Sequence[Any]) -> Sequence[Any]:
    """The same parameters, read by Python where their type is a plain one."""
    for param in params:
        descriptor = getattr(param, "type_descriptor", None)
        kind = _plain_kind(getattr(descriptor, "annotation", None))
        if kind is not None and getattr(param, "_runtime_param", param) is None:
            param._runtime_param = _Plain(kind)
    return params


def _plain_kind(annotation: Any) -> type | None:
    """str, int, float or bool, alone or in a list; None for any other type."""
    inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    return inner if inner in (str, int, float, bool) else None

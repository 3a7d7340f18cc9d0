"""What an examination finds: facts in sections, for people and for programs.

Knows: that a fact may be a problem. Does not know: what is examined, how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str | int | float | bool | None  # for programs
    shown: str  # for people
    problem: str | None = None  # what to do about it, where it is worth something


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    facts: tuple[Fact, ...]


def plain(name: str, value: str | int | None) -> Fact:
    """A fact that needs no words."""
    return Fact(name, value, str(value))

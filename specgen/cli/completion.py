"""What the shell offers after Tab, beyond Typer's names of commands and flags.

Knows: names of models. Does not know: shells.
"""

from __future__ import annotations

from collections.abc import Iterator


def model_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Known models that begin like `incomplete`, with what they are good for. Silence where the registry is broken:
    what is wrong with it is told by the command itself."""
    from specgen.errors import SpecgenError
    from specgen.registry import load_registry

    try:
        entries = load_registry().entries
    except (SpecgenError, OSError):
        return
    yield from ((name, entry.good_for) for name, entry in entries.items() if name.startswith(incomplete))

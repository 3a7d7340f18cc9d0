"""specgen: exact speculative decoding of quantised language models on one machine.

    from specgen import load

    for piece in load("smollm2-135m").generate("Why is the sky blue?"):
        print(piece, end="")

See `specgen.api`. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.api import Model, load

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """`load` and `Model`, when they are asked for."""
    if name not in ("Model", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specgen import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), "Model", "load"])

"""One launch of a Triton kernel: run it here, or compile it ahead of time for a card that is not here.

Knows: what a launch consists of. Does not know: kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specgen.kernels.aot import CAPABILITIES, AotCase, launch_options


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid, and everything that decides which variant of it is compiled."""

    kernel: Any  # the function under @triton.jit
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # tensors, integers, floats by name
    constants: Mapping[str, Any]  # the constexprs
    num_warps: int = 4
    num_stages: int = 1

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).strip("_")

    def run(self) -> None:
        options = launch_options(self.num_warps, self.num_stages)
        self.kernel[self.grid](**self.arguments, **self.constants, **options)

    def case(self, name: str, capabilities: tuple[int, ...] = CAPABILITIES) -> AotCase:
        """The variant that `run` would compile."""
        options = (self.num_warps, self.num_stages, capabilities)
        return AotCase.of_launch(name, self.kernel, self.arguments, self.constants, options)

"""Where a model is put, and how much memory there is for it.

Knows: that "auto" tries a card first and then the processor, and what of a card's memory a plan may use. Does not know:
models, files, what a plan is made of (memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from specgen.errors import DeviceError, OutOfMemoryError, SpecgenError
from specgen.kernels import select_kernels
from specgen.kernels.base import Kernels
from specgen.kernels.card_memory import is_out_of_memory, release, shortage
from specgen.kernels.cuda import Card, CardLostError, CudaSystem, beside, choose_card
from specgen.kernels.cuda_system import NvidiaSystem
from specgen.machine import processor_name
from specgen.memory import MemoryPlan, Request, budget_bytes
from specgen.options import LoadOptions

GRAPH_BYTES = 192 << 20
"""Of a card's memory, for captured graphs and the kernels' own workspace."""
MARGIN_SHARE = 1 / 64
"""Of all its memory, left alone: a desktop takes more when a window opens, and allocations do not pack tightly."""

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Placement:
    """A card or the processor, with its kernels."""

    kernels: Kernels
    card: Card | None = None
    system: CudaSystem | None = None  # that the card belongs to
    notices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a measurement made here holds for."""
        return processor_name() if self.card is None else f"{self.card.name} {self.card.arch}"

    @property
    def device(self) -> str:
        return "cpu" if self.card is None else self.card.device

    def budget_bytes(self, max_memory_bytes: int | None) -> int | None:
        """What a plan may use here. DeviceError when the card does not answer any more."""
        if self.card is None or self.system is None:
            return budget_bytes(max_memory_bytes)
        try:
            free_bytes, total_bytes = self.system.memory(self.card)
        except CardLostError as error:
            raise DeviceError(f"the {self.card.name} does not answer: {error}", "`nvidia-smi` may say more") from error
        left = max(0, free_bytes - GRAPH_BYTES - int(MARGIN_SHARE * total_bytes))
        return left if max_memory_bytes is None else min(left, max_memory_bytes)


Load = Callable[[Placement, MemoryPlan], Loaded]


def placements(options: LoadOptions, system: CudaSystem | None = None) -> Iterator[Placement]:
    """Where to try, in order: with "auto" the processor comes after a card that does not hold the model.

    DeviceError and UsageError as `choose_card` raises them.
    """
    system = system or NvidiaSystem()
    choice = choose_card(options.device, system)
    notices = (choice.notice,) if choice.notice else ()
    if choice.card is not None:
        try:
            placement = Placement(select_kernels(choice.card, options.threads)[0], choice.card, system)
        except DeviceError as error:
            if options.device != "auto":
                raise
            notices = (f"{beside(choice.card)}: {error.message}",)
        else:
            yield placement
    if options.device not in ("auto", "cpu"):
        return
    kernels, notice = select_kernels(None, options.threads)
    yield Placement(kernels, notices=(*notices, *((notice,) if notice else ())))


def first_that_holds(options: LoadOptions, request: Request, load: Load[Loaded]) -> Loaded:
    """What `load` makes in the first place that holds it.

    Memory that runs out although the plan fitted leads to the plan's next step. With "auto" a card on which that ends,
    or on which the model does not run, is left for the processor, with a notice; otherwise OutOfMemoryError with the
    numbers, or DeviceError.
    """
    said: str | None = None
    for placement in placements(options):
        if said is not None:
            placement = replace(placement, notices=(*placement.notices, said))
        try:
            plan = request.plan(placement.budget_bytes(options.max_memory_bytes))
            return _smaller_and_smaller(placement, plan, request, load)
        except Exception as error:
            if placement.card is None or (options.device != "auto" and isinstance(error, SpecgenError)):
                raise
            if options.device != "auto":
                raise DeviceError(*_said(placement.card, error)) from error
            said = f"{beside(placement.card)}: {_said(placement.card, error)[0]}"
        release()  # only now: the error's frames held what was loaded
    raise AssertionError("the processor is the last place, and there it loads or fails")


def _said(card: Card, error: Exception) -> tuple[str, str]:
    """What stands against the card, and a hint. Errors of compilers and drivers have many classes, and none of them is
    the user's doing."""
    hint = "--device cpu runs without the card; --debug shows more"
    if isinstance(error, SpecgenError):
        return error.message, hint
    first = str(error).strip().partition("\n")[0]
    return f"the model does not run on the {card.name}: {type(error).__name__}: {first}", hint


def _smaller_and_smaller(placement: Placement, plan: MemoryPlan, request: Request, load: Load[Loaded]) -> Loaded:
    while True:
        try:
            return load(placement, plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = shortage(f"loading on {placement.device}", error)
        release()  # only now: the error's frames held what was loaded
        try:
            plan = request.smaller(plan)
        except OutOfMemoryError as least:
            raise OutOfMemoryError(f"{failure.message} ({least.message})", failure.hint) from None

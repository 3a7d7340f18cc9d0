"""Which graphics card a model runs on, or why none.

Knows: what a card, its driver, torch and Triton must be like, and how a refusal reads. Does not know: who answers these
questions on a real machine (`cuda_system`; tests answer in its place), kernels, models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specgen.errors import DeviceError, UsageError
from specgen.options import device_index

LEAST_CAPABILITY = (7, 5)
"""Turing, the oldest that Triton compiles for."""

BFLOAT16_CAPABILITY = (8, 0)
"""Ampere, the first whose tensor cores take bfloat16; older cards compute with float16."""

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card as its driver describes it; to ask takes no memory on it."""

    index: int  # the N of cuda:N
    name: str
    capability: Version  # compute capability, e.g. (8, 9)
    total_bytes: int
    prohibited: bool = False  # its administrator lets nobody compute on it

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def half(self) -> str:
        """The 16-bit format of activations, by torch's name for it."""
        return "bfloat16" if self.capability >= BFLOAT16_CAPABILITY else "float16"


@dataclass(frozen=True, slots=True)
class Driver:
    version: str | None  # of the package, e.g. "570.133.20", where the system tells
    cuda: Version  # newest CUDA that it can run
    failure: str | None = None  # why it does not start

    @property
    def shown(self) -> str:
        return f"{self.version or 'driver'} (CUDA {dotted(self.cuda)})"


class CardLostError(Exception):
    """A card does not answer; the message says what its driver said."""


class CudaSystem(Protocol):
    """What decides whether a card can be used, asked in this order and no further than needed."""

    def driver(self) -> Driver | None:
        """None: there is none, so there is no card either."""
        ...

    def cards(self) -> Sequence[Card]: ...

    def torch_cuda(self) -> Version | None:
        """The CUDA that torch was built with."""
        ...

    def torch_archs(self) -> Sequence[str]:
        """What torch has machine code ("sm_80") or portable code ("compute_90") for; nothing where it does not say."""
        ...

    def triton(self) -> str | None:
        """Its version; None: it is not installed."""
        ...

    def triton_obstacle(self) -> tuple[str, str] | None:
        """(what Triton lacks to build its launcher, what to do about it)."""
        ...

    def memory(self, card: Card) -> tuple[int, int]:
        """(free, total) bytes. The first question that needs a context on the card: CardLostError when there can be
        none."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a card, or every card, is not used."""

    reason: str
    hint: str

    def error(self, device: str) -> DeviceError:
        return DeviceError(f"--device {device}: {self.reason}", self.hint)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a model runs."""

    card: Card | None = None  # None: on the processor
    free_bytes: int | None = None  # on the card
    notice: str | None = None  # why a card that is there is not used


def choose_card(device: str, system: CudaSystem | None = None) -> Choice:
    """The card for `--device device`. "auto" takes the first that can be used, else the processor.

    DeviceError when the card that was asked for cannot be used, UsageError when there is no such card.
    """
    if device == "cpu":
        return Choice()
    if system is None:
        from specgen.kernels.cuda_system import NvidiaSystem

        system = NvidiaSystem()
    if device == "auto":
        return _first(system)
    refusals = []
    cards = _asked_for(device, system)
    for card in cards:
        found = _opened(card, system)
        if isinstance(found, Choice):
            return found
        refusals.append(found)
    raise refusals[0].error(device)


def _all_cards(system: CudaSystem) -> Sequence[Card]:
    driver = system.driver()
    return () if driver is None or driver.failure is not None else system.cards()


def _asked_for(device: str, system: CudaSystem) -> Sequence[Card]:
    """The cards that `device` allows, at least one."""
    cards = _all_cards(system)
    missing = no_card(system.driver(), cards)
    if missing is not None:
        raise missing.error(device)
    index = device_index(device)
    if index is None:
        return cards
    if index >= len(cards):
        known = ", ".join(f"{card.device} ({card.name})" for card in cards)
        raise UsageError(f"--device {device}: there is no such card", hint=f"known: {known}")
    return [cards[index]]


def _first(system: CudaSystem) -> Choice:
    notice = None
    for card in _all_cards(system):
        found = _opened(card, system)
        if isinstance(found, Choice):
            return found
        notice = notice or f"{beside(card)}: {found.reason} ({found.hint})"
    driver = system.driver()
    if driver is not None and driver.failure is not None and driver.version is not None:  # a module, so also a card
        refusal = no_card(driver, ())
        assert refusal is not None
        notice = f"running on the processor: {refusal.reason} ({refusal.hint})"
    return Choice(notice=notice)


def _opened(card: Card, system: CudaSystem) -> Choice | Refusal:
    refusal = card_refusal(card, system)
    if refusal is not None:
        return refusal
    try:
        free_bytes, _ = system.memory(card)
    except CardLostError as error:
        return Refusal(f"the {card.name} is busy or does not answer: {error}", "`nvidia-smi` shows who uses it")
    return Choice(card, free_bytes)


def beside(card: Card) -> str:
    """The beginning of a notice."""
    return f"running on the processor, not on the {card.name}"


def no_card(driver: Driver | None, cards: Sequence[Card]) -> Refusal | None:
    """Why there is no card to speak of."""
    if driver is None:
        return Refusal("there is no NVIDIA driver", "install it, or leave --device out to run on the processor")
    if driver.failure is not None:
        return Refusal(f"the NVIDIA driver does not start: {driver.failure}", "`nvidia-smi` may say more")
    if not cards:
        return Refusal("the driver shows no card", "see `nvidia-smi -L` and the variable CUDA_VISIBLE_DEVICES")
    return None


def card_refusal(card: Card, system: CudaSystem) -> Refusal | None:
    """Why our kernels cannot run on `card`, found without touching it."""
    return next(_refusals(card, system), None)


def _refusals(card: Card, system: CudaSystem) -> Iterator[Refusal]:
    if card.capability < LEAST_CAPABILITY:
        yield Refusal(
            f"the {card.name} has compute capability {dotted(card.capability)}, and kernels need "
            f"{dotted(LEAST_CAPABILITY)}",
            "use a card of the Turing generation or newer",
        )
    if card.prohibited:
        yield Refusal(f"the {card.name} is closed for computing", "an administrator can open it: nvidia-smi -c DEFAULT")
    built, driver = system.torch_cuda(), system.driver()
    if built is None:
        yield Refusal("this torch was built without CUDA", "install torch from its CUDA index, see pytorch.org")
        return
    if driver is not None and driver.cuda[0] < built[0]:
        yield Refusal(
            f"the driver {driver.shown} is too old for torch, which was built for CUDA {dotted(built)}",
            f"update the driver, or install a torch for CUDA {driver.cuda[0]}",
        )
    archs = system.torch_archs()
    if archs and not runs_on(card.capability, archs):
        yield Refusal(
            f"this torch has no code for {card.arch}, which the {card.name} is", "install a torch made for this card"
        )
    if system.triton() is None:
        yield Refusal("Triton is not installed", "it comes with torch's CUDA builds, or with `pip install triton`")
        return
    obstacle = system.triton_obstacle()
    if obstacle is not None:
        yield Refusal(*obstacle)


def runs_on(capability: Version, archs: Iterable[str]) -> bool:
    """Machine code runs on its own generation from its own step on; portable code on anything newer."""
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = "".join(char for char in number if char.isdigit())  # "sm_90a" is for one step alone, and near enough
        if not digits:
            continue
        made_for = (int(digits[:-1] or 0), int(digits[-1]))
        newer = made_for <= capability
        if newer and (kind == "compute" or made_for[0] == capability[0]):
            return True
    return False


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"

"""What the graphics cards of this machine are like, and what stands against using them.

Knows: the facts in the order in which they matter. Does not know: how the system is asked (kernels.cuda_system). On a
machine without a card it is one line for each thing that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specgen.errors import SpecgenError
from specgen.kernels.cuda import (
    BFLOAT16_CAPABILITY,
    Card,
    CardLostError,
    CudaSystem,
    card_refusal,
    choose_card,
    dotted,
    no_card,
)
from specgen.measure.findings import Fact, Section, plain
from specgen.measure.limits import limit_facts
from specgen.measure.roofline import Bandwidth, CopySpeed
from specgen.measure.timer import timer_for
from specgen.memory import megabytes


def copy_speed(card: Card) -> Bandwidth:
    device = torch.device(card.device)
    return CopySpeed(device, timer_for(device))


@dataclass(frozen=True, slots=True)
class CardPatient:
    """What is looked at."""

    system: CudaSystem
    model: Path | None = None
    device: str = "auto"  # asked for
    bandwidth: Callable[[Card], Bandwidth] = copy_speed


def card_sections(patient: CardPatient) -> Iterator[Section]:
    """What all cards share, then each card."""
    yield Section("graphics", tuple(_shared(patient)))
    driver = patient.system.driver()
    if driver is not None and driver.failure is None:
        for card in patient.system.cards():
            yield Section(f"card {card.device}", tuple(_card(card, patient)))


def _shared(patient: CardPatient) -> Iterator[Fact]:
    system = patient.system
    driver = system.driver()
    cards = () if driver is None or driver.failure is not None else system.cards()
    missing = no_card(driver, cards)
    yield Fact("driver", driver.shown if driver else None, driver.shown if driver else "none")
    yield Fact("cards", len(cards), ", ".join(card.name for card in cards) or f"none: {missing and missing.reason}")
    built = system.torch_cuda()
    yield Fact(
        "torch cuda", dotted(built) if built else None, dotted(built) if built else "none: torch was built without it"
    )
    triton = system.triton()
    yield Fact("triton", triton, triton or "none: it is not installed")
    yield _taken(patient)


def _taken(patient: CardPatient) -> Fact:
    """What `--device` comes to."""
    try:
        choice = choose_card(patient.device, patient.system)
    except SpecgenError as error:
        return Fact("device", None, "none", f"{error.message} ({error.hint})" if error.hint else error.message)
    if choice.card is None:
        return Fact("device", "cpu", "cpu", choice.notice)
    return Fact("device", choice.card.device, f"{choice.card.device} (--device {patient.device})")


def _card(card: Card, patient: CardPatient) -> Iterator[Fact]:
    yield plain("name", card.name)
    yield Fact("compute capability", dotted(card.capability), f"{dotted(card.capability)} ({card.arch})")
    refusal = card_refusal(card, patient.system)
    if refusal is not None:
        yield plain("memory", megabytes(card.total_bytes))
        yield Fact("kernels", None, "none", f"{refusal.reason} ({refusal.hint})")
        return
    try:
        free_bytes, total_bytes = patient.system.memory(card)
    except CardLostError as error:
        yield Fact("memory", None, megabytes(card.total_bytes), f"the card is busy or does not answer: {error}")
        return
    yield Fact("total", total_bytes, megabytes(total_bytes))
    yield Fact("free", free_bytes, megabytes(free_bytes))
    yield plain("kernels", f"triton {card.half}")
    yield plain("why", _why(card))
    yield from _speed(card, patient)


def _why(card: Card) -> str:
    """Why this number format of activations, and not the other."""
    least = dotted(BFLOAT16_CAPABILITY)
    if card.capability >= BFLOAT16_CAPABILITY:
        return f"bfloat16: compute capability {least} or more; fp8 weights are converted in the kernel on any card"
    return f"not bfloat16: it needs compute capability {least}; float16: any card from 7.5 on"


def _speed(card: Card, patient: CardPatient) -> Iterator[Fact]:
    try:
        yield from limit_facts(patient.bandwidth(card), patient.model)
    except RuntimeError as error:  # a card that is full, or lost, is a finding too
        yield Fact("copy bandwidth", None, "not measured", str(error).partition("\n")[0])

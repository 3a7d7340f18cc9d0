"""The figures that change while an answer is made, and the status line that shows them.

Knows: events to figures, figures to words that fit a number of columns. Does not know: how a line is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from specgen.events import CycleDone, Event, Finished, Piece, Prefilled, Started

DRAFT_WORD = "draft"
"""Shown in the style of draft-accepted text: the legend is the word itself."""


@dataclass(frozen=True, slots=True)
class Marks:
    """How draft-accepted text looks. The underline is what tells it apart without colour."""

    draft: str = ""  # SGR parameters; empty: no highlighting at all

    @classmethod
    def chosen(cls, *, steer: bool, color: bool) -> Marks:
        if color:
            return cls("4;36")
        return cls("4" if steer else "")

    def paint(self, text: str) -> str:
        return f"\x1b[{self.draft}m{text}\x1b[0m" if self.draft and text else text


class Progress:
    """What is known of a running answer. As in `RunRecord`, the speed is that of the tokens after the first commit."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.prefilled = False
        self.cycles = 0
        self.committed = 0
        self.decode_ms = 0.0  # in cycles after the first
        self.decoded_tokens = 0  # committed in those cycles
        self.proposed = 0
        self.accepted = 0
        self.gamma = 0  # levels of the last cycle's draft
        self.length = 0
        self.said_something = False
        self.thinking = False

    def see(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
                self.length = event.prompt_tokens
            case Prefilled():
                self.prefilled = True
            case CycleDone():
                self._cycle(event)
            case Piece():
                self.said_something = True
                self.thinking = event.thinking
            case Finished():
                pass

    def _cycle(self, event: CycleDone) -> None:
        record = event.record
        self.cycles += 1
        self.committed += record.committed
        self.proposed += record.proposed
        self.accepted += record.accepted
        self.gamma = record.depth
        self.length = event.length
        if self.cycles > 1:
            self.decoded_tokens += record.committed
            self.decode_ms += record.propose_ms + record.verify_ms + record.reconcile_ms

    @property
    def tok_s(self) -> float | None:
        return 1e3 * self.decoded_tokens / self.decode_ms if self.decode_ms > 0 else None

    @property
    def per_pass(self) -> float | None:
        return self.committed / self.cycles if self.cycles else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def context_share(self) -> float:
        return self.length / self.started.context_tokens if self.started and self.started.context_tokens else 0.0


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def rate(tok_s: float | None) -> str:
    """Tokens per second, with a decimal only where it tells something."""
    return number(tok_s, 1 if tok_s is None or tok_s < 99.95 else 0) + " tok/s"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def status_line(progress: Progress, columns: int, marks: Marks) -> str:
    """The status in at most `columns` cells, with the legend; the widest wording that fits."""
    started = progress.started
    if started is None or not progress.prefilled:
        tokens = "" if started is None else f": {started.prompt_tokens} tokens"
        return fit(f"reading the prompt{tokens}", columns)
    wordings = _wordings(progress, started, bool(marks.draft))
    for gap, parts in wordings:
        line = gap.join(parts)
        if cell_len(line) <= columns:
            return _paint_legend(line, marks)
    gap, parts = wordings[-1]
    while len(parts) > 1 and cell_len(gap.join(parts)) > columns:
        parts = parts[:-1]
    return _paint_legend(fit(gap.join(parts), columns), marks)


def _wordings(progress: Progress, started: Started, legend: bool) -> list[tuple[str, list[str]]]:
    """(gap, parts) from wide to narrow; the parts at the end are the first to go."""
    speed, per_pass = rate(progress.tok_s), progress.per_pass
    accepted, context = percent(progress.acceptance), percent(progress.context_share)
    lossy = [] if started.lossless else ["lossy"]
    thinking = ["thinking"] if progress.thinking else []
    used = f"{progress.length} of {started.context_tokens} tokens ({context})"
    wide = [*thinking, speed, f"{number(per_pass, 2)} tokens per pass", f"{DRAFT_WORD} {accepted} accepted"]
    wide += [f"γ {progress.gamma}", f"context {used}", *lossy]
    middle = [*thinking, speed, f"{number(per_pass, 2)} per pass", f"{DRAFT_WORD} {accepted}"]
    middle += [f"γ {progress.gamma}", f"context {context}", *lossy]
    narrow = [*thinking, speed, *lossy, f"{number(per_pass)}/pass", f"{DRAFT_WORD} {accepted}", f"γ{progress.gamma}"]
    narrow += [f"ctx {context}"]
    explained = [[*wide, "underlined: from the draft"]] if legend else []
    return [*[(" · ", parts) for parts in (*explained, wide, middle)], (" ", narrow)]


def _paint_legend(line: str, marks: Marks) -> str:
    return line.replace(DRAFT_WORD, marks.paint(DRAFT_WORD), 1)


def fit(text: str, columns: int) -> str:
    """Cut to at most `columns` terminal cells."""
    return text if cell_len(text) <= columns else set_cell_size(text, max(0, columns - 1)).rstrip() + "…"

"""Tables and bars of text that fit any terminal, from 40 columns on.

Knows: cells, columns, bars. Does not know: what the numbers mean.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from specgen.cli.console import Console, descriptor, printable
from specgen.cli.report import json_line
from specgen.cli.screen import terminal_size
from specgen.cli.status import fit
from specgen.cli.view import write_bytes

if TYPE_CHECKING:
    from specgen.measure.runs import Report

GAP = "  "
EIGHTHS = " ▏▎▍▌▋▊▉"
LABEL_SHARE = 0.4
"""Of the width, at most, for the labels of a chart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """Columns at the end of a table are the first to go when it gets too wide."""

    head: str
    cells: Sequence[str]
    left: bool = False

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.head, *self.cells)))


def table(title: str, columns: Sequence[Column], width: int) -> list[str]:
    """Lines of at most `width` cells; the first column is always there."""
    kept = list(columns)
    while len(kept) > 1 and sum(c.width for c in kept) + len(GAP) * (len(kept) - 1) > width:
        kept.pop()
    rows = [[column.head for column in kept]]
    rows += [[column.cells[row] for column in kept] for row in range(len(kept[0].cells))]
    lines = [fit(title, width)]
    for row in rows:
        cells = [_aligned(cell, column) for cell, column in zip(row, kept, strict=True)]
        lines.append(fit(GAP.join(cells).rstrip(), width))
    lines.insert(2, "─" * min(width, max(cell_len(line) for line in lines[1:])))
    left_out = [column.head for column in columns[len(kept) :]]
    if left_out:
        lines.append(fit(f"(a wider terminal also shows {', '.join(left_out)})", width))
    return lines


def _aligned(cell: str, column: Column) -> str:
    padding = " " * (column.width - cell_len(cell))
    return cell + padding if column.left else padding + cell


def bars(title: str, items: Sequence[tuple[str, float, str]], width: int, most: float | None = None) -> list[str]:
    """items: (label, value ≥ 0, the value in words), one bar each; `most` is the value of a full bar."""
    lines = [fit(title, width)]
    if not items:
        return lines
    label_width = min(max(cell_len(label) for label, _, _ in items), int(LABEL_SHARE * width))
    word_width = max(cell_len(words) for _, _, words in items)
    room = max(1, width - label_width - word_width - 2)
    full = most or max(value for _, value, _ in items) or 1.0
    for label, value, words in items:
        name = set_cell_size(fit(label, label_width), label_width)
        lines.append(f"{name} {_bar(value / full, room)} {words.rjust(word_width)}")
    return lines


def _bar(share: float, room: int) -> str:
    """`room` cells, filled to the eighth of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * room * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[part] if part else "")).ljust(room)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """The answer of a command, on stdout."""
    text = "\n".join(printable(line) for line in lines) + "\n"
    write_bytes(console.answer(), text.encode("utf-8"))


def print_json(console: Console, value: object) -> None:
    plain = jsonable(value)
    assert isinstance(plain, dict)
    write_bytes(console.answer(), (json_line(plain) + "\n").encode("utf-8"))


def print_csv(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """One header, one line for each row."""
    import csv

    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(console.answer(), text.getvalue().encode("utf-8"))


def jsonable(value: object) -> Any:
    """Dataclasses as objects, tuples as lists; what is not finite is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field for field in dataclasses.fields(value) if field.repr]
        return {field.name: jsonable(getattr(value, field.name)) for field in shown}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def columns_of(console: Console) -> int:
    """The width of what stdout shows."""
    if not console.can_steer(console.stdout):
        given = console.environ.get("COLUMNS", "")
        return max(40, int(given)) if given.isdigit() else 100
    return max(40, terminal_size(descriptor(console.stdout))[0])


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar on a terminal's stderr while the block runs; nothing elsewhere."""
    if console.quiet or not console.can_steer(console.stderr):
        yield lambda done, total, what: None
        return
    from rich import progress

    bar = progress.Progress(
        progress.BarColumn(bar_width=None),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[what]}", markup=False),
        console=console.rich(),
        transient=True,
    )
    task = bar.add_task("", total=1.0, what="")
    with bar:
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=printable(what))

"""A progress bar for downloads and checksums, on a terminal's stderr; one line where there is no terminal.

Knows: `specgen.registry.Progress` and Rich. Does not know: what is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specgen.cli.console import Console, printable

if TYPE_CHECKING:
    import rich.progress

    from specgen.registry import Progress


class _Bar:
    """Drawn from the first report on, so that a model which is there already shows nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: rich.progress.Progress | None = None
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __call__(self, done_bytes: int, total_bytes: int | None, what: str) -> None:
        bar = self._started()
        if what not in self._tasks:
            self._tasks[what] = bar.add_task("", name=printable(what), total=total_bytes)
        bar.update(self._tasks[what], completed=done_bytes, total=total_bytes)

    def _started(self) -> rich.progress.Progress:
        if self._bar is None:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.fields[name]}", markup=False),
                progress.BarColumn(bar_width=None),
                progress.DownloadColumn(),
                progress.TimeRemainingColumn(),
                console=self._console.rich(),
                transient=True,
            )
            self._bar.start()
        return self._bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Notes:
    """Each new step as one line, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[str] = set()

    def __call__(self, done_bytes: int, total_bytes: int | None, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._console.note(what if total_bytes is None else f"{what} ({total_bytes / 1e6:.0f} MB)")


@contextmanager
def fetch_bar(console: Console) -> Iterator[Progress]:
    """What `registry.pull(entry, progress=…)` should report to while the block runs."""
    if console.quiet or not console.can_steer(console.stderr):
        yield _Notes(console)
        return
    bar = _Bar(console)
    try:
        yield bar
    finally:
        bar.close()

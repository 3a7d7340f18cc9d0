"""Workers from the command line: `specgen ps`, `specgen stop`, and a session in a worker for `specgen run`.

Knows: how workers are shown, and when a command does without one. Does not know: sockets (worker.client). No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli.console import Console, printable
from specgen.cli.fetchbar import fetch_bar
from specgen.cli.models import JsonFlag, print_json
from specgen.errors import SpecgenError, UsageError
from specgen.memory import megabytes
from specgen.options import LoadOptions, WorkerOptions

if TYPE_CHECKING:
    from specgen.registry import ModelRef
    from specgen.worker.client import Found, RemoteSession

QUICK_S = 0.1
"""A model that is loaded answers sooner; only after that is it worth showing that it is being loaded."""


def warm_session(
    console: Console, ref: ModelRef, draft: ModelRef | None, options: LoadOptions, worker: WorkerOptions
) -> RemoteSession | None:
    """The model in a worker, which is started when `worker` says for how long; None: do without.

    ModelError and its like when the worker cannot load it either.
    """
    wanted = worker.keep_alive_minutes
    if wanted == 0 or not _possible(console, wanted):
        return None
    from specgen.registry import pull
    from specgen.worker.client import WorkerGoneError, open_session, order_for, source_of
    from specgen.worker.place import ForeignError

    with fetch_bar(console) as progress:
        sources = [source_of(one.name, Path(pull(one.entry, progress=progress).target)) for one in (ref, draft) if one]
    order = order_for(sources[0], sources[1] if draft else None, options)
    try:
        session = open_session(order, wanted)
        if session is not None and not session.loaded_within(QUICK_S):
            with console.busy(f"loading {ref.name}"):
                session.loaded_within(None)
    except (WorkerGoneError, ForeignError, OSError) as error:
        console.note(f"{error}: the model is loaded by this command itself")
        return None
    return session


def _possible(console: Console, wanted: float | None) -> bool:
    """Whether there is a worker, or may be one."""
    from specgen.worker import place

    try:
        return bool(place.sockets()) or wanted is not None
    except (SpecgenError, OSError) as error:
        if wanted is not None:
            console.note(f"no worker can be kept: {error}")
        return False


def list_workers(context: typer.Context, json_: JsonFlag = False) -> None:
    """Loaded models that --keep-alive has left behind.

    specgen ps
    specgen ps --json
    """
    from specgen.cli.charts import print_lines
    from specgen.worker.client import find_workers

    console, found = Console.of(context), find_workers()
    if json_:
        print_json(console, {"workers": [_worker_object(worker) for worker in found]})
        return
    if not found:
        console.note("no model is kept alive (`specgen run --keep-alive MINUTES`)")
        return
    head = ("PID", "MODEL", "STATE", "ANSWERS", "MEMORY", "IDLE", "ENDS AFTER")
    rows = [head, *(_row(worker) for worker in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    print_lines(console, ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))


def stop_workers(
    context: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME|PID", help="Which ones; without any, all of them.")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """End loaded models that --keep-alive has left behind, and what they are answering.

    specgen stop
    specgen stop smollm2-135m
    """
    from specgen.cli.charts import print_lines
    from specgen.worker.client import find_workers, stop_worker

    console, found = Console.of(context), find_workers()
    for name in names or ():
        if not any(name in _names(worker) for worker in found):
            raise UsageError(f"no worker is called {name!r}", hint="`specgen ps` shows them")
    chosen = [worker for worker in found if not names or _names(worker) & set(names)]
    for worker in chosen:
        stop_worker(worker)
    if json_:
        print_json(console, {"stopped": [_worker_object(worker) for worker in chosen]})
    elif chosen:
        print_lines(console, (f"stopped {_label(worker)} (process {worker.pid})" for worker in chosen))
    else:
        console.note("no model is kept alive")


def _names(worker: Found) -> set[str]:
    return {str(worker.pid), *([worker.status.model] if worker.status is not None else [])}


def _label(worker: Found) -> str:
    return "a worker that did not answer" if worker.status is None else printable(worker.status.model)


def _worker_object(worker: Found) -> dict[str, Any]:
    from specgen.worker.codec import encode

    status = None if worker.status is None else encode(worker.status)
    return {"pid": worker.pid, "socket": str(worker.path), "status": status}


def _row(worker: Found) -> tuple[str, ...]:
    status = worker.status
    if status is None:
        return (str(worker.pid), "?", "stuck, or of another version", "", "", "", "")
    waiting = f", {status.waiting} waiting" if status.waiting else ""
    return (
        str(worker.pid),
        printable(status.model),
        status.state + waiting,
        str(status.answers),
        megabytes(status.rss_bytes),
        _minutes(status.idle_s / 60),
        _minutes(status.keep_alive_minutes) + " idle",
    )


def _minutes(minutes: float) -> str:
    return f"{60 * minutes:.0f} s" if minutes < 2 else f"{minutes:.0f} min"

"""The worker and its thin client: the same events as the session's own, whatever happens to either side."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fake_session import FakeSession, Script
from gguf_files import llama_file
from test_layers import heavy_after
from typer.testing import CliRunner

from specgen.cancel import Cancel
from specgen.cli.app import app
from specgen.errors import ContextFullError, ExitCode, ModelError, OutOfMemoryError, SpecgenError, UsageError
from specgen.events import Finished, FinishReason, Piece
from specgen.options import LoadOptions, RunOptions
from specgen.prompt import Prompt
from specgen.worker import client, codec, place, protocol, server
from specgen.worker.client import RemoteSession, WorkerGoneError, digest_of, find_workers, open_session, stop_worker
from specgen.worker.place import ForeignError
from specgen.worker.protocol import AskAnswer, Hello, Order, ProtocolError, Source, from_line, to_line

LONG = Script(cycles=[[(f"word{index} ", index % 2 == 1)] for index in range(50)], repeat=200, delay_s=0.005)


class Session(FakeSession):
    """The fake one with the values of the real one, and a guard: nothing of it may run twice at once."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.running = 0

    def prompt_ids(self, text: str, *, system: str | None, raw: bool, think: str = "auto") -> Any:
        self.calls.append({"text": text})
        self.prompt = text
        return Prompt(tuple(text.encode()))

    def generate(self, prompt: Any, options: RunOptions, cancel: Any) -> Iterator[Any]:
        self.running += 1
        assert self.running == 1
        try:
            yield from super().generate(prompt, options, cancel)
        finally:
            self.running -= 1


class Worker:
    """A worker in a thread of this process."""

    def __init__(self, session: Session, keep_alive_s: float, load: Callable[[Order], Any] | None = None) -> None:
        self.session = session
        self.order = Order(1, "0", "code", Source("fake", "/fake", "stamp"), None, LoadOptions(), (), ())
        self.shared = server.Shared(self.order, keep_alive_s / 60)
        self.path = place.socket_path(digest_of(self.order))
        self.thread = threading.Thread(target=server.serve, args=(self.shared, self.path, load or self._load))
        self.thread.start()
        _until(lambda: self.path.exists() or not self.thread.is_alive())

    def _load(self, order: Order) -> Any:
        return self.session

    def connect(self, keep_alive_minutes: float | None = None) -> RemoteSession:
        session = open_session(self.order, keep_alive_minutes)
        assert session is not None
        assert session.loaded_within(5)
        return session

    def raw(self) -> socket.socket:
        """A connection past the greeting, for messages that no client sends."""
        link = place.connect(self.path, 5)
        assert link is not None
        link.sendall(to_line(Hello(protocol.PROTOCOL, digest_of(self.order))))
        received = b""
        while received.count(b"\n") < 2:
            received += link.recv(4096)
        assert b"Ready" in received
        return link

    def close(self) -> None:
        self.shared.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    monkeypatch.setenv("SPECGEN_RUNTIME", str(folder))
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    workers: list[Worker] = []

    def build(script: Script | None = None, keep_alive_s: float = 60.0, load: Any = None) -> Worker:
        workers.append(Worker(Session(script or Script()), keep_alive_s, load))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


def _until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def _events(session: Any, text: str = "hi", options: RunOptions | None = None) -> list[Any]:
    prompt = session.prompt_ids(text, system=None, raw=False)
    return list(session.generate(prompt, options or RunOptions(), Cancel()))


# The same answer.


def test_the_events_are_the_session_s_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(cycles=[[("Grüße \x1b[31m\u2028\n", False)], [("😀", True), ("b", False)]], notices=("one", "two"))
    worker, expected = start(script), _events(Session(script))
    remote = worker.connect()
    assert _events(remote) == expected
    assert remote.report() == worker.session.report()
    monkeypatch.setattr(protocol, "encode", lambda value: _shortened(codec.encode(value)))
    assert _events(worker.connect()) != expected, "the mutant: texts lose their last letter"


def _shortened(value: Any) -> Any:
    return {key: item[:-1] if key == "text" else item for key, item in value.items()}


def test_every_option_arrives(start: Start) -> None:
    from specgen.options import ConstraintOptions, DraftOptions, NgramOptions, SamplingOptions

    sampling = SamplingOptions(0.7, 5, 0.9, 0.1, 1.1, 0.2, 0.3, ((3, -float("inf")), (4, 1.5)), 2**64 - 1)
    options = RunOptions(
        sampling, 7, ("a\n", "é"), False, "none", 3, "rejection", 2, NgramOptions(5, 3), DraftOptions(0.5),
        ConstraintOptions("regex", "[ab]+"), "show",
    )  # fmt: skip
    worker = start()
    _events(worker.connect(), options=options)
    assert [call["options"] for call in worker.session.calls if "options" in call] == [options]


def test_one_connection_may_ask_again(start: Start) -> None:
    worker = start()
    remote = worker.connect()
    assert _events(remote) == _events(remote)
    assert worker.shared.status().answers == 2


# Cancelling, leaving, waiting.


def test_a_cancel_ends_the_answer(start: Start) -> None:
    worker = start(LONG)
    remote, cancel = worker.connect(), Cancel()
    events = remote.generate(remote.prompt_ids("hi"), RunOptions(), cancel)
    seen = [next(events) for _ in range(5)]
    cancel.set()
    last = [*seen, *events][-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    worker.session.script = Script()
    assert isinstance(_events(worker.connect())[-1], Finished), "the worker lives on"


@pytest.mark.parametrize("leave", ["close the events", "close the session"])
def test_a_client_that_leaves_cancels_its_answer(start: Start, leave: str) -> None:
    worker = start(LONG)
    remote = worker.connect()
    events = remote.generate(remote.prompt_ids("hi"), RunOptions())
    next(events)
    if leave == "close the events":
        events.close()  # type: ignore[attr-defined]
    else:
        remote.close()
    _until(lambda: worker.session.closed and worker.shared.running is None)
    assert worker.shared.status().state == "idle"


def test_two_clients_queue(start: Start) -> None:
    script = replace(LONG, repeat=1)
    worker, expected = start(script), _events(Session(script))
    found: dict[int, list[Any]] = {}

    def ask(number: int) -> None:
        found[number] = _events(worker.connect())

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(20)
    assert [found[number] for number in range(4)] == [expected] * 4, "each its own, none mixed"


def test_who_leaves_the_queue_costs_nothing(start: Start) -> None:
    worker = start(replace(LONG, repeat=2))
    first, second = worker.connect(), worker.connect()
    events = first.generate(first.prompt_ids("first"), RunOptions())
    next(events)
    second._channel.send(protocol.AskPrompt("never read", None, False, "auto"))
    _until(lambda: worker.shared.status().waiting == 1)
    second.close()
    assert isinstance(list(events)[-1], Finished)
    _until(lambda: worker.shared.status().waiting == 0 and worker.shared.running is None)
    assert {"text": "never read"} not in worker.session.calls


def test_a_client_that_does_not_read_holds_nobody_up(start: Start) -> None:
    script = Script(cycles=[[("x" * 1000, False)]], repeat=2000)  # megabytes: more than the socket takes
    worker = start(script)
    link = worker.raw()
    link.sendall(to_line(AskAnswer(Prompt((1, 2)), RunOptions())))
    assert isinstance(_events(worker.connect())[-1], Finished)
    link.close()


# The idle time-out.


def test_it_ends_when_idle(start: Start, runtime: Path) -> None:
    worker = start(keep_alive_s=0.3)
    _events(worker.connect())
    worker.thread.join(5)
    assert not worker.thread.is_alive()
    assert list(runtime.glob("*.sock")) == []
    assert open_session(worker.order, None) is None


def test_an_answer_may_take_longer_than_the_time_out(start: Start) -> None:
    worker = start(replace(LONG, repeat=2), keep_alive_s=0.1)
    assert isinstance(_events(worker.connect())[-1], Finished)
    worker.thread.join(5)
    assert not worker.thread.is_alive()


def test_a_client_may_prolong_and_shorten_it(start: Start) -> None:
    worker = start(keep_alive_s=0.5)
    worker.connect(keep_alive_minutes=5)
    time.sleep(0.7)
    assert worker.thread.is_alive()
    worker.connect(keep_alive_minutes=0.2 / 60)
    worker.thread.join(5)
    assert not worker.thread.is_alive()


def test_a_client_that_never_says_hello_does_not_keep_it_alive(start: Start) -> None:
    worker = start(keep_alive_s=0.3)
    link = place.connect(worker.path, 5)
    assert link is not None
    worker.thread.join(5)
    assert not worker.thread.is_alive()
    link.close()


# Nonsense.

GARBAGE = {
    "empty": b"\n",
    "no object": b"[1]\n",
    "no kind": b"{}\n",
    "an unknown kind": b'{"is": "Shutdown"}\n',
    "a kind that is no text": b'{"is": {"a": 1}}\n',
    "no UTF-8": b"\xff\xfe\n",
    "no JSON": b"{\n",
    "deep": b"[" * 100_000 + b"\n",
    "a field too few": b'{"is": "AskPrompt", "text": "a"}\n',
    "a field too many": b'{"is": "AskStatus", "more": 1}\n',
    "a wrong type": b'{"is": "AskPrompt", "text": 1, "system": null, "raw": false, "think": "auto"}\n',
    "a wrong word": b'{"is": "AskPrompt", "text": "a", "system": null, "raw": false, "think": "loudly"}\n',
    "a server's message": b'{"is": "Ready"}\n',
    "a number for a flag": b'{"is": "AskPrompt", "text": "a", "system": null, "raw": 1, "think": "auto"}\n',
    "half a line": b'{"is": "AskP',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_nonsense_is_let_go_and_nobody_else_notices(start: Start, name: str) -> None:
    worker = start()
    link = worker.raw()
    link.sendall(GARBAGE[name])
    link.shutdown(socket.SHUT_WR)
    link.settimeout(5)
    assert link.recv(4096) == b""
    fresh = place.connect(worker.path, 5)
    assert fresh is not None
    fresh.sendall(GARBAGE[name])  # in place of Hello
    fresh.shutdown(socket.SHUT_WR)
    fresh.settimeout(5)
    assert fresh.recv(4096) == b""
    assert isinstance(_events(worker.connect())[-1], Finished)
    assert len(worker.session.calls) == 2


def test_a_line_without_end_is_let_go(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1 << 16)
    worker = start()
    link = worker.raw()
    with pytest.raises(OSError, match=r"reset|Broken"):
        link.sendall(b"x" * (64 << 20))
    assert isinstance(_events(worker.connect())[-1], Finished)


def test_a_reply_without_end_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(Script(cycles=[[("x" * 100_000, False)]]))
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1 << 16)
    with pytest.raises(WorkerGoneError, match="without end"):
        _events(worker.connect())


def test_a_second_question_before_the_answer_is_refused(start: Start) -> None:
    worker = start(LONG)
    link = worker.raw()
    ask = to_line(AskAnswer(Prompt((1,)), RunOptions()))
    link.sendall(ask + ask)
    link.settimeout(5)
    while link.recv(65536):
        pass  # it was let go
    # The second question is dropped; a reminder to look whether to go on may still be in the queue.
    _until(lambda: worker.shared.status().state == "idle" and worker.shared.requests.empty())


@pytest.mark.parametrize(("field", "value"), [("gamma", 99), ("max_tokens", 0), ("stop", [""])])
def test_options_that_no_run_may_have_are_told(start: Start, field: str, value: object) -> None:
    worker = start()
    link = worker.raw()
    ask = json.loads(to_line(AskAnswer(Prompt((1,)), RunOptions())))
    ask["options"][field] = value
    link.sendall(json.dumps(ask).encode() + b"\n")
    failure = from_line(link.makefile("rb").readline())
    assert isinstance(protocol.error_of(failure), UsageError)


# Failures travel.


@pytest.mark.parametrize(
    ("fail", "kind", "code"),
    [
        ("context", ContextFullError, ExitCode.CONTEXT),
        ("memory", OutOfMemoryError, ExitCode.MEMORY),
        ("bug", SpecgenError, ExitCode.ERROR),
    ],
)
def test_a_failing_answer(
    start: Start, fail: str, kind: type[SpecgenError], code: ExitCode, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start(Script(fail=fail))
    with pytest.raises(kind) as raised:
        _events(worker.connect())
    assert raised.value.code == code
    worker.session.script = Script()
    assert isinstance(_events(worker.connect())[-1], Finished), "the worker lives on"


def test_a_model_that_cannot_be_loaded(start: Start, runtime: Path) -> None:
    def broken(order: Order) -> Any:
        time.sleep(0.3)
        raise ModelError("the file is broken", hint="fetch it again")

    worker = start(load=broken)
    remote = open_session(worker.order, None)
    assert remote is not None
    with pytest.raises(ModelError, match="broken") as raised:
        remote.loaded_within(5)
    assert raised.value.hint == "fetch it again"
    worker.thread.join(5)
    assert list(runtime.glob("*.sock")) == []


def test_clients_wait_while_the_model_loads(start: Start) -> None:
    session = Session(Script())

    def slowly(order: Order) -> Any:
        time.sleep(0.5)
        return session

    worker = start(load=slowly)
    remote = open_session(worker.order, None)
    assert remote is not None
    assert not remote.loaded_within(0.05)
    assert find_workers()[0].status.state == "loading"  # type: ignore[union-attr]
    assert remote.loaded_within(5)
    assert isinstance(_events(remote)[-1], Finished)


# Whose it is, and which.


def test_only_the_owner_may_come_in(start: Start, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE(worker.path.stat().st_mode) == 0o600
    own = os.geteuid()
    link = place.connect(worker.path, 5)
    assert link is not None
    monkeypatch.setattr(place.os, "geteuid", lambda: own + 1)
    with pytest.raises(ForeignError):
        place.check_peer(link)
    with pytest.raises(ForeignError):
        place.connect(worker.path, 5)
    with pytest.raises(ForeignError):
        place.socket_folder()


def test_a_stranger_is_let_go(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(link: object) -> int:
        raise ForeignError("another user")

    worker = start()
    monkeypatch.setattr(place, "check_peer", foreign)  # both ends ask it, and the client's answer is patched back
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(worker.path))
    link.settimeout(5)
    assert link.recv(4096) == b""


def test_a_folder_that_others_may_enter_is_closed_to_them(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    runtime.chmod(0o755)
    place.socket_folder()
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignError, match="no folder of yours"):
        place.socket_folder()


def test_a_socket_that_others_may_use_is_refused(start: Start) -> None:
    worker = start()
    worker.path.chmod(0o666)
    with pytest.raises(ForeignError):
        open_session(worker.order, None)


def test_a_long_path_gets_a_short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_RUNTIME", str(tmp_path / ("x" * 120)))
    short = place.socket_folder()
    assert len(str(place.socket_path("0" * 64))) <= place.MAX_PATH_BYTES
    short.rmdir()


@pytest.mark.parametrize("left", ["a dead worker's socket", "a file", "nothing"])
def test_nobody_is_there(left: str) -> None:
    path = place.socket_path("f" * 64)
    if left == "a dead worker's socket":
        place.listen(path).close()
    elif left == "a file":
        path.write_text("")
    assert place.connect(path, 5) is None
    assert find_workers() == []
    assert path.exists() == (left == "a file"), "a dead socket is removed"


@pytest.mark.parametrize("change", ["protocol", "order"])
def test_another_version_is_not_used(start: Start, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    if change == "protocol":
        monkeypatch.setattr(client, "PROTOCOL", 99)
    else:
        worker.order = replace(worker.order, version="0.0.1")
        worker.path.rename(place.socket_path(digest_of(worker.order)))
    with pytest.raises(WorkerGoneError, match="another version"):
        open_session(worker.order, None)


def test_an_order_changes_with_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")

    def digest(options: LoadOptions | None = None) -> str:
        return digest_of(client.order_for(client.source_of("m", model), None, options or LoadOptions()))

    found = [digest(), digest(LoadOptions(threads=1)), digest(LoadOptions(kv="f32"))]
    assert digest() == found[0]
    model.write_bytes(b"other")
    found.append(digest())
    monkeypatch.setattr(client.specgen, "__version__", "9")
    found.append(digest())
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    found.append(digest())
    monkeypatch.setattr(client.os, "sched_getaffinity", lambda pid: {0}, raising=False)
    found.append(digest())
    assert len(set(found)) == len(found)


# Values on the wire.


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, True), (int, 1.0), (float, "1"), (float, True), (str, 1), (bool, 0), (int | None, "x"),
        (tuple[int, ...], [1, "2"]), (tuple[int, float], [1]), (list[int], {"0": 1}), (FinishReason, "bored"),
        (Piece, {"text": "a"}), (Piece, {"text": "a", "drafted": True, "more": 1}), (Piece, []), (LoadOptions, None),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises(codec.CodecError):
        codec.decode(hint, value)


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e-320, float("inf"), 2**64 - 1, "\ud7ff\U0001f600\x00"])
def test_numbers_and_texts_arrive_bit_by_bit(value: Any) -> None:
    sent = json.loads(json.dumps(codec.encode((value,))))
    assert codec.decode(tuple[float | int | str, ...], sent) == (value,)


def test_a_message_is_one_line() -> None:
    message = Piece("a\nb\u2028", True)
    assert to_line(message).count(b"\n") == 1
    assert from_line(to_line(message)) == message
    with pytest.raises(ProtocolError):
        from_line(to_line(message)[:-3])


@pytest.mark.parametrize("module", ["worker.client", "worker.protocol", "worker.place", "cli.worker"])
def test_the_client_imports_nothing_heavy(module: str, tmp_path: Path) -> None:
    assert heavy_after(f"import specgen.{module}", tmp_path) == set()


# The commands.


def test_ps_and_stop(start: Start) -> None:
    worker = start()
    _events(worker.connect())
    shown = CliRunner().invoke(app, ["ps", "--json"])
    (found,) = json.loads(shown.stdout)["workers"]
    assert found["pid"] == os.getpid()
    assert (found["status"]["model"], found["status"]["state"], found["status"]["answers"]) == ("fake", "idle", 1)
    table = CliRunner().invoke(app, ["ps"]).stdout.splitlines()
    assert table[0].split()[:3] == ["PID", "MODEL", "STATE"]
    assert table[1].split()[:4] == [str(os.getpid()), "fake", "idle", "1"]
    wrong = CliRunner().invoke(app, ["stop", "other"])
    assert (wrong.exit_code, "no worker is called 'other'" in wrong.stderr) == (2, True)
    done = CliRunner().invoke(app, ["stop", "fake"])
    assert (done.exit_code, done.stdout) == (0, f"stopped fake (process {os.getpid()})\n")
    worker.thread.join(5)
    assert not worker.thread.is_alive()
    assert CliRunner().invoke(app, ["ps"]).stdout == ""


def test_stop_ends_a_running_answer(start: Start) -> None:
    worker = start(LONG)
    remote = worker.connect()
    events = remote.generate(remote.prompt_ids("hi"), RunOptions())
    next(events)
    began = time.monotonic()
    stop_worker(find_workers()[0])
    worker.thread.join(5)
    assert not worker.thread.is_alive()
    assert time.monotonic() - began < 3
    last = list(events)[-1]
    assert last.reason is FinishReason.CANCELLED, "what was said until then arrives"


# Whole processes, with a real (tiny) model.


@pytest.fixture
def environment(tmp_path: Path, runtime: Path) -> dict[str, str]:
    cache = os.environ.get("SPECGEN_CACHE")
    kept = {"SPECGEN_CACHE": cache} if cache else {}
    return {**os.environ, **kept, "SPECGEN_RUNTIME": str(runtime), "SPECGEN_CONFIG": str(tmp_path)}


def _specgen(environment: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "specgen", *words]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env=environment, **pipes)


def _finished(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return process.returncode, out


TIMED = ("timings", "memory", "reused_tokens")


def _untimed(out: bytes) -> dict[str, Any]:
    answer = json.loads(out)
    answer["speculation"] = {key: value for key, value in answer["speculation"].items() if not key.endswith("_ms")}
    return {key: value for key, value in answer.items() if key not in TIMED}


def test_a_warm_run_is_a_cold_run(tmp_path: Path, environment: dict[str, str]) -> None:
    model = llama_file(tmp_path / "tiny.gguf", "Q4_1")
    line = ("run", "-m", str(model), "--raw", "-p", "abc", "-n", "20", "--ignore-eos", "--gamma", "2", "-t", "0.9")
    cold_text = _finished(_specgen(environment, *line, "--keep-alive", "0"))[1]
    cold_json = _finished(_specgen(environment, *line, "--keep-alive", "0", "--json"))[1]
    try:
        racing = [_specgen(environment, *line, "--keep-alive", "1") for _ in range(2)]
        assert [_finished(process)[1] for process in racing] == [cold_text] * 2
        (worker,) = find_workers()
        assert worker.status is not None
        assert worker.status.answers == 2, "both came to the one that won"
        assert _finished(_specgen(environment, *line))[1] == cold_text, "without the flag too"
        assert _untimed(_finished(_specgen(environment, *line, "--json"))[1]) == _untimed(cold_json)
        other = _finished(_specgen(environment, *line, "--seed", "1"))[1]
        assert other != cold_text, "the mutant: another seed"
        assert find_workers()[0].status.answers == 5  # type: ignore[union-attr]

        os.kill(worker.pid, signal.SIGKILL)
        _until(lambda: place.connect(worker.path, 1) is None)
        assert worker.path.exists(), "a stale socket"
        assert _finished(_specgen(environment, *line, "--keep-alive", "1"))[1] == cold_text
        (worker,) = find_workers()
        assert worker.status is not None
        assert worker.status.answers == 1
    finally:
        for worker in find_workers():
            stop_worker(worker)
    _until(lambda: not place.sockets())


def test_a_stuck_worker_is_done_without_and_can_be_stopped(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama_file(tmp_path / "tiny.gguf", "Q4_1")
    line = ("run", "-m", str(model), "--raw", "-p", "abc", "-n", "5", "--ignore-eos")
    expected = _finished(_specgen(environment, *line, "--keep-alive", "1"))[1]
    (worker,) = find_workers()
    os.kill(worker.pid, signal.SIGSTOP)
    stuck = _specgen(environment, *line)
    out, err = stuck.communicate(timeout=60)
    assert (stuck.returncode, out) == (0, expected)
    assert b"does not answer" in err
    monkeypatch.setattr(client, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(client, "KILL_AFTER_S", 0.2)
    (found,) = find_workers()
    assert (found.pid, found.status) == (worker.pid, None)
    stop_worker(found)
    _until(lambda: place.connect(worker.path, 1) is None)


def test_ctrl_c_in_the_client(tmp_path: Path, environment: dict[str, str]) -> None:
    model = llama_file(tmp_path / "tiny.gguf", "Q4_1", context_length=100_000)
    line = ("run", "-m", str(model), "--raw", "-p", "abc", "--ignore-eos", "--keep-alive", "1")
    process = _specgen(environment, *line)
    assert process.stdout is not None
    try:
        process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        _until(lambda: find_workers()[0].status.state == "idle")  # type: ignore[union-attr]
    finally:
        for worker in find_workers():
            stop_worker(worker)


def test_a_worker_that_cannot_start_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    model = llama_file(tmp_path / "tiny.gguf", "Q4_1")
    model.write_bytes(model.read_bytes()[:3000])
    process = _specgen(environment, "run", "-m", str(model), "-p", "x", "--keep-alive", "1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.MODEL
    assert b"error: " in err
    assert find_workers() == []


def test_the_options_are_checked(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "-m", "x", "-p", "hi", "--keep-alive", "-1"])
    assert (result.exit_code, "keep-alive is -1" in result.stderr) == (2, True)
    assert asdict(LoadOptions())["weight_cache_bytes"] > 0

"""`specgen run` between other programs: pipes, closed streams, signals, other locales."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_session import PROMPT, Script
from gguf_files import llama_file

HERE = Path(__file__).resolve().parent
ENVIRON = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    "SPECGEN_CONFIG": os.devnull,
    "OMP_NUM_THREADS": "1",
}

Command = Callable[..., list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The command line of specgen with a scripted session."""

    def build(script: Script, *arguments: str) -> list[str]:
        path = tmp_path / "script.json"
        path.write_text(json.dumps(asdict(script)), encoding="utf-8")
        return [sys.executable, str(HERE / "fake_session.py"), str(path), "run", *arguments]

    return build


def shell(line: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", line], capture_output=True, env={**ENVIRON, **more}, timeout=60, check=False)


TEXT = "é漢😀 naïve\r\n\x1b[1mraw\x1b[0m\t|"
ENDLESS = Script(cycles=((("word ", True), ("more ", False)),), repeat=10_000, delay_s=0.001)


def test_a_pipe_gets_exact_bytes(command: Command) -> None:
    line = shlex.join(command(Script(cycles=(((TEXT, False),), (("end", True),))), "-p", "x"))
    done = shell(f"{line} </dev/null | cat")
    assert done.stdout == (TEXT + "end").encode()
    assert done.stderr == b""


@pytest.mark.parametrize("locale", [{"LANG": "C", "LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}])
def test_utf8_in_any_locale(command: Command, locale: dict[str, str]) -> None:
    line = shlex.join(command(Script(cycles=(((PROMPT, False),),)), "-p", "é漢😀"))
    done = shell(f"{line} </dev/null", PYTHONCOERCECLOCALE="0", **locale)
    assert (done.returncode, done.stdout, done.stderr) == (0, "é漢😀".encode(), b"")


def test_a_closed_pipe_is_no_failure_to_talk_about(command: Command) -> None:
    line = shlex.join(command(ENDLESS, "-p", "x"))
    done = shell(f"{line} </dev/null | head -c 10; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == b"word more 141\n"
    assert done.stderr == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_json_into_a_closed_pipe(command: Command, unbuffered: str) -> None:
    line = shlex.join(command(Script(cycles=((("x" * 300_000, False),),)), "-p", "x", "--json"))
    done = shell(f"{line} </dev/null | head -c 5; echo ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED=unbuffered)
    assert done.stdout == b'{"sch141\n'
    assert done.stderr == b""


def test_text_arrives_while_the_answer_is_made(command: Command) -> None:
    script = Script(cycles=((("first ", False),), (("second", False),)), delay_s=1.0)
    with subprocess.Popen(
        command(script, "-p", "x"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENVIRON
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"first "
        arrived_s = time.monotonic()
        assert os.read(process.stdout.fileno(), 100) == b"second"
        assert time.monotonic() - arrived_s > 0.5
        assert process.wait(timeout=30) == 0


def test_a_full_disk_is_told(command: Command) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full on this system")
    done = shell(f"{shlex.join(command(Script(), '-p', 'x'))} </dev/null >/dev/full")
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[0] == "error: No space left on device"
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_the_answer_does_not_need_stderr(command: Command, redirection: str) -> None:
    done = shell(f"{shlex.join(command(Script(notices=['n']), '-p', 'x'))} </dev/null {redirection}")
    assert (done.returncode, done.stdout) == (0, b"Hello big world")


@pytest.mark.parametrize(
    ("redirection", "message"),
    [("<&-", b"there is no prompt"), (">&- </dev/null -p x", b"standard output is closed"), ("- <&-", b"is closed")],
)
def test_closed_streams(command: Command, redirection: str, message: bytes) -> None:
    done = shell(f"{shlex.join(command(Script()))} {redirection}")
    assert done.returncode == 2
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


def test_p_needs_no_stdin(command: Command) -> None:
    assert shell(f"{shlex.join(command(Script(), '-p', 'x'))} <&-").stdout == b"Hello big world"


def test_a_slow_writer_is_waited_for(command: Command) -> None:
    line = shlex.join(command(Script(cycles=(((PROMPT, False),),)), "-p", "x", "-q"))
    assert shell(f"(sleep 1; echo late; sleep 0.5; echo later) | {line}").stdout == b"x\n\nlate\nlater"


def interrupted(command: list[str], signum: int, times: int = 1) -> tuple[int, bytes, bytes]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRON
    ) as process:
        assert process.stdout is not None
        head = os.read(process.stdout.fileno(), 4)
        time.sleep(0.3)
        for _ in range(times):
            process.send_signal(signum)
            time.sleep(0.1)
        out, err = process.communicate(timeout=30)
        return process.returncode, head + out, err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_answer_and_keeps_what_was_said(command: Command, signum: int, code: int) -> None:
    got, out, err = interrupted(command(ENDLESS, "-p", "x"), signum)
    assert got == code
    assert out.startswith(b"word more ")
    assert out.endswith((b"word ", b"more "))
    assert err == b""


def test_a_second_signal_does_not_wait_for_the_step(command: Command) -> None:
    script = Script(cycles=((("word", False),), (("late", False),)), delay_s=2.0, repeat=2)
    assert interrupted(command(script, "-p", "x"), signal.SIGINT, times=2) == (130, b"word", b"")
    assert interrupted(command(script, "-p", "x"), signal.SIGINT, times=1) == (130, b"wordlate", b"")


def test_o_keeps_what_was_said_until_the_signal(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    with subprocess.Popen(
        command(ENDLESS, "-p", "x", "-o", str(file)), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRON
    ) as process:
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")
    assert file.read_bytes().startswith(b"word more ")
    assert sorted(os.listdir(tmp_path)) == ["out.txt", "script.json"]


def test_an_ignored_interrupt_stays_ignored(command: Command) -> None:
    line = shlex.join(command(Script(delay_s=0.3), "-p", "x"))
    done = shell(f"trap '' INT; {line} </dev/null & pid=$!; sleep 0.8; kill -INT $pid; wait $pid; echo $?")
    assert done.stdout == b"Hello big world0\n"


# With a real model: a random Llama of one layer in a GGUF file.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=20_000)


def specgen(model: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "specgen", "run", "-m", str(model), "--device", "cpu", *arguments]


def test_a_real_answer_into_head(model: Path) -> None:
    line = shlex.join(specgen(model, "-p", "x", "--ignore-eos"))
    done = shell(f"{line} </dev/null | head -c 10 | wc -c; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.split() == [b"10", b"141"]
    assert done.stderr == b""


def test_a_real_answer_is_interrupted(model: Path) -> None:
    code, out, err = interrupted(specgen(model, "-p", "x", "--ignore-eos"), signal.SIGINT)
    assert (code, err) == (130, b"")
    assert out

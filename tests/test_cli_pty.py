"""`specgen run` on a real pseudo-terminal: what a person sees while the answer is made, and what stays."""

from __future__ import annotations

import json
import re
import termios
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_session import Script
from gguf_files import llama_file
from terminal import Terminal

HERE = Path(__file__).resolve().parent
Open = Callable[..., Terminal]

PLAIN_SUMMARY = re.compile(r"^\d+ tokens")


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A terminal in which specgen answers by a script."""

    def build(script: Script, *arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> Terminal:
        path = tmp_path / "script.json"
        path.write_text(json.dumps(asdict(script)), encoding="utf-8")
        line = [str(HERE / "fake_session.py"), str(path), "run", *arguments]
        return Terminal(line, columns, rows, **environment)

    return build


DRAFTED = Script(cycles=((("Plain", False),), ((" drafted", True), (" chosen", False))), delay_s=0.3)
DRAFTED_ON = Script(cycles=[*DRAFTED.cycles, *[[(" on", False)]] * 9], delay_s=0.3)


@pytest.mark.parametrize("columns", [40, 200])
def test_the_text_and_one_line_stay(opened: Open, columns: int) -> None:
    words = [[(f"word{index} ", index % 2 == 1)] for index in range(60)]
    terminal = opened(Script(cycles=[*words, [("漢字😀 end", False)]], delay_s=0.01), "-p", "x", columns=columns)
    terminal.until("tok/s")
    assert terminal.finish() == 0
    text = "".join(f"word{index} " for index in range(60)) + "漢字😀 end"
    lines = terminal.lines()
    assert "".join(line.ljust(columns) for line in lines[:-1]).rstrip() == text
    assert PLAIN_SUMMARY.match(lines[-1])
    assert "91 tokens" in lines[-1]
    assert not any("ctx" in line or "context 1" in line for line in lines[:-1]), "the status line is gone"


@pytest.mark.parametrize("columns", [40, 200])
def test_the_status_line_shows_the_figures_below_the_text(opened: Open, columns: int) -> None:
    terminal = opened(DRAFTED_ON, "-p", "x", columns=columns)
    terminal.until("chosen on")
    text, status = terminal.lines()[-2:]
    assert text.startswith("Plain drafted chosen on")
    for figure in ("tok/s", "draft 50%", "γ"):
        assert figure in status
    terminal.finish()


@pytest.mark.parametrize(("environ", "colour"), [({}, "cyan"), ({"NO_COLOR": "1"}, "default")])
def test_drafted_text_differs_also_without_colour(opened: Open, environ: dict[str, str], colour: str) -> None:
    terminal = opened(DRAFTED, "-p", "x", **environ)
    terminal.finish()
    assert [(cell.underscore, cell.fg) for cell in terminal.cells("drafted")] == [(True, colour)] * 7
    assert [(cell.underscore, cell.fg) for cell in terminal.cells("chosen")] == [(False, "default")] * 6
    assert [cell.underscore for cell in terminal.cells("draft 50%")[:5]] == [True] * 5, "the legend"
    assert "underlined: from the draft" in terminal.lines()[-1]


def test_a_dumb_terminal_gets_no_control_codes(opened: Open) -> None:
    terminal = opened(DRAFTED, "-p", "x", TERM="dumb")
    assert terminal.finish() == 0
    assert terminal.raw == b"Plain drafted chosen\r\n"


def test_quiet_leaves_only_the_text(opened: Open) -> None:
    terminal = opened(DRAFTED, "-p", "x", "--quiet")
    assert terminal.finish() == 0
    assert terminal.raw == b"Plain drafted chosen\r\n"


def test_the_model_cannot_steer_the_terminal(opened: Open) -> None:
    nasty = "before\x1b[2J\x1b]0;owned\x07\x1b[31mafter\x9b1A[bold]b[/bold]"
    terminal = opened(Script(cycles=(((nasty, False),),)), "-p", "x")
    assert terminal.finish() == 0
    assert terminal.lines()[0].startswith("before")
    assert "[bold]b[/bold]" in terminal.lines()[0]
    assert terminal.screen.title == ""
    assert b"\x1b[2J" not in terminal.raw
    assert b"\x1b[31m" not in terminal.raw


def test_lines_longer_than_the_screen(opened: Open) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(1000))
    script = Script(cycles=[[(text[index : index + 7], False)] for index in range(0, 1000, 7)], delay_s=0.002)
    terminal = opened(script, "-p", "x", columns=40, rows=5)
    assert terminal.finish() == 0
    assert "".join(terminal.lines()[:-1]) == text


def test_a_resize_in_the_middle(opened: Open) -> None:
    script = Script(cycles=[[(f"line {index}\n", False)] for index in range(40)], delay_s=0.03)
    terminal = opened(script, "-p", "x", columns=100, rows=20)
    terminal.until("line 8")
    terminal.resize(40, 8)
    terminal.until("line 20")
    terminal.resize(200, 10)
    assert terminal.finish() == 0
    lines = [line for line in terminal.lines() if line.startswith("line")]
    assert lines[-15:] == [f"line {index}" for index in range(25, 40)]
    assert sum("tok/s" in line for line in terminal.lines()[-12:]) == 1, "the summary alone"


ENDLESS = Script(cycles=((("word ", True), ("more ", False)),), repeat=100_000, delay_s=0.01, context_tokens=10**6)


def test_ctrl_c_stops_the_answer_and_says_so(opened: Open) -> None:
    terminal = opened(ENDLESS, "-p", "x")
    terminal.until("word more word")
    terminal.process.send("\x03")
    assert terminal.finish() == 130
    assert "interrupted" in terminal.lines()[-1]
    assert terminal.lines()[0].startswith("word more word")
    assert "^C" not in "".join(terminal.lines())
    assert "Traceback" not in "".join(terminal.lines())


def test_a_second_ctrl_c_leaves_at_once_and_restores_the_terminal(opened: Open) -> None:
    script = Script(cycles=((("word", False),), (("late", False),)), delay_s=3.0)
    terminal = opened(script, "-p", "x")
    assert termios.tcgetattr(terminal.process.child_fd)[3] & termios.ECHO
    terminal.until("word")
    local = termios.tcgetattr(terminal.process.child_fd)[3]
    assert not local & termios.ECHO
    assert local & termios.NOFLSH, "^C must not discard half of a redrawn line"
    terminal.process.send("\x03")
    terminal.read(0.3)
    terminal.process.send("\x03")
    assert terminal.finish(timeout_s=2) == 130
    assert terminal.lines() == ["word"]


def test_the_keyboard_echoes_again_afterwards(tmp_path: Path, opened: Open) -> None:
    script = tmp_path / "s.json"
    script.write_text(json.dumps(asdict(DRAFTED)))
    code = (
        "import subprocess, sys, termios\n"
        f"subprocess.run([sys.executable, {str(HERE / 'fake_session.py')!r}, {str(script)!r}, 'run', '-p', 'x'])\n"
        "print('echo', bool(termios.tcgetattr(0)[3] & termios.ECHO))"
    )
    terminal = Terminal(["-c", code])
    terminal.finish()
    assert terminal.lines()[-1] == "echo True"


def test_a_terminal_without_a_prompt_is_not_waited_for(opened: Open) -> None:
    terminal = opened(Script())
    assert terminal.finish(timeout_s=10) == 2
    assert terminal.lines()[0] == "error: there is no prompt"


def test_dash_reads_the_terminal_to_ctrl_d(opened: Open) -> None:
    terminal = opened(Script(cycles=((("You said: {prompt}", False),),)), "-")
    terminal.until("Ctrl-D")
    terminal.process.send("typed\n\x04")
    assert terminal.finish() == 0
    assert "You said: typed" in terminal.lines()


def test_ctrl_c_while_the_prompt_is_typed(opened: Open) -> None:
    terminal = opened(Script(), "-")
    terminal.until("Ctrl-D")
    terminal.process.send("\x03")
    assert terminal.finish() == 130
    assert "Traceback" not in "".join(terminal.lines())


def test_a_failure_in_the_middle_leaves_a_tidy_screen(opened: Open) -> None:
    terminal = opened(Script(fail="bug"), "-p", "x")
    assert terminal.finish() == 1
    lines = terminal.lines()
    assert lines[0] == "Hello"
    assert lines[1].startswith("error: internal error: KeyError")


def test_a_file_gets_plain_text_while_the_terminal_shows_the_status(opened: Open, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    terminal = opened(DRAFTED, "-p", "x", "-o", str(out))
    terminal.until("tok/s")
    assert terminal.finish() == 0
    assert out.read_text() == "Plain drafted chosen"
    assert len(terminal.lines()) == 1
    assert PLAIN_SUMMARY.match(terminal.lines()[0])


# With a real model: a random Llama of one layer in a GGUF file.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=20_000)


def test_a_real_answer_on_a_terminal(model: Path) -> None:
    line = ["-m", "specgen", "run", "-m", str(model), "--device", "cpu", "-p", "hello world", "--ignore-eos"]
    terminal = Terminal(line, columns=60, rows=12)
    terminal.until("per pass")
    assert "tok/s" in terminal.lines()[-1]
    terminal.process.send("\x03")
    assert terminal.finish() == 130
    assert PLAIN_SUMMARY.match(terminal.lines()[-1])
    assert "interrupted" in terminal.lines()[-1]
    assert sum("per pass" in shown for shown in terminal.lines()) <= 1, "the status line is gone"
    assert "Traceback" not in "".join(terminal.lines())

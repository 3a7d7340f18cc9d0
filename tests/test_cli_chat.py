"""`specgen chat` on a real pseudo-terminal, with a tiny random model."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import chat_file
from prompt_toolkit.document import Document
from terminal import Terminal

from specgen.chat.conversation import Conversation
from specgen.chat.records import Record, from_line
from specgen.cli.chat_commands import COMMANDS
from specgen.cli.lines import CommandCompleter, PrivateHistory

Open = Callable[..., Terminal]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_file(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=30_000)


@pytest.fixture
def opened(model: Path, tmp_path: Path) -> Open:
    """A terminal in which `specgen chat` runs; it waits for the first prompt."""

    def build(*arguments: str, columns: int = 80, rows: int = 24, ready: str = ">", **environment: str) -> Terminal:
        line = ["-m", "specgen", "chat", "-m", str(model), "--device", "cpu", *arguments]
        environment = {"SPECGEN_DATA": str(tmp_path / "data"), "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        terminal = Terminal(line, columns, rows, **environment)
        if ready:
            terminal.until(ready)
        return terminal

    return build


def chats(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / "chats").glob("*.jsonl"))


def saved(path: Path) -> Conversation:
    return Conversation.of(records(path))


def records(path: Path) -> list[Record]:
    return [from_line(line) for line in path.read_bytes().splitlines()]


def until_prompts(terminal: Terminal, count: int) -> None:
    """Until so many prompts were drawn, the last one at the end."""
    end_s = time.monotonic() + 60
    while sum(line.startswith(">") for line in terminal.lines()) < count or not terminal.lines()[-1].startswith(">"):
        assert terminal.read(), terminal.raw
        assert time.monotonic() < end_s, terminal.lines()


def test_two_turns_and_ctrl_d(opened: Open, tmp_path: Path) -> None:
    terminal = opened("-n", "8", "--ignore-eos")
    terminal.process.send("hello\r")
    until_prompts(terminal, 2)
    terminal.process.send("world\r")
    until_prompts(terminal, 3)
    terminal.process.send("\x04")
    assert terminal.finish() == 0
    assert sum("8 tokens" in line for line in terminal.lines()) == 2
    (path,) = chats(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.user for one in saved(path).exchanges] == ["hello", "world"]
    assert [len(one.reply_ids) for one in saved(path).exchanges] == [8, 8]
    history = tmp_path / "data" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+hello" in history.read_text()


@pytest.mark.parametrize("columns", [40, 200])
def test_commands_at_any_width(opened: Open, columns: int, tmp_path: Path) -> None:
    terminal = opened("-n", "4", columns=columns, rows=40)
    terminal.process.send("/help\r")
    terminal.until("/export FILE")
    terminal.process.send("/set temperature 0.5\r")
    until_prompts(terminal, 3)
    terminal.process.send("/set temperature\r")
    terminal.until("temperature 0.5")
    terminal.process.send("/sett\r")
    terminal.until("there is no command /sett")
    terminal.process.send("/set gamma 99\r")
    terminal.until("error: gamma is 99")
    terminal.process.send("hello\r")
    terminal.until("4 tokens")
    terminal.process.send("/stats\r")
    terminal.until("written")
    document = tmp_path / "out.md"
    terminal.process.send(f"/export {document}\r")
    terminal.until("written to")
    assert "## User\n\nhello" in document.read_text()
    terminal.process.send("/undo\r")
    terminal.until("taken back: hello")
    terminal.process.send("/undo\r")
    terminal.until("nothing was said yet")
    terminal.process.send("/quit\r")
    assert terminal.finish() == 0


def test_edit_puts_the_message_back_to_be_changed(opened: Open, tmp_path: Path) -> None:
    terminal = opened("-n", "4")
    terminal.process.send("helo\r")
    until_prompts(terminal, 2)
    terminal.process.send("/edit\r")
    until_prompts(terminal, 3)
    terminal.process.send("\x7flo!\r")
    until_prompts(terminal, 4)
    terminal.process.send("/save mine\r")
    terminal.until("saved as it grows")
    terminal.process.send("\x04")
    assert terminal.finish() == 0
    assert [path.stem for path in chats(tmp_path)] == ["mine"]
    assert [one.user for one in saved(chats(tmp_path)[0]).exchanges] == ["hello!"]


def test_a_file_goes_before_the_message(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("line one\nline two\n")
    terminal = opened("-n", "4")
    terminal.process.send(f"/file {tmp_path / 'notes.txt'}\r")
    terminal.until("17 characters")
    terminal.process.send("what is it?\r")
    terminal.until("4 tokens")
    terminal.process.send("\x04")
    terminal.finish()
    assert saved(chats(tmp_path)[0]).exchanges[0].user == "notes.txt:\n\nline one\nline two\n\nwhat is it?"


def test_ctrl_c_stops_the_reply_and_keeps_it(opened: Open, tmp_path: Path) -> None:
    terminal = opened("--ignore-eos")
    terminal.process.send("hello\r")
    terminal.until("per pass")
    terminal.process.send("\x03")
    terminal.until("interrupted")
    until_prompts(terminal, 2)
    terminal.process.send("\x04")
    assert terminal.finish() == 0
    last = saved(chats(tmp_path)[0]).exchanges[0]
    assert last.reason == "cancelled"
    assert len(last.reply_ids) > 2


def test_ctrl_c_twice_at_the_prompt_leaves(opened: Open) -> None:
    terminal = opened()
    terminal.process.send("\x03")
    terminal.until("Ctrl-C again leaves")
    terminal.process.send("\x03")
    assert terminal.finish() == 130
    assert "Traceback" not in "".join(terminal.lines())
    assert termios.tcgetattr(terminal.process.child_fd)[3] & termios.ECHO, "the keyboard echoes again"


def test_ctrl_c_drops_a_line_and_one_more_line_counts_anew(opened: Open, tmp_path: Path) -> None:
    terminal = opened("-n", "4")
    for _ in range(2):
        terminal.process.send("half a line\x03")
        terminal.until("again leaves")
        terminal.process.send("/set seed 5\r")
        time.sleep(0.3)
        terminal.read()
    terminal.process.send("\x04")
    assert terminal.finish() == 0
    assert chats(tmp_path) == [], "nothing was said, so nothing is kept"


@pytest.mark.parametrize("bracketed", [True, False])
def test_a_paste_of_five_thousand_lines(opened: Open, tmp_path: Path, bracketed: bool) -> None:
    terminal = opened("-n", "4")
    pasted = "\n".join(f"{number}" for number in range(5000))
    begin, end = ("\x1b[200~", "\x1b[201~") if bracketed else ("", "")
    data = (begin + pasted + end).encode()
    for start in range(0, len(data), 1024):  # a terminal takes a little at a time
        terminal.process.send(data[start : start + 1024])
        terminal.read(0.01)
    terminal.until("4999", timeout_s=120)
    terminal.process.send("\r")
    terminal.until("4 tokens", timeout_s=120)
    terminal.process.send("\x04")
    assert terminal.finish() == 0
    assert saved(chats(tmp_path)[0]).exchanges[0].user == pasted


@pytest.mark.parametrize("ending", ["\\\r", "\n", "\x1b\r"])
def test_a_new_line_without_sending(opened: Open, tmp_path: Path, ending: str) -> None:
    terminal = opened("-n", "4")
    terminal.process.send(f"one{ending}two\r")
    terminal.until("4 tokens")
    terminal.process.send("\x04")
    terminal.finish()
    assert saved(chats(tmp_path)[0]).exchanges[0].user == "one\ntwo"


def test_a_resize_in_the_middle_of_a_reply(opened: Open) -> None:
    terminal = opened("-n", "300", "--ignore-eos", "-t", "1", columns=100, rows=20)
    terminal.process.send("hello\r")
    terminal.until("per pass")
    terminal.resize(40, 10)
    terminal.read(0.2)
    terminal.resize(120, 30)
    terminal.until("300 tokens")
    until_prompts(terminal, 1)
    terminal.process.send("/quit\r")
    assert terminal.finish() == 0


def test_kill_9_loses_nothing_and_the_chat_goes_on(opened: Open, tmp_path: Path) -> None:
    terminal = opened("--ignore-eos", "--session", "kept")
    terminal.process.send("hello\r")
    terminal.until("per pass")
    shown = 0
    while shown < 20:
        terminal.read()
        shown = sum(len(one.ids) for one in records(chats(tmp_path)[0]) if type(one).__name__ == "Said")
    terminal.process.kill(signal.SIGKILL)
    assert terminal.finish() == 128 + signal.SIGKILL
    committed = saved(chats(tmp_path)[0]).exchanges[0].reply_ids
    assert len(committed) >= 20
    again = opened("--continue", "-n", "4")
    again.until("resumed kept")
    again.process.send("on\r")
    again.until("4 tokens")
    again.process.send("\x04")
    assert again.finish() == 0
    first, second = saved(chats(tmp_path)[0]).exchanges
    assert (first.reply_ids, first.reason) == (committed, "cancelled")
    assert not second.fresh


def test_two_processes_do_not_share_a_conversation(opened: Open) -> None:
    first = opened("--session", "mine")
    second = opened("--session", "mine", ready="")
    assert second.finish() == 2
    assert "open in another specgen" in second.lines()[0]
    first.process.send("\x04")
    assert first.finish() == 0


def test_a_loaded_reply_cannot_steer_the_terminal(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "data" / "chats" / "evil.jsonl"
    path.parent.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"kind": "opened", "schema": 1, "model": "tiny", "digest": "d"},
        {"kind": "asked", "user": "a\x1b]0;owned\x07", "ids": [1], "fresh": True, "seed": 0},
        {"kind": "replied", "text": "x\x1b[2J\x9b1A[bold]y", "thinking": "", "reason": "eos"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    terminal = opened("--session", "evil", ready="resumed evil")
    terminal.until("[bold]y")
    assert terminal.screen.title == ""
    assert b"\x1b[2J\x9b" not in terminal.raw
    terminal.process.send("\x04")
    assert terminal.finish() == 0


def test_markdown_is_rendered_when_the_reply_is_complete(opened: Open) -> None:
    terminal = opened("--markdown", "--regex", r"\*\*bold\*\* and `code`")
    terminal.process.send("x\r")
    terminal.until("bold and code")
    assert all(cell.bold for cell in terminal.cells("bold"))
    terminal.process.send("\x04")
    assert terminal.finish() == 0


def test_without_a_terminal_it_says_what_to_use() -> None:
    done = subprocess.run([sys.executable, "-m", "specgen", "chat"], input=b"hi", capture_output=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: a chat needs a terminal")
    assert b"specgen run" in done.stderr


def test_completion() -> None:
    completer = CommandCompleter(list(COMMANDS), {name: command.words for name, command in COMMANDS.items()})

    def words(text: str) -> list[str]:
        return [one.text for one in completer.get_completions(Document(text), None)]  # type: ignore[arg-type]

    assert words("/s") == ["/system", "/set", "/stats", "/save"]
    assert words("/set ga") == ["gamma"]
    assert words("/set proposer n") == ["ngram", "none"]
    assert words("hello /s") == []
    assert words("/" * 5000) == []


def test_a_history_on_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = PrivateHistory(tmp_path / "history")
    assert history.trouble is None
    history.store_string("kept")
    history.filename = "/dev/full"
    history.store_string("lost")
    assert history.trouble == "No space left on device"


def test_a_long_history_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.cli.lines.MAX_HISTORY_BYTES", 2000)
    path = tmp_path / "history"
    first = PrivateHistory(path)
    for number in range(200):
        first.store_string(f"line {number}")
    again = PrivateHistory(path)
    strings = list(again.load_history_strings())
    assert strings[0] == "line 199"
    assert 5 < len(strings) < 60
    assert path.stat().st_size <= 2000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

"""What the views write, on a screen of cells: text that is never damaged, and a status line that never stays."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pyte
import pytest
from fake_session import FakeSession, Script
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from terminal import Glass

from specgen.cancel import Cancel
from specgen.cli.report import Outcome, answer_object, json_line, main_fallback, summary
from specgen.cli.screen import Screen
from specgen.cli.status import Marks, Progress, status_line
from specgen.cli.view import REDRAW_S, LiveView, StreamView, WaitingView
from specgen.events import CycleDone, Event, Finished, Piece, Started
from specgen.options import RunOptions

UNDERLINED, COLOURED = Marks("4"), Marks("4;36")


class Watched:
    """A screen that a test can look at, and what was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.screen = Glass(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.writes: list[str] = []

    def write(self, text: str) -> None:
        self.writes.append(text)
        # A terminal driver adds the carriage return.
        self._stream.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    def lines(self) -> list[str]:
        return self.screen.rows()


def events(*cycles: Sequence[tuple[str, bool]], **script: object) -> list[Event]:
    session = FakeSession(Script(cycles=cycles, **script))  # type: ignore[arg-type]
    prompt = session.prompt_ids("x", system=None, raw=False)
    return list(session.generate(prompt, RunOptions(), Cancel()))


def shown_plainly(text: str, columns: int, rows: int) -> list[str]:
    glass = Watched(columns, rows)
    glass.write(text)
    return glass.lines()


def shown_live(pieces: Sequence[str], columns: int, rows: int) -> list[str]:
    glass = Watched(columns, rows)
    view = LiveView(Screen(glass.write, glass.size), COLOURED, clock=Ticks(REDRAW_S))
    for event in events(*[[(piece, index % 2 == 1)] for index, piece in enumerate(pieces)]):
        view.show(event)
    view.close()
    return glass.lines()


class Ticks:
    """A clock that moves by `step_s` each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


# Tabs and zero-width characters are left out here: pyte itself does not place them as terminals do.
words = st.text(st.sampled_from("ab cde\n漢字😀é"), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.lists(words, max_size=12), st.sampled_from([4, 7, 40, 200]), st.sampled_from([2, 5, 24]))
@example(["abcd", "efgh", "\n", "\n", "i"], 4, 5)
@example(["漢字", "漢", "a😀", "\n\n"], 4, 2)
@example(["a" * 500], 40, 5)
def test_live_text_is_what_a_plain_write_shows(pieces: list[str], columns: int, rows: int) -> None:
    assert shown_live(pieces, columns, rows) == shown_plainly("".join(pieces), columns, rows)


def _never_steps(self: Screen) -> str:
    return ""


def _keeps_status(self: Screen, *, newline: bool = True) -> None:
    pass


def _doubles_newline(self: Screen, text: str) -> str:
    self._stepped = False
    return APPENDED(self, text)


APPENDED = Screen._appended


@pytest.mark.parametrize(
    ("method", "mutant"),
    [("_step", _never_steps), ("close", _keeps_status), ("_appended", _doubles_newline)],
)
def test_a_damaged_screen_is_noticed(
    method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Screen, method, mutant)
    pieces = ["abcd", "efgh", "\nij"]
    assert shown_live(pieces, 4, 5) != shown_plainly("".join(pieces), 4, 5)


def test_status_line_is_under_the_text_and_each_update_is_one_write() -> None:
    glass = Watched(60, 5)
    view = LiveView(Screen(glass.write, glass.size), COLOURED, clock=Ticks(REDRAW_S))
    for event in events([("Hello", False)], [(" big", True), (" world", False)]):
        before = len(glass.writes)
        view.show(event)
        assert len(glass.writes) <= before + 1
        if isinstance(event, Piece):
            assert glass.lines()[0].startswith("Hello")
            assert "tok/s" in glass.lines()[1]
    assert glass.lines()[0] == "Hello big world"
    cursor = glass.screen.cursor
    assert (cursor.x, cursor.y) == (len("Hello big world"), 0), "the cursor rests at the end of the text"


def test_text_scrolls_past_the_screen_with_the_status_line_at_its_bottom() -> None:
    glass = Watched(40, 5)
    view = LiveView(Screen(glass.write, glass.size), COLOURED, clock=Ticks(REDRAW_S))
    for event in events(*[[(f"line {index}\n", False)] for index in range(30)], [("end", True)]):
        view.show(event)
    assert glass.lines()[-2] == "end"
    assert "tok/s" in glass.lines()[-1]
    assert glass.lines()[:30] == [f"line {index}" for index in range(30)]


def test_a_screen_of_one_row_has_no_status_line() -> None:
    glass = Watched(40, 1)
    view = LiveView(Screen(glass.write, glass.size), COLOURED)
    for event in events([("Hello", False)], [(" big", True)]):
        view.show(event)
    assert glass.lines() == ["Hello big"]


def test_status_line_is_not_reworded_more_often_than_it_can_be_read() -> None:
    wordings = set()
    glass = Watched(200, 24)
    view = LiveView(Screen(glass.write, glass.size), COLOURED, clock=lambda: 1.0)
    for event in events(*[[("x", False)]] * 20):
        view.show(event)
        wordings.add(glass.lines()[-1])
    assert len(wordings - {"x" * n for n in range(21)}) == 1


@pytest.mark.parametrize("columns", [1, 8, 39, 40, 60, 80, 100, 120, 200])
def test_status_line_fits_and_keeps_its_legend(columns: int) -> None:
    progress = Progress()
    for event in events([("a", False)], [("b", True), ("c", False)], context_tokens=32768):
        progress.see(event)
    plain = status_line(progress, columns, Marks())
    assert cell_len(plain) <= columns
    if columns >= 39:
        for figure in ("100 tok/s", "1.5", "draft 50%", "γ", "0%"):
            assert figure in plain
        assert "\x1b[4mdraft\x1b[0m" in status_line(progress, columns, UNDERLINED)
    assert "underlined: from the draft" in status_line(progress, 200, UNDERLINED)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_lossy_rule_is_labelled_in_the_status_line_and_the_summary(columns: int) -> None:
    progress, all_events = Progress(), events([("a", False)], [("b", True)], lossless=False)
    for event in all_events:
        progress.see(event)
    assert "lossy" in status_line(progress, columns, Marks())
    assert "lossy" in summary(outcome_of(all_events), Marks(), columns)
    assert answer_object(outcome_of(all_events))["speculation"]["lossless"] is False


def outcome_of(all_events: Sequence[Event]) -> Outcome:
    started = next(event for event in all_events if isinstance(event, Started))
    finished = next(event for event in all_events if isinstance(event, Finished))
    return Outcome(started, finished, RunOptions(), FakeSession(Script()).report())


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_the_summary_is_one_line(columns: int) -> None:
    line = summary(outcome_of(events([("a", False)], [("b", True)])), Marks(), columns)
    assert cell_len(line) <= columns
    assert "\n" not in line
    assert line.startswith("3 tokens")


def test_the_summary_says_why_most_cycles_were_plain() -> None:
    plain = outcome_of(events(*[[("a", False)]] * 4))
    assert main_fallback(plain.record) == "plain in 4 of 4 cycles: no match"
    assert "no match" in summary(plain, Marks(), 200)
    drafted = outcome_of(events([("a", False)], *[[("b", True)]] * 4))
    assert main_fallback(drafted.record) is None


def test_drafted_text_is_underlined_with_and_without_colour() -> None:
    for marks, colour in ((UNDERLINED, "default"), (COLOURED, "cyan")):
        glass = Watched(60, 5)
        view = LiveView(Screen(glass.write, glass.size), marks)
        for event in events([("Hello", False)], [(" big", True), (" world", False)]):
            view.show(event)
        row = glass.screen.buffer[0]
        assert [row[x].underscore for x in (0, 6, 12)] == [False, True, False]
        assert [row[x].fg for x in (0, 6, 12)] == ["default", colour, "default"]


NASTY = "\x1b[2J\x1b]0;title\x07\x9b31m[bold]\x08\x7f\r"


def test_control_characters_of_the_model_never_reach_a_terminal() -> None:
    glass = Watched(80, 5)
    view = LiveView(Screen(glass.write, glass.size), Marks())
    harmless, nasty = [Watched(80, 5), glass]
    quiet = LiveView(Screen(harmless.write, harmless.size), Marks())
    for good, bad in zip(events([("safe", False)]), events([("safe" + NASTY, True)]), strict=True):
        quiet.show(good)
        view.show(bad)
    assert glass.lines()[0].startswith("safe")
    assert "[bold]" in glass.lines()[0], "Rich markup is text"
    ours = "".join(harmless.writes)
    for character in "\x07\x9b\x08\x7f":
        assert character not in "".join(nasty.writes)
    assert "".join(nasty.writes).count("\x1b") == ours.count("\x1b"), "every escape is our own"
    assert "".join(nasty.writes).count("\r") == ours.count("\r")


def stream() -> tuple[io.TextIOWrapper, io.BytesIO]:
    raw = io.BytesIO()
    return io.TextIOWrapper(raw, encoding="utf-8", newline=""), raw


def test_a_pipe_gets_the_bytes_of_the_text_and_nothing_else() -> None:
    text, raw = stream()
    view = StreamView(text, Marks(), terminal=False)
    for event in events([("é漢😀\r\n", False)], [("\x1b[1m", True)]):
        view.show(event)
    view.close()
    assert raw.getvalue() == "é漢😀\r\n\x1b[1m".encode()


def test_a_pipe_is_flushed_with_each_piece() -> None:
    text, raw = stream()
    view = StreamView(text, Marks(), terminal=False)
    so_far = ""
    for event in events([("one ", False)], [("two", True)]):
        view.show(event)
        so_far += event.text if isinstance(event, Piece) else ""
        assert raw.getvalue() == so_far.encode()


def test_a_terminal_without_status_line_gets_clean_text_that_ends_a_line() -> None:
    text, raw = stream()
    view = StreamView(text, UNDERLINED, terminal=True)
    for event in events([("Hello", False)], [(" big\x1b[2J", True)]):
        view.show(event)
    view.close()
    view.close()
    written = raw.getvalue().decode()
    assert written.count("\x1b") == 2
    assert written.endswith("\n")
    assert not written.endswith("\n\n")


def test_a_status_line_alone_leaves_nothing() -> None:
    glass = Watched(60, 5)
    text, raw = stream()
    inner = StreamView(text, Marks(), terminal=False)
    view = WaitingView(Screen(glass.write, glass.size), inner, clock=Ticks(REDRAW_S))
    for event in events([("Hello", False)], [(" big", True)]):
        view.show(event)
        if isinstance(event, CycleDone):
            assert "tok/s" in glass.lines()[0]
            assert len(glass.lines()) == 1
    view.close()
    assert glass.lines() == []
    assert raw.getvalue() == b"Hello big"


def test_json_is_one_line_that_cannot_steer_a_terminal() -> None:
    import json

    value = {"text": "é漢😀\x1b[2J\x9b\u202e\n\x7f\u2028"}
    line = json_line(value)
    assert json.loads(line) == value
    assert "漢" in line
    assert line.isprintable()


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_line({"x": float("nan")})

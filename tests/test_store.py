"""The n-gram store: bounded, shared, private, and never trusted."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from filelock import FileLock

from specgen.options import NgramOptions
from specgen.propose import store as module
from specgen.propose.ngram import NgramIndex, NgramProposer
from specgen.propose.store import MAX_FILE_BYTES, MAX_TOKENS, NgramStore

DIGEST = "ab" * 32
VOCAB = 100


def open_store(folder: Path, digest: str = DIGEST) -> NgramStore:
    return NgramStore(folder, digest, VOCAB)


def text(first: int, length: int = 10) -> list[int]:
    return [(first + index) % VOCAB for index in range(length)]


def test_what_was_stored_is_read_by_the_next_run_and_drafted(tmp_path: Path) -> None:
    assert open_store(tmp_path).read() == []
    open_store(tmp_path).add(text(40))
    store = open_store(tmp_path)
    earlier = NgramIndex(NgramOptions(), store.read())
    draft = NgramProposer(earlier=earlier).propose([7, 42, 43], 3)
    assert store.notice is None
    assert draft is not None
    assert draft.tokens == (44, 45, 46)


def test_the_oldest_go_first_and_the_file_stays_bounded(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for first in range(5):
        store.add([first, *text(10, MAX_TOKENS // 3)])
    kept = store.read()
    assert sum(map(len, kept)) == MAX_TOKENS
    assert [known[0] for known in kept[-2:]] == [3, 4]
    assert store.path.stat().st_size < MAX_FILE_BYTES
    assert store.path.stat().st_mode & 0o077 == 0, "what was said is nobody else's business"


def test_a_conversation_is_kept_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for length in (10, 20, 30):
        store.add(text(0, length))
    store.add(text(0, 30))
    assert store.read() == [text(0, 30)]
    store.add(text(0, 3))
    assert len(store.read()) == 1, "too short to be of use"


def test_models_do_not_share(tmp_path: Path) -> None:
    open_store(tmp_path).add(text(1))
    assert open_store(tmp_path, "cd" * 32).read() == []


GOOD = {"schema": 1, "model": DIGEST, "texts": [text(1)]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"[" * 100_000,
        b'{"schema": 1',
        json.dumps([1]).encode(),
        json.dumps({**GOOD, "schema": 2}).encode(),
        json.dumps({**GOOD, "model": "ef" * 32}).encode(),
        json.dumps({**GOOD, "texts": 3}).encode(),
        json.dumps({**GOOD, "texts": [[1, VOCAB]]}).encode(),
        json.dumps({**GOOD, "texts": [[1, -1]]}).encode(),
        json.dumps({**GOOD, "texts": [[1, True]]}).encode(),
        json.dumps({**GOOD, "texts": [[1.5]]}).encode(),
        json.dumps(GOOD).encode() + b" " * MAX_FILE_BYTES,
    ],
    ids=lambda content: repr(content[:24]),
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_notice_and_replaced(tmp_path: Path, content: bytes) -> None:
    store = open_store(tmp_path)
    store.path.write_bytes(content)
    assert store.read() == []
    assert store.notice is not None
    assert "ignored" in store.notice
    store.add(text(5))
    assert open_store(tmp_path).read() == [text(5)]


def test_a_valid_file_has_no_notice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.path.write_text(json.dumps(GOOD))
    assert (store.read(), store.notice) == ([text(1)], None)


def _add_many(folder: Path, first: int) -> None:
    for number in range(10):
        open_store(folder).add(text(first + number, 9))


def test_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_many, args=(tmp_path, first)) for first in (0, 20, 40)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    expected = {tuple(text(first + number, 9)) for first in (0, 20, 40) for number in range(10)}
    assert {tuple(known) for known in open_store(tmp_path).read()} == expected
    leftovers = {path.name for path in tmp_path.iterdir()} - {f"{DIGEST[:32]}.json", f"{DIGEST[:32]}.lock"}
    assert not leftovers


def test_without_the_lock_something_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above, in one process: another writer comes between reading and replacing."""

    class NoLock:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(module, "FileLock", NoLock)
    store, other = open_store(tmp_path), open_store(tmp_path)
    original = store._write

    def interrupted(texts: list[list[int]]) -> None:
        other.add(text(50))
        original(texts)

    store._write = interrupted  # type: ignore[method-assign]
    store.add(text(1))
    assert open_store(tmp_path).read() == [text(1)]


def test_a_store_in_use_does_not_hold_up_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    store = open_store(tmp_path)
    store.add(text(1))
    with FileLock(store.path.with_suffix(".lock")):
        store.add(text(2))
    assert store.notice is not None
    assert "in use" in store.notice
    assert store.read() == [text(1)]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    store = open_store(blocker)
    store.add(text(1))
    assert store.notice is not None

"""Prompts: those that ship, and the user's own, good and bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgen.errors import UsageError
from specgen.measure.workloads import HARD_KIND, KINDS, LONG_KIND, digest, kinds_in_turn, load_workloads, shipped
from specgen.tune.plan import LONG_TOKENS


def test_nine_kinds_ship_with_several_prompts_each() -> None:
    loads = shipped()
    assert list(dict.fromkeys(load.kind for load in loads)) == list(KINDS)
    assert len(KINDS) == 9
    for kind in KINDS:
        mine = [load for load in loads if load.kind == kind]
        assert len(mine) >= 3
        assert all(load.sampling.temperature > 0 for load in mine)
    assert len({load.id for load in loads}) == len(loads)
    assert len({load.text for load in loads}) == len(loads)
    assert all(load.sampling.temperature == 1.0 for load in loads if load.kind == HARD_KIND)
    assert all(len(load.text.split()) >= 12 for load in loads)


def test_long_prompts_share_one_document_and_come_only_when_asked_for() -> None:
    loads = load_workloads((LONG_KIND,))
    assert len(loads) >= 3
    assert len({load.system for load in loads}) == 1
    # A token is at most a word and a half of English in any of the usual vocabularies.
    assert len((loads[0].system or "").split()) > LONG_TOKENS / 1.25
    assert LONG_KIND not in {load.kind for load in shipped()}
    assert LONG_KIND not in {load.kind for load in load_workloads()}


def test_an_edit_copies_from_its_prompt() -> None:
    assert all("```" in load.text for load in shipped() if load.kind == "code_editing")


def test_turns_go_over_kinds() -> None:
    turns = kinds_in_turn(shipped())
    assert [load.kind for load in turns[:9]] == list(KINDS)
    assert len(turns) == len(shipped())


def test_greedy_and_own_temperature() -> None:
    load = load_workloads(("chat",))[0]
    assert load.options(0.0).sampling.temperature == 0.0
    own = load.options()
    assert own.sampling.temperature == load.sampling.temperature > 0
    assert own.max_tokens == load.max_tokens


def test_digest_follows_the_prompts() -> None:
    loads = shipped()
    assert digest(loads) == digest(shipped())
    assert digest(loads) != digest(loads[1:])


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UsageError) as failure:
        load_workloads(("storie",))
    assert "story" in (failure.value.hint or "")


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_text_file_is_one_prompt(tmp_path: Path) -> None:
    (load,) = load_workloads((), write(tmp_path / "mine.txt", "\nTell me\na joke.\n"))
    assert (load.kind, load.name, load.text) == ("own", "mine", "Tell me\na joke.")


def test_jsonl_lines_are_prompts(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "a", "temperature": 0, "max_tokens": 9, "system": "be brief"}),
        "",
        json.dumps("just text"),
        json.dumps({"text": "b", "kind": "mail", "name": "second", "top_p": 0.5}),
    ]
    loads = load_workloads((), write(tmp_path / "set.jsonl", "\n".join(lines) + "\n"))
    assert [(load.kind, load.name) for load in loads] == [("set", "1"), ("set", "3"), ("mail", "second")]
    assert (loads[0].system, loads[0].max_tokens, loads[0].sampling.temperature) == ("be brief", 9, 0)
    assert loads[2].sampling.top_p == 0.5
    assert [load.kind for load in load_workloads(("mail",), tmp_path / "set.jsonl")] == ["mail"]


def test_a_folder_gives_kinds_by_sub_folder(tmp_path: Path) -> None:
    write(tmp_path / "top.txt", "x")
    write(tmp_path / "mails" / "one.md", "y")
    write(tmp_path / "mails" / "more.jsonl", '{"text": "z"}')
    write(tmp_path / "mails" / "picture.bin", b"\xff")
    found = {load.id: load.text for load in load_workloads((), tmp_path)}
    assert found == {"own/top": "x", "mails/one": "y", "mails/1": "z"}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.txt", b"", ["empty"]),
        ("blank.txt", b" \n\n", ["empty"]),
        ("latin.txt", "one\ntwo\ncaf\xe9".encode("latin-1"), ["line 3", "UTF-8"]),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', ["line 2", "JSON"]),
        ("list.jsonl", b"[1]\n", ["line 1", "object"]),
        ("none.jsonl", b'{"kind": "a"}\n', ["line 1", "no text"]),
        ("key.jsonl", b'{"text": "a", "temprature": 1}\n', ["line 1", "temprature"]),
        ("type.jsonl", b'{"text": 7}\n', ["line 1", "text is 7"]),
        ("bool.jsonl", b'{"text": "a", "temperature": true}\n', ["line 1", "temperature"]),
        ("range.jsonl", b'\n{"text": "a", "top_p": 2}\n', ["line 2", "top-p"]),
        ("tokens.jsonl", b'{"text": "a", "max_tokens": 0}\n', ["line 1", "max tokens"]),
        ("deep.jsonl", b"[" * 100_000, ["line 1"]),
    ],
)
def test_bad_files_are_usage_errors_with_lines(tmp_path: Path, name: str, data: bytes, words: list[str]) -> None:
    with pytest.raises(UsageError) as failure:
        load_workloads((), write(tmp_path / name, data))
    for word in [name, *words]:
        assert word in failure.value.message


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_workloads((), tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no prompts"):
        load_workloads((), tmp_path)

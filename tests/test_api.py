"""The library's few lines: the text of the command line, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import llama_file

import specgen
from specgen import Model, load
from specgen.errors import ContextFullError, ModelError, SpecgenError, UsageError
from specgen.events import FinishReason

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(
        tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=512, **{"tokenizer.chat_template": TEMPLATE}
    )


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with load(path, threads=1, kv="f32") as loaded:
        yield loaded


def test_the_text_is_that_of_the_command_line(model: Model, path: Path) -> None:
    pieces = list(model.generate("abc", raw=True, max_tokens=20, ignore_eos=True, temperature=0.9, seed=3))
    line = ["run", "-m", str(path), "--raw", "-p", "abc", "-n", "20", "--ignore-eos", "-t", "0.9", "--seed", "3"]
    line += ["--kv", "f32", "--threads", "1", "--keep-alive", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "specgen", *line], capture_output=True, check=True, stdin=subprocess.DEVNULL
    )
    said = json.loads(done.stdout)
    assert "".join(pieces) == said["text"]
    assert model.finished is not None
    assert list(model.finished.token_ids) == said["token_ids"]
    assert model.record is not None
    assert model.record.completion_tokens == 20
    other = model.text("abc", raw=True, max_tokens=20, ignore_eos=True, temperature=0.9, seed=4)
    assert other != said["text"], "the mutant: another seed"


def test_text_and_messages_are_the_same_turn(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    alone = model.text("hi", **options)
    assert model.text([{"role": "user", "content": "hi"}], **options) == alone
    told = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert model.text("hi", system="be brief", **options) == model.text(told, **options)
    assert model.record is not None
    assert model.record.reused_tokens > 0, "the second time from the cache"


def test_an_answer_can_be_left(model: Model) -> None:
    pieces = model.generate("abc", raw=True, ignore_eos=True)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert model.finished is None
    assert model.text("abc", raw=True, max_tokens=3, ignore_eos=True), "the model stays usable"


def test_an_answer_can_be_cancelled_from_another_thread(model: Model) -> None:
    pieces = model.generate("abc", raw=True, ignore_eos=True)
    next(pieces)
    thread = threading.Thread(target=model.cancel)
    thread.start()
    thread.join()
    list(pieces)
    assert model.finished is not None
    assert model.finished.reason is FinishReason.CANCELLED


def test_one_stop_string_and_biases_by_token(model: Model) -> None:
    text = model.text("abc", raw=True, max_tokens=30, ignore_eos=True)
    stop = text[3:5]
    assert model.text("abc", raw=True, max_tokens=30, ignore_eos=True, stop=stop) == text[: text.index(stop)]
    first = model.finished.token_ids[0]  # type: ignore[union-attr]
    model.text("abc", raw=True, max_tokens=1, ignore_eos=True, logit_bias={first: -float("inf")})
    assert model.finished is not None
    assert model.finished.token_ids[0] != first


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"temprature": 1}, "unknown option 'temprature'", "'temperature'"),
        ({"temperature": -1}, "temperature is -1", "at least 0"),
        ({"temperature": "hot"}, "temperature is 'hot'", "float"),
        ({"max_tokens": True}, "max_tokens is True", "int"),
        ({"gamma": 99}, "gamma is 99", "at most 16"),
        ({"proposer": "magic"}, "proposer is 'magic'", ""),
        ({"stop": 3}, "stop is 3", ""),
        ({"system": "x", "raw": True}, "--system needs", ""),
    ],
)
def test_bad_options_are_told_before_any_work(model: Model, options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        model.generate("hi", **options)
    assert message in raised.value.message
    assert hint in (raised.value.hint or "")


def test_messages_exclude_what_a_text_may_have(model: Model) -> None:
    with pytest.raises(UsageError, match="messages go through"):
        model.generate([{"role": "user", "content": "hi"}], system="x")


def test_a_prompt_that_does_not_fit(model: Model) -> None:
    with pytest.raises(ContextFullError):
        model.generate("abc " * 1000, raw=True)


@pytest.mark.parametrize(
    ("options", "kind"), [({"thread": 1}, UsageError), ({"threads": 0}, UsageError), ({"kv": "f8"}, UsageError)]
)
def test_bad_load_options(path: Path, options: dict[str, Any], kind: type[SpecgenError]) -> None:
    with pytest.raises(kind):
        load(path, **options)


def test_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="unknown model"):
        load("no-such-model-here")


def test_a_closed_model(path: Path) -> None:
    loaded = load(path, threads=1)
    assert loaded.report()["model"] == "tiny"
    loaded.close()
    loaded.close()
    with pytest.raises(UsageError, match="closed"):
        loaded.generate("hi")


def test_the_package_has_what_it_says() -> None:
    assert set(specgen.__all__) <= set(dir(specgen))
    with pytest.raises(AttributeError):
        specgen.lode  # noqa: B018

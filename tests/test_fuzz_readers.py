"""Broken and hostile model files: whatever is read of them, a ModelError comes out, soon, and without large memory.

Whole checkpoints are mutated and then used as a load uses them: opened, every tensor read, every module decoded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from gguf_files import llama_file
from golden_files import CPU, Golden
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgen.errors import ModelError
from specgen.model.families import spec_from_config
from specgen.weights.base import Checkpoint
from specgen.weights.checkpoint import open_checkpoint
from specgen.weights.formats import find_format
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.mapped import MappedFile

MEMORY_BYTES = 256 << 20
"""What reading a file of 100 kB may take on top of what the process has already."""

SECONDS = 5.0
GOLDEN = ("awq-gemm", "gptq-act-order", "ct-w4a16-asym", "fp8-block", "bnb-nf4-double", "bnb-int8")
ABSURD = (0, 1, 0x7F, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 48, (1 << 63) - 1, (1 << 64) - 1)

bounded = settings(
    max_examples=120,
    deadline=None,  # the tests' own limit is in `use`
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@contextmanager
def limited_memory() -> Iterator[None]:
    """An allocation beyond MEMORY_BYTES fails at once (where the system can do that)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_everything(checkpoint: Checkpoint, shape: tuple[int, int]) -> None:
    """Every tensor, and every module as if it had `shape` or the shape of its own weight."""
    names = sorted(checkpoint.names())
    checkpoint.digest()
    for name in names:
        attempt(lambda name=name: checkpoint.tensor(name))
    for key in sorted({name.rpartition(".")[0] for name in names} - {""}):
        for guess in (shape, shape[::-1]):
            attempt(lambda key=key, guess=guess: find_format(checkpoint, key).linear(checkpoint, key, guess, CPU))
    if isinstance(checkpoint, GgufCheckpoint):
        for key in checkpoint.metadata:
            attempt(lambda key=key: checkpoint.metadata[key])
    attempt(lambda: spec_from_config(checkpoint.config))
    checkpoint.release()


def attempt(read: Any) -> None:
    """A ModelError about one tensor does not keep the others from being read."""
    with suppress(ModelError):
        read()


def use(path: Path, shape: tuple[int, int]) -> bool:
    """Whether the checkpoint could be opened. Anything but a ModelError passes through to the test."""
    start = time.perf_counter()
    with limited_memory():
        try:
            checkpoint = open_checkpoint(path)
        except ModelError:
            return False
        read_everything(checkpoint, shape)
    assert time.perf_counter() - start < SECONDS
    return True


@st.composite
def damage(draw: st.DrawFn, whole: bytes, header: int) -> bytes:
    """`whole` with a few changes, most of them in its first `header` bytes."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, header - 1) | st.integers(0, max(1, len(data)) - 1))
        match draw(st.sampled_from(("byte", "number", "cut", "insert", "remove", "repeat"))):
            case "byte":
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                size = draw(st.sampled_from((4, 8)))
                data[place : place + size] = (draw(st.sampled_from(ABSURD)) % (1 << 8 * size)).to_bytes(size, "little")
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=16))
            case "remove":
                del data[place : place + draw(st.integers(1, 16))]
            case "repeat":
                data[place:place] = data[place : place + draw(st.integers(1, 64))]
    return bytes(data)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return llama_file(tmp_path_factory.mktemp("whole") / "model.gguf", "Q8_0").read_bytes()


@given(data=st.data())
@bounded
def test_a_damaged_gguf_file(data: st.DataObject, gguf_bytes: bytes, tmp_path: Path) -> None:
    header = gguf_bytes.index(b"blk.0.attn_q.weight") + 800
    (tmp_path / "model.gguf").write_bytes(data.draw(damage(gguf_bytes, header)))
    use(tmp_path / "model.gguf", (64, 64))


@pytest.mark.parametrize("name", ["gguf-Q4_K", "gguf-Q6_K", "gguf-IQ4_XS"])
@given(data=st.data())
@settings(bounded, max_examples=30)
def test_a_damaged_gguf_file_of_another_type(data: st.DataObject, name: str, tmp_path: Path) -> None:
    Golden.load(name).checkpoint(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(data.draw(damage(path.read_bytes(), 256)))
    use(path, (128, 256))


@pytest.mark.parametrize("name", GOLDEN)
@given(data=st.data())
@settings(bounded, max_examples=60)
def test_a_damaged_safetensors_file(data: st.DataObject, name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    golden.checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(data.draw(damage(whole, 8 + int.from_bytes(whole[:8], "little"))))
    use(tmp_path, golden.shape)


json_values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(ABSURD) | st.integers(-4, 600) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def with_one_value_changed(draw: st.DrawFn | Any, value: Any) -> Any:
    """`value` (JSON) with one of its parts, at any depth, replaced."""
    if isinstance(value, dict) and value and draw(st.booleans() | st.just(True)):
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: with_one_value_changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], with_one_value_changed(draw, value[place]), *value[place + 1 :]]
    return draw(json_values)


@pytest.mark.parametrize("name", GOLDEN)
@given(data=st.data())
@settings(bounded, max_examples=60)
def test_a_header_that_lies(data: st.DataObject, name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    golden.checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.dumps(with_one_value_changed(data.draw, json.loads(whole[8 : 8 + length]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    use(tmp_path, golden.shape)


@pytest.mark.parametrize("name", GOLDEN)
@given(data=st.data())
@settings(bounded, max_examples=60)
def test_a_config_that_lies(data: st.DataObject, name: str, tmp_path: Path) -> None:
    golden = Golden.load(name)
    golden.checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(with_one_value_changed(data.draw, json.loads(path.read_text()))))
    use(tmp_path, golden.shape)


@given(data=st.data())
@bounded
def test_an_index_that_lies(data: st.DataObject, tmp_path: Path) -> None:
    golden = Golden.load("fp8-block")
    index = {"metadata": {}, "weight_map": dict.fromkeys(golden.tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    golden.checkpoint(tmp_path)
    changed = with_one_value_changed(data.draw, index)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
    use(tmp_path, golden.shape)


def test_an_undamaged_file_is_read(gguf_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes)
    assert use(tmp_path / "model.gguf", (64, 64))


def test_a_reader_without_bounds_checks_is_noticed(
    gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappedFile, "check", lambda self, offset, nbytes, name: None)
    (tmp_path / "model.gguf").write_bytes(gguf_bytes[:-100])
    with pytest.raises((RuntimeError, ValueError)):
        use(tmp_path / "model.gguf", (64, 64))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits a process's memory")
def test_a_large_allocation_is_noticed() -> None:
    with pytest.raises(MemoryError), limited_memory():
        bytearray(2 * MEMORY_BYTES)

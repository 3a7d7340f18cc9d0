"""A GGUF header is read as gguf-py reads it; a broken one is an error, never a crash, a hang or a big allocation."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import llama_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgen.errors import ModelError
from specgen.weights.ggml_types import GGML_TYPES
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_header import GgufHeader
from specgen.weights.mapped import MappedFile


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return llama_file(tmp_path_factory.mktemp("gguf") / "model.gguf", "Q4_1").read_bytes()


def header_of(tmp_path: Path, data: bytes) -> GgufHeader:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return GgufHeader(MappedFile(path))


def open_and_read(path: Path, data: bytes) -> None:
    """Everything that a load does."""
    path.write_bytes(data)
    checkpoint = GgufCheckpoint(path)
    _ = dict(checkpoint.config)
    for name in checkpoint.names():
        checkpoint.packed(name) if name.endswith("proj.weight") else checkpoint.type_name(name)
    for key in checkpoint.metadata:
        _ = checkpoint.metadata[key]
    checkpoint.digest()


def test_the_types_are_those_of_gguf_py() -> None:
    theirs = {
        int(kind): (kind.name, *gguf.constants.GGML_QUANT_SIZES[kind]) for kind in gguf.constants.GGMLQuantizationType
    }
    ours = {number: (kind.name, kind.block, kind.block_bytes) for number, kind in GGML_TYPES.items()}
    common = theirs.keys() & ours.keys()  # another version of the package knows a few more or fewer
    assert len(common) >= 28
    assert {number: ours[number] for number in common} == {number: theirs[number] for number in common}


def test_the_same_as_gguf_py(tmp_path: Path, whole: bytes) -> None:
    header = header_of(tmp_path, whole)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert [key for key in reader.fields if not key.startswith("GGUF.")] == list(header)
    for key in header:
        value = header[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == reader.fields[key].contents()
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.shape, ours.type.name) == (tuple(tensor.shape.tolist())[::-1], tensor.tensor_type.name)
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)


def overwritten(data: bytes, offset: int, layout: str, value: int) -> bytes:
    new = bytearray(data)
    struct.pack_into(layout, new, offset, value)
    return bytes(new)


def at(data: bytes, text: bytes) -> int:
    """The offset just behind the first `text`."""
    return data.index(text) + len(text)


BREAKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda d: b"GGML" + d[4:], "no GGUF"),
    "version 1": (lambda d: overwritten(d, 4, "<I", 1), "version 1"),
    "version 9": (lambda d: overwritten(d, 4, "<I", 9), "version 9"),
    "big-endian": (lambda d: overwritten(d, 4, ">I", 3), "big-endian"),
    "absurd tensor count": (lambda d: overwritten(d, 8, "<Q", 1 << 60), "needs"),
    "absurd key count": (lambda d: overwritten(d, 16, "<Q", (1 << 64) - 1), "needs"),
    "one key more than there are": (lambda d: overwritten(d, 16, "<Q", 999), ""),
    "absurd key length": (lambda d: overwritten(d, 24, "<Q", 1 << 62), "needs"),
    "unknown value type": (lambda d: overwritten(d, at(d, b"llama.block_count"), "<I", 77), "unknown value type"),
    "nested array": (lambda d: overwritten(d, at(d, b"tokenizer.ggml.tokens") + 4, "<I", 9), "unknown value type"),
    "absurd array": (lambda d: overwritten(d, at(d, b"tokenizer.ggml.tokens") + 8, "<Q", 1 << 61), "array"),
    "absurd numbers": (lambda d: overwritten(d, at(d, b"ggml.token_type") + 8, "<Q", 1 << 61), "token_type needs"),
    "absurd string": (lambda d: overwritten(d, at(d, b"tokenizer.ggml.merges") + 16, "<Q", 1 << 63), "past the end"),
    "no dimensions": (lambda d: overwritten(d, at(d, b"output_norm.weight"), "<I", 0), "0 dimensions"),
    "many dimensions": (lambda d: overwritten(d, at(d, b"output_norm.weight"), "<I", 1 << 30), "dimensions"),
    "empty shape": (lambda d: overwritten(d, at(d, b"output_norm.weight") + 4, "<Q", 0), "empty"),
    "overflowing shape": (lambda d: overwritten(d, at(d, b"token_embd.weight") + 12, "<Q", 1 << 63), "takes bytes"),
    "ragged rows": (lambda d: overwritten(d, at(d, b"token_embd.weight") + 4, "<Q", 63), "multiple of Q4_1's 32"),
    "unknown tensor type": (lambda d: overwritten(d, at(d, b"output_norm.weight") + 12, "<I", 4), "unknown type 4"),
    "offset outside": (lambda d: overwritten(d, at(d, b"output_norm.weight") + 16, "<Q", 1 << 40), "takes bytes"),
    "offset overflow": (lambda d: overwritten(d, at(d, b"output_norm.weight") + 16, "<Q", (1 << 64) - 32), "bytes"),
    "odd offset": (lambda d: overwritten(d, at(d, b"output_norm.weight") + 16, "<Q", 1), "no multiple"),
    "same tensor twice": (lambda d: d.replace(b"blk.0.attn_q.weight", b"blk.0.attn_v.weight"), "twice"),
    "truncated weights": (lambda d: d[:-100], "output_norm.weight takes bytes"),
    "truncated header": (lambda d: d[:700], ""),
    "key is no text": (lambda d: d.replace(b"llama.block_count", b"llama.\xff\xfeock_count"), "UTF-8"),
    "empty file": (lambda d: b"", "empty"),
    "four bytes": (lambda d: d[:4], "the header ends"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_file_is_told(name: str, tmp_path: Path, whole: bytes) -> None:
    damage, message = BREAKS[name]
    data = damage(whole)
    assert data != whole
    with pytest.raises(ModelError) as caught:
        open_and_read(tmp_path / "model.gguf", data)
    assert str(tmp_path / "model.gguf") in caught.value.message
    assert message in caught.value.message


def test_the_same_key_twice(tmp_path: Path) -> None:
    pair = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)
    with pytest.raises(ModelError, match="metadata key k occurs twice"):
        header_of(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair * 2)


def test_an_unaligned_alignment(tmp_path: Path) -> None:
    key = b"general.alignment"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 24)
    with pytest.raises(ModelError, match="power of two"):
        header_of(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """Random damage to a real file: it opens or it is refused, soon and with bounded memory."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, 8000))
        damaged[offset : offset + 8] = data.draw(st.binary(min_size=1, max_size=8))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    begin, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(ModelError):
        open_and_read(tmp_path / "model.gguf", bytes(damaged[:cut]))
    assert time.monotonic() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000  # kB


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_fuzz_from_nothing(tmp_path: Path, tail: bytes) -> None:
    with pytest.raises(ModelError):
        open_and_read(tmp_path / "model.gguf", b"GGUF\x03\x00\x00\x00" + tail)


def test_mutant_gguf_py_alone_would_not_do(tmp_path: Path, whole: bytes) -> None:
    """gguf-py's reader meets the same damage with something else than an error that names file and tensor."""
    path = tmp_path / "model.gguf"
    path.write_bytes(BREAKS["odd offset"][0](whole))
    gguf.GGUFReader(path)  # accepts it
    with pytest.raises(ModelError, match="output_norm"):
        GgufHeader(MappedFile(path))

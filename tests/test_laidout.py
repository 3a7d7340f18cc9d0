"""Laid-out weights kept on disk: the same bits as laying them out again, whatever happens to the file."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu import cpu_kernels
from tiny import Quant, tiny_spec, tiny_weights
from torch import Tensor

from specgen.errors import SpecgenError
from specgen.kernels.base import Attend
from specgen.kernels.cpu.ops import CpuKernels
from specgen.model import laidout
from specgen.model.decoder import Decoder
from specgen.model.laidout import LaidOutStore
from specgen.model.spec import LayerSpec, ModelSpec, MoeSpec, NormNames
from specgen.weights import safetensors_write
from specgen.weights.packed import GroupedInt4

LIMIT_BYTES = 1 << 30
BASE = tiny_spec()
SPECS = {
    "llama": BASE,
    "tied": replace(BASE, tied_head=True),
    "norms": replace(BASE, qk_norm="head", norms=NormNames("a", "b", "c", "d")),
    "experts": replace(BASE, layers=(replace(BASE.layers[0], moe=MoeSpec(4, 2, 64, True)), BASE.layers[1])),
}


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return cpu_kernels(1)


@pytest.fixture
def store(tmp_path: Path) -> LaidOutStore:
    return LaidOutStore(tmp_path / "weights", LIMIT_BYTES)


def _decoder(spec: ModelSpec, kernels: CpuKernels, quant: Quant = "int4", seed: int = 0) -> Decoder:
    return Decoder(spec, tiny_weights(spec, seed, quant), kernels)


def _logits(model: Decoder) -> Tensor:
    cache = model.new_cache(64)
    cache.reserve(5)
    return model.forward([3, 1, 4, 1, 5], Attend.chain(0, 5), cache, last_only=False).logits


def _kept(store: LaidOutStore, kernels: CpuKernels, name: str = "a") -> Path:
    """One tiny model's weights in the store."""
    path = store.folder / f"{name}.weights"
    store.write(path, _decoder(BASE, kernels).weights)
    assert path.exists()
    return path


@pytest.mark.parametrize("quant", ["dense", "int4", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_the_same_logits_from_the_file(store: LaidOutStore, kernels: CpuKernels, name: str, quant: Quant) -> None:
    spec = SPECS[name]
    fresh = _decoder(spec, kernels, quant)
    path = store.folder / "a.weights"
    store.write(path, fresh.weights)
    kept = store.read(path, kernels)
    assert kept is not None
    assert (kept.head is kept.embedding) == spec.tied_head
    assert torch.equal(_logits(Decoder(spec, kept, kernels)), _logits(fresh))
    other = _decoder(spec, kernels, quant, seed=1)  # the mutant: another file's weights
    assert not torch.equal(_logits(other), _logits(fresh))


def test_columns_in_an_order_of_their_own_and_biases_are_kept(store: LaidOutStore, kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    weight = GroupedInt4(
        torch.randint(0, 256, (48, 32), dtype=torch.uint8), torch.rand(48, 2).half(), torch.rand(48, 2).half(), 32,
        bias=torch.rand(48), perm=torch.randperm(64, dtype=torch.int32),
    )  # fmt: skip
    prepared = kernels.prepare(weight)
    restored = kernels.restore(prepared.tensors())
    x = torch.rand(3, 64)
    assert torch.equal(kernels.linear(x, restored), kernels.linear(x, prepared))
    assert kernels.prepare(restored) is restored


@pytest.mark.parametrize("change", ["data", "bias", "perm", "n", "group", "tile_bytes"])
def test_parts_that_contradict_each_other_are_refused(kernels: CpuKernels, change: str) -> None:
    weight = GroupedInt4(
        torch.zeros(48, 32, dtype=torch.uint8), torch.rand(48, 2).half(), torch.rand(48, 2).half(), 32,
        bias=torch.rand(48), perm=torch.arange(64, dtype=torch.int32),
    )  # fmt: skip
    parts = {name: tensor.clone() for name, tensor in kernels.prepare(weight).tensors().items()}
    kernels.restore(parts)
    numbers = {"n": 1, "group": 4, "tile_bytes": 7}
    if change in numbers:
        parts["struct"][numbers[change]] += 64
    else:
        parts[change] = parts[change][:-1]
    with pytest.raises(SpecgenError, match="laid-out weight"):
        kernels.restore(parts)


@pytest.mark.parametrize("damage", ["cut", "empty", "zeroed", "header", "swapped"])
def test_a_damaged_file_is_not_used(store: LaidOutStore, kernels: CpuKernels, damage: str) -> None:
    path = _kept(store, kernels)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "empty":
        data.clear()
    elif damage == "zeroed":
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    elif damage == "header":
        data[9] ^= 1
    else:  # one layer's numbers in the place of another's
        data[:] = data.replace(b'"layers.0.q:data"', b'"layers.9.q:data"').replace(
            b"layers.1.q:data", b"layers.0.q:data"
        )
    path.write_bytes(data)
    assert store.read(path, kernels) is None
    assert store.read(_kept(store, kernels), kernels) is not None, "and is written anew"


def test_the_name_changes_with_the_weights_the_kernels_and_the_code(
    store: LaidOutStore, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known:
        def __init__(self, digest: str) -> None:
            self.digest = lambda: digest

    names = {store.path(Known("a"), kernels), store.path(Known("b"), kernels)}  # type: ignore[arg-type]
    monkeypatch.setattr(laidout, "_code", lambda: "other")
    names.add(store.path(Known("a"), kernels))  # type: ignore[arg-type]
    monkeypatch.setattr(CpuKernels, "layout", "kernels-of-another-cpu")
    names.add(store.path(Known("a"), kernels))  # type: ignore[arg-type]
    assert len(names) == 4


def test_the_folder_stays_below_its_limit_and_the_oldest_go(tmp_path: Path, kernels: CpuKernels) -> None:
    size = _kept(LaidOutStore(tmp_path / "weights", LIMIT_BYTES), kernels, "a").stat().st_size
    store = LaidOutStore(tmp_path / "weights", int(2.5 * size))
    for age_s, name in ((200, "a"), (100, "b")):
        path = _kept(store, kernels, name)
        os.utime(path, (time.time() - age_s,) * 2)
    assert store.read(store.folder / "a.weights", kernels) is not None  # used: now b is the oldest
    _kept(store, kernels, "c")
    assert sorted(path.stem for path in store.folder.glob("*.weights")) == ["a", "c"]


def test_an_evicted_file_that_is_mapped_stays_usable(store: LaidOutStore, kernels: CpuKernels) -> None:
    path = _kept(store, kernels)
    model = Decoder(BASE, store.read(path, kernels), kernels)  # type: ignore[arg-type]
    expected = _logits(model)
    path.unlink()
    assert torch.equal(_logits(model), expected)


@pytest.mark.parametrize("limit_bytes", [0, 100])
def test_it_can_be_off_or_too_small(tmp_path: Path, kernels: CpuKernels, limit_bytes: int) -> None:
    path = _kept(LaidOutStore(tmp_path, LIMIT_BYTES), kernels)
    path.rename(other := tmp_path / "b.weights")
    small = LaidOutStore(tmp_path, limit_bytes)
    small.write(path, _decoder(BASE, kernels).weights)
    assert not path.exists()
    assert (small.read(other, kernels) is None) == (limit_bytes == 0)


def test_a_full_disk_is_no_error(store: LaidOutStore, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_write.os, "fsync", full)
        store.write(store.folder / "a.weights", _decoder(BASE, kernels).weights)
    assert [path.name for path in store.folder.iterdir() if path.suffix != ".lock"] == []
    free = shutil.disk_usage(store.folder)._replace(free=1000)
    monkeypatch.setattr(laidout.shutil, "disk_usage", lambda folder: free)
    store.write(store.folder / "a.weights", _decoder(BASE, kernels).weights)
    assert not (store.folder / "a.weights").exists(), "the last of the disk is not taken"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, kernels: CpuKernels) -> None:
    (tmp_path / "file").write_text("")
    store = LaidOutStore(tmp_path / "file" / "weights", LIMIT_BYTES)
    store.write(store.folder / "a.weights", _decoder(BASE, kernels).weights)
    assert store.read(store.folder / "a.weights", kernels) is None


def test_what_a_killed_process_left_is_removed(store: LaidOutStore, kernels: CpuKernels) -> None:
    store.folder.mkdir()
    old, new = store.folder / "x.1.part", store.folder / "y.2.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * laidout.STALE_S,) * 2)
    _kept(store, kernels)
    assert not old.exists()
    assert new.exists()


def _write_often(folder: Path) -> None:
    torch.set_num_threads(1)
    kernels, store = cpu_kernels(1), LaidOutStore(folder, LIMIT_BYTES)
    weights = _decoder(BASE, kernels).weights
    for _ in range(20):
        store.write(folder / "a.weights", weights)


def test_two_writers_and_a_reader(store: LaidOutStore, kernels: CpuKernels) -> None:
    expected = _logits(_decoder(BASE, kernels))
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(store.folder,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        kept = store.read(store.folder / "a.weights", kernels)
        if kept is not None:
            seen += 1
            assert torch.equal(_logits(Decoder(BASE, kept, kernels)), expected)
        assert kept is not None or not seen, "once there it is always whole"
    assert seen
    assert [writer.exitcode for writer in writers] == [0, 0]


def test_layers_of_another_count(store: LaidOutStore, kernels: CpuKernels) -> None:
    spec = replace(BASE, layers=(LayerSpec(rope=BASE.layers[0].rope),) * 12)  # two digits: no order of text
    fresh = _decoder(spec, kernels)
    store.write(store.folder / "a.weights", fresh.weights)
    kept = store.read(store.folder / "a.weights", kernels)
    assert kept is not None
    assert torch.equal(_logits(Decoder(spec, kept, kernels)), _logits(fresh))

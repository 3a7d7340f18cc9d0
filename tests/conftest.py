"""Fixtures shared by all tests: where the real model and the format fixtures are, when they are anywhere."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

# Before the libraries start their pools: on tiny tensors a second thread only spins, beside the kernels' own threads.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined, so this stands before any import of one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test talks to a worker that the user keeps alive, or reads and writes what specgen learned for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECGEN_RUNTIME", str(tmp_path_factory.mktemp("run")))
        patch.setenv("SPECGEN_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file: SPECGEN_TEST_SMOLLM2, or fetched through the registry into specgen's own cache."""
    given = os.environ.get("SPECGEN_TEST_SMOLLM2")
    if given:
        return Path(given)
    from specgen.errors import SpecgenError
    from specgen.registry import load_registry, pull

    try:
        return pull(load_registry().get("smollm2-135m")).target
    except SpecgenError as error:
        pytest.skip(f"the default model is not cached and cannot be fetched: {error.message}")


@pytest.fixture(scope="session")
def checkpoints_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints written by the real tools, beside the repository on machines that have them."""
    archive = SHARED / "fixtures.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} does not exist here; the golden files in tests/golden cover every format")
    target = tmp_path_factory.mktemp("checkpoints")
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / "fixtures"

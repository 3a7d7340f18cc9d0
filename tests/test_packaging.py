"""What is inside the wheel and the source archive, and that the version is said once."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import specgen

ROOT = Path(__file__).resolve().parents[1]
UNREACHABLE = ("after connection broken by", "No matching distribution found for hatchling", "getaddrinfo failed")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as `pip install .` builds it."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("the tests are not in a source checkout")
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    if done.returncode and any(words in done.stderr + done.stdout for words in UNREACHABLE):
        pytest.skip("building needs hatchling from the package index, which cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.network
def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    kept = {".py", ".cpp", ".h", ".toml", ".typed"}
    tree = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("specgen/**/*") if path.suffix in kept}
    assert tree <= names
    assert {"specgen/py.typed", "specgen/models.toml"} <= names
    for name in names:
        assert name.startswith(("specgen/", f"specgen-{specgen.__version__}.dist-info/")), name
        assert "test" not in name, name
        assert not name.endswith((".gguf", ".safetensors", ".so", ".pyc", ".o")), name
    assert sum(info.file_size for info in wheel.infolist()) < 5_000_000


@pytest.mark.network
def test_the_registry_in_the_wheel_is_the_one_of_the_tree(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("specgen/models.toml") == (ROOT / "models.toml").read_bytes()


@pytest.mark.network
def test_the_metadata_names_program_licence_and_version(wheel: zipfile.ZipFile) -> None:
    info = f"specgen-{specgen.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.M)
    assert f"Version: {specgen.__version__}\n" in metadata
    assert "specgen = specgen.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"], "specgen/__init__.py says it"
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "specgen/__init__.py"


def test_the_program_is_installed() -> None:
    (found,) = entry_points(group="console_scripts", name="specgen")
    assert found.value == "specgen.__main__:main"

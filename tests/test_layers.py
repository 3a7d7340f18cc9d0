"""Imports point one way, and the cheap commands import nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specgen

PACKAGE = Path(specgen.__file__).parent

# A module may import modules of lower rank, and of its own package. `cache` and `step` are interfaces that models
# implement, so they stand below `model`.
RANKS = {
    "specgen": 0,
    "errors": 0,
    "options": 1,
    "paths": 1,
    "cancel": 1,
    "prompt": 1,
    "draft": 1,
    "records": 1,
    "events": 2,
    "config": 2,
    "weights": 3,
    "kernels": 4,
    "cache": 5,
    "sampling": 5,
    "step": 6,
    "accept": 6,
    "model": 7,
    "propose": 8,
    "engine": 9,
    "graph": 8,
    "fused": 9,
    "memory": 9,
    "machine": 9,
    "placement": 10,
    "tune": 9,
    "speculation": 10,
    "steptime": 10,
    "text": 10,
    "registry": 10,
    "session": 11,
    "measure": 12,
    "chat": 12,
    "worker": 12,
    "api": 13,
    "cli": 13,
    "__main__": 14,
}

# Third-party packages with one home each.
HOMES = {"prompt_toolkit": "cli", "typer": "cli", "rich": "cli", "huggingface_hub": "registry"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module named by an import, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def part(module: str) -> str:
    """`specgen.model.rope` → `model`; `specgen` → `specgen`."""
    words = module.split(".")
    return words[1] if len(words) > 1 else words[0]


def violations(root: Path) -> list[str]:
    """Every import below `root` (the folder of the package) that points the wrong way."""
    found = []
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root.parent).with_suffix("")
        own = part(".".join(inside.parts).removesuffix(".__init__"))
        for name in imports(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            if name.split(".")[0] == "specgen":
                other = part(name)
                if (str(inside), other) == ("specgen/__init__", "api"):
                    continue  # the package's front door, opened when it is asked for
                if other != own and RANKS[other] >= RANKS[own] and other != "specgen":
                    found.append(f"{inside} imports {name}")
            elif own != HOMES.get(name.split(".")[0], own):
                found.append(f"{inside} imports {name}")
    return found


def test_every_part_has_a_rank() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" and path.stem != "__init__"}
    parts |= {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert parts - set(RANKS) == set(), "give the new module its place in RANKS"


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("engine.py", "from specgen.session import Session"),
        ("weights/awq.py", "import specgen.model.spec"),
        ("errors.py", "def f():\n    from specgen.cli import app"),
        ("session.py", "import rich.console"),
        ("model/decoder.py", "from huggingface_hub import snapshot_download"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / "specgen" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(violations(tmp_path / "specgen")) == 1


HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "gguf", "tokenizers")


def heavy_after(code: str, home: Path) -> set[str]:
    """Which heavy packages a fresh interpreter has imported after `code`."""
    script = f"import sys\n{code}\nprint('\\n' + ' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    environ = {"SPECGEN_CACHE": str(home), "SPECGEN_CONFIG": str(home), "PATH": "", "HF_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


RUN = """
sys.argv = ["specgen", *{arguments!r}]
from specgen.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["models", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    assert heavy_after(RUN.format(arguments=arguments), tmp_path) == set()


def test_import_specgen_imports_nothing_heavy(tmp_path: Path) -> None:
    assert heavy_after("import specgen; from specgen import load, Model", tmp_path) == set()


def test_list_of_models_imports_no_torch(tmp_path: Path) -> None:
    assert "torch" not in heavy_after(RUN.format(arguments=["models", "list"]), tmp_path)


def test_a_heavy_import_is_seen(tmp_path: Path) -> None:
    assert heavy_after("import specgen.weights.packed", tmp_path) >= {"torch"}

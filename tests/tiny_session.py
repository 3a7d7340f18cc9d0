"""A session over a tiny GGUF file, loaded the way the commands load theirs."""

from __future__ import annotations

from pathlib import Path

from gguf_files import llama_file

from specgen.measure.runs import Case, make_cases
from specgen.measure.workloads import Workload
from specgen.options import LoadOptions, SamplingOptions
from specgen.registry import load_registry, resolve_model
from specgen.session import Session, load

CONTEXT = 640
COPY = "hello world 12 hello world 12 hello world 12 hello"
FREE = "the quick brown fox"


def tiny_file(folder: Path, layers: int = 1) -> Path:
    return llama_file(folder / "tiny.gguf", context_length=CONTEXT, block_count=layers)


def tiny_session(path: Path) -> Session:
    return load(resolve_model(str(path), load_registry()), LoadOptions(threads=1))


def tiny_loads() -> list[Workload]:
    return [
        Workload("copy", "one", COPY, SamplingOptions(temperature=0.7), 48),
        Workload("free", "one", FREE, SamplingOptions(temperature=1.0), 48),
    ]


def tiny_cases(session: Session, tokens: int = 32) -> list[Case]:
    return make_cases(session, tiny_loads(), "both", tokens)[0]

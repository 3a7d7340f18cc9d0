"""The equivalent of a plan for servers: their flags for the same kind of speculation.

Knows: flag names, as of the versions named below. Does not know: whether such a server is here, or gains the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote

from specgen.options import NEED_DRAFT
from specgen.tune.plan import Plan
from specgen.tune.setting import Setting


@dataclass(frozen=True, slots=True)
class Chain:
    """What a server can be told: γ candidates in a row, looked up or drafted by a model."""

    gamma: int
    setting: Setting  # for the sizes of n-gram
    draft: str | None = None  # name of the model; None: looked up


def export(plan: Plan, server: str) -> tuple[str, tuple[str, ...]]:
    """(flags on one line, what is lost). `server` is a key of SERVERS. Nothing to add when plain is the fastest."""
    if plan.setting.is_plain:
        return "", ("plain decoding was the fastest here: no flags are needed",)
    setting, notes = plan.setting, []
    gamma = setting.gamma
    if gamma is None or setting.tree > 1 or setting.proposer == "skip":
        gamma = plan.fixed_gamma
    if setting.gamma is None:
        notes.append(f"γ auto has no counterpart there: {gamma} is the best fixed γ")
    if setting.tree > 1:
        notes.append(f"trees have no counterpart there: a chain of the best fixed γ, {gamma}, is shown")
    if setting.proposer == "mix":
        notes.append("the mix proposer has no counterpart there: the draft model alone is shown")
    elif setting.proposer not in ("ngram", "model"):
        notes.append(f"the {setting.proposer} proposer has no counterpart there: n-gram lookup is shown")
    draft = plan.draft if setting.proposer in NEED_DRAFT else None
    if draft is not None:
        notes.append(f"the server must find the draft model by the name {draft}: give its path or repository")
    return SERVERS[server](Chain(gamma, setting, draft)), tuple(notes)


def _vllm(chain: Chain) -> str:
    """vLLM 0.9 and later (draft models 0.11 and later): `vllm serve MODEL …`."""
    config: dict[str, object] = {"num_speculative_tokens": chain.gamma}
    if chain.draft is not None:
        config |= {"method": "draft_model", "model": chain.draft}
    else:
        sizes = {"prompt_lookup_max": chain.setting.n_max, "prompt_lookup_min": chain.setting.n_min}
        config |= {"method": "ngram", **sizes}
    return f"--speculative-config {quote(json.dumps(config))}"


def _llama_cpp(chain: Chain) -> str:
    """llama.cpp since the flags were named by type (2026): `llama-server -m MODEL …`. It looks up one size only: the
    smallest finds whatever the larger ones would."""
    most = f"--spec-draft-n-max {chain.gamma}"
    if chain.draft is not None:
        return f"--spec-draft-model {quote(chain.draft)} {most}"
    sizes = f"--spec-ngram-simple-size-n {chain.setting.n_min} --spec-ngram-simple-size-m {chain.gamma}"
    return f"--spec-type ngram-simple {sizes} {most}"


def _sglang(chain: Chain) -> str:
    """SGLang: `python -m sglang.launch_server --model-path MODEL …`. Its draft tokens include the pending one; breadth
    or top-k 1 is a chain."""
    tokens = f"--speculative-num-draft-tokens {chain.gamma + 1}"
    if chain.draft is not None:
        steps = f"--speculative-num-steps {chain.gamma} --speculative-eagle-topk 1"
        model = f"--speculative-draft-model-path {quote(chain.draft)}"
        return f"--speculative-algorithm STANDALONE {model} {steps} {tokens}"
    breadth = "--speculative-ngram-min-bfs-breadth 1 --speculative-ngram-max-bfs-breadth 1"
    return f"--speculative-algorithm NGRAM {tokens} {breadth}"


SERVERS: dict[str, Callable[[Chain], str]] = {"vllm": _vllm, "llama.cpp": _llama_cpp, "sglang": _sglang}

"""The equivalent of a plan for servers: their flags for the same kind of speculation.

Knows: flag names, as of the versions named below. Does not know: whether such a server is here, or gains the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from specgen.tune.plan import Plan
from specgen.tune.setting import Setting


def export(plan: Plan, server: str) -> tuple[str, tuple[str, ...]]:
    """(flags on one line, what is lost). `server` is a key of SERVERS. Nothing to add when plain is the fastest."""
    if plan.setting.is_plain:
        return "", ("plain decoding was the fastest here: no flags are needed",)
    notes: list[str] = []
    gamma = plan.setting.gamma
    if gamma is None:
        gamma = plan.fixed_gamma
        notes.append(f"γ auto has no counterpart there: {gamma} is the best fixed γ")
    if plan.setting.proposer != "ngram":
        notes.append(f"the {plan.setting.proposer} proposer has no counterpart there: n-gram lookup is shown")
    return SERVERS[server](plan.setting, gamma), tuple(notes)


def _vllm(setting: Setting, gamma: int) -> str:
    """vLLM 0.9 and later: `vllm serve MODEL …`."""
    config = {
        "method": "ngram",
        "num_speculative_tokens": gamma,
        "prompt_lookup_max": setting.n_max,
        "prompt_lookup_min": setting.n_min,
    }
    return f"--speculative-config '{json.dumps(config)}'"


def _llama_cpp(setting: Setting, gamma: int) -> str:
    """llama.cpp since the flags were named by type (2026): `llama-server -m MODEL …`. It looks up one size only: the
    smallest finds whatever the larger ones would."""
    sizes = f"--spec-ngram-simple-size-n {setting.n_min} --spec-ngram-simple-size-m {gamma}"
    return f"--spec-type ngram-simple {sizes} --spec-draft-n-max {gamma}"


def _sglang(setting: Setting, gamma: int) -> str:
    """SGLang: `python -m sglang.launch_server --model-path MODEL …`. Its draft tokens include the pending one; breadth
    1 is a chain."""
    chain = "--speculative-ngram-min-bfs-breadth 1 --speculative-ngram-max-bfs-breadth 1"
    return f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {gamma + 1} {chain}"


SERVERS: dict[str, Callable[[Setting, int], str]] = {"vllm": _vllm, "llama.cpp": _llama_cpp, "sglang": _sglang}

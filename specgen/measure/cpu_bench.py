"""Speed of the CPU kernels against the memory they read: `python -m specgen.measure.cpu_bench --model PATH`.

Knows: how to time a step, and what it would take if memory were all that counted. The read bandwidth is measured in the
same run, between the other measurements, since machines drift. Does not know: sampling, drafts, text. A hidden tool:
`specgen bench` is for users.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specgen.cache import KV_DTYPES, KVCache
from specgen.kernels.base import Attend, Noise, Truncation
from specgen.kernels.cpu import load_cpu_kernels
from specgen.kernels.cpu.ops import CpuKernels, Prepared
from specgen.measure.roofline import ReadSpeed, weight_bytes
from specgen.measure.timer import interleaved
from specgen.model.families import spec_from_config
from specgen.model.planned import PlannedDecoder
from specgen.model.weights import MlpWeights, load_weights
from specgen.weights.checkpoint import open_checkpoint

ROWS = tuple(range(1, 18))
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured and how often."""

    model: PlannedDecoder
    kernels: CpuKernels
    cache: KVCache
    repeats: int

    def step_ms(self, rows: int, context: int) -> float:
        """One step of `rows` rows after `context` cached tokens, right after another one, as in decoding: the first
        step after something else finds nothing in the processor's caches."""
        tokens = [(11 * row + 5) % self.model.spec.vocab for row in range(rows)]
        attend = Attend.chain(context, rows)
        self.model.forward(tokens, attend, self.cache, last_only=False)
        begin = time.perf_counter()
        self.model.forward(tokens, attend, self.cache, last_only=False)
        return (time.perf_counter() - begin) * 1e3

    def prefill_ms(self, tokens: int) -> float:
        ids = [(7 * i + 3) % self.model.spec.vocab for i in range(tokens)]
        begin = time.perf_counter()
        self.model.forward(ids, Attend.chain(0, tokens), self.cache, last_only=True)
        return (time.perf_counter() - begin) * 1e3


def measure_steps(bench: Bench, contexts: Sequence[int]) -> None:
    """Prints bandwidth, the table t(R), and decoding at each context against the roofline."""
    reading = ReadSpeed(bench.kernels)
    short = contexts[0]
    tasks: dict[str, Callable[[], float]] = {"read": reading.gbps}
    for rows in ROWS:
        tasks[f"t({rows})"] = lambda rows=rows: bench.step_ms(rows, short)  # type: ignore[misc]
    for context in contexts[1:]:
        tasks[f"context {context}"] = lambda context=context: bench.step_ms(1, context)  # type: ignore[misc]
    found = interleaved(tasks, bench.repeats)
    weights = weight_bytes(bench.model)
    assert weights is not None, "a plan covers dense models alone"
    one = found["t(1)"]
    print(f"read {found['read']:.1f} GB/s; weights {weights / 1e6:.1f} MB a step")
    for context in contexts:
        ms = one if context == short else found[f"context {context}"]
        moved = weights + context * bench.cache.slot_bytes
        roofline = found["read"] * 1e9 / moved
        print(
            f"context {context}: {1e3 / ms:.1f} tok/s, {moved / 1e6:.1f} MB a token, "
            f"{100e3 / ms / roofline:.0f} % of the roofline ({roofline:.0f} tok/s)"
        )
    for rows in ROWS:
        ms = found[f"t({rows})"]
        print(f"t({rows:2}) {ms:7.3f} ms  {ms / one:5.2f} × t(1)")


def measure_ops(bench: Bench) -> None:
    """Prints GB/s of each linear, and the sampler's time."""
    kernels, weights = bench.kernels, bench.model.weights
    layers = [layer for layer in weights.layers if isinstance(layer.mlp, MlpWeights)]
    groups: dict[str, list[Prepared]] = {
        "q": [layer.q for layer in layers],
        "o": [layer.o for layer in layers],
        "gate": [layer.mlp.gate for layer in layers if isinstance(layer.mlp, MlpWeights)],
        "down": [layer.mlp.down for layer in layers if isinstance(layer.mlp, MlpWeights)],
        "head": [weights.head],
    }

    def gbps(linears: list[Prepared], rows: int) -> float:
        x = torch.randn(rows, linears[0].shape[1])
        begin = time.perf_counter()
        for linear in linears:
            kernels.linear(x, linear)
        return sum(linear.nbytes for linear in linears) / (time.perf_counter() - begin) / 1e9

    tasks: dict[str, Callable[[], float]] = {}
    for name, linears in groups.items():
        for rows in (1, 5):
            tasks[f"{name}, {rows} rows"] = lambda linears=linears, rows=rows: gbps(linears, rows)  # type: ignore[misc]
    for name, value in interleaved(tasks, bench.repeats).items():
        print(f"{name}: {value:.1f} GB/s")
    logits = torch.randn(bench.model.spec.vocab) * 3
    cuts = (Truncation(), Truncation(1.0), Truncation(0.8, 40), Truncation(0.8, 0, 0.95), Truncation(0.8, min_p=0.05))
    for cut in cuts:

        def sample(cut: Truncation = cut) -> float:
            begin = time.perf_counter()
            kernels.gumbel_argmax(logits, cut, Noise(1, 2))
            return (time.perf_counter() - begin) * 1e6

        print(f"sampling {cut}: {interleaved({'us': sample}, bench.repeats)['us']:.0f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv", choices=sorted(KV_DTYPES), default="bf16")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--ops", action="store_true", help="also GB/s of each linear, and the sampler")
    options = parser.parse_args()
    kernels = load_cpu_kernels(options.threads)
    checkpoint = open_checkpoint(options.model)
    spec = spec_from_config(checkpoint.config)
    model = PlannedDecoder(spec, load_weights(checkpoint, spec, torch.device("cpu")), kernels)
    cache = model.new_cache(max(*options.contexts, PREFILL_TOKENS) + max(ROWS), KV_DTYPES[options.kv])
    bench = Bench(model, kernels, cache, options.repeats)
    print(f"{kernels.name}, {kernels.threads} threads, KV {options.kv}, medians of {options.repeats}")
    bench.model.forward([1] * cache.capacity, Attend.chain(0, cache.capacity), cache, last_only=True)  # fills the cache
    measure_steps(bench, options.contexts)
    prefill = interleaved({"ms": lambda: bench.prefill_ms(PREFILL_TOKENS)}, max(3, options.repeats // 4))["ms"]
    print(f"prefill {PREFILL_TOKENS}: {PREFILL_TOKENS / prefill * 1e3:.0f} tok/s")
    if options.ops:
        measure_ops(bench)


if __name__ == "__main__":
    main()

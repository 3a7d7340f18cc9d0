"""What every Triton kernel needs on every card, from a machine without one: `python -m specgen.measure.aot`.

Knows: the table of kernels and cards. Does not know: how kernels are compiled (`kernels.aot`). Ends with status 1 when
a kernel does not compile, spills more than a value or two, or takes more of something than a card has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from specgen.kernels.aot import CAPABILITIES, MOST_SPILL_BYTES, SHARED_BYTES, AotResult, Selection, compile_all


def table(results: Sequence[AotResult]) -> str:
    """One line per kernel, one column per card: registers a thread, shared KiB a block; ! where it does not fit."""
    capabilities = sorted({result.capability for result in results})
    found = {(result.module, result.case, result.capability): result for result in results}
    kernels = list(dict.fromkeys((result.module, result.case) for result in results))
    width = max(len(case) for _, case in kernels)
    lines = [" " * width + "".join(f"{'sm_' + str(capability):>14}" for capability in capabilities)]
    module = ""
    for kernel in kernels:
        if kernel[0] != module:
            module = kernel[0]
            lines.append(f"{module} (registers a thread · shared KiB a block)")
        cells = [_cell(found.get((*kernel, capability))) for capability in capabilities]
        lines.append(f"{kernel[1]:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def _cell(result: AotResult | None) -> str:
    if result is None:
        return ""
    if result.error is not None:
        return "! error"
    return f"{'' if result.ok else '! '}{result.registers} · {result.shared_bytes / 1024:.1f}"


def failures(results: Sequence[AotResult]) -> list[str]:
    return [
        f"{result.module} {result.case} on sm_{result.capability}: {failure}"
        + (f"\n{result.error}" if result.error else "")
        for result in results
        for failure in result.failures
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument("--in-turn", action="store_true", help="each kernel for one card only, cards in turn")
    parser.add_argument("--every", type=int, default=1, help="only every so manyth kernel")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    selection = Selection(tuple(options.capability), options.only, options.in_turn, options.every)
    results = compile_all(selection, options.processes)
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
    elif results:
        print(table(results))
        limits = ", ".join(f"sm_{capability} {limit >> 10}" for capability, limit in SHARED_BYTES.items())
        print(f"{MOST_SPILL_BYTES} bytes of spills and 255 registers are allowed, and shared KiB: {limits}.")
    found = failures(results)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found or not results else 0


if __name__ == "__main__":
    sys.exit(main())

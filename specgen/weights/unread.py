"""Ways of packing that are known by name and not read, so that a refusal can say what was met and what to use instead.

Knows: names in `quantization_config` and tensor names that give a packing away. Does not know: how to decode them.
"""

from __future__ import annotations

from specgen.errors import nearest
from specgen.weights.awq import VERSIONS, awq_version
from specgen.weights.base import Checkpoint
from specgen.weights.gptq import gptq_version
from specgen.weights.module import Module, quant_config, quant_method

READ_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes")
GPTQ_VERSIONS = ("gptq", "gptq_v2")
TENSORS = {
    "q_weight": "EXL2",
    "q_scale": "EXL2",
    "trellis": "EXL3",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "weight_global_scale": "NVFP4",
    "weight_blocks": "MXFP4",
    "meta": "Marlin 2:4",
    "B": "Marlin",
}
"""A module's tensor → the packing that has one of this name."""

INSTEAD = "get the model as AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes or GGUF, or unquantised"


def unread_name(checkpoint: Checkpoint, key: str) -> tuple[str, str] | None:
    """(what module `key` is packed in, a hint) when the config or the tensors name something that is not read."""
    method, config = quant_method(checkpoint), quant_config(checkpoint)
    awq, gptq = awq_version(checkpoint), gptq_version(checkpoint)
    if awq is not None and awq not in VERSIONS:
        return f"AWQ of version {awq!r}", "the versions read are " + ", ".join(VERSIONS)
    if method == "gptq" and gptq not in GPTQ_VERSIONS:
        return f"GPTQ in the format {gptq!r}", "the formats read are " + ", ".join(GPTQ_VERSIONS)
    module = Module(checkpoint, key)
    for suffix, name in TENSORS.items():
        if module.has(suffix):
            return name, INSTEAD
    if method is not None and method not in READ_METHODS:
        return f"quant_method {method!r}", nearest(method, READ_METHODS) or INSTEAD
    if config and method is None:
        return "a quantization_config without quant_method", INSTEAD
    return None

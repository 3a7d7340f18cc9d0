"""Every weight format there is, in the order in which they are asked.

Knows: the list. Does not know: how any of them works. A format is added by appending to FORMATS; formats recognise
tensors by content, so the order matters only where one module's tensors could mean two things.
"""

from __future__ import annotations

from specgen.errors import ModelError
from specgen.weights.awq import AwqGemm, AwqGemv, AwqGemvFast
from specgen.weights.base import Checkpoint, WeightFormat
from specgen.weights.bnb import Bnb4, BnbInt8
from specgen.weights.compressed_tensors import PackQuantized, WholeBytes
from specgen.weights.dense import Dense
from specgen.weights.fp8 import FineGrainedFp8
from specgen.weights.gguf_file import GgufCheckpoint
from specgen.weights.gguf_k import GGUF_BLOCKS
from specgen.weights.gguf_q4 import GgufQ4_0, GgufQ4_1
from specgen.weights.gguf_q8 import GgufQ8_0
from specgen.weights.gptq import Gptq, GptqV2
from specgen.weights.quantise import QUANTISERS
from specgen.weights.unread import unread_name

FORMATS: tuple[WeightFormat, ...] = (
    GgufQ4_0(),
    GgufQ4_1(),
    GgufQ8_0(),
    *GGUF_BLOCKS,
    AwqGemm(),
    AwqGemv(),
    AwqGemvFast(),
    Gptq(),
    GptqV2(),
    PackQuantized(),
    WholeBytes(),
    FineGrainedFp8(),
    Bnb4("nf4"),
    Bnb4("fp4"),
    BnbInt8(),
    *QUANTISERS.values(),
    Dense(),  # last: bitsandbytes can store its nibbles as a bfloat16 tensor named `weight`
)


def find_format(checkpoint: Checkpoint, key: str) -> WeightFormat:
    """The format of module `key`. ModelError when the module is missing or nothing here can read it."""
    for weight_format in FORMATS:
        if weight_format.claims(checkpoint, key):
            return weight_format
    raise _refusal(checkpoint, key)


def _refusal(checkpoint: Checkpoint, key: str) -> ModelError:
    names = sorted(name for name in checkpoint.names() if name.startswith(f"{key}."))
    if not names:
        return ModelError(
            f"{checkpoint.path}: module {key} has no tensors",
            hint="the file is incomplete, or its architecture is not what its configuration says",
        )
    known = "this version reads " + ", ".join(weight_format.name for weight_format in FORMATS)
    if isinstance(checkpoint, GgufCheckpoint):
        kind = checkpoint.type_name(names[-1])
        return ModelError(
            f"{checkpoint.path}: tensor {names[-1]} is packed as {kind}, which cannot be read", hint=known
        )
    if (unread := unread_name(checkpoint, key)) is not None:
        what, hint = unread
        return ModelError(f"{checkpoint.path}: module {key} (tensor {names[0]}) is packed as {what}, not read", hint)
    tensors = ", ".join(names)
    return ModelError(f"{checkpoint.path}: module {key} is packed in an unknown way (tensors {tensors})", hint=known)

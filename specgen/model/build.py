"""A checkpoint's decoder, in the fastest form that the kernels offer.

Knows: which kernels run a whole step as one call. Does not know: files, caches.
"""

from __future__ import annotations

import torch

from specgen.kernels.base import Kernels
from specgen.kernels.cpu.ops import CpuKernels
from specgen.model.decoder import Decoder
from specgen.model.planned import PlannedDecoder
from specgen.model.spec import ModelSpec
from specgen.model.weights import load_weights
from specgen.weights.base import Checkpoint


def build_model(checkpoint: Checkpoint, spec: ModelSpec, kernels: Kernels) -> Decoder:
    """The decoder of `checkpoint`, its weights laid out for `kernels`. ModelError names a tensor that does not fit."""
    weights = load_weights(checkpoint, spec, torch.device("cpu"))
    if isinstance(kernels, CpuKernels):
        return PlannedDecoder(spec, weights, kernels)
    return Decoder(spec, weights, kernels)

"""A checkpoint's decoder, in the fastest form that the kernels offer.

Knows: which kernels run a whole step as one call, and which keep laid-out weights. Does not know: files, caches.
"""

from __future__ import annotations

import torch

from specgen.kernels.base import Kernels
from specgen.kernels.cpu.ops import CpuKernels
from specgen.kernels.device import DeviceKernels
from specgen.model.decoder import Decoder
from specgen.model.device import DeviceDecoder
from specgen.model.laidout import LaidOutStore
from specgen.model.planned import PlannedDecoder
from specgen.model.spec import ModelSpec
from specgen.model.weights import ModelWeights, load_weights
from specgen.weights.base import Checkpoint


def build_model(
    checkpoint: Checkpoint, spec: ModelSpec, kernels: Kernels, store: LaidOutStore | None = None
) -> Decoder:
    """The decoder of `checkpoint`, its weights laid out for `kernels`. ModelError names a tensor that does not fit.

    With a `store`, laying out is done once and its result is mapped from then on.
    """
    if not isinstance(kernels, CpuKernels):
        return make_decoder(spec, load_weights(checkpoint, spec, kernels.device), kernels)
    path = None if store is None else store.path(checkpoint, kernels)
    kept = None if store is None or path is None else store.read(path, kernels)
    model = PlannedDecoder(spec, kept or load_weights(checkpoint, spec, torch.device("cpu")), kernels)
    if store is not None and path is not None and kept is None:
        store.write(path, model.weights)
    return model


def make_decoder(spec: ModelSpec, weights: ModelWeights, kernels: Kernels) -> Decoder:
    """The decoder of `weights`, which are laid out for `kernels` layer by layer."""
    if isinstance(kernels, CpuKernels):
        return PlannedDecoder(spec, weights, kernels)
    if isinstance(kernels, DeviceKernels):
        return DeviceDecoder(spec, weights, kernels)
    return Decoder(spec, weights, kernels)

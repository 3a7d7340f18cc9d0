"""A card that computes something else is found out while the model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_ops import CPU, ReferenceOps
from tiny import Quant, tiny_spec, tiny_weights
from torch import Tensor

from specgen.errors import DeviceError
from specgen.kernels.device import DeviceKernels
from specgen.model.device import DeviceDecoder

SPEC = tiny_spec()


class WrongOps(ReferenceOps):
    """Products are off by a share, from one output on."""

    def __init__(self, share: float, first: int = 0) -> None:
        super().__init__()
        self.share, self.first = share, first

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        y = super().linear(x, weight)
        y[:, self.first :] *= 1.0 + self.share
        return y


@pytest.mark.parametrize("quant", ["int4", "int8", "dense"])
def test_what_rounding_explains_is_allowed(quant: Quant) -> None:
    for share in (0.0, 0.005):
        DeviceDecoder(SPEC, tiny_weights(SPEC, 0, quant), DeviceKernels(WrongOps(share), CPU))


@pytest.mark.parametrize(("share", "first"), [(0.2, 0), (float("nan"), 0), (1.0, 5), (-1.0, 0)])
def test_wrong_products_are_refused(share: float, first: int) -> None:
    with pytest.raises(DeviceError, match="products of"):
        DeviceDecoder(SPEC, tiny_weights(SPEC, 0, "int4"), DeviceKernels(WrongOps(share, first), CPU))


def test_damaged_weights_are_left_to_the_step_that_finds_them() -> None:
    weights = tiny_weights(SPEC, 0, "dense")
    weights.layers[0].o.weight[0, 0] = torch.nan  # type: ignore[attr-defined]
    DeviceDecoder(SPEC, weights, DeviceKernels(ReferenceOps(), CPU))

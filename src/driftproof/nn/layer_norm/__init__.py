"""Layer normalisation without parameters.

On CUDA it is one Triton kernel forward and one backward, which take rows as short as the layers' widths many at a time;
torch's kernels give each row a program of its own, at several times the price of reading it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

fused: ModuleType | None
try:
    fused = importlib.import_module("driftproof.nn.layer_norm.fused")
except ModuleNotFoundError:  # Triton is a part of torch's builds for CUDA only.
    fused = None

FEWEST_ROWS = 512
"""With fewer rows, as in acting, the launch is what costs, and that of torch's kernels costs less."""


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of the last axis, without parameters.

    Under autocast the result of the kernel has the type of products, as the next layer would round it anyway.

    Args:
        width: Length of the last axis.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, elementwise_affine=False)
        self._ones = torch.ones(width, device="cpu")

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.eps, self.scale(input))

    def scale(self, inputs: Tensor) -> Tensor | None:
        """A scale that changes nothing: without any, torch takes twice as long for float32 on a CPU."""
        return self._ones if inputs.dtype is torch.float32 and inputs.device.type == "cpu" else None


def layer_norm(inputs: Tensor, epsilon: float, scale: Tensor | None = None) -> Tensor:
    """Rows of the last axis less their mean, divided by their standard deviation.

    Args:
        inputs: Rows ``[..., width]``.
        epsilon: Added to the variance.
        scale: What torch multiplies the result by, ``[width]``; the kernel does not.
    """
    if fused is None or not _has_kernel(inputs, fused):
        return F.layer_norm(inputs, inputs.shape[-1:], scale, None, epsilon)
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
    result: Tensor = fused.run(inputs, epsilon, dtype)
    return result


def _has_kernel(inputs: Tensor, module: ModuleType) -> bool:
    width = inputs.shape[-1]
    return (
        (inputs.is_cuda or module.INTERPRETED)
        and inputs.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 0 < width <= module.WIDEST
        and inputs.numel() >= FEWEST_ROWS * width
        # Tensors of torch.func's transformations, of which the kernel knows nothing.
        and not torch._C._functorch.is_functorch_wrapped_tensor(inputs)
    )

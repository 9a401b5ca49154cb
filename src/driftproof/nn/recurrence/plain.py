"""The recurrence of LSTM and GRU in plain PyTorch, step by step: the reference for the fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from driftproof.nn.grouped import gru_cell, linear, lstm_cell

if TYPE_CHECKING:
    from driftproof.nn.recurrence import Recurrence


def run(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: tuple[Tensor, ...], keep: Tensor | None
) -> Recurrence:
    """What :func:`driftproof.nn.recurrence.recurrence` returns, for any device and precision."""
    outputs = []
    kept = None if keep is None else keep.unsqueeze(-1).unbind(1)
    for step, gates in enumerate(inputs.unbind(1)):
        if kept is not None:
            state = tuple(part * kept[step] for part in state)
        products = linear(state[0], weight)
        if len(state) == 2:
            state = lstm_cell(gates + products, state[1])
        else:
            units = state[0].shape[-1]
            if bias is not None:
                products = torch.cat((products[..., : 2 * units], products[..., 2 * units :] + bias.unsqueeze(1)), -1)
            state = (gru_cell(gates, products, state[0]),)
        outputs.append(state[0])
    return torch.stack(outputs, 1), state

"""Layers and recurrent cells of one network, or of ``G`` identical ones: members of a population, or actor and critics.

The group axis leads: inputs are ``[G, ..., width]`` and weights ``[G, outputs, inputs]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A dense layer: weights ``[outputs, inputs]``, or those of each group."""
    if weight.dim() == 2:
        return F.linear(inputs, weight, bias)
    rows = inputs.reshape(len(weight), -1, inputs.shape[-1])
    products = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(-2), rows, weight.mT)
    return products.view(*inputs.shape[:-1], -1)


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden and cell state ``[..., units]`` from the gates' arguments ``[..., 4 * units]`` in torch's order."""
    input_gate, forget_gate, candidate, output_gate = torch.split(gates, cell.shape[-1], -1)
    cell = torch.addcmul(forget_gate.sigmoid() * cell, input_gate.sigmoid(), candidate.tanh())
    return output_gate.sigmoid() * cell.tanh(), cell


def gru_cell(input_gates: Tensor, hidden_gates: Tensor, hidden: Tensor) -> Tensor:
    """Hidden state ``[..., units]`` from the gates' arguments by inputs and hidden state ``[..., 3 * units]`` each."""
    units = hidden.shape[-1]
    input_reset, input_update, input_new = torch.split(input_gates, units, -1)
    hidden_reset, hidden_update, hidden_new = torch.split(hidden_gates, units, -1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    return torch.lerp((input_new + reset * hidden_new).tanh(), hidden, update)

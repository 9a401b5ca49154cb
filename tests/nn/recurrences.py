"""Arguments of recurrences."""

from __future__ import annotations

import torch
from torch import nn


def random_case(module, members, steps, batch, units, seed, dtype=torch.float64):
    """Arguments of a recurrence with random masks."""
    torch.manual_seed(seed)
    gates, parts = (4, 2) if module is nn.LSTM else (3, 1)
    inputs = torch.randn(members, steps, batch, gates * units, dtype=dtype)
    weight = torch.randn(members, gates * units, units, dtype=dtype) / units**0.5
    bias = None if module is nn.LSTM else torch.randn(members, units, dtype=dtype)
    state = tuple(torch.randn(members, batch, units, dtype=dtype) for _ in range(parts))
    return inputs, weight, bias, state, (torch.rand(members, steps, batch) > 0.2).to(dtype)

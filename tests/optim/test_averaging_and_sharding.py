"""``torch.optim.swa_utils`` works with the optimizers; sharded parameters are refused."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.optim import swa_utils

from .helpers import OPTIMIZERS, parameters


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_stochastic_weight_averaging(optimizer_class):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    averaged = swa_utils.AveragedModel(model)
    following = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    batches = [torch.randn(16, 4) for _ in range(5)]
    seen = []
    for inputs in batches:
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        following.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    torch.testing.assert_close(averaged.module[0].weight, torch.stack(seen).mean(0))
    expected = seen[0]
    for weight in seen[1:]:
        expected = expected.lerp(weight, 0.5)
    torch.testing.assert_close(following.module[0].weight, expected)
    swa_utils.update_bn(batches, averaged)
    inputs = torch.cat(batches)
    torch.testing.assert_close(averaged.module[1].running_mean, averaged.module[0](inputs).mean(0))


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_sharded_parameters_are_refused(optimizer_class):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
    with pytest.raises(NotImplementedError, match="does not support DTensor parameters"):
        optimizer_class([sharded])
    optimizer = optimizer_class(parameters((2,)))
    with pytest.raises(NotImplementedError, match="FSDP2"):
        optimizer.add_param_group({"params": [sharded]})
    assert len(optimizer.param_groups) == 1

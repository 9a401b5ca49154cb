"""How long the recurrence takes on a GPU, alone and as a part of an agent's optimizer step.

    python benchmarks/recurrence.py                   # about a minute

Sequences are 64 steps by 16. Cores: forward, and forward with backward, in CUDA graphs. Agents: a whole optimizer step
with twin quantile critics, AdaptiveUPGD and VGS.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import common
import torch
from stable_baselines3.common.env_util import make_vec_env

from driftproof.nn import cores
from driftproof.nn.recurrence import plain, product_precision, reason_against_kernels, recurrence
from driftproof.ppo import DistributionalPPO

STEPS, BATCH = 64, 16
MODES = {"float32": ("highest", torch.float32), "tf32": ("high", torch.float32), "bf16": ("highest", torch.bfloat16)}


def microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Time of a call in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return events(graph.replay, repeats) * 1e3


def events(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call, by the device's clock."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def core_times(run: Callable[..., Any], gates: int, members: int, units: int, dtype: torch.dtype) -> list[float]:
    """Microseconds forward, and forward with backward."""
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    inputs = random(members, STEPS, BATCH, gates * units).to(dtype).requires_grad_()
    weight = (random(members, gates * units, units) / units**0.5).requires_grad_()
    bias = random(members, units) if gates == 3 else None
    state = tuple(random(members, BATCH, units) for _ in range(gates - 2))
    keep = (torch.rand(members, STEPS, BATCH, device="cuda") > 0.02).float()
    given = random(members, STEPS, BATCH, units)

    def forward() -> torch.Tensor:
        outputs: torch.Tensor = run(inputs, weight, bias, state, keep)[0]
        return outputs

    def both() -> object:
        outputs = forward()
        return torch.autograd.grad(outputs, [inputs, weight], given.to(outputs.dtype))

    with torch.no_grad():
        alone = microseconds(forward)
    return [alone, microseconds(both)]


def agent_time(units: int, mixed: bool, precision: str, kernels: bool = True, profile: bool = False) -> float:
    """Milliseconds of an agent's optimizer step in a CUDA graph."""
    torch.set_float32_matmul_precision(precision)
    refusal = mock.patch.object(cores, "reason_against_kernels", return_value="switched off")
    if not kernels:
        refusal.start()
    try:
        agent = DistributionalPPO(
            *("MlpLstmPolicy", make_vec_env("CartPole-v1", BATCH, seed=0)),
            device="cuda",
            n_steps=STEPS,
            batch_size=STEPS * BATCH,
            n_epochs=2,
            seed=0,
            cuda_graph=True,
            mixed_precision=mixed,
            policy_kwargs={"lstm_hidden_size": units},
            drift_kit=False,
        )
        step = agent.learner.take_step
        seen: list[Any] = []
        original = type(step).__call__

        def recorded(self: Any, batch: Any, coefficients: Any) -> Any:
            seen[:] = [batch, coefficients]
            return original(self, batch, coefficients)

        with mock.patch.object(type(step), "__call__", recorded):
            agent.learn(2 * STEPS * BATCH)
        time = events(lambda: step(*seen), 100)
        if profile:
            show_profile(lambda: step(*seen))
        return time
    finally:
        torch.set_float32_matmul_precision("highest")
        if not kernels:
            refusal.stop()


def show_profile(call: Callable[[], object], repeats: int = 10) -> None:
    """Print the kernels of a call that take the longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    total, count = (sum(getattr(row, name) for row in rows) / repeats for name in ("self_device_time_total", "count"))
    print(f"{count:.0f} kernels, {total:.0f} us")
    for row in rows[:30]:
        print(f"  {row.self_device_time_total / repeats:7.1f} us x{row.count / repeats:5.1f}  {row.key[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="print the kernels of the default agent's step")
    parser.add_argument("--only", choices=["cores", "agents"])
    profile, only = vars(parser.parse_args()).values()
    warnings.filterwarnings("ignore", "You are trying to run PPO on the GPU")
    print(common.machine())
    if only != "agents":
        print("| core | members | products | forward (us) | forward and backward (us) |\n|---|---|---|---|---|")
        for gates, units, members in ((4, 128, 2), (4, 128, 128), (3, 128, 2), (4, 256, 2), (4, 256, 128), (4, 512, 2)):
            for mode, (precision, dtype) in MODES.items():
                torch.set_float32_matmul_precision(precision)
                weight = torch.empty(members, gates * units, units, device="cuda")
                if reason_against_kernels(weight, dtype) is None:
                    one, both = core_times(recurrence, gates, members, units, dtype)
                    kind = f"{'LSTM' if gates == 4 else 'GRU'} {units}"
                    print(
                        f"| {kind} | {members} | {mode} ({product_precision(dtype)}) | {one:.0f} | {both:.0f} |",
                        flush=True,
                    )
        torch.set_float32_matmul_precision("highest")
        one, both = core_times(plain.run, 4, 2, 128, torch.float32)
        print(f"| LSTM 128, loop over time | 2 | float32 | {one:.0f} | {both:.0f} |", flush=True)
    if only != "cores":
        print("\n| agent | products | step (ms) | without kernels (ms) |\n|---|---|---|---|")
        for units in (128, 256):
            for mode, (precision, dtype) in MODES.items():
                mixed = dtype is torch.bfloat16
                time = agent_time(units, mixed, precision, profile=profile and mixed and units == 128)
                loop = agent_time(units, mixed, precision, kernels=False)
                print(f"| two LSTMs of {units} | {mode} | {time:.2f} | {loop:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""A population on one accelerator: what M members cost against one, from the optimizer step to whole trainings.

    python benchmarks/population.py                     # on the GPU if there is one; about five minutes there
    python benchmarks/population.py --quick             # tiny, also on a CPU: about a minute
    python benchmarks/population.py --parts population --members 1 64 --units 128 --products float32 bf16
    python benchmarks/population.py --report            # tables and the picture of what has been measured

- environments: steps per second of tensor environments, and of Gymnasium's vector environments on one core.
- population: M members at once against a single agent: an optimizer step, of 64 steps x 16 sequences each, alone and
  as a part of a whole update; an exploit, in which half of the population gets the state of the other half; and
  trainings in the market with regimes, rollouts and updates on the device. A single agent has its CUDA graph, and its
  environments are tensors too.
- learning: what 64 members, and single agents with the seeds of the first, have learned after 500,000 steps in that
  market.

Everything is on: twin quantile critics, LSTMs for actor and critics, AdaptiveUPGD with noise, gradient scaling. Matrix
products are exact float32, TF32 (``torch.set_float32_matmul_precision("high")``) or bfloat16 (``mixed_precision``). The
floor of a step is the time in which the device could do its arithmetic (6 operations per weight of a matrix and sample,
forward and backward, on tensor cores in TF32 or bfloat16), or move its numbers (12 per weight: three reads and a write
around the gradient, and parameters, utilities and two moments of the optimizer; 2 per output of a layer and sample),
whichever is longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from common import RESULTS, console, machine, show_table, write_result
from recurrence import show_profile

from driftproof.envs import tensor
from driftproof.pbt.vectorized import VectorizedPopulation
from driftproof.ppo import DistributionalPPO

MARKET = "driftproof/RegimeMarket-v0"
PARTS = ("environments", "population", "learning")
PRODUCTS = ("float32", "tf32", "bf16")
"""Precisions of matrix products."""
PEAKS = {"H200": (495e12, 4.8e12), "H100": (495e12, 3.35e12), "A100": (156e12, 2.0e12)}
"""Operations per second of TF32 and bytes per second, by what the device's name contains."""


def seconds(call: Callable[[], object], device: str, repeats: int, warm_up: int = 2) -> float:
    """Time of a call, over some in a row."""
    for _ in range(warm_up):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def agent(device: str, units: int, envs: int, n_steps: int, batch_size: int, **settings: Any) -> DistributionalPPO:
    """One of the members, in tensor environments."""
    return DistributionalPPO(
        "MlpLstmPolicy",
        tensor.make(MARKET, envs, device),
        n_steps=n_steps,
        batch_size=batch_size,
        sequence_length=min(64, n_steps),
        n_epochs=2,
        policy_kwargs={"lstm_hidden_size": units},
        device=device,
        drift_kit=False,
        **settings,
    )


def floor(model: DistributionalPPO, members: int, samples: int) -> float | None:
    """Seconds that an optimizer step takes at least on this device; ``None`` if its peaks are unknown."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peaks = next((peaks for part, peaks in PEAKS.items() if part in name), None)
    if peaks is None or model.device.type != "cuda":
        return None
    matrices = [parameter for parameter in model.policy.parameters() if parameter.dim() == 2]
    weights = sum(parameter.numel() for parameter in model.policy.parameters())
    # Tensor cores multiply twice as many numbers of half the size.
    operations = 6 * samples * sum(matrix.numel() for matrix in matrices) / (2 if model.mixed_precision else 1)
    words = 12 * weights + 2 * samples * sum(len(matrix) for matrix in matrices)
    return members * max(operations / peaks[0], 4 * words / peaks[1])


def environments(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps per second of environments alone, with fixed actions."""
    for env_id in ("CartPole-v1", "Pendulum-v1", MARKET):
        vector = gymnasium.vector.SyncVectorEnv([lambda env_id=env_id: gymnasium.make(env_id) for _ in range(16)])
        vector.reset(seed=0)
        fixed = vector.action_space.sample()
        rate = 16 / seconds(lambda vector=vector, fixed=fixed: vector.step(fixed), "cpu", 512)
        yield {"environment": env_id, "form": "Gymnasium, 16, one core", "rate": rate}
        for count in (16, 1024) if options.device == "cpu" else (1024, 4096, 16384):
            rate = count / environment_step(env_id, count, options.device, 512 if options.device == "cpu" else 128)
            yield {"environment": env_id, "form": f"tensors, {count}, {options.device}", "rate": rate}


def environment_step(env_id: str, count: int, device: str, steps: int) -> float:
    """Seconds of a step, in a graph on a GPU."""
    env = tensor.make(env_id, count, device)
    env.reset(0)
    is_discrete = isinstance(env.single_action_space, gymnasium.spaces.Discrete)
    actions = torch.ones(count, device=device, dtype=torch.long) if is_discrete else torch.ones(count, 1, device=device)

    def rollout() -> None:
        env.prepare(steps)
        for _ in range(steps):
            env.step(actions)

    if device == "cpu":
        return seconds(rollout, device, 1, warm_up=1) / steps
    return seconds(captured(rollout).replay, device, 5) / steps


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def population(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """An optimizer step, an exploit and whole trainings, of M members and of a single agent."""
    before = torch.get_float32_matmul_precision()
    for units in options.units:
        for products in options.products:
            torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
            for measured in members_at_once(options, units, products == "bf16"):
                yield {"products": products, **measured}
    torch.set_float32_matmul_precision(before)


def members_at_once(options: argparse.Namespace, units: int, mixed_precision: bool) -> Iterator[dict[str, Any]]:
    n_steps, sequences, envs = (16, 4, 8) if options.quick else (64, 16, options.envs)
    device, samples = options.device, n_steps * sequences
    shape = {"units": units, "n_steps": n_steps, "batch_size": samples, "envs": envs}
    shape["mixed_precision"] = mixed_precision
    single = agent(device, cuda_graph=device == "cuda", **shape)
    single.learn(n_steps * envs)
    steps = single.optimizer_steps_per_update
    alone, update = step_and_update(single.learner, single.train, device, options)
    whole = seconds(partial(single.learn, n_steps * envs, reset_num_timesteps=False), device, 1, 0)
    bound = floor(single, 1, samples)
    yield row("single", units, 1, alone, alone, update / steps, bound, n_steps * envs / whole)
    del single
    for members in options.members:
        forget(device)
        console.print(f"{members} members, {units} units", "bfloat16" if mixed_precision else "", style="dim")
        make_agent = partial(member_agent, device, shape)
        together = VectorizedPopulation(make_agent, members)
        together.learn(1)
        settings = [each.update_settings() for each in together.agents]
        call = partial(together.learner.update, together.rollout, settings)
        step, update = step_and_update(together.learner, call, device, options)
        half = members // 2
        halves = list(range(half)), list(range(half, 2 * half))
        exploit = 1e3 * seconds(partial(together.exploit, *halves), device, 5) if half else None
        bound = floor(together.agents[0], members, samples)
        updates = dict.fromkeys(range(members), options.repeats)
        training = seconds(
            partial(together.train, updates, 10**6, dict.fromkeys(updates)), device, 1, warm_up=not options.quick
        )
        yield {
            **row("population", units, members, step, alone, update / steps, bound, 0.0),
            "rate": members * n_steps * envs * options.repeats / training,
            "memory_gib": memory(device),
            "exploit_ms": exploit,
        }
        together.close()
        del together, settings


def step_and_update(
    learner: Any, update: Callable[[], object], device: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of an optimizer step, as an update takes it, and of the whole update."""
    taken: list[Any] = []
    step = learner.take_step

    def noted(*arguments: Any) -> Any:
        taken[:] = arguments
        return step(*arguments)

    learner.take_step = noted
    update()
    learner.take_step = step
    call = partial(step, *taken)
    alone = seconds(call, device, 10 * options.repeats)
    if options.profile and device == "cuda":
        show_profile(call)
    return alone, seconds(update, device, options.repeats)


def member_agent(device: str, shape: dict[str, Any], member: int) -> DistributionalPPO:
    """A member, with a learning rate of its own."""
    return agent(device, seed=member, learning_rate=1e-4 * 1.02**member, **shape)


def learning(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns after the same number of steps: of members that train at once, and of agents that train alone."""
    device, updates = options.device, 2 if options.quick else 122
    members, singles = (2, 1) if options.quick else (64, 3)
    shape: dict[str, Any] = {"units": 16 if options.quick else 128, "envs": 64, "n_steps": 64, "batch_size": 1024}
    shape |= {"gamma": 0.9, "gae_lambda": 0.8, "mixed_precision": device == "cuda"}
    steps = updates * shape["n_steps"] * shape["envs"]
    alone, spent = [], 0.0
    for seed in range(singles):
        # The seeds of members, as returns depend on the markets that they draw.
        single = agent(device, seed=seed, cuda_graph=device == "cuda", **shape)
        start = time.perf_counter()
        single.learn(steps)
        synchronize(device)
        spent += time.perf_counter() - start
        alone.append(last_return(single))
    yield learned("single agents, one by one", alone, steps, spent)
    together = VectorizedPopulation(lambda member: agent(device, seed=member, **shape), members)
    start = time.perf_counter()
    together.learn(updates)
    synchronize(device)
    spent = time.perf_counter() - start
    yield learned("members at once", [last_return(each) for each in together.agents], steps, spent)
    together.close()


def last_return(model: DistributionalPPO) -> float:
    """Mean return of the last 100 episodes of training."""
    returns = [float(episode["r"]) for episode in model.ep_info_buffer or []]
    return sum(returns) / max(len(returns), 1)


def learned(kind: str, returns: list[float], steps: int, spent: float) -> dict[str, Any]:
    return {"learning": kind, "agents": len(returns), "steps": steps, "returns": returns, "seconds": spent}


def row(
    kind: str, units: int, members: int, step: float, alone: float, update: float, bound: float | None, rate: float
) -> dict[str, Any]:
    """A row of the results; ``update`` is its time by optimizer step."""
    return {
        "kind": kind,
        "units": units,
        "members": members,
        "step_ms": 1e3 * step,
        "update_ms": 1e3 * update,
        "speedup": members * alone / step,
        "floor_ms": None if bound is None else 1e3 * bound,
        "rate": rate,
        "memory_gib": 0.0,
        "exploit_ms": None,
    }


def what(measured: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured, in the order of the tables."""
    if "environment" in measured:
        return measured["environment"], measured["form"]
    if "learning" in measured:
        return (measured["learning"],)
    return measured["units"], PRODUCTS.index(measured["products"]), measured["kind"] != "single", measured["members"]


def forget(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory(device: str) -> float:
    """Most memory in use on the device since :func:`forget`, in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def report(results: dict[str, Any]) -> list[str]:
    """Tables of what has been measured."""
    sections = []
    if rows := results.get("environments"):
        table = [[each["environment"], each["form"], f"{each['rate']:,.0f}"] for each in rows]
        sections.append(show_table("Environments alone", ["environment", "form", "steps/s"], table))
    if rows := results.get("population"):
        columns = [
            "units",
            "products",
            "members",
            "optimizer step, ms",
            "whole update by step, ms",
            "against one by one",
            "floor, ms",
            "share of the floor",
        ]
        columns += ["exploit of half, ms", "memory, GiB", "training, steps/s"]
        table = [
            [
                str(each["units"]),
                each["products"],
                "single agent" if each["kind"] == "single" else str(each["members"]),
                f"{each['step_ms']:.2f}",
                f"{each['update_ms']:.2f}",
                f"{each['speedup']:.1f}x",
                shown(each["floor_ms"], "{:.2f}"),
                shown(each["floor_ms"] and 100 * each["floor_ms"] / each["step_ms"], "{:.0f} %"),
                shown(each["exploit_ms"], "{:.2f}"),
                shown(each["memory_gib"], "{:.1f}"),
                f"{each['rate']:,.0f}",
            ]
            for each in rows
        ]
        sections.append(show_table("Members at once", columns, table))
    if rows := results.get("learning"):
        columns = ["agents", "number", "steps of each", "return", "lowest", "highest", "seconds"]
        table = [
            [
                each["learning"],
                str(each["agents"]),
                f"{each['steps']:,}",
                f"{sum(each['returns']) / len(each['returns']):.4g}",
                f"{min(each['returns']):.4g}",
                f"{max(each['returns']):.4g}",
                f"{each['seconds']:.0f}",
            ]
            for each in rows
        ]
        sections.append(show_table("Mean return of the last 100 episodes", columns, table))
    return sections


def shown(number: float | None, form: str) -> str:
    return form.format(number) if number else ""


def plot(results: dict[str, Any], path: Path) -> None:
    """Time of a step, and steps per second of whole trainings, over the number of members."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows, colours = results.get("population", []), itertools.cycle(plt.get_cmap("tab10").colors)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for units, products in sorted({(each["units"], each["products"]) for each in rows}):
        colour, label = next(colours), f"{units} units, {products}"
        single, *many = [each for each in rows if (each["units"], each["products"]) == (units, products)]
        members = [each["members"] for each in many]
        left.loglog(members, [each["step_ms"] for each in many], "o-", color=colour, label=label)
        left.loglog(members, [single["step_ms"] * count for count in members], "--", color=colour, alpha=0.5)
        if single["floor_ms"] is not None:
            left.loglog(members, [each["floor_ms"] for each in many], ":", color=colour)
        right.loglog(members, [each["rate"] for each in many], "o-", color=colour, label=label)
        right.axhline(single["rate"], color=colour, ls="--", alpha=0.5)
    left.set_title("Optimizer step, ms (dashed: one by one, dotted: floor)", fontsize=10)
    right.set_title("Training, environment steps/s (dashed: a single agent)", fontsize=10)
    for ax in (left, right):
        ax.set_xlabel("members")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small networks and few members; printed, and kept in --output only"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--members", nargs="+", type=int)
    parser.add_argument("--units", nargs="+", type=int)
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, help="on a CPU float32 only")
    parser.add_argument("--profile", action="store_true", help="print the kernels of every step, on a GPU")
    parser.add_argument("--envs", type=int, default=64, help="environments of each member")
    parser.add_argument("--report", action="store_true", help="tables and picture of what is in population.json")
    parser.add_argument("--output", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    options.members = options.members or ([1, 4] if options.quick else [1, 8, 32, 64, 128])
    options.units = options.units or ([16] if options.quick else [128, 256])
    options.products = ["float32"] if options.device == "cpu" else options.products or PRODUCTS
    options.repeats = 1 if options.quick else 3
    folder = options.output or (None if options.quick else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    kept = folder / "population.json" if folder else Path(os.devnull)
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    measures = {"environments": environments, "population": population, "learning": learning}
    for part in [] if options.report else options.parts:
        for measured in measures[part](options):
            # What has been measured of others stays.
            others = [each for each in results.get(part, []) if what(each) != what(measured)]
            results[part] = sorted([*others, measured], key=what)
            kept.write_text(json.dumps({**results, "machine": machine()}, indent=1))
    sections = report(results)
    if folder is not None:
        measured_on = results.get("machine") if options.report else None
        write_result("population", "python benchmarks/population.py", sections, folder=folder, on=measured_on)
        plot(results, folder / "population.png")


if __name__ == "__main__":
    main()

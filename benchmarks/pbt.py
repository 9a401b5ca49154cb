"""Populations: what an exploit costs, what it must carry, how processes scale, and whether it all pays.

    python benchmarks/pbt.py --quick                     # everything, small, a few minutes
    python benchmarks/pbt.py                             # everything; two cores and nothing else on them, about an hour
    python benchmarks/pbt.py --parts exploit scaling     # some parts: exploit, scaling, worth, schedule, tune
    python benchmarks/pbt.py --report                    # tables of what has been run

- exploit: seconds to fetch, load and apply the whole state of an agent of a million parameters.
- scaling: updates per second of two one-thread processes against one, taking turns.
- worth: returns after a weak agent took over a strong one's state, all of it, and without some of it.
- schedule: a world in which the right learning rate changes: a population against as many fixed learning rates.
- tune: Ray Tune's PBT around SB3's PPO against ours, the same ranges and budget.

A finished run is kept in pbt.json at once and not run again.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import common
import learning
import numpy as np
import pbt_tune
import torch
from pbt_tasks import finder, learner, normalized, return_on_target
from stable_baselines3.common.vec_env import VecNormalize

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner, ProcessBackend, Trainee
from driftproof.pbt.work import Report
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.tree import parameters_from
from driftproof.runs.folder import RunFolder
from driftproof.state import read

Entry = dict[str, Any]


def exploit(rounds: int) -> Entry:
    """Seconds of each step of an exploit, medians."""
    settings: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "device": "cpu", "drift_kit": False}
    settings["policy_kwargs"] = {"lstm_hidden_size": 336}
    donor, taker = (
        Trainee(DistributionalPPO("MlpLstmPolicy", "LunarLander-v3", seed=seed, **settings), 10) for seed in (0, 1)
    )
    for each in (donor, taker):
        each.train(2)
    times: dict[str, list[float]] = {"fetch": [], "load": [], "apply": []}
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(name)
        file = io.BytesIO()
        donor.agent.save(file)
        path = folder.write_member(0, 2, file.getvalue())
        for _ in range(rounds):
            start = time.perf_counter()
            data = folder.read_member(path)
            fetched = time.perf_counter()
            parameters = parameters_from(read(io.BytesIO(data)).tree)
            loaded = time.perf_counter()
            taker.inherit(parameters, "v2_full_parameters", {"learning_rate": 1e-3})
            applied = time.perf_counter()
            for step, seconds in zip(times, (fetched - start, loaded - fetched, applied - loaded), strict=True):
                times[step].append(seconds)
    count = sum(p.numel() for p in donor.agent.policy.parameters())
    medians = {step: float(np.median(values)) for step, values in times.items()}
    return {"parameters": count, "bytes": len(data), **medians}


def scaling(rounds: int, updates: int) -> Entry:
    """Updates per second of one and of two processes of one thread, after all members have begun."""
    config = PBTConfig(
        population_size=4,
        perturbation_interval=2,
        hyperparams=[HyperparamConfig("learning_rate", 1e-4, 1e-3, is_log_scale=True)],
    )
    make = functools.partial(learner, "CartPole-v1", 0)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for workers, found in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                backend = ProcessBackend(workers, threads=1)
                runner = PBTRunner(config, make, updates, folder, backend=backend)
                found.append(rate(runner))
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {"rates": rates, "ratios": ratios}


def rate(runner: PBTRunner) -> float:
    """Updates per second, from when every member has reported until the first is done."""
    times: list[tuple[float, int, int]] = []
    receive = runner._receive

    def noting(report: Report) -> list[int]:
        times.append((time.perf_counter(), report.member, report.updates))
        return receive(report)

    runner._receive = noting  # type: ignore[method-assign]
    runner.run()
    members: set[int] = set()
    begin = end = 0
    for i, (_, member, updates) in enumerate(times):
        members.add(member)
        if len(members) == runner.config.population_size and not begin:
            begin = i
        if updates >= runner.total_updates and not end:
            end = i
    return (end - begin) * runner.config.perturbation_interval / (times[end][0] - times[begin][0])


TAKEN: dict[str, tuple[str, ...]] = {
    "everything": (),
    "without VGS": ("vgs_state",),
    "without the return scale": ("return_scale_state",),
    "without the normaliser": ("normalizer_state",),
    "without the optimizer": ("policy.optimizer",),
    "policy only": ("vgs_state", "return_scale_state", "normalizer_state", "policy.optimizer"),
}
"""What is left behind: the weak agent keeps its own."""


LATER = (0, 2, 6)
"""Updates after a weak agent took over."""


def worth(seed: int, task: str, updates: int) -> Entry:
    """Returns of a strong agent, and of a weak one right after it took over from it, and some updates later."""
    torch.set_num_threads(1)
    total = updates + LATER[-1]

    def trained(member: int, learning_rate: float) -> Trainee:
        trainee = Trainee(learner(task, seed, member, learning_rate=learning_rate, gamma=0.9), total)
        trainee.train(updates)
        return trainee

    def returns_of(trainee: Trainee) -> list[float]:
        found = []
        for since in np.diff(LATER, prepend=0):
            trainee.train(int(since))
            found.append(play(trainee, task))
        return found

    strong, weak_state = trained(0, 1e-3), trained(1, 1e-6).agent.state_tree()
    parameters = strong.agent.get_parameters()
    returns: Entry = {"strong": returns_of(strong)}
    for name, kept in TAKEN.items():
        weak = Trainee(learner(task, seed, 1, gamma=0.9), total)
        weak.agent.load_state_tree(weak_state)
        own = weak.agent.get_parameters()
        taken = {part: own[part] if part in kept else state for part, state in parameters.items()}
        weak.inherit(taken, "v2_full_parameters", {"learning_rate": 1e-3})
        returns[name] = returns_of(weak)
    return returns


def play(trainee: Trainee, task: str) -> float:
    """Mean return of deterministic episodes in fresh environments, with its statistics of observations."""
    env = normalized(task, 8)
    trained = trainee.agent.get_env()
    assert isinstance(trained, VecNormalize)
    env.obs_rms = trained.obs_rms
    return pbt_tune.score(trainee.agent, env, 40)


def schedule(seed: int, updates: int, members: int) -> Entry:
    """Returns on fresh episodes at the end of training: of a population's best member, and of fixed learning rates."""
    torch.set_num_threads(1)
    low, high = 1e-4, 3e-2
    lr = HyperparamConfig("learning_rate", low, high, is_log_scale=True, perturbation_factor=2.0)
    config = PBTConfig(population_size=members, perturbation_interval=5, hyperparams=[lr], truncation_ratio=0.34)
    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(finder, seed, updates)
        runner = PBTRunner(config, make, updates, folder, seed=seed, synchronous=True)
        best = runner.run()
        rates = [[event.step, event.member, event.hyperparams["learning_rate"]] for event in runner.scheduler.events]
    result: Entry = {"population": return_on_target(best, seed), "rates": rates, "fixed": {}}
    for member, value in enumerate(np.geomspace(low, high, members)):
        trainee = Trainee(finder(seed, updates, member, learning_rate=float(value)), updates)
        trainee.train(updates)
        result["fixed"][f"{value:.1e}"] = return_on_target(trainee.agent, seed)
    return result


def plan(quick: bool, parts: Sequence[str], seeds: int) -> dict[str, Callable[[], Entry]]:
    """What there is to run, by name."""
    runs: dict[str, Callable[[], Entry]] = {
        "exploit": functools.partial(exploit, 10 if quick else 50),
        "scaling": functools.partial(scaling, 1 if quick else 5, 8 if quick else 24),
    }
    for seed in range(seeds):
        runs[f"worth/{seed}"] = functools.partial(worth, seed, "Pendulum-v1", 4 if quick else 40)
        runs[f"schedule/{seed}"] = functools.partial(schedule, seed, 20 if quick else 120, 3 if quick else 6)
    # The same budget, and as long as Ray Tune takes for it.
    searches = [("ours", pbt_tune.ours, 48), ("ray", pbt_tune.with_ray_tune, 48), ("ours", pbt_tune.ours, 240)]
    for seed, (name, search, updates) in itertools.product(range(min(3, seeds)), searches[:2] if quick else searches):
        count = 8 if quick else updates
        runs[f"tune/{name}/{count}/{seed}"] = functools.partial(search, seed, count)
    return {name: run for name, run in runs.items() if name.split("/")[0] in parts}


def carried_out(runs: dict[str, Callable[[], Entry]]) -> Iterator[tuple[str, Entry]]:
    """What comes of each: those that use the whole machine one by one, then the others two at a time."""
    alone = {name: run for name, run in runs.items() if name.split("/")[0] not in ("worth", "schedule")}
    for name, run in alone.items():
        yield name, timed(run)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(timed, run): name for name, run in runs.items() if name not in alone}
        for future in as_completed(futures):
            yield futures[future], future.result()


def timed(run: Callable[[], Entry]) -> Entry:
    start = time.perf_counter()
    return {**run(), "seconds": round(time.perf_counter() - start, 1)}


def tables(results: dict[str, Entry]) -> list[str]:
    """Of what has been run."""
    sections = []
    if "exploit" in results:
        entry = results["exploit"]
        steps = {step: 1e3 * entry[step] for step in ("fetch", "load", "apply")}
        row = [f"{entry['parameters']:,}", f"{entry['bytes'] / 1e6:.1f} MB", *(f"{ms:.1f} ms" for ms in steps.values())]
        columns = ["parameters", "file", *steps, "together"]
        sections.append(common.show_table("An exploit", columns, [[*row, f"{sum(steps.values()):.1f} ms"]]))
    if "scaling" in results:
        entry = results["scaling"]
        rows = [[str(workers), f"{np.median(found):.2f}"] for workers, found in entry["rates"].items()]
        text = f"{np.median(entry['ratios']):.2f} ({min(entry['ratios']):.2f} to {max(entry['ratios']):.2f})"
        rows.append(["two against one", text])
        sections.append(common.show_table("Processes of one thread", ["", "updates/s"], rows))
    sections += [table for table in (_worth(results), _schedule(results), _tune(results)) if table]
    return sections


def _of(results: dict[str, Entry], part: str) -> list[Entry]:
    return [entry for name, entry in sorted(results.items()) if name.startswith(f"{part}/")]


def _interval(values: Sequence[float]) -> str:
    mean, low, high = common.interval(values)
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"


def _worth(results: dict[str, Entry]) -> str:
    entries = _of(results, "worth")
    if not entries:
        return ""
    names = [name for name in entries[0] if name != "seconds"]
    rows = [[name, *(_interval(values) for values in zip(*(e[name] for e in entries), strict=True))] for name in names]
    title = f"A weak agent takes over from a strong one, Pendulum, {len(entries)} seeds"
    columns = ["what is taken", "return at once", *(f"after {since} updates" for since in LATER[1:])]
    return common.show_table(title, columns, rows)


def _schedule(results: dict[str, Entry]) -> str:
    entries = _of(results, "schedule")
    if not entries:
        return ""
    found = {"population": [entry["population"] for entry in entries]}
    for value in entries[0]["fixed"]:
        found[f"fixed at {value}"] = [entry["fixed"][value] for entry in entries]
    best = [max(entry["fixed"].values()) for entry in entries]
    found["the best fixed one of each seed"] = best
    found["population − that"] = [ours - theirs for ours, theirs in zip(found["population"], best, strict=True)]
    rows = [[name, _interval(values), ", ".join(f"{value:.2f}" for value in values)] for name, values in found.items()]
    title = f"The right learning rate changes: return of fresh episodes at the end, {len(entries)} seeds"
    return common.show_table(title, ["", "return", "seeds"], rows)


def _tune(results: dict[str, Entry]) -> str:
    rows = []
    budgets = sorted({int(name.split("/")[2]) for name in results if name.startswith("tune/")})
    labels = {"ours": "driftproof", "ray": "Ray Tune's PBT, SB3's PPO"}
    for updates, (name, label) in itertools.product(budgets, labels.items()):
        entries = _of(results, f"tune/{name}/{updates}")
        if entries:
            returns = [entry["return"] for entry in entries]
            seconds = np.median([entry["seconds"] for entry in entries])
            each = ", ".join(f"{value:.0f}" for value in returns)
            steps = f"{updates * pbt_tune.steps_per_update():,}"
            rows.append([label, steps, _interval(returns), each, f"{seconds:.0f} s"])
    title = f"The same search on {pbt_tune.TASK}, best member at the end, 50 fresh episodes"
    return common.show_table(title, ["", "steps of a member", "return", "seeds", "time"], rows) if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["exploit", "scaling", "worth", "schedule", "tune"]
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small, and not kept")
    parser.add_argument("--report", action="store_true", help="only show what has been run")
    parser.add_argument("--folder", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    path = args.folder / "pbt.json"
    results = {} if args.quick else learning.load(path)
    if not args.report:
        runs = plan(args.quick, args.parts, 1 if args.quick else args.seeds)
        for name, entry in carried_out({name: run for name, run in runs.items() if name not in results}):
            results[name] = entry
            print(f"{name}: {entry['seconds']} s", flush=True)
            if not args.quick:
                learning.save(path, results)
    sections = tables(results)
    if not args.quick and args.folder == common.RESULTS:
        common.write_result("pbt", "python benchmarks/pbt.py", sections)


if __name__ == "__main__":
    main()

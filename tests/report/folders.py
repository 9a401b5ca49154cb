"""Folders of runs, written by what writes them in earnest, with numbers that are made up."""

from __future__ import annotations

import json
import math
import re

import numpy as np

from driftproof.pbt import Event, HyperparamConfig, PBTConfig, PBTScheduler, append_events
from driftproof.runs.events import write_events
from driftproof.runs.folder import RunFolder

STEPS = 256
"""Of an update."""
_PER_AGENT = (
    *(
        "rollout/ep_len_mean",
        "train/approx_kl",
        "kl/exact",
        "kl/penalty_coef",
        "train/clip_fraction",
        "train/value_loss",
    ),
    *("critic/divergence", "critic/correlation", "train/explained_variance", "vgs/scaling_factor", "train/grad_norm"),
    *("vgs/normalized_variance", "upgd/gate_mean", "upgd/gate_std", "upgd/noise_to_direction", "lstm/actor_norm"),
)
_QUIET = ("critic/warning", "kl/stopped", "train/skipped_minibatches")


def row(update, member=0, **more):
    """What an agent logs after an update, with a return that rises and tells the member: ``10 * update + member``."""
    wave = 0.5 + 0.4 * math.sin(update / 3 + member)
    return {
        "step": update * STEPS,
        "time/iterations": float(update),
        "time/time_elapsed": 2.0 * update,
        "rollout/ep_rew_mean": 10.0 * update + member,
        "train/entropy_loss": -wave,
        "train/learning_rate": 1e-3 / update,
        **dict.fromkeys(_PER_AGENT, wave),
        **dict.fromkeys(_QUIET, 0.0),
        **{f"critic/quantile_p{p}": update + p / 50 for p in (10, 50, 90)},
        **{f"upgd/utility_p{p}": (p - 50) * 1e-5 for p in (10, 50, 90)},
        **more,
    }


def write_agent(path, updates=20, seed=0, phases=0, **changes):
    """An agent that trained alone; with ``phases``, in a world that changed as often."""
    folder = RunFolder(path)
    with folder.locked():
        rows = []
        for update in range(1, updates + 1):
            phase = (update - 1) * phases // updates
            drift = {"drift/phase": float(phase), "drift/length": [0.5, 2.0][phase % 2]} if phases else {}
            rows.append(row(update, seed, **drift, **changes))
        folder.log(0, rows)
    (path / "config.yaml").write_text(f"env:\n  id: CartPole-v1\nrun:\n  name: {path.name}\n  seed: {seed}\n")
    return path


def write_population(path, members=4, updates=12, interval=2, seed=0):
    """A population that a real scheduler decided about; members do well as their learning rate is near 1e-3."""
    config = PBTConfig(
        population_size=members,
        perturbation_interval=interval,
        hyperparams=[
            HyperparamConfig("learning_rate", 1e-5, 1e-2, is_log_scale=True),
            HyperparamConfig("clip_range", values=[0.1, 0.2, 0.3]),
        ],
    )
    scheduler, folder = PBTScheduler(config, seed), RunFolder(path)
    hyperparams, returns = scheduler.initial_hyperparams(), np.full(members, 20.0)
    with folder.locked():
        for update in range(1, updates + 1):
            for member in range(members):
                distance = abs(math.log10(hyperparams[member]["learning_rate"]) + 3)
                returns[member] += max(5 - 3 * distance, -1)
                folder.log(member, [row(update, member, **{"rollout/ep_rew_mean": returns[member]})])
            if update % interval:
                continue
            for member in range(members):
                scheduler.update_performance(member, returns[member], update, {"weights": float(returns[member])})
            for member in range(members):
                taken, hyperparams[member], _ = scheduler.exploit_and_explore(member)
                if taken is not None:
                    scheduler.report_transfer(member, ok=True)
                    returns[member] = taken["weights"]
            statistics = scheduler.statistics()
            signs = {"best_performance": statistics["best_performance"], "mean_performance": returns.mean()}
            signs |= {"exploit_success_rate": statistics["exploit_success_rate"] or 0.0, "diversity/learning_rate": 0.3}
            signs = {f"population/{k}": float(v) for k, v in signs.items()}
            folder.log(None, [{"step": update * members, "time/time_elapsed": 2.0 * update, **signs}])
    write_events(path / "population.json", scheduler.events)
    return path


def write_outcomes(path):
    """An evaluation with baselines, attacks, and an evaluation in four phases of which two are the same."""
    returns = [180.0, 200.0, 220.0]
    score = {"episodes": 3, "mean": 200.0, "std": 16.3, "interval": [185.0, 215.0], "returns": returns}
    baselines = {"random": {"episodes": 2, "mean": 20.0, "interval": [15.0, 25.0], "returns": [18.0, 22.0]}}
    (path / "evaluation.json").write_text(json.dumps({**score, "baselines": baselines}))
    results = [{"attack": "clean", "epsilon": 0.0, "mean": 200.0, "low": 190.0, "high": 210.0, "returns": returns}]
    for i, attack in enumerate(("random", "mad"), 1):
        for epsilon in (0.05, 0.1):
            mean = 200.0 - 400 * i * epsilon
            ends = {"mean": mean, "low": mean - 10, "high": mean + 10}
            results.append({"attack": attack, "epsilon": epsilon, "returns": returns, **ends})
    (path / "attacks.json").write_text(json.dumps({"results": results}))
    (path / "phases.json").write_text(
        json.dumps({"phases": [phase(0, 2), phase(1, is_last=True), phase(3, is_seen=False)]})
    )
    return path


def phase(*phases, name="length", **more):
    """Returns in phases of the drift, which tell the first of them."""
    mean = 100.0 * (1 + phases[0])
    score = {"mean": mean, "std": 1.0, "interval": [mean - 10, mean + 10], "returns": [mean]}
    return {"phases": phases, "values": {name: 0.5}, "is_seen": True, "is_last": False, **score, **more}


HOSTILE = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<a href='javascript:window.hacked=1'>a</a>\"><svg onload=window.hacked=1>",
    "%{customdata} $x$ &lt;b&gt; \u2028 \x00 \u202e",
)


def write_hostile(path, members=4):
    """A population in which everything that can have a name has one that wants to be more."""
    write_outcomes(write_population(path, members, updates=16))
    folder = RunFolder(path)
    with folder.locked():
        rows = [{f"drift/{name}": float(i) for name in HOSTILE} | dict.fromkeys(HOSTILE, 1.0) for i in range(2)]
        folder.log(0, [row(17 + i, **more) for i, more in enumerate(rows)])
        folder.log(None, [{"step": 9_999, **{f"population/diversity/{name}": 1.0 for name in HOSTILE}}])
    told = {"hyperparams": dict(zip(HOSTILE, HOSTILE, strict=True)), "detail": HOSTILE[0]}
    told |= {"mutated": {name: [name, name] for name in HOSTILE}}
    append_events(path / "population.json", [Event(kind, 1, 16, 0, 16, **told) for kind in ("exploit", "restart")])
    (path / "config.yaml").write_text(json.dumps(told))
    score = {"mean": 1.0, "low": 0.0, "high": 2.0, "interval": [0, 2], "returns": [1.0]}
    everybody = (*HOSTILE, "half a \ud83d character", "x" * 500)
    (path / "evaluation.json").write_text(json.dumps({**score, "baselines": dict.fromkeys(everybody, score)}))
    results = [{"attack": name, "epsilon": 0.1, **score} for name in everybody]
    (path / "attacks.json").write_text(json.dumps({"results": results}))
    (path / "phases.json").write_text(json.dumps({"phases": [phase(i, name=name) for i, name in enumerate(everybody)]}))
    return path


def figures(page):
    """All figures of a page, as its script gets them."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def titles(page):
    """Of everything on a page, in order."""
    return re.findall(r"<h3>(.*?)</h3>", page.read_text())


def figure(page, title):
    """The figure under a title."""
    return figures(page)[chart_titles(page).index(title)]


def chart_titles(page):
    return re.findall(r"<figcaption><h3>(.*?)</h3>", page.read_text())

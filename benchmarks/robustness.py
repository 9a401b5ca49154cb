"""How much does an attack on what agents see cost them, and does training against attacks help?

    python benchmarks/robustness.py --quick                            # a few steps of everything, minutes
    python benchmarks/robustness.py --tasks pendulum --seeds 3         # one task
    python benchmarks/robustness.py --part cost                        # what an attacked update costs
    python benchmarks/robustness.py --report                           # table and picture of what has been run

A plain agent and some that are trained against attacks, with more or less weight on the robust term but otherwise the
same settings and the same number of steps, play 50 deterministic episodes each: undisturbed, and while their normalised
observations are moved at random, by maximal action difference, by the critic, and, at the largest radius, by an
adversary that was trained for this very agent. A finished run is kept in robustness.json at once and not run again;
trained agents are kept in runs/robustness.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import learning
import numpy as np
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from driftproof.adversarial import PerturbationConfig, Robustness, SAPPOConfig, evaluate_under_attack, train_adversary
from driftproof.adversarial.evaluation import AttackName
from driftproof.nn.policies import DistributionalPolicy
from driftproof.ppo import DistributionalPPO

ATTACKS: tuple[AttackName, ...] = ("clean", "random", "mad", "critic")
PLAIN = "plain"
EPISODES = 50
AGENTS = Path("runs") / "robustness"
EVALUATION_SEED = 1_000_000
NOTE = (
    ". Returns: mean over seeds of the mean of 50 deterministic episodes, and its bootstrap interval over seeds. "
    "Strongest: of every agent the attack that costs it most. Agents were trained in processes of one thread each, "
    "those of Hopper on a machine with 16 cores. "
)


@dataclass(frozen=True)
class Task:
    title: str
    env: str
    steps: int
    n_envs: int
    settings: Mapping[str, Any]
    adversarial: SAPPOConfig
    coefficients: Sequence[float]
    """Of the robust term, each of them tried."""
    epsilons: Sequence[float]
    """The last one is judged."""
    adversary_steps: int
    adversary_settings: Mapping[str, Any]

    @property
    def variants(self) -> dict[str, SAPPOConfig | None]:
        weighted = {f"robust_kl_coef={c:g}": replace(self.adversarial, robust_kl_coef=c) for c in self.coefficients}
        return {PLAIN: None, **weighted}


TASKS = {
    "pendulum": Task(
        "Pendulum",
        "Pendulum-v1",
        steps=200_000,
        n_envs=4,
        settings={
            "learning_rate": "linear 1e-3",
            "n_steps": 1024,
            "batch_size": 256,
            "n_epochs": 10,
            "gamma": 0.9,
            "gae_lambda": 0.95,
        },
        adversarial=SAPPOConfig(
            epsilon_schedule="linear",
            epsilon_final=0.2,
            perturbation=PerturbationConfig(epsilon=0.02, attack_lr=0.08),
        ),
        coefficients=(0.01, 0.1),
        epsilons=(0.1, 0.2),
        adversary_steps=200_000,
        adversary_settings={"learning_rate": "linear 1e-3", "n_steps": 512, "batch_size": 512},
    ),
    "hopper": Task(
        "Hopper",
        "Hopper-v5",
        steps=500_000,
        n_envs=8,
        settings={
            "learning_rate": "linear 5e-4",
            "n_steps": 256,
            "batch_size": 256,
            "n_epochs": 10,
            "gamma": 0.99,
            "gae_lambda": 0.95,
        },
        adversarial=SAPPOConfig(
            epsilon_schedule="linear",
            epsilon_final=0.1,  # 0.075 when 72% of the training are over
            perturbation=PerturbationConfig(epsilon=0.01, attack_lr=0.04),
        ),
        coefficients=(0.03, 0.1, 0.3, 1.0),
        epsilons=(0.025, 0.05, 0.075),
        adversary_steps=300_000,
        adversary_settings={"learning_rate": "linear 5e-4", "n_steps": 256, "batch_size": 256},
    ),
}


@dataclass(frozen=True)
class Run:
    """One agent: trained, and then attacked in every way."""

    task: str
    variant: str
    seed: int
    steps: int
    adversary_steps: int
    episodes: int

    @property
    def key(self) -> str:
        return f"{self.task}/{self.variant}/{self.seed}"

    @property
    def adversarial(self) -> SAPPOConfig | None:
        config = TASKS[self.task].variants[self.variant]
        # A quick run is over before a warm-up would be.
        is_quick = self.steps < TASKS[self.task].steps
        return replace(config, warmup_updates=0) if config is not None and is_quick else config

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs of one variant must have in common."""
        task = TASKS[self.task]
        own = {"adversarial": dataclasses.asdict(self.adversarial)} if self.adversarial else {}
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "n_envs": task.n_envs,
            "epsilons": list(task.epsilons),
            "adversary_steps": self.adversary_steps,
            "adversary_settings": dict(task.adversary_settings),
            **task.settings,
            **own,
        }


def make_env(task: Task, count: int) -> VecEnv:
    return make_vec_env(task.env, count)


def trained(run: Run) -> tuple[DistributionalPPO, float]:
    """The agent, from its file if it has been trained with these settings before, and its steps per second."""
    task, path = TASKS[run.task], AGENTS / f"{run.key}-{run.steps}.zip"
    note = path.with_suffix(".json")
    wanted = learning.as_json(run.settings)
    if path.exists() and note.exists() and (kept := json.loads(note.read_text()))["settings"] == wanted:
        return DistributionalPPO.load(path, device="cpu"), kept["steps_per_second"]
    env = VecNormalize(make_env(task, task.n_envs), norm_reward=False)
    settings = learning.with_schedules(task.settings)
    # Environment i of a run is seeded with seed + i: far apart, so that no two runs share one.
    model = DistributionalPPO(
        "MlpPolicy",
        env,
        seed=1000 * run.seed,
        device="cpu",
        adversarial=run.adversarial,
        drift_kit=False,
        **settings,
    )
    start = time.perf_counter()
    model.learn(run.steps)
    speed = round(model.num_timesteps / (time.perf_counter() - start), 1)
    env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    note.write_text(json.dumps({"settings": wanted, "steps_per_second": speed}))
    return model, speed


def train(run: Run) -> dict[str, Any]:
    """Train, attack, and return what is kept."""
    torch.set_num_threads(1)
    task = TASKS[run.task]
    model, speed = trained(run)
    print(f"  {run.key}: trained", flush=True)
    env = make_env(task, 10)
    settings = learning.with_schedules(task.adversary_settings)
    table = evaluate_under_attack(model, env, ATTACKS, task.epsilons, run.episodes, seed=EVALUATION_SEED)
    # The most expensive attack, where it counts.
    judged = task.epsilons[-1]
    adversaries = {judged: train_adversary(model, env, judged, run.adversary_steps, **settings)}
    learned = evaluate_under_attack(
        model, env, ["learned"], [judged], run.episodes, adversaries=adversaries, seed=EVALUATION_SEED
    )
    env.close()
    table = Robustness((*table.results, *learned.results))
    print(table, flush=True)
    results = [{key: value for key, value in vars(r).items() if key != "returns"} for r in table.results]
    return {
        "task": run.task,
        "label": run.variant,
        "seed": run.seed,
        "settings": run.settings,
        "final": table.results[0].mean,
        "steps_per_second": speed,
        "robustness": results,
    }


Returns = dict[tuple[str, float], float]


def returns(entry: Mapping[str, Any]) -> Returns:
    """Mean return by attack and radius, with ``"strongest"`` for each radius."""
    found = {(r["attack"], r["epsilon"]): r["mean"] for r in entry["robustness"]}
    for epsilon in sorted({epsilon for _, epsilon in found if epsilon > 0}):
        found["strongest", epsilon] = min(value for (_, e), value in found.items() if e == epsilon)
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """Tables, printed, and in Markdown with the settings."""
    sections = []
    for name, task in TASKS.items():
        groups = {v: [e for e in results.values() if (e["task"], e["label"]) == (name, v)] for v in task.variants}
        groups = {label: sorted(entries, key=lambda e: e["seed"]) for label, entries in groups.items() if entries}
        if not groups:
            continue
        by_seed = {label: [returns(entry) for entry in entries] for label, entries in groups.items()}
        rows = []
        for key in next(iter(by_seed.values()))[0]:
            cells = [interval([seed[key] for seed in seeds]) for seeds in by_seed.values()]
            rows.append([key[0] + (f", ε {key[1]:g}" if key[1] else ""), *cells])
        seeds = ", ".join(f"{label} {len(entries)}" for label, entries in groups.items())
        sections.append(common.show_table(f"{task.title} (seeds: {seeds})", ["attack", *by_seed], rows))
        plain = by_seed.pop(PLAIN, None)
        sections += [verdict(label, plain, own, task.epsilons[-1]) for label, own in by_seed.items() if plain]
        sections.append(learning.describe_settings(groups))
    return sections


def interval(values: Sequence[float]) -> str:
    mean, low, high = common.interval(values)
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"


def verdict(label: str, plain: Sequence[Returns], own: Sequence[Returns], epsilon: float) -> str:
    """What adversarial training keeps and what it wins, in a sentence."""

    def means(key: tuple[str, float]) -> tuple[float, float]:
        theirs, ours = (float(np.mean([seed[key] for seed in seeds])) for seeds in (plain, own))
        return theirs, ours

    clean, worst = means(("clean", 0.0)), means(("strongest", epsilon))
    gap, own_gap = clean[0] - worst[0], clean[1] - worst[1]
    ratio = f" ({worst[1] / worst[0]:.2f} times)" if min(worst) > 0 else ""
    text = (
        f"{label} against plain: clean return {clean[1]:.4g} against {clean[0]:.4g} "
        f"({(clean[1] - clean[0]) / abs(clean[0]):+.1%}), under the strongest attack at ε {epsilon:g} {worst[1]:.4g} "
        f"against {worst[0]:.4g}{ratio}; that attack costs {own_gap:.4g} against {gap:.4g} "
        f"({own_gap / gap:.2f} times)."
    )
    common.console.print(text, markup=False)
    return text + "\n"


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Mean return over seeds against the radius, under the strongest attack."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in TASKS if any(entry["task"] == name for entry in results.values())]
    figure, grid = plt.subplots(1, len(names), figsize=(6.4 * len(names), 3.8), squeeze=False)
    for axes, name in zip(grid[0], names, strict=True):
        shades = plt.colormaps["viridis"](np.linspace(0.75, 0.15, len(TASKS[name].coefficients)))
        colours = [common.COLOURS["theirs"], *shades]
        for i, (label, colour) in enumerate(zip(TASKS[name].variants, colours, strict=True)):
            entries = [returns(e) for e in results.values() if (e["task"], e["label"]) == (name, label)]
            if not entries:
                continue
            x = [0.0, *TASKS[name].epsilons]
            keys = [("clean", 0.0), *(("strongest", epsilon) for epsilon in TASKS[name].epsilons)]
            means, lows, highs = zip(*(common.interval([e[key] for e in entries]) for key in keys), strict=True)
            beside = np.array(x) + (i - len(colours) / 2) * x[-1] / 60  # so that bars do not hide each other
            errors = np.abs(np.array([lows, highs]) - means)
            axes.errorbar(beside, means, errors, color=colour, marker="o", linewidth=2, elinewidth=1, label=label)
        axes.set_title(TASKS[name].title, loc="left", fontsize=11)
        axes.set_xlabel("ε, in standard deviations of observations")
        axes.set_ylabel("return, strongest attack")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    common.console.print(f"picture: {path}")


def cost(quick: bool) -> list[str]:
    """Time of an update, plain and attacked with 3 steps of PGD on half of each minibatch, and its passes."""
    torch.set_num_threads(1)
    rows = []
    configs = {PLAIN: None, "adversarial": SAPPOConfig(warmup_updates=0)}
    for policy in ("MlpLstmPolicy", "MlpPolicy", "MlpGruPolicy"):
        agents = {
            label: DistributionalPPO(
                policy,
                make_vec_env("Pendulum-v1", 8),
                n_steps=128,
                batch_size=256,
                n_epochs=1 if quick else 4,
                seed=0,
                device="cpu",
                drift_kit=False,
                adversarial=config,
            ).learn(1024)
            for label, config in configs.items()
        }
        times = common.alternate({label: agent.train for label, agent in agents.items()}, 2 if quick else 9, 1)
        ratio = common.ratio(times, "adversarial", PLAIN)
        counts = [f"{passes(agent):.2f}" for agent in agents.values()]
        rows.append([policy, f"{np.median(times[PLAIN]) * 1e3:.0f} ms", *counts, f"{ratio:.2f}"])
    columns = ["policy", "plain update", *(f"passes, {label}" for label in configs), "attacked update, times plain"]
    table = common.show_table("Cost of an update: 3 steps of PGD on half of each minibatch", columns, rows)
    explanation = (
        "Passes: how often the samples of a minibatch go forward and backward through actor and critics. Plain: 1. "
        "Attacked, actor and critics each search for 3 steps, and learn from what was found, with half of the samples: "
        "½ · (3 + 1) = 2 more. Those of the search need no gradients of weights, which makes them cheaper; half a "
        "minibatch takes more than half as long, which makes them dearer.\n"
    )
    common.console.print(explanation)
    return [table, explanation]


def passes(agent: DistributionalPPO) -> float:
    """How often, in an update, samples go through actor and critics, per epoch."""
    count = 0.0
    halves = {"evaluate": 2, "evaluate_dense": 2, "evaluate_actor": 1, "evaluate_critics": 1}
    originals = {name: getattr(DistributionalPolicy, name) for name in halves}

    def watch(name: str) -> Any:
        def watched(self: Any, *arguments: Any) -> Any:
            nonlocal count
            observation = next(each for each in arguments if isinstance(each, torch.Tensor))
            count += halves[name] / 2 * observation.shape[0] * observation.shape[1]
            return originals[name](self, *arguments)

        return watched

    try:
        for name in originals:
            setattr(DistributionalPolicy, name, watch(name))
        agent.train()
    finally:
        for name, original in originals.items():
            setattr(DistributionalPolicy, name, original)
    return count / (int(agent.hyperparams["n_epochs"]) * agent.n_steps * agent.n_envs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything; writes no result")
    parser.add_argument("--report", action="store_true", help="run nothing, rebuild table and picture")
    parser.add_argument("--part", choices=["returns", "cost", "all"], default="all")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--folder", type=Path, default=common.RESULTS, help="of the results; Markdown only by default")
    return parser.parse_args()


def plan(tasks: Sequence[str], seeds: int, quick: bool = False) -> list[Run]:
    """All runs, seed by seed, so that an interrupted campaign has something of everything."""
    return [
        Run(
            name,
            variant,
            seed,
            4_096 if quick else TASKS[name].steps,
            2_048 if quick else TASKS[name].adversary_steps,
            4 if quick else EPISODES,
        )
        for seed in range(seeds)
        for name in tasks
        for variant in TASKS[name].variants
    ]


def main() -> None:
    arguments = parse()
    folder = Path("runs") / "robustness-quick" if arguments.quick else arguments.folder
    path = folder / "robustness.json"
    if arguments.part in ("cost", "all") and not arguments.report:
        sections = cost(arguments.quick)
        if folder == common.RESULTS:
            common.write_result("robustness_cost", "python benchmarks/robustness.py --part cost", sections)
    if arguments.part == "cost":
        return
    if arguments.quick:
        learning.save(path, {})
    if arguments.report:
        results = learning.load(path)
    else:
        seeds = 1 if arguments.quick else arguments.seeds
        runs = plan(arguments.tasks, seeds, arguments.quick)
        results = learning.run_all(runs, path, arguments.workers, train)
    if not results:
        raise SystemExit(f"no results in {path}")
    sections = report(results)
    plot(results, folder / "robustness.png")
    if folder == common.RESULTS:
        common.write_result("robustness", "python benchmarks/robustness.py", sections, NOTE)


if __name__ == "__main__":
    main()

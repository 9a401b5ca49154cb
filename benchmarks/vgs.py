"""Variance gradient scaling: does the factor follow the noise, how should tensors be combined, and does it help?

    python benchmarks/vgs.py            # everything, about 45 minutes on two cores
    python benchmarks/vgs.py --quick    # about 2 minutes

Three parts. *Response*: the factor against noise of known size. *Combination*: raw gradients of Stable-Baselines3's
PPO and of small classifiers, and what several ways to combine tensors would have made of them. *Ablation*: off,
``apply_to="gradient"`` and ``apply_to="update"`` with six optimizers on noisy problems, as change from off, seed by
seed: each at its own best learning rate, and at the one that is best without scaling.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
from collections.abc import Callable
from typing import NamedTuple

import common
import numpy as np
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler

ALPHA, CAP = 0.1, 50.0
"""The scaler's defaults, for factors computed from recorded variances."""


def factor(variance: np.ndarray) -> np.ndarray:
    return 1 / (1 + ALPHA * np.minimum(variance, CAP))


# Response ---------------------------------------------------------------------------------------------------------


def response_curve() -> str:
    """A constant gradient of unit size plus Gaussian noise of growing size, on four tensors, after 1,000 steps."""
    noises = [0.0, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0]
    table: dict[str, list[float]] = {}
    for statistic in ("elementwise", "spatial_mean"):
        table[statistic] = []
        for noise in noises:
            torch.manual_seed(0)
            params = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 64), (64,), (64, 10), (10,))]
            scaler = VarianceGradientScaler(params, statistic=statistic, apply_to="gradient")
            factors = []
            for step in range(1000):
                for param in params:
                    param.grad = 1 + noise * torch.randn_like(param)
                scaler.scale_gradients()
                scaler.step()
                if step >= 500:
                    factors.append(scaler.get_scaling_factor())
            table[statistic].append(float(np.mean(factors)))
    plot_response(noises, table)
    rows = [[f"{n:g}", *(f"{table[s][i]:.3f}" for s in table)] for i, n in enumerate(noises)]
    columns = ["noise over signal, per element", *(f"factor, {s}" for s in table)]
    return common.show_table("Response: mean factor against injected noise", columns, rows)


# Combination ------------------------------------------------------------------------------------------------------


class Recorder:
    """Variance and energy of every tensor's gradient, step by step, as the scaler measures them."""

    def __init__(self, params: list[Tensor]) -> None:
        self.scaler = VarianceGradientScaler(params)
        self.variances: list[np.ndarray] = []
        self.energies: list[np.ndarray] = []

    def record(self) -> None:
        self.scaler.update_statistics()
        self.scaler.step()
        statistics = self.scaler._statistics
        self.variances.append(statistics.variances(self.scaler.eps).numpy().copy())
        self.energies.append((statistics.energy / statistics.weight).numpy().copy())

    def results(self, warmup: int = 100) -> tuple[np.ndarray, np.ndarray]:
        """``[steps, tensors]`` each, without the first steps."""
        return np.array(self.variances)[warmup:], np.array(self.energies)[warmup:]


def record_ppo(environment: str, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw gradients of Stable-Baselines3's PPO, caught where it clips them."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    recorder: list[Recorder] = []
    clip = nn.utils.clip_grad_norm_

    def recording_clip(params: object, *args: object, **kwargs: object) -> Tensor:
        params = list(params)
        if not recorder:
            recorder.append(Recorder(params))
        recorder[0].record()
        return clip(params, *args, **kwargs)

    nn.utils.clip_grad_norm_ = recording_clip
    try:
        model = PPO(
            "MlpPolicy", make_vec_env(environment, 8, seed=seed), n_steps=128, batch_size=256, seed=seed, device="cpu"
        )
        model.learn(steps)
    finally:
        nn.utils.clip_grad_norm_ = clip
    return recorder[0].results()


def record_digits(batch: int, label_noise: float, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw gradients of a classifier in training."""
    problem = Digits(seed, batch=batch, label_noise=label_noise)
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    recorder = Recorder(list(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        problem.loss(model).backward()
        recorder.record()
        optimizer.step()
    return recorder.results()


def lengths(variances: np.ndarray, energies: np.ndarray) -> np.ndarray:
    return np.expm1(np.nanmean(np.log1p(variances), 1) / 2)


def geometric(variances: np.ndarray, energies: np.ndarray) -> np.ndarray:
    return np.expm1(np.nanmean(np.log1p(variances), 1))


def pooled(variances: np.ndarray, energies: np.ndarray) -> np.ndarray:
    signals = energies / (1 + variances)
    return (energies - signals).sum(1) / signals.sum(1)


COMBINATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "geometric mean of lengths √(1 + v), less 1 (ours)": lengths,
    "geometric mean of 1 + v, less 1": geometric,
    "50th percentile of v": lambda v, e: np.nanmedian(v, 1),
    "90th percentile of v": lambda v, e: np.nanquantile(v, 0.9, 1),
    "mean of v, weighted by energy": lambda v, e: np.nansum(v * e, 1) / e.sum(1),
    "v of all tensors pooled": pooled,
}


def combinations(quick: bool) -> list[str]:
    steps = 20_000 if quick else 100_000
    jobs: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
        f"PPO, {name}": functools.partial(record_ppo, name, steps, 0)
        for name in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1")
    }
    jobs["digits, batch 64"] = functools.partial(record_digits, 64, 0.0, 1000 if quick else 3000, 0)
    jobs["digits, batch 8, half the labels random"] = functools.partial(
        record_digits, 8, 0.5, 1000 if quick else 3000, 0
    )
    sections = []
    for name, job in jobs.items():
        variances, energies = job()
        rows = []
        for combination, combine in COMBINATIONS.items():
            values = combine(variances, energies)
            factors = factor(values)
            low, middle, high = np.quantile(factors, [0.05, 0.5, 0.95])
            rows.append(
                [
                    combination,
                    " / ".join(f"{q:.2g}" for q in np.quantile(values, [0.05, 0.5, 0.95])),
                    f"{low:.2f} / {middle:.2f} / {high:.2f}",
                    f"{100 * np.mean(values >= CAP):.0f}%",
                    f"{100 * np.mean(factors > 0.95):.0f}%",
                ]
            )
        columns = ["combination", "variance p5 / p50 / p95", "factor p5 / p50 / p95", "at the cap", "above 0.95"]
        sections.append(common.show_table(f"Combination: {name}, {len(variances)} steps", columns, rows))
    return sections


# Ablation ---------------------------------------------------------------------------------------------------------


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data / 8 - 1, dtype=torch.float32), torch.tensor(data.target)


class Digits:
    """8×8 digits with wrong labels and small batches. Score: accuracy on clean test data at the end."""

    higher_is_better = True

    def __init__(self, seed: int, batch: int = 8, label_noise: float = 0.5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        inputs, labels = digits()
        order = torch.randperm(len(labels), generator=self.generator)
        self.train, self.test = order[:1200], order[1200:]
        self.inputs, self.labels = inputs, labels.clone()
        wrong = torch.rand(len(labels), generator=self.generator) < label_noise
        self.noisy = torch.where(wrong, torch.randint(10, labels.shape, generator=self.generator), labels)
        self.batch = batch

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(self, model: nn.Module) -> Tensor:
        rows = self.train[torch.randint(len(self.train), (self.batch,), generator=self.generator)]
        return nn.functional.cross_entropy(model(self.inputs[rows]), self.noisy[rows])

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        return (model(self.inputs[self.test]).argmax(1) == self.labels[self.test]).float().mean().item()


class Regression:
    """A small network as teacher, heavy noise on its answers, batches of 8. Score: error against the clean teacher."""

    higher_is_better = False
    noise = 2.0

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.randn(10, 20, generator=self.generator) / 10**0.5,
            torch.randn(20, 1, generator=self.generator),
        ]
        self.tests = torch.randn(2000, 10, generator=self.generator)

    def teacher(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weights[0]) @ self.weights[1] / 20**0.5

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model: nn.Module) -> Tensor:
        inputs = torch.randn(8, 10, generator=self.generator)
        targets = self.teacher(inputs)
        targets = targets + self.noise * torch.randn(targets.shape, generator=self.generator)
        return nn.functional.mse_loss(model(inputs), targets)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        return nn.functional.mse_loss(model(self.tests), self.teacher(self.tests)).item()


class Jumps(Regression):
    """The regression with a teacher that is replaced every 500 steps. Score: mean error along the way."""

    noise = 1.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.step = 0
        self.errors: list[float] = []

    def loss(self, model: nn.Module) -> Tensor:
        self.step += 1
        if self.step % 500 == 0:
            self.weights = [torch.randn(w.shape, generator=self.generator) * w.std() for w in self.weights]
        if self.step % 10 == 0:
            self.errors.append(super().score(model))
        return super().loss(model)

    def score(self, model: nn.Module) -> float:
        return float(np.mean(self.errors))


PROBLEMS: dict[str, Callable[[int], Digits | Regression]] = {
    "digits, half the labels random": Digits,
    "regression under noise": Regression,
    "regression, teacher replaced": Jumps,
}

LARGE = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
SMALL = (0.0003, 0.0006, 0.0012, 0.0024, 0.0048, 0.0096, 0.0192)
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "SGD": (torch.optim.SGD, LARGE),
    "Adam": (torch.optim.Adam, SMALL),
    "AdamW": (torch.optim.AdamW, SMALL),
    "UPGD": (UPGD, LARGE),
    "AdaptiveUPGD": (AdaptiveUPGD, SMALL),
    "UPGDW": (UPGDW, SMALL),
}
MODES = ("off", "gradient", "update")


class Run(NamedTuple):
    problem: str
    optimizer: str
    lr: float
    mode: str
    seed: int
    steps: int


def train(run: Run) -> tuple[Run, float, np.ndarray]:
    """The score, and quantiles of the factor after the warm-up."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    problem = PROBLEMS[run.problem](run.seed)
    model = problem.model()
    optimizer = OPTIMIZERS[run.optimizer][0](model.parameters(), lr=run.lr)
    scaler = None
    if run.mode != "off":
        scaler = VarianceGradientScaler(model.parameters(), apply_to=run.mode)
        if run.mode == "update":
            scaler.attach(optimizer)
    factors = [1.0]
    for step in range(run.steps):
        optimizer.zero_grad()
        problem.loss(model).backward()
        if scaler is not None:
            scaler.scale_gradients()
            factors += [scaler.get_scaling_factor()] if step >= scaler.warmup_steps else []
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scaler is not None:
            scaler.step()
    return run, problem.score(model), np.quantile(factors, [0.05, 0.5, 0.95])


def ablation(quick: bool) -> list[str]:
    steps, seeds = (1000, 2) if quick else (2000, 6)
    runs = [
        Run(problem, optimizer, lr, mode, seed, steps)
        for problem, (optimizer, (_, lrs)), mode, seed in itertools.product(
            PROBLEMS, OPTIMIZERS.items(), MODES, range(seeds)
        )
        for lr in (lrs[2:4] if quick else lrs)
    ]
    scores: dict[tuple[str, str, str], dict[float, dict[int, float]]] = {}
    factors: dict[str, list[np.ndarray]] = {}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        jobs = pool.imap_unordered(train, runs, chunksize=4)
        for run, score, quantiles in track(jobs, "ablation", total=len(runs), console=common.console):
            scores.setdefault((run.problem, run.optimizer, run.mode), {}).setdefault(run.lr, {})[run.seed] = score
            if run.mode != "off":
                factors.setdefault(run.problem, []).append(quantiles)
    sections = []
    gains: dict[tuple[str, str], list[float]] = {(mode, how): [] for mode in MODES[1:] for how in ("tuned", "same")}
    for problem, make in PROBLEMS.items():
        sign = 1 if make(0).higher_is_better else -1
        rows = []
        for optimizer in OPTIMIZERS:
            tables = {mode: scores[problem, optimizer, mode] for mode in MODES}
            best = {
                mode: max(t, key=lambda lr, t=t: sign * np.mean(list(t[lr].values()))) for mode, t in tables.items()
            }
            off = tables["off"][best["off"]]
            row = [optimizer, f"{np.mean(list(off.values())):.3f} at {best['off']:g}"]
            for mode in MODES[1:]:
                for how, lr in (("tuned", best[mode]), ("same", best["off"])):
                    change = [100 * sign * (tables[mode][lr][seed] - off[seed]) / off[seed] for seed in off]
                    gains[mode, how] += change
                    mean, low, high = common.interval(change)
                    row.append(f"{mean:+.1f}% [{low:+.1f}, {high:+.1f}]" + (f" at {lr:g}" if how == "tuned" else ""))
            rows.append(row)
        low, middle, high = np.mean(factors[problem], 0)
        measure = "accuracy" if sign > 0 else "error"
        title = f"Ablation: {problem} (factor p5 / p50 / p95: {low:.2f} / {middle:.2f} / {high:.2f})"
        columns = ["optimizer", f"off: {measure}"]
        columns += [f"{mode}, {how} lr" for mode in MODES[1:] for how in ("tuned", "same")]
        sections.append(common.show_table(title, columns, rows))
    rows = []
    for mode in MODES[1:]:
        row = [mode]
        for how in ("tuned", "same"):
            mean, low, high = common.interval(gains[mode, how])
            row.append(f"{mean:+.2f}% [{low:+.2f}, {high:+.2f}]")
        rows.append(row)
    columns = ["VGS", "each at its best lr", "at the best lr of off"]
    sections.append(common.show_table("Ablation: relative gain over off, all problems and optimizers", columns, rows))
    return sections


def plot_response(noises: list[float], table: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (statistic, values), colour in zip(
        table.items(), (common.COLOURS["ours"], common.COLOURS["warn"]), strict=True
    ):
        axes.plot(np.maximum(noises, 0.03), values, "o-", color=colour, label=statistic)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("noise over signal of a gradient element (0 shown at the left edge)")
    axes.set_ylabel("scaling factor")
    axes.set_title("The factor falls with the noise, and never to zero", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    common.RESULTS.mkdir(exist_ok=True)
    figure.savefig(common.RESULTS / "vgs.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, rates and steps; writes no result file")
    parser.add_argument(
        "--part", choices=["response", "combination", "ablation"], help="only this part, no result file"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sections = []
    if arguments.part in (None, "response"):
        sections.append(response_curve())
    if arguments.part in (None, "combination"):
        sections += combinations(arguments.quick)
    if arguments.part in (None, "ablation"):
        sections += ablation(arguments.quick)
    if not arguments.quick and arguments.part is None:
        common.write_result("vgs", "python benchmarks/vgs.py", sections)


if __name__ == "__main__":
    main()

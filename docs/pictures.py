"""Draw the pictures of docs/techniques.md: ``python docs/pictures.py`` (needs the extra ``bench``).

Curves come from the library itself, not from copies of its formulas. Every picture is 780 pixels wide, so that its text
can be read on a screen of 390.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from driftproof.nn.heads import QuantileHead
from driftproof.optim import VarianceGradientScaler
from driftproof.pbt import HyperparamConfig, PBTConfig, PBTScheduler

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9731a", "#2e8b57", "#8a8f98"

plt.rcParams.update(
    {
        "figure.dpi": 200,
        "figure.facecolor": "white",
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
    }
)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    pictures: dict[str, tuple[float, int, Callable[..., None]]] = {
        "upgd": (2.6, 1, upgd),
        "vgs": (4.2, 2, vgs),
        "critics": (4.4, 2, critics),
        "pbt": (3.4, 1, pbt),
        "drift_kit": (5.4, 1, drift_kit),
    }
    for name, (height, panels, draw) in pictures.items():
        figure, axes = plt.subplots(panels, 1, figsize=(3.9, height), layout="constrained")
        draw(*np.atleast_1d(axes))
        figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})
        plt.close(figure)


def upgd(axes: Axes) -> None:
    """Step lengths by utility, with the anchored gate and with min-max for three ranges of utilities."""
    utility = torch.linspace(-1, 1, 201)
    axes.plot(utility, 2 * (1 - torch.sigmoid(utility)), color=BLUE, lw=2, label="anchored (default)")
    for low, high, style in ((-1, 1, "--"), (0, 1, ":"), (-1, 0, "-.")):
        inside = utility[(utility >= low) & (utility <= high)]
        rank = (inside - low) / (high - low)
        steps = 1 - torch.sigmoid(2 * (rank - 0.5))
        axes.plot(
            inside, steps, color=GREY, ls=style, label=f"min-max, utilities from {low} to {high}".replace("-1", "−1")
        )
    axes.axhline(1, color="black", lw=0.5)
    axes.axvline(0, color="black", lw=0.5)
    axes.set(xlabel="utility of the weight, over the largest one", ylabel="step, relative to lr", ylim=(0, 1.6))
    axes.legend(loc="upper right")


def vgs(gradients: Axes, factors: Axes) -> None:
    """A gradient whose noise comes and goes, and the factor that it is scaled with."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.zeros(64))
    scaler = VarianceGradientScaler([("weights", weights)], warmup_steps=100)
    elements, scales = [], []
    for step in range(1500):
        noise = 10.0 if 500 <= step < 1000 else 0.5
        weights.grad = 1 + noise * torch.randn(64)
        elements.append(float(weights.grad[0]))
        scaler.scale_gradients()
        scaler.step()
        scales.append(scaler.get_scaling_factor())
    gradients.plot(elements, color=GREY, lw=0.5)
    gradients.set(ylabel="one element", xticklabels=[])
    gradients.set_title("Gradient: mean 1, noise 0.5, then 10, then 0.5", loc="left")
    factors.plot(scales, color=BLUE)
    factors.axvspan(0, 100, color=GREY, alpha=0.2, lw=0)
    factors.text(110, 0.5, "warm-up", fontsize=7.5, color=GREY)
    factors.set(xlabel="optimizer step", ylabel="factor", ylim=(0.4, 1.05))
    factors.set_title("Factor that multiplies the gradients", loc="left")


def critics(loss: Axes, values: Axes) -> None:
    """The quantile Huber loss, and the value of two critics."""
    head = QuantileHead(1, num_quantiles=5, huber_kappa=0.1)
    error = torch.linspace(-1, 1, 401)
    for level, colour in ((0, ORANGE), (2, GREY), (4, BLUE)):
        # Predictions of the other quantiles are exact, so that the loss is that of one.
        prediction = torch.zeros(401, 5)
        prediction[:, level] = -error
        losses = 5 * head.loss(prediction, torch.zeros(401))
        loss.plot(error, losses, color=colour, label=f"τ = {float(head.levels[level]):.1f}")
    loss.set(xlabel="target − prediction", ylabel="loss")
    loss.set_title("Quantile Huber loss, κ = 0.1", loc="left")
    loss.legend(loc="upper center")

    levels = (np.arange(32) + 0.5) / 32
    normal = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(levels)).numpy()
    first, second = 1.0 + 0.8 * normal, 1.25 + 1.3 * normal
    values.step(levels, first, where="mid", color=BLUE, label="critic 1")
    values.step(levels, second, where="mid", color=ORANGE, label="critic 2")
    values.axhline(first.mean(), color=BLUE, lw=0.8, ls="--")
    values.axhline(second.mean(), color=ORANGE, lw=0.8, ls="--")
    values.text(0.98, first.mean() - 0.15, "value: the smaller mean", color=BLUE, fontsize=7.5, va="top", ha="right")
    values.axvspan(0, 0.2, color=GREY, alpha=0.15, lw=0)
    values.text(0.21, -1.55, "CVaR at 0.2: mean of the\nshaded fifth; here critic 2's", fontsize=7.5)
    values.set(xlabel="level", ylabel="predicted return", xlim=(0, 1))
    values.set_title("32 quantiles of each critic", loc="left")
    values.legend(loc="upper left")


def pbt(axes: Axes) -> None:
    """Learning rates of a population whose best value falls with time."""
    config = PBTConfig(
        population_size=6,
        perturbation_interval=5,
        hyperparams=[HyperparamConfig("learning_rate", 1e-5, 1e-2, is_log_scale=True)],
    )
    scheduler = PBTScheduler(config, seed=0)
    members = scheduler.initial_hyperparams()
    history: list[list[float]] = [[] for _ in members]
    for step in range(1, 61):
        best = 3e-3 * 0.94**step
        for i, member in enumerate(members):
            rate = member["learning_rate"]
            scheduler.update_performance(i, -abs(np.log(rate / best)), step, {"policy": {}})
            history[i].append(rate)
        for i in range(len(members)):
            _, members[i], _ = scheduler.exploit_and_explore(i)
    for rates in history:
        axes.plot(range(1, 61), rates, lw=1.2)
    takeovers = [event for event in scheduler.events if event.donor is not None]
    for event in takeovers:
        rates = history[event.donor][event.step - 1], history[event.member][min(event.step, 59)]
        axes.annotate(
            "",
            xy=(event.step + 1, rates[1]),
            xytext=(event.step, rates[0]),
            arrowprops={"arrowstyle": "->", "color": "black", "lw": 0.7},
        )
    axes.plot(range(1, 61), [3e-3 * 0.94**step for step in range(1, 61)], color="black", ls=":", label="best value")
    axes.set(yscale="log", xlabel="update", ylabel="learning rate", ylim=(8e-6, 1.5e-2))
    axes.set_title(
        "Six members; an arrow leads from the donor's value\nto the mutated one of the weak member", loc="left"
    )
    axes.legend(loc="upper right")


def drift_kit(axes: Axes) -> None:
    """The parts of the drift kit, from an observation to the strongest response."""
    axes.set(xlim=(0, 10), ylim=(0, 15.6))
    axes.axis("off")
    _box(axes, 14.2, 1.2, "observation", "#eef1f5")
    _box(
        axes,
        11.7,
        1.7,
        "observation normaliser\nfinds shifts and changed gains in the\nfirst observations of episodes",
        "#dbe8f6",
    )
    _box(
        axes,
        9.2,
        1.7,
        "networks with layer normalisation\nexploration floor: the policy never\nbecomes entirely certain",
        "#dbe8f6",
    )
    _box(axes, 6.7, 1.7, "alarm (CUSUM)\nreturns are low, and lower than the\ncritics predicted", "#fbe6d2")
    _box(axes, 0.2, 5.7, "", "#f6f6f6")
    axes.text(5, 5.45, "response, only as strong as needed", ha="center", va="center", fontsize=8.5, weight="bold")
    steps = [
        "trial: rewired sensors or actions",
        "trial: weights of earlier worlds",
        "1: restart statistics, explore more",
        "2: last layers halfway to fresh weights",
        "3: fresh weights",
    ]
    for i, text in enumerate(steps):
        axes.text(1.2, 4.6 - 0.95 * i, text, va="center")
    for top in (14.2, 11.7, 9.2, 6.7):
        axes.annotate("", xy=(5, top - 0.75), xytext=(5, top), arrowprops={"arrowstyle": "->"})


def _box(axes: Axes, bottom: float, height: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (0.4, bottom), 9.2, height, boxstyle="round,pad=0.02,rounding_size=0.2", fc=colour, ec=GREY, lw=0.8
        )
    )
    axes.text(5, bottom + height / 2, text, ha="center", va="center")


if __name__ == "__main__":
    main()

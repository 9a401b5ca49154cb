"""Evaluation under attack: returns of an agent for several attacks and radii."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from stable_baselines3.common.type_aliases import GymEnv

from driftproof._arguments import check_count, check_number, check_option
from driftproof._text import table
from driftproof.adversarial.attacks import StatePerturbation
from driftproof.adversarial.learned import LearnedAttack, check_adversary, perturbation_of, train_adversary
from driftproof.adversarial.playing import Flags, Perturb, Player, as_the_agent_sees_it, play
from driftproof.nn.types import Observation
from driftproof.ppo import DistributionalPPO
from driftproof.settings.adversarial import PerturbationConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AttackName: TypeAlias = Literal["clean", "random", "mad", "critic", "learned"]

_DRAWS = 10_000
"""Samples of the bootstrap."""
_SEARCH = PerturbationConfig(epsilon=1.0, attack_steps=10, attack_lr=0.25)
"""Default search for the worst observation: PGD with steps of a quarter of the radius."""


@dataclass(frozen=True)
class AttackResult:
    """Returns under one attack.

    Attributes:
        attack: Name of the attack.
        epsilon: Radius of the attack; 0 for ``"clean"``.
        returns: Return of every episode.
        mean: Mean return.
        low: Lower end of the mean's 95% confidence interval, by bootstrap over episodes; NaN if there is none.
        high: Upper end of the interval.
    """

    attack: str
    epsilon: float
    returns: tuple[float, ...]
    mean: float
    low: float
    high: float

    @staticmethod
    def of(attack: str, epsilon: float, returns: Sequence[float]) -> AttackResult:
        """The result for these returns, with their mean and its interval."""
        values = np.asarray(returns)
        means = np.random.default_rng(0).choice(values, size=(_DRAWS, len(values))).mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
        return AttackResult(attack, epsilon, tuple(returns), float(values.mean()), float(low), float(high))


@dataclass(frozen=True)
class Robustness:
    """A table of returns under attacks; ``print`` shows it.

    Attributes:
        results: One for each attack and radius.
    """

    results: tuple[AttackResult, ...]

    def worst(self, epsilon: float | None = None) -> AttackResult:
        """The attack with the lowest mean return, of all or of those with this radius."""
        found = [result for result in self.results if epsilon is None or result.epsilon == epsilon]
        if not found:
            raise ValueError(f"there is no attack with epsilon {epsilon!r}: there are {self._epsilons()}")
        return min(found, key=lambda result: result.mean)

    def to_dict(self) -> dict[str, Any]:
        """The results as plain values."""
        return {"results": [{**vars(result), "returns": list(result.returns)} for result in self.results]}

    def plot(self, axes: Axes | None = None, path: str | Path | None = None) -> Axes:
        """Plot return against radius, with a line and its interval for each attack.

        Args:
            axes: Axes to draw in; ``None``: a new figure.
            path: File to save the plot to.
        """
        from matplotlib.figure import Figure

        if axes is None:
            axes = Figure(figsize=(6, 4), layout="constrained").subplots()
        clean = [result for result in self.results if result.epsilon == 0]
        for name in dict.fromkeys(result.attack for result in self.results if result.epsilon > 0):
            line = [*clean[:1], *(result for result in self.results if result.attack == name and result.epsilon > 0)]
            line.sort(key=lambda result: result.epsilon)
            x = [result.epsilon for result in line]
            axes.plot(x, [result.mean for result in line], marker="o", label=name)
            axes.fill_between(x, [result.low for result in line], [result.high for result in line], alpha=0.15)
        if clean:
            axes.axhline(clean[0].mean, color="black", linewidth=0.8, linestyle=":", label="clean")
        axes.set_xlabel("ε")
        axes.set_ylabel("return")
        axes.legend(frameon=False)
        if path is not None:
            axes.figure.savefig(str(path), dpi=150)  # type: ignore[union-attr]
        return axes

    def __str__(self) -> str:
        rows = [("attack", "epsilon", "return", "95% interval", "episodes")]
        for r in self.results:
            interval = "–" if math.isnan(r.low) else f"[{r.low:.4g}, {r.high:.4g}]"
            rows.append((r.attack, f"{r.epsilon:g}", f"{r.mean:.4g}", interval, f"{len(r.returns)}"))
        return table(rows)

    def _epsilons(self) -> list[float]:
        return sorted({result.epsilon for result in self.results})


def evaluate_under_attack(
    model: DistributionalPPO,
    env: GymEnv | str,
    attacks: Sequence[AttackName] = ("clean", "random", "mad", "critic"),
    epsilons: Sequence[float] = (0.025, 0.05, 0.075),
    episodes: int = 20,
    *,
    perturbation: PerturbationConfig | None = None,
    adversaries: Mapping[float, DistributionalPPO] | None = None,
    adversary_steps: int = 50_000,
    deterministic: bool = True,
    seed: int | None = 0,
) -> Robustness:
    """Evaluate an agent under every attack and radius, in the same episodes each time.

    ``"clean"``: no attack. ``"random"``: a random point in the ball. ``"mad"``: the point where the action distribution
    changes most (maximal action difference, Zhang et al., 2020, arXiv 2003.08938). ``"critic"``: the point with the
    lowest value. ``"learned"``: chosen by a trained adversary, the strongest if trained long enough. The agent's
    recurrent state is updated with perturbed observations.

    Args:
        model: The agent.
        env: Environment for evaluation, not the one that it trains in. Its ``VecNormalize``, or else the agent's own
            normaliser, is not updated; normalised observations are attacked.
        attacks: Names of the attacks.
        epsilons: Radii, in units of the policy's (normalised) observations.
        episodes: Number of episodes for each attack and radius.
        perturbation: Search for the worst observation, relative to its ``epsilon``; ``None``: ten steps of PGD, each a
            quarter of the radius.
        adversaries: Trained adversaries for ``"learned"``, by radius. Missing ones are trained.
        adversary_steps: Environment steps to train a missing adversary.
        deterministic: Whether the agent takes its most probable actions.
        seed: Seed of environments, attacks and random actions; global generators are restored afterwards.
    """
    config, trained = _SEARCH if perturbation is None else perturbation, dict(adversaries or {})
    _check(attacks, epsilons, episodes, config, adversary_steps)
    for adversary in trained.values():
        check_adversary(model, adversary)
    results = []
    with as_the_agent_sees_it(model, env) as venv:
        player = Player(model, deterministic)
        if "clean" in attacks:
            results.append(AttackResult.of("clean", 0.0, play(player, venv, None, episodes, seed)))
        for name in attacks:
            for epsilon in map(float, epsilons if name != "clean" else ()):
                if name == "learned" and epsilon not in trained:
                    trained[epsilon] = train_adversary(
                        model, venv, epsilon, adversary_steps, norm_type=config.norm_type, seed=seed
                    )
                attack = perturbation_of(model, _scaled(config, epsilon), seed)
                perturb = _attack(name, attack, trained.get(epsilon))
                results.append(AttackResult.of(name, epsilon, play(player, venv, perturb, episodes, seed)))
    return Robustness(tuple(results))


def _attack(name: AttackName, attack: StatePerturbation, adversary: DistributionalPPO | None) -> Perturb:
    """The attack by its name."""

    def random(player: Player, observation: Observation, starts: Flags) -> Observation:
        return attack.random(observation)

    def mad(player: Player, observation: Observation, starts: Flags) -> Observation:
        with torch.no_grad():
            intended = player.actor(observation)
        kl = player.policy.distribution.kl
        return attack.perturb(observation, lambda seen: kl(intended, player.actor(seen)), is_flat_at_clean=True)

    def critic(player: Player, observation: Observation, starts: Flags) -> Observation:
        return attack.perturb(observation, lambda seen: -player.value(seen))

    if adversary is not None and name == "learned":
        return LearnedAttack(adversary, attack)
    return {"random": random, "mad": mad, "critic": critic}[name]


def _scaled(config: PerturbationConfig, epsilon: float) -> PerturbationConfig:
    """The same search in a ball of another size."""
    lr = config.attack_lr if config.epsilon == 0 or epsilon == 0 else config.attack_lr * epsilon / config.epsilon
    fields = {**vars(config), "epsilon": epsilon, "attack_lr": lr}
    return PerturbationConfig(**fields)


def _check(
    attacks: Sequence[AttackName],
    epsilons: Sequence[float],
    episodes: int,
    perturbation: PerturbationConfig,
    adversary_steps: int,
) -> None:
    if isinstance(attacks, str):
        raise TypeError(f"attacks must be a sequence of names, such as [{attacks!r}]")
    if not isinstance(epsilons, Iterable):
        raise TypeError(f"epsilons must be a sequence of radii, such as [{epsilons!r}]")
    if not isinstance(perturbation, PerturbationConfig):
        raise TypeError(f"perturbation must be a PerturbationConfig, not {perturbation!r}")
    for name in attacks:
        check_option("attacks", name, get_args(AttackName))
    for epsilon in epsilons:
        check_number("epsilons", epsilon, above=0)
    check_count("episodes", episodes, at_least=1)
    check_count("adversary_steps", adversary_steps, at_least=1)
    if len(attacks) == 0 or (len(epsilons) == 0 and set(attacks) != {"clean"}):
        raise ValueError(f"attacks={attacks!r} with epsilons={epsilons!r} is nothing to evaluate")

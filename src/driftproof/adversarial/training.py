"""Adversarial training (SA-PPO): the policy and critics are regularised to be smooth around observations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftproof._members import Number
from driftproof.adversarial.attacks import StatePerturbation
from driftproof.learner.adversary import Adversary
from driftproof.learner.hyperparams import Hyperparameter
from driftproof.learner.losses import mean
from driftproof.learner.rollout import Minibatch
from driftproof.nn.distributions import Gaussian
from driftproof.nn.policies import DistributionalPolicy
from driftproof.nn.types import Evaluation, Observation, map_observation
from driftproof.ppo.manifest import storable
from driftproof.settings.adversarial import (
    AdversarialSettings,
    PerturbationConfig,
    unused_by_adversary,
    unused_by_training_attack,
)
from driftproof.settings.definition import documented, settings_of
from driftproof.settings.schedules import Cosine, Linear, base_and_schedule
from driftproof.settings.unused import without_unused
from driftproof.state.schema import anything, check, count, table

_FICKLE = (
    *(nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU),
    *(nn.MultiheadAttention, nn.utils.parametrizations._SpectralNorm),
)
"""Layers whose output differs from pass to pass in training mode, or whose state changes with every pass."""
_STEADY = ("torch", "stable_baselines3", "driftproof")
"""Whose other layers do not."""


@storable
@documented(AdversarialSettings)
@dataclass(frozen=True)
class SAPPOConfig(AdversarialSettings):
    """Settings of adversarial training, for ``DistributionalPPO(..., adversarial=SAPPOConfig(...))``.

    PPO learns from clean observations. Added to its loss is how much the policy's distribution changes at worst when
    they are moved a little: SA-PPO (Zhang et al., 2020, arXiv 2003.08938).
    """

    @classmethod
    def from_file(cls, fields: Mapping[str, Any]) -> SAPPOConfig:
        """From saved fields. Settings without effect, which earlier versions accepted, keep their defaults."""
        kept = without_unused(fields, unused_by_adversary(fields))
        if isinstance(attack := kept.get("perturbation"), PerturbationConfig):
            kept["perturbation"] = PerturbationConfig(
                **without_unused(vars(attack), unused_by_training_attack(vars(attack)))
            )
        return cls(**kept)

    def build(self, policy: DistributionalPolicy, seed: int | None) -> SmoothnessAdversary:
        """Build the adversary of one agent."""
        return SmoothnessAdversary(self, policy, seed)


class SmoothnessAdversary(Adversary):
    """Finds the observations in a ball where policy and critics change most, and the loss of that change.

    Actor and critics are attacked separately, each at its own worst observation.

    Args:
        config: Settings of adversarial training.
        policy: The agent's policy.
        seed: Seed of the attack's random generator.
    """

    def __init__(self, config: SAPPOConfig, policy: DistributionalPolicy, seed: int | None) -> None:
        self.config, self.policy = config, policy
        self.attack = StatePerturbation(
            config.perturbation,
            policy.observation_space,
            images_are_divided=policy.normalize_images,
            device=policy.device,
            seed=seed,
        )
        self.updates = 0
        """Number of updates started."""
        self._is_active = False
        self.epsilon = torch.zeros((), device=policy.device)
        self.coefficient = torch.zeros((), device=policy.device)
        self._fickle = [module for module in policy.modules() if _may_be_fickle(module)]

    def hyperparameters(self) -> dict[str, Hyperparameter]:
        config, epsilon = self.config, self.config.perturbation.epsilon
        base, factor = base_and_schedule("epsilon", epsilon)
        if config.epsilon_schedule != "constant":
            schedule = Linear if config.epsilon_schedule == "linear" else Cosine
            base, factor = base_and_schedule("epsilon", schedule(epsilon, config.epsilon_final))
        radius, weight = settings_of(PerturbationConfig)["epsilon"], settings_of(SAPPOConfig)["robust_kl_coef"]
        needed = None if config.adversarial_ratio > 0 else "an adversarial_ratio above 0"
        return {
            "epsilon": Hyperparameter(base, radius.bounds, schedule=factor, apply=_setter(self.epsilon), unused=needed),
            "robust_kl_coef": Hyperparameter(
                config.robust_kl_coef, weight.bounds, apply=_setter(self.coefficient), unused=needed
            ),
        }

    def begin_update(self) -> None:
        self._is_active = self.updates >= self.config.warmup_updates and self.config.adversarial_ratio > 0
        self.updates += 1

    def share(self, sequences: int) -> int:
        if not self._is_active:
            return 0
        return max(1, round(self.config.adversarial_ratio * sequences))

    def loss(self, batch: Minibatch, clean: Evaluation, vf_coef: Number) -> tuple[Tensor, dict[str, Tensor]]:
        sequences = batch.log_probs.shape[1]
        count = self.share(sequences)
        zero = torch.zeros_like(self.epsilon)
        metrics = {"epsilon": self.epsilon.clone(), "share": torch.full_like(zero, count / sequences)}
        metrics |= dict.fromkeys(("robust_kl", "value_smoothing", "perturbation_norm"), zero)
        if count == 0:
            return zero, metrics
        part = _first(batch, count)
        robust_kl = value_smoothing = zero
        norms = []
        with self._steady():
            if self.config.attack_policy:
                robust_kl, norm = self._policy_term(part, clean.parameters[:, :count])
                norms.append(norm)
            if self.config.attack_value:
                value_smoothing, norm = self._value_term(part, tuple(p[:, :count] for p in clean.predictions))
                norms.append(norm)
        loss = self.coefficient * (robust_kl + vf_coef * value_smoothing)
        terms = {"robust_kl": robust_kl, "value_smoothing": value_smoothing}
        return loss, {**metrics, **terms, "perturbation_norm": torch.stack(norms).mean()}

    def state_dict(self) -> dict[str, Any]:
        """Number of updates started, and the attack's counters and generator."""
        return {"updates": self.updates, "attack": self.attack.state_dict()}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such an adversary."""
        check("adversary", state_dict, table({"updates": count(), "attack": anything}))
        self.attack.check_state_dict(state_dict["attack"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        self.attack.load_state_dict(state_dict["attack"])
        self.updates = state_dict["updates"]

    def _policy_term(self, part: Minibatch, clean: Tensor) -> tuple[Tensor, Tensor]:
        """KL(clean‖attacked) with a gradient, and the norms of the perturbations."""

        def evaluate(observations: Observation) -> Tensor:
            parameters = self.policy.evaluate_actor(observations, part.state, part.attacked_segments, part.keep)
            return self._with_fixed_spread(parameters.float())

        clean = evaluate(part.observations) if self._fickle else self._with_fixed_spread(clean)
        return self._term(part, clean, evaluate, self.policy.distribution.kl)

    def _with_fixed_spread(self, parameters: Tensor) -> Tensor:
        """The parameters, with the standard deviation detached if it does not depend on observations.

        A Gaussian policy would otherwise lower the divergence by a larger standard deviation, without being robust.
        """
        distribution = self.policy.distribution
        if not isinstance(distribution, Gaussian):
            return parameters
        return torch.cat((parameters[..., : distribution.dim], parameters[..., distribution.dim :].detach()), -1)

    def _value_term(self, part: Minibatch, clean: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Change of the critics' predictions, with a gradient, and the norms of the perturbations."""
        heads = self.policy.heads

        def evaluate(observations: Observation) -> Tensor:
            predictions = self.policy.evaluate_critics(observations, part.state, part.attacked_segments, part.keep)
            return torch.stack([prediction.float() for prediction in predictions])

        def difference(one: Tensor, other: Tensor) -> Tensor:
            pairs = zip(heads, one, other, strict=True)
            return torch.stack([head.difference(a, b) for head, a, b in pairs]).mean(0)

        stacked = evaluate(part.observations) if self._fickle else torch.stack(clean)
        return self._term(part, stacked, evaluate, difference)

    def _term(
        self,
        part: Minibatch,
        clean: Tensor,
        evaluate: Callable[[Observation], Tensor],
        difference: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The mean difference at the worst observations found, and the norms of the perturbations."""
        reference = clean.detach()

        def objective(observations: Observation) -> Tensor:
            differences = difference(reference, evaluate(observations))
            return differences if part.valid is None else differences * part.valid

        attacked = self.attack.perturb(part.observations, objective, epsilon=self.epsilon, is_flat_at_clean=True)
        norm = mean(self.attack.norms(part.observations, attacked), part.valid)
        return mean(difference(clean, evaluate(attacked)), part.valid), norm

    @contextlib.contextmanager
    def _steady(self) -> Iterator[None]:
        """Make forward passes deterministic, without updating the averages of batch normalisation."""
        was_training = [module.training for module in self._fickle]
        for module in self._fickle:
            module.eval()
        try:
            yield
        finally:
            for module, training in zip(self._fickle, was_training, strict=True):
                module.train(training)


def _may_be_fickle(module: nn.Module) -> bool:
    """Whether a layer's output may differ from pass to pass; assumed for user-defined layers."""
    return isinstance(module, _FICKLE) or type(module).__module__.partition(".")[0] not in _STEADY


def _first(batch: Minibatch, count: int) -> Minibatch:
    """The first sequences of a minibatch."""
    return batch._replace(
        observations=map_observation(batch.observations, lambda part: part[:, :count]),
        valid=None if batch.valid is None else batch.valid[:, :count],
        state=batch.state.rows(slice(count)),
    )


def _setter(target: Tensor) -> Callable[[float], None]:
    def apply(value: float) -> None:
        target.fill_(value)

    return apply

"""Adversarial training (SA-PPO): the policy and critics are regularised to be smooth around observations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from driftproof._members import Number
from driftproof.adversarial.attacks import MemberPerturbation, StatePerturbation
from driftproof.learner.adversary import Adversary, MemberAdversaries
from driftproof.learner.hyperparams import Hyperparameter
from driftproof.learner.losses import mean
from driftproof.learner.rollout import Minibatch
from driftproof.nn.distributions import Gaussian
from driftproof.nn.policies import DistributionalPolicy
from driftproof.nn.stacked import StackedPolicy
from driftproof.nn.types import Evaluation, Observation, PolicyState, map_observation
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
TERMS = ("robust_kl", "value_smoothing", "perturbation_norm")
"""Names of the results of :class:`SmoothnessTerms` in metrics."""
_STEADY = ("torch", "stable_baselines3", "driftproof")
"""Whose other layers do not."""


_Networks: TypeAlias = DistributionalPolicy | StackedPolicy


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


class SmoothnessTerms:
    """Loss terms of one agent's adversary, or of those of a population's members.

    Args:
        config: Settings of adversarial training.
        attack: Searches for the worst observations.
        like: A policy: its distribution, value heads and layers. Weights may be others.
        members: Whether tensors have a leading member axis.
    """

    def __init__(
        self, config: SAPPOConfig, attack: StatePerturbation, like: DistributionalPolicy, members: bool = False
    ) -> None:
        self.config, self.attack, self.like, self.members = config, attack, like, members
        self.sequence_axis = 2 if members else 1
        self._fickle = [module for module in like.modules() if _may_be_fickle(module)]

    def share(self, sequences: int) -> int:
        """How many of a minibatch's sequences are attacked."""
        return max(1, round(self.config.adversarial_ratio * sequences))

    def __call__(
        self, policy: _Networks, batch: Minibatch, clean: Evaluation, epsilon: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The divergence of the policy, the change of the critics' predictions, and the norm of perturbations.

        All three are means over samples: 0-dim, or one per member ``[M]``.

        Args:
            policy: The networks, with present weights.
            batch: Minibatch with clean observations.
            clean: Outputs for the clean observations.
            epsilon: Radius of the ball; or one per member.
            count: How many sequences are attacked, the first ones.
        """
        axis = self.sequence_axis
        part = _first(batch, count, axis)
        robust_kl = value_smoothing = torch.zeros_like(epsilon)
        norms = []
        with self._steady():
            if self.config.attack_policy:
                robust_kl, norm = self._policy_term(policy, part, clean.parameters.narrow(axis, 0, count), epsilon)
                norms.append(norm)
            if self.config.attack_value:
                predictions = tuple(p.narrow(axis, 0, count) for p in clean.predictions)
                value_smoothing, norm = self._value_term(policy, part, predictions, epsilon)
                norms.append(norm)
        return robust_kl, value_smoothing, torch.stack(norms).mean(0)

    def _policy_term(self, policy: _Networks, part: Minibatch, clean: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        """KL(clean‖attacked) with a gradient, and the norms of the perturbations."""

        def evaluate(observations: Observation) -> Tensor:
            parameters = policy.evaluate_actor(observations, part.state, part.attacked_segments, part.keep)
            return self._with_fixed_spread(parameters.float())

        clean = evaluate(part.observations) if self._fickle else self._with_fixed_spread(clean)
        return self._term(part, clean, evaluate, self.like.distribution.kl, epsilon)

    def _with_fixed_spread(self, parameters: Tensor) -> Tensor:
        """The parameters, with the standard deviation detached if it does not depend on observations.

        A Gaussian policy would otherwise lower the divergence by a larger standard deviation, without being robust.
        """
        distribution = self.like.distribution
        if not isinstance(distribution, Gaussian):
            return parameters
        return torch.cat((parameters[..., : distribution.dim], parameters[..., distribution.dim :].detach()), -1)

    def _value_term(
        self, policy: _Networks, part: Minibatch, clean: tuple[Tensor, ...], epsilon: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Change of the critics' predictions, with a gradient, and the norms of the perturbations."""
        heads = self.like.heads

        def evaluate(observations: Observation) -> Tensor:
            predictions = policy.evaluate_critics(observations, part.state, part.attacked_segments, part.keep)
            return torch.stack([prediction.float() for prediction in predictions])

        def difference(one: Tensor, other: Tensor) -> Tensor:
            pairs = zip(heads, one, other, strict=True)
            return torch.stack([head.difference(a, b) for head, a, b in pairs]).mean(0)

        stacked = evaluate(part.observations) if self._fickle else torch.stack(clean)
        return self._term(part, stacked, evaluate, difference, epsilon)

    def _term(
        self,
        part: Minibatch,
        clean: Tensor,
        evaluate: Callable[[Observation], Tensor],
        difference: Callable[[Tensor, Tensor], Tensor],
        epsilon: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The mean difference at the worst observations found, and the norms of the perturbations."""
        reference = clean.detach()

        def objective(observations: Observation) -> Tensor:
            differences = difference(reference, evaluate(observations))
            return differences if part.valid is None else differences * part.valid

        radius = epsilon.view(-1, 1, 1) if self.members else epsilon
        attacked = self.attack.perturb(part.observations, objective, epsilon=radius, is_flat_at_clean=True)
        norm = mean(self.attack.norms(part.observations, attacked), part.valid, self.members)
        return mean(difference(clean, evaluate(attacked)), part.valid, self.members), norm

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
        self.terms = SmoothnessTerms(config, self.attack, policy)
        self.updates = 0
        """Number of updates started."""
        self.is_active = False
        """Whether observations are attacked in the present update."""
        self.epsilon = torch.zeros((), device=policy.device)
        self.coefficient = torch.zeros((), device=policy.device)

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
        self.is_active = self.updates >= self.config.warmup_updates and self.config.adversarial_ratio > 0
        self.updates += 1

    def share(self, sequences: int) -> int:
        return self.terms.share(sequences) if self.is_active else 0

    def loss(self, batch: Minibatch, clean: Evaluation, vf_coef: Number) -> tuple[Tensor, dict[str, Tensor]]:
        sequences = batch.log_probs.shape[1]
        count = self.share(sequences)
        zero = torch.zeros_like(self.epsilon)
        metrics = {"epsilon": self.epsilon.clone(), "share": torch.full_like(zero, count / sequences)}
        if count == 0:
            return zero, metrics | dict.fromkeys(TERMS, zero)
        terms = self.terms(self.policy, batch, clean, self.epsilon, count)
        loss = self.coefficient * (terms[0] + vf_coef * terms[1])
        return loss, metrics | dict(zip(TERMS, terms, strict=True))

    def of_members(self, adversaries: Sequence[SmoothnessAdversary]) -> SmoothnessAdversaries:
        return SmoothnessAdversaries(adversaries)

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


class SmoothnessAdversaries(MemberAdversaries):
    """The adversaries of a population's members as one.

    Counters of the members' own adversaries become views of tensors ``[M]``. On a CPU, members draw from the
    generators of their own adversaries.

    Args:
        adversaries: One adversary for each member.

    Raises:
        ValueError: They differ in their settings, or the attack method does not support several members.
    """

    def __init__(self, adversaries: Sequence[SmoothnessAdversary]) -> None:
        first = adversaries[0]
        if any(each.config != first.config for each in adversaries):
            raise ValueError(
                "members of one population need the same settings of adversarial training; set a member's own radius "
                'with hyperparams["adversary.epsilon"]'
            )
        self.adversaries = list(adversaries)
        self.attack = MemberPerturbation([each.attack for each in adversaries])
        self.terms = SmoothnessTerms(first.config, self.attack, first.policy, members=True)
        self.epsilon = torch.zeros(len(adversaries), device=first.epsilon.device)
        self.coefficient, self._is_active = torch.zeros_like(self.epsilon), torch.zeros_like(self.epsilon)
        self._attacked: list[bool] = []
        """Members whose observations are attacked in the present update."""

    def adopt(self, member: int, adversary: SmoothnessAdversary) -> None:
        if adversary is not self.adversaries[member]:
            self.adversaries[member] = adversary
            self.attack.adopt(member, adversary.attack)

    def begin_update(self, trains: Sequence[bool]) -> None:
        for each, train in zip(self.adversaries, trains, strict=True):
            if train:
                each.begin_update()
        self._attacked = [train and each.is_active for each, train in zip(self.adversaries, trains, strict=True)]
        self._is_active.copy_(torch.tensor(self._attacked, dtype=torch.float32), non_blocking=True)
        self.epsilon.copy_(torch.stack([each.epsilon for each in self.adversaries]))
        self.coefficient.copy_(torch.stack([each.coefficient for each in self.adversaries]))

    def share(self, sequences: int) -> int:
        return self.terms.share(sequences) if any(self._attacked) else 0

    def loss(
        self, policy: StackedPolicy, batch: Minibatch, clean: Evaluation, vf_coef: Number, proceed: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sequences = batch.log_probs.shape[2]
        count, zero = self.share(sequences), torch.zeros_like(self.epsilon)
        metrics = {"epsilon": self.epsilon.clone(), "share": self._is_active * (count / sequences)}
        if count == 0:
            return zero, metrics | dict.fromkeys(TERMS, zero)
        self.attack.mask = mask = self._is_active * proceed
        terms = [term * mask for term in self.terms(policy, batch, clean, self.epsilon, count)]
        loss = self.coefficient * (terms[0] + vf_coef * terms[1])
        return loss, metrics | dict(zip(TERMS, terms, strict=True))


def _may_be_fickle(module: nn.Module) -> bool:
    """Whether a layer's output may differ from pass to pass; assumed for user-defined layers."""
    return isinstance(module, _FICKLE) or type(module).__module__.partition(".")[0] not in _STEADY


def _first(batch: Minibatch, count: int, axis: int) -> Minibatch:
    """The first sequences of a minibatch."""

    def narrowed(part: Tensor) -> Tensor:
        return part.narrow(axis, 0, count)

    return batch._replace(
        observations=map_observation(batch.observations, narrowed),
        valid=None if batch.valid is None else narrowed(batch.valid),
        state=PolicyState(*(tuple(map(narrowed, parts)) for parts in batch.state)),
        keep=None if batch.keep is None else narrowed(batch.keep),
    )


def _setter(target: Tensor) -> Callable[[float], None]:
    def apply(value: float) -> None:
        target.fill_(value)

    return apply

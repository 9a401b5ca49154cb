"""Variance gradient scaling: smaller steps while gradients are mostly noise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from driftproof._arguments import check_flag
from driftproof.optim._gradient_statistics import (
    STATE_KEYS,
    GradientStatistics,
    gradient_totals,
    scale_all,
)
from driftproof.optim._noise_ratio import register
from driftproof.optim._saved import saved_number
from driftproof.optim._step_scaling import StepScaling
from driftproof.optim.earlier_states import EARLIER_STATE, is_earlier_state, with_earlier_averages
from driftproof.optim.functional import ScalingSettings, scaling_factor
from driftproof.settings.definition import documented, takes
from driftproof.settings.scaling import VGSSettings

_HISTORY = 512
"""Number of recent factors that quantiles are taken over."""

_EXTREMES_EVERY = 11
"""On a CPU, the largest magnitude is averaged over every 11th step: a prime number, so as not to follow epochs."""

_MOST_STEPS = 2**53
_KEYS = ("statistic", "named", "step_count", "factor", *STATE_KEYS)
"""Keys of a state."""

_PATIENCE = 10
"""Scaled steps that no optimizer took before there is a warning. A GradScaler may skip a few in a row."""


@documented(VGSSettings)
class VarianceGradientScaler:
    """Measures how noisy gradients are over time, and shrinks them, or the steps along them, accordingly.

    Over time, a tensor's gradients have a mean, the signal, and a variance around it, the noise. With ``v`` the ratio
    of noise to signal, they are ``√(1 + v)`` times as long as their mean. The geometric mean of that over all tensors,
    less one, is the *normalised variance* ``nv``: 0 without noise, about 13 for nothing but noise at the defaults. It
    sets the factor ``clip(1 / (1 + alpha * min(nv, variance_cap)), min_scaling_factor, 1)``. Every tensor counts and
    none rules: percentiles are ruled by few tensors, and pooling by the one with the largest gradients.
    ``benchmarks/vgs.py`` compares them on gradients of PPO and of classifiers. Rescaling gradients by a constant
    changes nothing.

    Use::

        loss.backward()
        scaler.scale_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scaler.step()

    Adam-like directions cancel a constant factor on the gradients: with them, ``apply_to="gradient"`` acts only while
    the factor changes. ``apply_to="update"`` shrinks the step itself to ``p_old + factor * (p_new - p_old)``, weight
    decay and noise included; it needs :meth:`attach`. For the theory of such factors see Balles & Hennig, "Dissecting
    Adam", 2018 (arXiv 1705.07774).

    Learning rates are never touched, and nothing waits for the device unless a ``get_...`` method or the logger wants
    a Python number. Several scalers may share an optimizer, each with parameters of its own, such as one group. A copy
    of a scaler follows copies of the parameters, like a copy of an optimizer: copy it together with the model.
    """

    @takes(VGSSettings)
    def __init__(self, given: VGSSettings) -> None:
        self.enabled = given.enabled
        self.beta = given.beta
        self.alpha = given.alpha
        self.eps = given.eps
        self.warmup_steps = given.warmup_steps
        self.min_scaling_factor = given.min_scaling_factor
        self.variance_cap = given.variance_cap
        self.statistic = given.statistic
        self.apply_to = given.apply_to
        self.logger = given.logger
        self._statistics = GradientStatistics([], [], given.statistic)
        self._named = False
        self._history = torch.full((_HISTORY,), math.nan, dtype=torch.float32, device="cpu")
        self._recorded = torch.zeros((), dtype=torch.long, device="cpu")
        self._in_vain = 0
        self._step_scaling = StepScaling()
        if given.parameters is not None:
            self.update_parameters(given.parameters)

    @property
    def step_count(self) -> int:
        """Steps counted so far."""
        return int(self._statistics.step_count)

    def follows(self, params: Iterable[Tensor]) -> bool:
        """Whether all of these parameters are the scaler's."""
        return {id(param) for param in params} <= {id(param) for param in self._statistics.params}

    @torch.no_grad()
    def scale_gradients(self, proceed: Tensor | None = None) -> Tensor:
        """Fold the raw gradients into the averages, then scale them, or the next step of the optimizer.

        Args:
            proceed: Whether the step will be taken, a 0-dim bool tensor; if not, the state does not change.

        Returns:
            The factor, a 0-dim tensor.
        """
        factor = self.measure_gradients(proceed)
        if self.enabled and self.apply_to == "gradient":
            # The last to be folded are the first to be scaled: they are still in the cache.
            scale_all(_gradients(self._statistics.params)[::-1], factor)
        return factor

    @torch.no_grad()
    def measure_gradients(self, proceed: Tensor | None = None) -> Tensor:
        """:meth:`scale_gradients` but for the scaling of gradients, which is left to the caller.

        Args:
            proceed: Whether the step will be taken, a 0-dim bool tensor; if not, the state does not change.

        Returns:
            The factor, a 0-dim tensor.
        """
        factor = self._statistics.factor
        if proceed is not None and self._statistics.on_host:
            if not proceed:
                return factor.clone()
            proceed = None
        if not self.enabled:
            return factor.fill_(1).clone()
        if self.apply_to == "update" and not self._step_scaling.attached:
            raise RuntimeError('apply_to="update" scales the steps of an optimizer: call attach(optimizer) first')
        if not self._fold(proceed):
            return factor.fill_(1).clone()
        factor = self._statistics.factor  # The averages may be new ones, of parameters that moved.
        if self._statistics.on_host:
            factor.fill_(self._factor_on_host())
        else:
            new = scaling_factor(self._statistics, self.settings())
            factor.copy_(new if proceed is None else torch.where(proceed, new, factor))
        self._record(factor, proceed)
        if self.apply_to == "update":
            self._step_scaling.announce([p for p in self._statistics.params if p.grad is not None], factor)
        return factor.clone()

    @torch.no_grad()
    def update_statistics(self) -> None:
        """Fold the gradients into the averages without scaling anything."""
        if self.enabled:
            self._fold()

    @torch.no_grad()
    def step(self, proceed: Tensor | None = None) -> None:
        """Count the step, after that of the optimizer, and log.

        Args:
            proceed: Whether it was taken, a 0-dim bool tensor.
        """
        self._statistics.step_count.add_(1 if proceed is None else proceed)
        self._check_that_steps_are_scaled()
        if self.logger is not None:
            for key, value in self.metrics().items():
                self.logger.record(key, value.item())

    def attach(self, *optimizers: Optimizer) -> None:
        """Scale the steps of these optimizers, and of no others. For ``apply_to="update"``.

        Raises:
            ValueError: There is a trainable parameter of the scaler that none of them has.
        """
        if self.apply_to != "update":
            raise RuntimeError(f'attach() needs apply_to="update", not {self.apply_to!r}')
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        followed = zip(self._statistics.keys, self._statistics.params, strict=False)
        missing = [key for key, param in followed if param.requires_grad and id(param) not in optimized]
        if missing or not self._statistics.params:
            raise ValueError(
                f"no optimizer has the parameters {missing}: attach those that do, or call update_parameters() before"
            )
        self._step_scaling.attach(*optimizers)

    def detach(self) -> None:
        """Detach from all optimizers."""
        self._step_scaling.detach()

    @torch.no_grad()
    def update_parameters(self, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Follow these parameters from now on, and keep the averages of those that were there before.

        A parameter is recognised as the same tensor, or by its name. Where no tensor is the same and there are no
        names, as after a model was built again, position and shape decide.
        """
        keys, params, named = _with_keys(parameters)
        old, new = self._statistics, GradientStatistics(keys, params, self.statistic)
        new.adopt(old, _sources(old, new, by_name=named and self._named))
        self._statistics, self._named = new, named
        register(params, self)
        self._history, self._recorded = self._history.to(new.device), self._recorded.to(new.device)

    def reset_statistics(self) -> None:
        """Reset all averages and the step count, so that the warm-up starts again."""
        self._statistics = self._new_statistics()
        self.reset_history()

    def reset_history(self) -> None:
        """Start a new period for the quantiles of the factor in :meth:`metrics`, such as an update of an agent."""
        self._history.fill_(math.nan)
        self._recorded.zero_()

    def get_normalized_variance(self) -> float:
        """The present normalised variance of all tensors together, before the cap."""
        return float(self._statistics.normalized_variance(self.eps))

    def get_scaling_factor(self) -> float:
        """The factor of the last :meth:`scale_gradients`."""
        return float(self._statistics.factor)

    @torch.no_grad()
    def compute_gradient_statistics(self) -> dict[str, Tensor]:
        """Norm, mean, variance over elements and largest magnitude of the present gradient; zeros without any."""
        return gradient_totals(_gradients(self._statistics.params), self._statistics.device)

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the scaler as 0-dim tensors, without waiting for the device.

        Quantiles of the factor are over the calls of :meth:`scale_gradients` since :meth:`reset_history`, the last 512
        at most; those of the variance are over the tensors. On a CPU, ``vgs/grad_max_ema`` is over every 11th step.
        """
        statistics = self._statistics
        metrics = {f"vgs/{name}_ema": value.nan_to_num(0) for name, value in statistics.total_averages().items()}
        metrics["vgs/normalized_variance"] = statistics.normalized_variance(self.eps)
        metrics["vgs/scaling_factor"] = statistics.factor.clone()
        metrics["vgs/step_count"] = statistics.step_count.clone()
        metrics["vgs/warmup_active"] = (statistics.step_count < self.warmup_steps).float()
        variances = statistics.variances(self.eps)
        for percent in (10, 50, 90):
            metrics[f"vgs/scaling_factor_p{percent}"] = self._history.nanquantile(percent / 100).nan_to_num(1)
            metrics[f"vgs/tensor_variance_p{percent}"] = variances.nanquantile(percent / 100).nan_to_num(0)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """A copy of the averages, the step count and the factor. Settings are not part of it."""
        return self._state_dict(self._statistics)

    def initial_state_dict(self) -> dict[str, Any]:
        """The state after :meth:`reset_statistics`, without resetting anything."""
        return self._state_dict(self._new_statistics())

    def _state_dict(self, statistics: GradientStatistics) -> dict[str, Any]:
        return {"statistic": self.statistic, "named": self._named, **statistics.state_dict()}

    def upgraded(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state in the current format from one with ``step_count``, ``grad_norm_ema``, … and nothing per tensor.

        Averages over the whole gradient, which are metrics, are kept. What sets the factor is not in such a state: it
        begins anew, and the step count with it, or there would be no warm-up.

        Raises:
            ValueError: A value is not a number.
        """
        return with_earlier_averages(self.initial_state_dict(), state_dict)

    def check_state_dict(self, state_dict: Any, partial: bool = False) -> None:
        """Raise the ``ValueError`` that :meth:`load_state_dict` would raise.

        Args:
            state_dict: The state.
            partial: Whether the state may lack parameters, which then start anew.
        """
        self._checked(state_dict, partial)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the averages, step count and factor. Parameters may also be added afterwards.

        A state of an earlier form is :meth:`upgraded`, with a ``FutureWarning``.

        Raises:
            ValueError: The state does not fit; nothing has changed.
        """
        if is_earlier_state(state_dict):
            warnings.warn(EARLIER_STATE, FutureWarning, stacklevel=2)
        named, loaded, sources = self._checked(state_dict)
        if self._statistics.params:
            self._statistics.adopt(loaded, sources)
        else:
            self._statistics, self._named = loaded, named
        self.reset_history()

    def _checked(self, state_dict: Any, partial: bool = False) -> tuple[bool, GradientStatistics, list[int | None]]:
        """Check a state: whether keys are names, its averages, and their indices by parameter."""
        if not isinstance(state_dict, dict):
            raise ValueError(f"the state must be a dict, not a {type(state_dict).__name__}")
        if is_earlier_state(state_dict):
            state_dict = self.upgraded(state_dict)
        if missing := [key for key in _KEYS if key not in state_dict]:
            raise ValueError(f"the state lacks {', '.join(map(repr, missing))}")
        if unknown := [key for key in state_dict if key not in _KEYS]:
            raise ValueError(f"the state has the unknown entry {repr(unknown[0])[:60]}")
        if state_dict["statistic"] != self.statistic:
            raise ValueError(
                f"the state has statistic {str(state_dict['statistic'])[:60]!r}: build the scaler with that, "
                f"not {self.statistic!r}"
            )
        check_flag("named", state_dict["named"])
        named, step_count = state_dict["named"], saved_number("step_count", state_dict["step_count"], 0, _MOST_STEPS)
        if step_count != int(step_count):
            raise ValueError(f"Invalid step_count: {step_count}; must be a whole number")
        factor = saved_number("factor", state_dict["factor"], 0, 1)
        try:
            loaded = GradientStatistics.from_state_dict(state_dict, self.statistic)
        except (TypeError, RuntimeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"the state is malformed: {error}") from error
        loaded.step_count.fill_(step_count)
        loaded.factor.fill_(factor)
        current = self._statistics
        if not current.params:
            return named, loaded, []
        sources = _sources(loaded, current, by_name=named and self._named)
        without = [key for key, source in zip(current.keys, sources, strict=True) if source is None]
        unused = [key for i, key in enumerate(loaded.keys) if i not in sources]
        if unused or (without and not partial):
            raise ValueError(
                f"the state does not fit: nothing of the right shape for parameters {without}, no use for {unused}"
            )
        return named, loaded, sources

    def __getstate__(self) -> dict[str, Any]:
        # A logger belongs to the process, not to the scaler.
        return {**self.__dict__, "logger": None}

    def _new_statistics(self) -> GradientStatistics:
        old = self._statistics
        return GradientStatistics(old.keys if old.params else [], old.params, self.statistic)

    def settings(self) -> ScalingSettings:
        """The present hyper-parameters."""
        names = ("beta", "alpha", "eps", "warmup_steps", "min_scaling_factor", "variance_cap")
        return ScalingSettings(**{name: getattr(self, name) for name in names})

    def _record(self, factor: Tensor, proceed: Tensor | None) -> None:
        """Store a factor for the quantiles."""
        if self._statistics.on_host and proceed is None:
            self._history.numpy()[int(self._recorded) % _HISTORY] = factor.item()
            self._recorded.add_(1)
            return
        place, entry = self._recorded.remainder(_HISTORY).view(1), factor.view(1)
        if proceed is not None:
            entry = torch.where(proceed, entry, self._history.index_select(0, place))
        self._history.index_copy_(0, place, entry)
        self._recorded.add_(1 if proceed is None else proceed)

    def _fold(self, proceed: Tensor | None = None) -> bool:
        statistics = self._statistics
        if statistics.is_outdated:
            params = statistics.params
            self.update_parameters(zip(statistics.keys, params, strict=True) if self._named else params)
        # The largest magnitude is costly on a CPU, where reading the step count is free.
        every = _EXTREMES_EVERY if self._statistics.on_host else 1
        extremes = every == 1 or self.step_count % every == 0
        grads = [param.grad for param in self._statistics.params]
        return self._statistics.fold(grads, self.beta, extremes, proceed)

    def _check_that_steps_are_scaled(self) -> None:
        if not self._step_scaling.is_due:
            self._in_vain = 0
            return
        self._step_scaling.cancel()
        self._in_vain += 1
        if self._in_vain == _PATIENCE:
            warnings.warn(
                f"the optimizers that this scaler is attached to have not stepped in {_PATIENCE} steps: "
                "attach() the optimizers in use",
                stacklevel=3,
            )

    def _factor_on_host(self) -> float:
        """:func:`scaling_factor` as a Python number: on a CPU, faster than arithmetic on 0-dim tensors."""
        if self.step_count < self.warmup_steps:
            return 1.0
        variance = self._statistics.normalized_variance_on_host(self.eps)
        factor = 1 / (1 + self.alpha * min(variance, self.variance_cap))
        return min(max(factor, self.min_scaling_factor), 1.0)


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _sources(old: GradientStatistics, new: GradientStatistics, by_name: bool) -> list[int | None]:
    """Index of the corresponding old parameter for every new one."""
    positions = {id(param): i for i, param in enumerate(old.params)}
    same = [positions.get(id(param)) for param in new.params]
    if by_name:
        names = {key: i for i, key in enumerate(old.keys)}
        candidates = [names.get(key) if i is None else i for key, i in zip(new.keys, same, strict=True)]
    elif any(i is not None for i in same):
        candidates = same
    else:
        candidates = [i if i < len(old.keys) else None for i in range(len(new.params))]
    pairs = zip(candidates, new.params, strict=True)
    return [i if i is not None and old.fits(i, param) else None for i, param in pairs]


def _with_keys(parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> tuple[list[str], list[Tensor], bool]:
    """A key for each tensor, the tensors, and whether the keys are names that the caller gave."""
    if isinstance(parameters, Tensor):
        raise TypeError("parameters must be several tensors, not one: put it into a list")
    entries: list[Any] = list(parameters)
    named = bool(entries) and isinstance(entries[0], tuple)
    pairs = entries if named else [(str(i), entry) for i, entry in enumerate(entries)]
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise TypeError(f"parameters must be tensors, or pairs of name and tensor, not {pair!r}")
    # A shared tensor that is listed twice is scaled once.
    unique: dict[int, tuple[str, Tensor]] = {}
    for key, param in pairs:
        unique.setdefault(id(param), (str(key), param))
    keys = [key for key, _ in unique.values()]
    if len(set(keys)) != len(keys):
        raise ValueError("the names of parameters must be unique")
    return keys, [param for _, param in unique.values()], named

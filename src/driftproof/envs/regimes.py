"""Prices of a market whose ways change, and nobody says when.

The market is in one of three regimes, which are hidden from observers. Between bars it may leave for one of the two
others, with equal chances. With ``x`` the logarithm of the price, ``e`` standard normal noise, per bar:

- trend: ``dx = ± trend_drift + volatility · e``, up or down as long as the regime lasts
- reversion: ``dx = -reversion_speed · (x - x₀) + volatility · e``, with ``x₀`` where the regime began
- turbulence: ``dx = turbulence · volatility · e``, and with ``jump_probability`` that times ``jump_size``

Directions and noise are symmetric: over all markets the logarithm of the price goes nowhere, and so does an account
that buys and holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from driftproof._arguments import check_number
from driftproof.envs._specs import from_plain

REGIMES = ("trend", "reversion", "turbulence")
"""By number."""
TREND, REVERSION, TURBULENCE = range(3)

PRICE = 100.0
"""What prices begin with."""
_WICK = 0.5
"""How far high and low go beyond open and close, in standard deviations of the bar."""
_VOLUME = 1000.0


@dataclass
class RegimeParameters:
    """What a market with regimes is like. Times are in bars.

    Args:
        volatility: Standard deviation of changes of the logarithm of the price, in a trend and in reversion; up to 0.1.
        trend_drift: Mean change in a trend, up or down; up to 0.1. As much as the volatility makes trends obvious.
        reversion_speed: Share of the distance from where reversion began that is taken back in a bar, below 1.
        turbulence: Volatility in turbulence, relative to ``volatility``; up to 20.
        jump_probability: Of a jump, in a bar of turbulence.
        jump_size: Of jumps, relative to the volatility in turbulence; up to 20.
        trend_duration: Mean length of a trend.
        reversion_duration: Mean length of a reversion.
        turbulence_duration: Mean length of turbulence.
    """

    volatility: float = 0.01
    trend_drift: float = 0.003
    reversion_speed: float = 0.2
    turbulence: float = 3.0
    jump_probability: float = 0.02
    jump_size: float = 3.0
    trend_duration: float = 100.0
    reversion_duration: float = 100.0
    turbulence_duration: float = 50.0

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise a ``ValueError`` if a parameter makes no sense."""
        # Beyond these, prices would leave what numbers can hold.
        check_number("volatility", self.volatility, above=0, at_most=0.1)
        check_number("trend_drift", self.trend_drift, at_least=0, at_most=0.1)
        check_number("reversion_speed", self.reversion_speed, at_least=0, below=1)
        check_number("turbulence", self.turbulence, at_least=0, at_most=20)
        check_number("jump_probability", self.jump_probability, at_least=0, at_most=1)
        check_number("jump_size", self.jump_size, at_least=0, at_most=20)
        for regime in REGIMES:
            check_number(f"{regime}_duration", getattr(self, f"{regime}_duration"), at_least=1)

    @property
    def leaving(self) -> tuple[float, float, float]:
        """Chances to leave a regime, per bar."""
        return 1 / self.trend_duration, 1 / self.reversion_duration, 1 / self.turbulence_duration

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of time that markets are in a regime: as whoever leaves goes anywhere else, in proportion to durations."""
        total = self.trend_duration + self.reversion_duration + self.turbulence_duration
        return self.trend_duration / total, self.reversion_duration / total, self.turbulence_duration / total


def regime_parameters(parameters: RegimeParameters | Mapping[str, Any] | None) -> RegimeParameters:
    """A copy of the parameters, or those with these arguments."""
    plain = vars(parameters) if isinstance(parameters, RegimeParameters) else parameters or {}
    return from_plain("parameters", plain, RegimeParameters)


class Noise(NamedTuple):
    """All that is random about prices, ``[..., T]`` each; arrays, or tensors.

    Attributes:
        leave: Uniform in [0, 1): who leaves a regime; the first: in which one the market begins.
        choose: Uniform: where to, and in which direction.
        shock: Normal: changes of the price.
        jump: Uniform: who jumps.
        above: Normal: how far the high is above.
        below: Normal: how far the low is below.
        volume: Normal: volumes.
    """

    leave: Any
    choose: Any
    shock: Any
    jump: Any
    above: Any
    below: Any
    volume: Any

    @classmethod
    def draw(cls, generator: np.random.Generator, rows: int) -> Noise:
        """For one market."""
        uniform, normal = generator.random((3, rows)), generator.standard_normal((4, rows))
        return cls(uniform[0], uniform[1], normal[0], uniform[2], *normal[1:])

    @classmethod
    def draw_batch(
        cls, generator: torch.Generator, markets: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> Noise:
        """For many markets."""
        options: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        uniform, normal = torch.rand(3, markets, rows, **options), torch.randn(4, markets, rows, **options)
        return cls(uniform[0], uniform[1], normal[0], uniform[2], *normal[1:])


class Path(NamedTuple):
    """Bars of a market, and what nobody is told, ``[..., T]`` each.

    Attributes:
        open: Prices at the beginning of bars.
        high: Highest prices.
        low: Lowest prices.
        close: Prices at the end.
        volume: Traded.
        regime: By number.
        drift: Change of the logarithm of the price that was to be expected.
    """

    open: Any
    high: Any
    low: Any
    close: Any
    volume: Any
    regime: Any
    drift: Any


def simulate(noise: Noise, parameters: RegimeParameters) -> Path:
    """One market, of arrays ``[T]``."""
    leaving, (trends, reversions, _) = parameters.leaving, parameters.shares
    speed, trend = parameters.reversion_speed, parameters.trend_drift
    leave, choose = noise.leave.tolist(), noise.choose.tolist()
    calm = noise.shock * parameters.volatility
    jumps = np.where(noise.jump < parameters.jump_probability, parameters.jump_size, 1.0)
    turbulent = noise.shock * (parameters.volatility * parameters.turbulence) * jumps
    shocks: list[list[float]] = [calm.tolist(), calm.tolist(), turbulent.tolist()]
    regime: Any = (leave[0] >= trends) + (leave[0] >= trends + reversions)
    x, origin, direction = 0.0, 0.0, _direction(choose[0])
    regimes, drifts, logarithms = [], [], []
    for t, choice in enumerate(choose):
        if t and leave[t] < leaving[regime]:
            regime = (regime + (1 if choice < 0.5 else 2)) % 3
            origin, direction = x, _direction(choice)
        drift = direction * trend if regime == TREND else speed * (origin - x) if regime == REVERSION else 0.0
        x += drift + shocks[regime][t]
        regimes.append(regime)
        drifts.append(drift)
        logarithms.append(x)
    regime = np.array(regimes)
    scale = parameters.volatility * np.where(regime == TURBULENCE, parameters.turbulence, 1.0)
    return _path(np, np.array(logarithms), regime, np.array(drifts), noise, scale, parameters)


def simulate_batch(noise: Noise, parameters: RegimeParameters) -> Path:
    """Many markets at once, of tensors ``[N, T]``; with the same noise, each is what :func:`simulate` makes of it.

    What depends on the bar before, the regime and how far reversion is from where it began, are scans, so that the
    number of kernels grows with the logarithm of the number of bars.
    """
    shock = noise.shock
    regime = _regimes(noise, parameters)
    entered = torch.cat([torch.ones_like(regime[:, :1]), regime[:, 1:] != regime[:, :-1]], 1).bool()
    began = torch.where(entered, torch.arange(shock.shape[1], device=shock.device), 0).cummax(1).values
    direction = torch.where(noise.choose * 4 % 2 < 1, 1.0, -1.0).to(shock).gather(1, began)
    # Factors are of the precision of the noise: torch.where() of two Python numbers would be of float32.
    turbulent = (regime == TURBULENCE).to(shock)
    scale = parameters.volatility * (1 + (parameters.turbulence - 1) * turbulent)
    jumps = turbulent * (noise.jump < parameters.jump_probability)
    push = shock * scale * (1 + (parameters.jump_size - 1) * jumps)

    reverts = regime == REVERSION
    kept = (1.0 - parameters.reversion_speed) * (reverts & ~entered).to(shock)
    distance = _recurrence(kept, torch.where(reverts, push, 0.0))
    before = torch.where(entered[:, 1:], 0.0, distance[:, :-1])
    before = torch.cat([torch.zeros_like(shock[:, :1]), before], 1)
    pull = torch.where(reverts, -parameters.reversion_speed * before, 0.0)
    drift = torch.where(regime == TREND, direction * parameters.trend_drift, pull)
    return _path(torch, (drift + push).cumsum(1), regime, drift, noise, scale, parameters)


def _regimes(noise: Noise, parameters: RegimeParameters) -> torch.Tensor:
    """Regimes, ``[N, T]``.

    A bar maps each regime that the market may have been in to the one after it. The regime at a bar is the composition
    of all maps so far, which doubles its length with each round.
    """
    leaving, (trends, reversions, _) = parameters.leaving, parameters.shares
    ways = torch.where(noise.choose < 0.5, 1, 2)
    maps = torch.stack([(regime + (noise.leave < leaving[regime]) * ways) % 3 for regime in range(3)], 2)
    first = noise.leave[:, :1]
    maps[:, 0] = (first >= trends).long() + (first >= trends + reversions).long()
    size = 1
    while size < maps.shape[1]:
        maps = torch.cat([maps[:, :size], maps[:, size:].gather(2, maps[:, :-size])], 1)
        size *= 2
    return maps[..., 0]


def _recurrence(kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """``y[t] = kept[t] * y[t - 1] + added[t]`` along the last dimension, from 0."""
    size = 1
    while size < kept.shape[1]:
        added = torch.cat([added[:, :size], torch.addcmul(added[:, size:], kept[:, size:], added[:, :-size])], 1)
        kept = torch.cat([kept[:, :size], kept[:, size:] * kept[:, :-size]], 1)
        size *= 2
    return added


def _direction(choice: float) -> float:
    """Up or down, whichever of the other regimes was chosen."""
    return 1.0 if choice * 4 % 2 < 1 else -1.0


def _path(xp: Any, x: Any, regime: Any, drift: Any, noise: Noise, scale: Any, parameters: RegimeParameters) -> Path:
    """Bars from logarithms of prices at their ends."""
    before = xp.concatenate([xp.zeros_like(x[..., :1]), x[..., :-1]], axis=-1)
    wick = scale * _WICK
    return Path(
        open=PRICE * xp.exp(before),
        high=PRICE * xp.exp(xp.maximum(x, before) + wick * xp.abs(noise.above)),
        low=PRICE * xp.exp(xp.minimum(x, before) - wick * xp.abs(noise.below)),
        close=PRICE * xp.exp(x),
        volume=_VOLUME * xp.exp(0.3 * noise.volume) * (1 + xp.abs(x - before) / parameters.volatility),
        regime=regime,
        drift=drift,
    )

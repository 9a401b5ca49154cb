"""Settings of the drift kit: parts of the agent that keep it learning when the environment changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftproof._arguments import ArgumentError
from driftproof.settings.definition import LARGE, check_values, defaults_of, setting

_KIT: dict[str, tuple[Any, Any]] = {
    "observation_normalizer": (True, False),
    "exploration_floor": (0.003, 0.0),
    "drift_alarm": (True, False),
    "layer_norm": (True, False),
    "init_decay": (0.0, 0.0),
    "optimism": (None, None),
    "recycle_dormant": (0.0, 0.0),
    "drift_response": (True, False),
    "drift_rewiring": (True, False),
}
"""Value of every part with the kit, and without it."""
_RECURRENT = ("exploration_floor", "layer_norm")
"""Parts that recurrent policies have without the kit, too: they learn faster with them."""
BEFORE: dict[str, Any] = {"drift_kit": False, **{name: _KIT[name][1] for name in _RECURRENT}}
"""Settings of agents saved before the kit existed: every part is off."""


_OF_PART = {
    "normalizer_memory": "observation_normalizer",
    "drift_threshold": "drift_alarm",
    **dict.fromkeys(("drift_patience", "drift_exploration", "drift_worlds"), "drift_response"),
}
"""Settings that have an effect only if a part is on, with the name of that part."""


@dataclass(kw_only=True)
class DriftSettings:
    """Parts that keep an agent learning when the environment changes; ``drift_kit`` switches all of them on or off."""

    drift_kit: bool = setting(
        True,
        "Keep learning when the environment changes: switches on every part below that is None.",
        section="drift",
    )
    observation_normalizer: bool | None = setting(
        None,
        "Normalise observations with exponentially decaying statistics, which follow shifts of the sensors; see "
        "normalizer_memory. None: as drift_kit.",
        section="drift",
    )
    normalizer_memory: int = setting(
        20_000,
        "Time constant of the normaliser's mean and scale, in steps. Shorter adapts faster, and is noisier; "
        "5,000 to 100,000.",
        at_least=100,
        section="drift",
    )

    exploration_floor: float | None = setting(
        None,
        "Weight of a loss that keeps the policy exploring; unlike the entropy's, its gradient does not vanish when "
        "the policy becomes deterministic; 0.001 to 0.03. Discrete actions: KL(uniform‖policy). Box actions: "
        "penalises means outside of the bounds, and standard deviations below 10% of half the range. None: 0.003 "
        "with a recurrent policy, else as drift_kit.",
        at_least=0,
        at_most=LARGE,
        section="drift",
        is_hyperparameter=True,
    )
    layer_norm: bool | None = setting(
        None,
        "Layer normalisation without parameters before each activation, and on the output of a recurrent core or a "
        "CNN, so that units cannot saturate. None: yes with a recurrent policy, else as drift_kit.",
        section="drift",
    )
    init_decay: float | None = setting(
        None,
        "Decay of all parameters towards their initial values: the rate per optimizer step is this times the "
        "learning rate; 0.01 to 1. None: as drift_kit.",
        at_least=0,
        at_most=LARGE,
        section="drift",
    )
    optimism: float | None = setting(
        None,
        "Compute advantages from mean(V1, V2) + optimism * |V1 - V2| / 2 of the twin critics, so that the policy "
        "explores states on which they disagree; 0 to 1. -1 is min(V1, V2). None: min(V1, V2).",
        at_least=-1,
        at_most=LARGE,
        section="drift",
        is_hyperparameter=True,
    )
    recycle_dormant: float | None = setting(
        None,
        "After every update, reinitialise the input weights of dormant units in dense layers, LSTMs and GRUs: units "
        "whose activations vary at most this much, relative to their layer; 0.01 to 0.1. None: as drift_kit.",
        at_least=0,
        below=1,
        section="drift",
    )
    drift_alarm: bool | None = setting(
        None,
        "Raise an alarm, logged as drift/alarm, when returns fall below the critics' predictions and below those of "
        "earlier episodes. None: as drift_kit.",
        section="drift",
        key="alarm",
    )
    drift_threshold: float = setting(
        7.0,
        "Threshold of the alarm, in standard deviations. Larger: fewer false alarms, and later detection; 5 to 10.",
        above=0,
        section="drift",
        key="threshold",
    )
    drift_response: bool | None = setting(
        None,
        "Respond to the alarm: try weights stored from earlier regimes first; reset statistics and explore more; if "
        "returns stay low, move the last layers halfway to newly initialised weights, then reinitialise the "
        "networks. None: as drift_kit.",
        section="drift",
        key="response",
    )
    drift_rewiring: bool | None = setting(
        None,
        "At the alarm, look for sensors and actions that were permuted or inverted, and try the last good weights "
        "with inputs and outputs permuted accordingly. Needs drift_response and observation_normalizer. None: as "
        "drift_kit.",
        section="drift",
        key="rewiring",
    )
    drift_patience: int = setting(
        4,
        "Updates without improvement after which the weights of an agent whose returns stay low are reinitialised. "
        "Fewer: restarts sooner; 2 to 10.",
        at_least=1,
        section="drift",
        key="patience",
    )
    drift_exploration: float = setting(
        0.02,
        "Added to exploration_floor after an alarm; decays over 20 updates. 0.001 to 0.05.",
        at_least=0,
        at_most=LARGE,
        section="drift",
        key="exploration",
    )
    drift_worlds: int = setting(
        3,
        "Number of earlier regimes whose weights are kept, to be tried at the next alarm, and, with drift_rewiring, of "
        "earlier times; each needs as much memory as the networks. 0 to 10.",
        at_least=0,
        section="drift",
        key="worlds",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.drift_response and not self.parts()["drift_alarm"]:
            raise ArgumentError("drift_response=True needs drift_alarm=True: it responds to that alarm")
        if self.drift_rewiring and not (self.parts()["drift_response"] and self.parts()["observation_normalizer"]):
            raise ArgumentError("drift_rewiring=True needs drift_response=True and observation_normalizer=True")
        parts, defaults = self.parts(), defaults_of(DriftSettings)
        for name, part in _OF_PART.items():
            if (value := getattr(self, name)) != defaults[name] and not parts[part]:
                raise ArgumentError(f"{name}={value!r} has no effect without {part}: set {part}=True", name)

    @staticmethod
    def of_file(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return an agent's settings from a file; for files written before the kit existed, all its parts are off."""
        return {**({} if "drift_kit" in settings else BEFORE), **settings}

    @staticmethod
    def off() -> dict[str, Any]:
        """Return the value of every part without the kit."""
        return {name: without for name, (_, without) in _KIT.items()}

    def parts(self, is_recurrent: bool = False) -> dict[str, Any]:
        """Return the value of every part: as given, or the default for ``drift_kit`` and the kind of policy."""
        with_part = {name: self.drift_kit or (is_recurrent and name in _RECURRENT) for name in _KIT}
        values = {name: getattr(self, name) for name in _KIT}
        parts = {name: _KIT[name][not with_part[name]] if value is None else value for name, value in values.items()}
        if self.drift_response is None and not parts["drift_alarm"]:
            parts["drift_response"] = False  # Without the alarm, there is nothing to respond to.
        if self.drift_rewiring is None and not (parts["drift_response"] and parts["observation_normalizer"]):
            parts["drift_rewiring"] = False
        return parts

"""Settings that a configuration sets explicitly, for agents whose other settings come from a checkpoint."""

from __future__ import annotations

from typing import Any

from driftproof.config.build import agent_arguments, seed_of
from driftproof.config.model import Config
from driftproof.config.sections import place_of
from driftproof.settings.agent import AgentSettings
from driftproof.settings.definition import settings_of


def given_arguments(config: Config) -> dict[str, Any]:
    """Arguments of :class:`driftproof.ppo.DistributionalPPO` that a file or the command line sets.

    Settings that are not set explicitly are left out, and so is the environment.
    """
    all_arguments = agent_arguments(config)
    given = {
        name: all_arguments[name]
        for name, each in settings_of(AgentSettings).items()
        if each.about.in_files and _is_given(config, *place_of(AgentSettings, each))
    }
    networks = config.policy.model_fields_set | config.critic.model_fields_set
    kwargs = {name: value for name, value in all_arguments["policy_kwargs"].items() if name in networks}
    given |= {"policy_kwargs": kwargs} if kwargs else {}
    of_sections = {
        "optimizer_class": _is_given(config, "optimizer", "name"),
        "optimizer_kwargs": _is_given(config, "optimizer", "kwargs"),
        "variance_gradient_scaling": bool(config.vgs.model_fields_set),
        "vgs_kwargs": bool(config.vgs.model_fields_set),
        "adversarial": bool(config.adversarial.model_fields_set),
    }
    given |= {name: all_arguments[name] for name, is_given in of_sections.items() if is_given and name in all_arguments}
    if _is_given(config, "run", "seed"):
        given["seed"] = seed_of(config)
    return {**given, "device": config.run.device}


def _is_given(config: Config, section: str, key: str) -> bool:
    return key in getattr(config, section).model_fields_set

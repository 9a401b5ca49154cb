"""What a configuration says explicitly, for agents whose other settings come from a file."""

from __future__ import annotations

from typing import Any

from driftproof.config.build import agent_arguments, seed_of
from driftproof.config.model import Config


def given_arguments(config: Config) -> dict[str, Any]:
    """Arguments of :class:`driftproof.ppo.DistributionalPPO` that a file or the command line gave.

    Those that are at their defaults because nobody gave them are left out, and so is the environment.
    """
    all_arguments = agent_arguments(config)
    given = {**_given(config.ppo, all_arguments), **_given(config.critic, all_arguments)}
    networks = config.policy.model_fields_set | config.critic.model_fields_set
    kwargs = {name: value for name, value in all_arguments["policy_kwargs"].items() if name in networks}
    given |= {"policy_kwargs": kwargs} if kwargs else {}
    of_sections = {
        "policy": "name" in config.policy.model_fields_set,
        "optimizer_class": "name" in config.optimizer.model_fields_set,
        "optimizer_kwargs": "kwargs" in config.optimizer.model_fields_set,
        "variance_gradient_scaling": bool(config.vgs.model_fields_set),
        "vgs_kwargs": bool(config.vgs.model_fields_set),
        "adversarial": bool(config.adversarial.model_fields_set),
        "stats_window_size": "stats_window_size" in config.run.model_fields_set,
    }
    given |= {name: all_arguments[name] for name, is_given in of_sections.items() if is_given and name in all_arguments}
    if "seed" in config.run.model_fields_set:
        given["seed"] = seed_of(config)
    return {**given, "device": config.run.device}


def _given(section: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in section.model_fields_set if name in arguments}

"""Builds environments, agents and populations from a configuration. torch is only imported when needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftproof._files import RunFolderError
from driftproof._process_signals import follow_parent, left_to_this_process
from driftproof._trust import OWN, Trust
from driftproof.config.files import ConfigError
from driftproof.config.model import Config
from driftproof.config.names import check_address, check_names, chosen, describe_error, features_extractor, make_env
from driftproof.config.resuming import check_is_of
from driftproof.config.sections import EnvSection
from driftproof.config.shipping import runtime_env
from driftproof.settings.adversarial import PerturbationConfig
from driftproof.settings.agent import AgentSettings
from driftproof.settings.definition import settings_of
from driftproof.settings.policy import PolicySettings, unused_by_policy
from driftproof.settings.population import HyperparamConfig, PBTConfig

if TYPE_CHECKING:
    import gymnasium
    from stable_baselines3.common.vec_env import VecEnv

    from driftproof.envs.tensor import TensorEnv
    from driftproof.pbt import Backend, PBTRunner
    from driftproof.ppo import DistributionalPPO

_SEEDS_APART = 10_000
"""Difference between the seeds of consecutive members; the environments of a member use the seeds in between."""
ACTIVATIONS = {
    "tanh": "Tanh",
    "relu": "ReLU",
    "elu": "ELU",
    "gelu": "GELU",
    "silu": "SiLU",
    "leaky_relu": "LeakyReLU",
}


@dataclass(frozen=True)
class EnvMaker:
    """Creates one environment; can be pickled for another process.

    Args:
        section: Settings of the environment.
        drift_seed: Seed of its drift.
        is_evaluation: Whether it is for evaluation.
        trust: Modules that may be imported.
    """

    section: EnvSection
    drift_seed: int
    is_evaluation: bool = False
    trust: Trust = OWN

    def __call__(self) -> gymnasium.Env[Any, Any]:
        from stable_baselines3.common.monitor import Monitor

        section = self.section
        env = make_env(section, self.trust, self.is_evaluation)
        if section.drift:
            from driftproof.envs import change, drifting

            try:
                changes = [change(spec, self.trust, f"env.drift.{i}") for i, spec in enumerate(section.drift)]
                env = drifting(env, changes, self.drift_seed)
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError([f"env.drift: {error}"]) from error
        if section.last_step:
            from driftproof.envs import LastStep

            env = LastStep(env)
        return Monitor(env)


@dataclass(frozen=True)
class AgentMaker:
    """Creates members of a population; can be pickled for other processes.

    Args:
        config: The configuration.
        folder: Folder to work in, if there is such a folder; paths in the configuration are relative to it.
    """

    config: Config
    folder: str | None = None

    def __call__(self, member: int) -> DistributionalPPO:
        if self.folder is not None and os.path.isdir(self.folder):
            os.chdir(self.folder)
        return build_agent(self.config, member)


def seed_of(config: Config, member: int = 0) -> int:
    """Seed of a member; member 0 has the run's."""
    return int(config.run.seed) + _SEEDS_APART * member


def build_env(
    config: Config, seed: int | None = None, *, n_envs: int | None = None, is_evaluation: bool = False
) -> VecEnv:
    """Build the vectorised environments, without observation normalisation.

    Args:
        config: The configuration.
        seed: Seed of the first environment; ``None``: not seeded.
        n_envs: Number of environments; ``None``: as configured.
        is_evaluation: Whether they are for evaluation.
    """
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    section, maker = config.env, _env_maker(config, is_evaluation)
    if section.vectorization == "device" and not is_evaluation:
        from driftproof.ppo import TensorVecEnv

        envs: VecEnv = TensorVecEnv(_tensor_env(config, section.n_envs if n_envs is None else n_envs))
        if seed is not None:
            envs.seed(seed)
        return envs
    makers: list[Callable[[], gymnasium.Env[Any, Any]]] = [maker] * (section.n_envs if n_envs is None else n_envs)
    if section.vectorization == "processes":
        maker().close()  # To get its error here: from another process only EOFError would arrive.
        with left_to_this_process():
            envs = SubprocVecEnv([partial(_make_as_follower, maker)] * len(makers), start_method="spawn")
    else:
        envs = DummyVecEnv(makers)
    if seed is not None:
        envs.seed(seed)
    return envs


def _tensor_env(config: Config, envs: int) -> TensorEnv:
    """Environments as tensors on the agents' device."""
    from stable_baselines3.common.utils import get_device

    from driftproof.envs import tensor

    section = config.env
    for name in ("drift", "last_step"):
        if getattr(section, name):
            raise ConfigError([f"env.{name}: needs env.vectorization in_process or processes, not device"])
    try:
        return tensor.make(section.id, envs, get_device(config.run.device), **section.kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"env: {error}"]) from error


def _make_as_follower(maker: EnvMaker) -> gymnasium.Env[Any, Any]:
    """Create an environment in its own process."""
    follow_parent()
    return maker()


def try_env(config: Config) -> None:
    """Take one step in an environment, so that its errors appear before training.

    Raises:
        ConfigError: The environment cannot be made, or fails at reset or its first step.
    """
    from stable_baselines3.common.vec_env import DummyVecEnv

    check_names(config)
    if config.env.id.startswith("driftproof/"):
        return
    try:
        env = DummyVecEnv([_env_maker(config)])
        try:
            env.seed(0)
            env.action_space.seed(0)
            env.reset()
            env.step([env.action_space.sample()])  # type: ignore[arg-type]
        finally:
            env.close()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            [f"env: {config.env.id!r} fails at reset or its first step: {describe_error(error)}"]
        ) from error


def _env_maker(config: Config, is_evaluation: bool = False) -> EnvMaker:
    section = config.env
    drift_seed = config.run.seed if section.drift_seed is None else section.drift_seed
    return EnvMaker(section, drift_seed, is_evaluation, config.trust)


def build_agent(config: Config, member: int = 0) -> DistributionalPPO:
    """Build an agent with its own environments.

    Args:
        config: The configuration.
        member: Id in a population; members differ by their seeds.

    Raises:
        ConfigError: Settings contradict each other, or the environment.
    """
    from driftproof.ppo import DistributionalPPO

    env = build_agent_env(config)
    try:
        _check_actions(config, env.action_space)
        with _as_config_error():
            return DistributionalPPO(env=env, seed=seed_of(config, member), **agent_arguments(config))
    except BaseException:
        env.close()
        raise


def build_agent_env(config: Config) -> VecEnv:
    """Build the training environments of an agent, with observation normalisation if configured."""
    from stable_baselines3.common.vec_env import VecNormalize

    check_names(config)
    _check_device(config)
    env = build_env(config)
    if config.env.normalize_observations:
        env = VecNormalize(env, norm_reward=False, clip_obs=config.env.clip_observations)
    return env


def build_population(
    config: Config,
    run_dir: str | Path,
    *,
    resume: bool = False,
    callback: Callable[[], Any] | None = None,
) -> PBTRunner:
    """Build or resume a population in a run folder.

    Args:
        config: Settings of the members and of the search.
        run_dir: Run folder.
        resume: Whether to resume the run in the folder.
        callback: Creates the callback of a member's training.

    Raises:
        ConfigError: Settings contradict each other or the environment, or the search is invalid.
    """
    from driftproof.pbt import PBTRunner

    check_names(config)
    maker = AgentMaker(config, os.getcwd() if config.pbt.backend == "ray" else None)
    metric = _metric(config.pbt.metric_name)
    with _as_config_error("pbt"):
        options: dict[str, Any] = {"backend": _backend(config), "max_restarts": config.pbt.max_restarts}
        if resume:
            check_is_of(population_config(config), config, Path(run_dir))
            return PBTRunner.resume(run_dir, maker, metric, callback=callback, trusted=config.trust, **options)
        return PBTRunner(
            population_config(config),
            maker,
            config.total_updates,
            run_dir,
            config.run.seed,
            metric,
            synchronous=config.pbt.synchronous,
            callback=callback,
            **options,
        )


def population_config(config: Config) -> PBTConfig:
    """Configuration of a population's search."""
    values = config.pbt.model_dump(include=set(settings_of(PBTConfig)))
    with _as_config_error("pbt"):
        searched = [HyperparamConfig(**item) for item in values.pop("hyperparams")]
        values["explore_method"] = chosen(config, "pbt.explore_method")
        return PBTConfig(**values, hyperparams=searched)


def check(config: Config, is_population: bool = False) -> DistributionalPPO:
    """Try the environment, build the agent, and check the search; returns the agent, with closed environments.

    Args:
        config: The configuration.
        is_population: Whether the search is to be checked.

    Raises:
        ConfigError: The configuration is invalid.
    """
    try_env(config)
    agent = build_agent(config)
    assert agent.env is not None
    agent.env.close()
    if is_population:
        from driftproof.pbt import check_against

        interval = config.pbt.perturbation_interval * agent.optimizer_steps_per_update
        with _as_config_error("pbt"):
            check_against(population_config(config), agent.hyperparams, steps_per_interval=interval)
    return agent


def agent_arguments(config: Config) -> dict[str, Any]:
    """Arguments of :class:`driftproof.ppo.DistributionalPPO`, except for its environment and seed."""
    arguments = config.arguments(AgentSettings) | {"policy_kwargs": _policy_kwargs(config)}
    arguments["optimizer_class"] = chosen(config, "optimizer.name")
    arguments["optimizer_kwargs"] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.optimizer.kwargs.items()
    }
    arguments["variance_gradient_scaling"] = config.vgs.enabled
    if config.vgs.enabled:
        arguments["vgs_kwargs"] = config.vgs.model_dump(exclude={"enabled"})
    if config.adversarial.enabled:
        from driftproof.adversarial import SAPPOConfig

        values = config.adversarial.model_dump(exclude={"enabled"})
        with _as_config_error("adversarial"):
            attack = values.pop("perturbation")
            attack["attack_method"] = chosen(config, "adversarial.perturbation.attack_method")
            perturbation = PerturbationConfig(**attack)
            arguments["adversarial"] = SAPPOConfig(**values, perturbation=perturbation)
    return arguments | {"device": config.run.device}


def _check_device(config: Config) -> None:
    import torch

    # Stable-Baselines3 would silently use the CPU.
    if config.run.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError([f"run.device: CUDA is not available for {config.run.device!r}; use auto or cpu"])


def _check_actions(config: Config, action_space: gymnasium.Space[Any]) -> None:
    """Refuse settings of continuous actions in environments without them."""
    from gymnasium import spaces

    if not isinstance(action_space, spaces.Box):
        unused = f"would have no effect: it needs Box actions; {config.env.id} has {type(action_space).__name__}"
        for name in ("log_std_init", "squash_output"):
            if value := getattr(config.policy, name):
                raise ConfigError([f"policy.{name}: {value!r} {unused}; remove it"])


def _policy_kwargs(config: Config) -> dict[str, Any]:
    from torch import nn

    unused = unused_by_policy(config.critic.value_head, config.has_memory, use_sde=True)
    kwargs = {name: value for name, value in config.arguments(PolicySettings).items() if name not in unused}
    kwargs["activation_fn"] = getattr(nn, ACTIVATIONS[kwargs["activation_fn"]])
    kwargs["features_extractor_class"] = features_extractor(config)
    return kwargs | {"core": chosen(config, "policy.core"), "value_head": chosen(config, "critic.value_head")}


def _metric(name: str) -> Callable[[DistributionalPPO], float]:
    from driftproof.pbt import mean_reward

    return {"mean_reward": mean_reward, "mean_length": mean_length, "success_rate": success_rate}[name]


def mean_length(agent: DistributionalPPO) -> float:
    """Mean length of recent episodes; NaN if none has ended yet."""
    from driftproof.runs.ranking import episode_mean

    mean = episode_mean(agent.ep_info_buffer, "l")
    return float("nan") if mean is None else mean


def success_rate(agent: DistributionalPPO) -> float:
    """Share of recent episodes whose ``info["is_success"]`` was true; NaN if none has ended yet."""
    successes = [float(success) for success in agent.ep_success_buffer or ()]
    return sum(successes) / len(successes) if successes else float("nan")


def _backend(config: Config) -> Backend:
    from driftproof.pbt import InlineBackend, ProcessBackend

    pbt = config.pbt
    if pbt.backend == "ray":
        check_address(config)
        try:
            from driftproof.pbt.ray_backend import RayBackend, is_connected
        except ImportError as error:
            raise ConfigError([f"pbt.backend: {error}"]) from error
        shipped = None if is_connected() else runtime_env(config)  # It belongs to the connection.
        return RayBackend(pbt.resources_per_member, pbt.address, pbt.members_per_actor, shipped)
    if pbt.backend == "vectorized":
        from driftproof.pbt.vectorized.backend import VectorizedBackend

        return VectorizedBackend()
    return InlineBackend() if pbt.backend == "inline" else ProcessBackend(pbt.workers, config.run.threads)


@contextmanager
def _as_config_error(place: str = "") -> Iterator[None]:
    """Raise errors of arguments as errors of the configuration."""
    try:
        yield
    except (ConfigError, RunFolderError):
        raise
    except (ValueError, TypeError, ImportError, AssertionError, OverflowError, RuntimeError) as error:
        # Assertions of Stable-Baselines3 have several lines.
        what = str(error).splitlines()[0] if isinstance(error, AssertionError) else str(error)
        raise ConfigError([f"{place}: {what}" if place else what]) from error

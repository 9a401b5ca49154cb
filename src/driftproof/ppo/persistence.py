"""Saving, loading and pickling of agents."""

from __future__ import annotations

import io
import pathlib
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from stable_baselines3.common.type_aliases import GymEnv

from driftproof._arguments import check_count
from driftproof._trust import Trust
from driftproof.nn.policies import NAMED_POLICIES
from driftproof.ppo import manifest
from driftproof.ppo.components import load_state
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.normalizer import unchanged_on_error
from driftproof.ppo.settings import policy_arguments, without_unused_settings
from driftproof.ppo.tree import ComponentTree, as_checkpoint_error, with_suffix
from driftproof.settings.agent import HYPERPARAMETERS, AgentSettings
from driftproof.settings.definition import settings_of
from driftproof.settings.drift import DriftSettings
from driftproof.state import Checkpoint, CheckpointError, printable, read, select, without, write

Self = TypeVar("Self", bound="Persistent")

_CONFIG = {"class", "settings", "observation_space", "action_space", "n_envs"}
"""Keys of a file's description of how to build the agent."""


class Persistent(ComponentTree):
    """Saving, loading and pickling of an agent: its settings and its tree of components."""

    _known_attributes: frozenset[str]
    """Names of attributes that every agent may have."""
    _built_in: tuple[str, ...]
    """Components that every agent has."""

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """Write the agent to a file, atomically.

        Attributes that users have set on the agent are written if they are plain values.

        Args:
            path: File name; ``.zip`` is added to a name without a suffix.
            exclude: Components, settings or attributes to leave out; names that the agent does not have are ignored.
                Settings then have their defaults when the file is loaded.
            include: Exceptions from ``exclude``; without ``exclude``, the only components to write.
        """
        tree, config = self.current_states(), self.config()
        if include is not None and exclude is None:
            tree = select(tree, list(include))
        left_out = set(exclude or ()) - set(include or ())
        settings, attributes = config["settings"], config["attributes"]
        for name in left_out & {*settings, *attributes}:
            settings.pop(name, None)
            attributes.pop(name, None)
        others = self.setting_names() | set(dir(self))
        parts = sorted(name for name in left_out if name in tree or name not in others)
        tree = without(tree, parts, missing_ok=True)
        self._warn_of_what_is_lost(settings)
        exact = self.worker.is_whole and include is None and exclude is None
        write(with_suffix(path, reading=False), tree, config=config, exact=exact)

    def _warn_of_what_is_lost(self, settings: Mapping[str, Any]) -> None:
        """Warn once of functions that must be passed to :meth:`load`, and of attributes that a file cannot hold."""
        functions = sorted(manifest.foreign_places(settings) & set(manifest.FUNCTIONS))
        values = [name for name, value in self._own_attributes().items() if not manifest.is_plain(value)]
        messages = [
            f"the file holds functions by name only: {', '.join(functions)}; pass them to load(..., "
            f"custom_objects={{{functions[0]!r}: ...}}), or use driftproof.ppo.Linear or Cosine"
            if functions
            else "",
            f"the file does not hold the agent's attributes {', '.join(values)}: they are not plain values"
            if values
            else "",
        ]
        for message in messages:
            if message and message not in self._told:
                self._told.add(message)
                warnings.warn(message, stacklevel=3)

    def _own_attributes(self) -> dict[str, Any]:
        """Public attributes that users have set on the agent."""
        components = {id(component) for component in self.components().values()}
        return {
            name: value
            for name, value in vars(self).items()
            if not (
                name in self._known_attributes
                or name.startswith("_")
                or hasattr(type(self), name)
                or id(value) in components
            )
        }

    @classmethod
    def load(
        cls: type[Self],
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: torch.device | str = "auto",
        custom_objects: Mapping[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool | None = None,
        trusted: Iterable[str] | Trust = (),
        warm_start: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load an agent from a file of :meth:`save`. No code in the file is run.

        Args:
            path: The file.
            env: Environment to continue training in, wrapped in ``VecNormalize`` if the agent's was; ``None``: call
                :meth:`set_env` later.
            device: Device of the agent.
            custom_objects: Classes and functions that files hold by name only, by the name of the setting or their
                own. They replace the file's settings where they differ.
            print_system_info: Print the versions of libraries that the file was written with.
            force_reset: Start new episodes; ``None``: only if the environments' states cannot be restored;
                ``False``: never, since ``env`` was not stepped since the agent was saved.
            trusted: Modules from which classes named in the file may be imported: policies, features extractors,
                optimizers.
            warm_start: Begin a new training in ``env``, which may be another one with the same spaces, or have another
                number of environments: with the file's settings, weights and statistics, but new counters, episodes and
                random generators; see :func:`driftproof.ppo.warm_start`.
            kwargs: Settings that replace those in the file. Settings that cannot change may be passed with the file's
                values.

        Raises:
            CheckpointError: The file is damaged, has another format, or does not fit.
        """
        if warm_start and env is None:
            raise TypeError("warm_start begins a new training: load(path, env, warm_start=True)")
        trust = Trust.of(trusted)
        others = {name for name, each in settings_of(AgentSettings).items() if each.about.changes_on_load}
        changeable = {*HYPERPARAMETERS, *others}
        custom_objects = dict(custom_objects or {})
        if "lr_schedule" in custom_objects:
            # Stable-Baselines3's alias.
            custom_objects.setdefault("learning_rate", custom_objects.pop("lr_schedule"))
        checkpoint = read(with_suffix(path))
        if print_system_info:
            print("\n".join(f"{name}: {version}" for name, version in checkpoint.versions.items()))
        whole = isinstance(checkpoint.tree, dict) and isinstance(checkpoint.tree.get("policy"), dict)
        if not whole or _CONFIG - set(checkpoint.config):
            raise CheckpointError(
                f"{path} holds no agent; if it holds components of one, build an agent with its settings, and load "
                "them: agent.set_parameters(path, exact_match=False)"
            )
        # Scripts may pass all constructor arguments again: values equal to the file's are no change.
        fixed = {name: value for name, value in kwargs.items() if name not in changeable}
        if wrong := manifest.differing(fixed, checkpoint.config["settings"]):
            raise TypeError(
                f"load() cannot change {', '.join(wrong)}; it can change {', '.join(sorted(changeable))}. Build an "
                "agent with other settings, and load the file: set_parameters(path, exact_match=False)"
            )
        kwargs = {name: value for name, value in kwargs.items() if name in changeable}
        tree, given = dict(checkpoint.tree), custom_objects
        with as_checkpoint_error(path):
            # As in Stable-Baselines3, passed policy_kwargs replace those of the file.
            replaced = changeable & manifest.replaced_settings(given, checkpoint.config["settings"])
            kwargs = {**{name: given[name] for name in replaced}, **kwargs}
            given = {**given, **fixed, **kwargs}
            build = partial(cls._from_config, checkpoint.config, tree, given, device, kwargs, trust)
            if warm_start:
                return _warm_started(build(env=env), checkpoint)
            agent = build()
            attributes = agent._attributes_from(checkpoint.config)
            # Do not load the state of components that the caller's settings remove.
            gone = [name for name, value in kwargs.items() if value is None]
            if isinstance(hyperparams := tree.get("hyperparams"), dict):
                tree["hyperparams"] = {name: x for name, x in hyperparams.items() if name not in gone}
        parts = agent.components()
        if env is None:
            # Without an environment the agent is only used to predict: keep the process's random generators.
            del parts["random"]
            tree.pop("random", None)
        with unchanged_on_error(env):
            with as_checkpoint_error(path):
                if env is not None and "normalizer" in tree:
                    agent.normalizer.load_state_dict(tree["normalizer"])
            if env is not None:
                agent.set_env(env)
            with as_checkpoint_error(path):
                load_state(agent.policy, parts, tree, exact_match=False)
        agent._unclaimed = {name: tree[name] for name in tree.keys() - agent.components().keys()}
        vars(agent).update(attributes)
        agent.worker.settle(force_reset, tree.get("rollout"))
        agent._change_settings(kwargs)
        agent.state_was_loaded()
        return agent

    def _change_settings(self, settings: Mapping[str, Any]) -> None:
        """Set hyper-parameters and the seed to those given to :meth:`load`."""
        for name, value in settings.items():
            if value is not None and name in HYPERPARAMETERS:
                setattr(self, name, value)
        if settings.get("seed") is not None:
            self.set_random_seed(self.seed)

    def config(self) -> dict[str, Any]:
        """Description of how to build an agent that this one's state fits, as plain values."""
        return {
            "class": type(self).__name__,
            "settings": manifest.encode_settings(self.settings()),
            "observation_space": manifest.encode(self.observation_space),
            "action_space": manifest.encode(self.action_space),
            "n_envs": self.n_envs,
            "attributes": {
                name: manifest.encode(x) for name, x in self._own_attributes().items() if manifest.is_plain(x)
            },
        }

    def _attributes_from(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes that users had set on the saved agent; raises an error for any that agents have themselves."""
        attributes = config.get("attributes", {})
        if not isinstance(attributes, dict) or not all(map(manifest.is_plain, attributes.values())):
            raise CheckpointError("attributes in the file are not plain values")
        for name in attributes:
            # Properties are looked up on the class: on the agent they may raise an error before it is set up.
            is_own = name in self._known_attributes or hasattr(type(self), str(name))
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or is_own:
                raise CheckpointError(f"a file may not set the attribute {printable(name, 60)}")
        return attributes

    @classmethod
    def setting_names(cls) -> set[str]:
        """Names of the settings that files hold."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Constructor arguments of this agent, without environment and device."""
        raise NotImplementedError

    @classmethod
    def _from_config(
        cls: type[Self],
        config: Mapping[str, Any],
        tree: Mapping[str, Any],
        given: Mapping[str, Any],
        device: torch.device | str,
        changes: Mapping[str, Any],
        trust: Trust,
        env: GymEnv | None = None,
    ) -> Self:
        """Build an untrained agent from a file's description, with an environment if one is given."""
        if config["class"] != cls.__name__:
            raise CheckpointError(f"the file holds a {config['class']}: load it with {config['class']}.load()")
        if unknown := set(config["settings"]) - cls.setting_names():
            # Especially env, whose id would be imported.
            raise CheckpointError(f"the file has unknown settings: {printable(sorted(unknown), 200)}")
        settings = without_unused_settings(manifest.decode(config["settings"], given, trust=trust))
        settings = DriftSettings.of_file(settings)
        # A path in a file must not decide where logs are written.
        settings |= {"tensorboard_log": None, **changes}
        observation_space, action_space = (
            manifest.decode(config[name], {}) for name in ("observation_space", "action_space")
        )
        check_count("n_envs", config["n_envs"], at_least=1)
        _check_networks(settings, observation_space, action_space, tree["policy"])
        if env is not None:
            return cls(**settings, env=env, device=device)
        return cls._rebuilt(settings, (observation_space, action_space, config["n_envs"]), device)

    @classmethod
    def _rebuilt(
        cls: type[Self],
        settings: Mapping[str, Any],
        spaces: tuple[Any, Any, int],
        device: torch.device | str,
    ) -> Self:
        """Build an untrained agent with these spaces and this number of environments."""
        with unchanged_generators():
            agent = cls(**settings, device=device, _init_setup_model=False)
            agent.observation_space, agent.action_space, agent.n_envs = spaces
            agent._setup_model()
        return agent

    def __getstate__(self) -> dict[str, Any]:
        """State for pickles and copies, without environment and random generators, which belong to the process."""
        if not self._is_built:
            raise TypeError("an agent without networks cannot be copied: call _setup_model() first")
        return {
            "settings": self.settings(),
            "spaces": (self.observation_space, self.action_space, self.n_envs),
            "device": str(self.device),
            "tree": without(self.state_tree(), ["random"]),
            "components": {name: part for name, part in self.components().items() if name not in self._built_in},
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__getstate__())


def _warm_started(agent: Self, checkpoint: Checkpoint) -> Self:
    """A new agent with the weights and statistics of a file."""
    from driftproof.ppo.warm_starts import warm_start

    warm_start(agent, checkpoint)
    return agent


def _rebuild(kind: type[Self], state: Mapping[str, Any]) -> Self:
    """Rebuild an agent from its pickle."""
    device = state["device"] if torch.cuda.is_available() else "cpu"
    agent = kind._rebuilt(state["settings"], state["spaces"], device)
    for name, component in state["components"].items():
        if name not in agent.components():
            agent.register(name, component)
    load_state(agent.policy, without(agent.components(), ["random"]), state["tree"], exact_match=True)
    agent.state_was_loaded()
    return agent


def _check_networks(
    settings: Mapping[str, Any], observation_space: Any, action_space: Any, state: Mapping[str, Any]
) -> None:
    """Refuse settings whose networks do not match the weights in a file, before memory is allocated for them.

    Networks of users' own classes are not checked: passing a class means trusting the file.
    """
    kind = NAMED_POLICIES.get(settings["policy"], settings["policy"])
    kwargs = policy_arguments(settings["policy_kwargs"] or {}, settings.get("use_sde", False))
    own = [kind, *(value for value in kwargs.values() if callable(value))]
    if not all(manifest.is_known(each) for each in own):
        return
    net_arch = kwargs.get("net_arch") or []
    widths = net_arch.values() if isinstance(net_arch, dict) else [net_arch]
    if kwargs.get("n_lstm_layers", 1) + sum(map(len, widths)) > len(state):
        raise ValueError("its settings have more layers than it has weights")
    with unchanged_generators(), torch.device("meta"):
        networks = kind(observation_space, action_space, **kwargs).state_dict()
    shapes, given = ({name: tuple(t.shape) for name, t in each.items()} for each in (networks, state))
    if shapes != given:
        wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ValueError(f"its settings and its weights differ in {', '.join(wrong[:5])}")

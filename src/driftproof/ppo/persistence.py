"""Files and pickles of agents."""

from __future__ import annotations

import io
import pathlib
import warnings
from collections.abc import Iterable, Mapping
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
from driftproof.state import CheckpointError, printable, read, select, without, write

Self = TypeVar("Self", bound="Persistent")

_CONFIG = {"class", "settings", "observation_space", "action_space", "n_envs"}
"""What a file says of how to build the agent."""


class Persistent(ComponentTree):
    """Saving, loading and pickling of an agent: what makes one like it, and its tree of components."""

    _known_attributes: frozenset[str]
    """Names of attributes that every agent has, now or later."""
    _built_in: tuple[str, ...]
    """Components that every agent has."""

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """Write the agent to a file, at once or not at all.

        Attributes that somebody has set on the agent are written if they are plain values.

        Args:
            path: ``.zip`` is added to a name without an ending.
            exclude: Components, settings or attributes to leave out. Settings then have their defaults when the file is
                loaded.
            include: Of these, what to write all the same; without ``exclude``, the only components to write.
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
        tree = without(tree, sorted(name for name in left_out if name in tree or name not in others))
        self._warn_of_what_is_lost(settings)
        exact = self.worker.is_whole and include is None and exclude is None
        write(with_suffix(path, reading=False), tree, config=config, exact=exact)

    def _warn_of_what_is_lost(self, settings: Mapping[str, Any]) -> None:
        """Warn once of functions that must be given again, and of attributes that a file cannot hold."""
        functions = sorted(manifest.foreign_places(settings) & set(manifest.FUNCTIONS))
        values = [name for name, value in self._own_attributes().items() if not manifest.is_plain(value)]
        messages = [
            f"the file only names {', '.join(functions)}, a function: to load it, pass it again, "
            f"load(..., custom_objects={{{functions[0]!r}: ...}}), or use driftproof.ppo.Linear or Cosine"
            if functions
            else "",
            f"the file does not hold the agent's attributes {', '.join(values)}, which are no plain values"
            if values
            else "",
        ]
        for message in messages:
            if message and message not in self._told:
                self._told.add(message)
                warnings.warn(message, stacklevel=3)

    def _own_attributes(self) -> dict[str, Any]:
        """What somebody has set on the agent: nothing of its own, and nothing private."""
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
        **kwargs: Any,
    ) -> Self:
        """An agent from a file of :meth:`save`. Nothing in the file is run.

        Args:
            path: The file.
            env: Where to go on learning, with ``VecNormalize`` around it if the agent had one; ``None``: to be given
                to :meth:`set_env`.
            device: Where to.
            custom_objects: Classes and functions that files only name, by the name of the setting or their own. What
                differs from the file's settings replaces them.
            print_system_info: Print what the file was written with.
            force_reset: Begin new episodes; ``None``: only if the environments cannot be put where they were;
                ``False``: never, since ``env`` has not moved since the agent was saved.
            trusted: Modules of which the file may name classes: policies, features extractors, optimizers.
            kwargs: Settings that are to be others than those in the file. Those that cannot change may be given too,
                as the file has them.

        Raises:
            CheckpointError: The file is damaged, is not one of ours, or does not fit.
        """
        trust = Trust.of(trusted)
        others = {name for name, each in settings_of(AgentSettings).items() if each.about.changes_on_load}
        changeable = {*HYPERPARAMETERS, *others}
        custom_objects = dict(custom_objects or {})
        if "lr_schedule" in custom_objects:
            # Stable-Baselines3's other name for it.
            custom_objects.setdefault("learning_rate", custom_objects.pop("lr_schedule"))
        checkpoint = read(with_suffix(path))
        if print_system_info:
            print("\n".join(f"{name}: {version}" for name, version in checkpoint.versions.items()))
        whole = isinstance(checkpoint.tree, dict) and isinstance(checkpoint.tree.get("policy"), dict)
        if not whole or _CONFIG - set(checkpoint.config):
            raise CheckpointError(
                f"{path} holds no agent; if it holds parts of one, build an agent with its settings, and give it the "
                "file: agent.set_parameters(path, exact_match=False)"
            )
        # Scripts give everything that they gave the constructor: what the file has too is no change.
        fixed = {name: value for name, value in kwargs.items() if name not in changeable}
        if wrong := manifest.differing(fixed, checkpoint.config["settings"]):
            raise TypeError(
                f"load() cannot change {', '.join(wrong)}; it can change {', '.join(sorted(changeable))}. Build an "
                "agent with other settings, and give it the file: set_parameters(path, exact_match=False)"
            )
        kwargs = {name: value for name, value in kwargs.items() if name in changeable}
        tree, given = dict(checkpoint.tree), custom_objects
        with as_checkpoint_error(path):
            # As in Stable-Baselines3, what is given replaces what the agent was made with.
            replaced = changeable & manifest.replaced_settings(given, checkpoint.config["settings"])
            kwargs = {**{name: given[name] for name in replaced}, **kwargs}
            agent = cls._from_config(checkpoint.config, tree, {**given, **fixed, **kwargs}, device, kwargs, trust)
            attributes = agent._attributes_from(checkpoint.config)
            # What the caller takes away is not to be loaded.
            gone = [name for name, value in kwargs.items() if value is None]
            if isinstance(hyperparams := tree.get("hyperparams"), dict):
                tree["hyperparams"] = {name: x for name, x in hyperparams.items() if name not in gone}
        parts = agent.components()
        if env is None:
            # Whoever only wants to ask it keeps their own random numbers.
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
        for name, value in kwargs.items():
            if value is not None and name in HYPERPARAMETERS:
                setattr(agent, name, value)
        if kwargs.get("seed") is not None:
            agent.set_random_seed(agent.seed)
        agent.state_was_loaded()
        return agent

    def config(self) -> dict[str, Any]:
        """What it takes to make an agent that this one's state fits, as plain values."""
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
        """What somebody had set on the agent that was saved; nothing that agents have themselves."""
        attributes = config.get("attributes", {})
        if not isinstance(attributes, dict) or not all(map(manifest.is_plain, attributes.values())):
            raise CheckpointError("its attributes are not plain values")
        for name in attributes:
            # Properties are asked of the class: the agent's own raise an error as long as something is not set.
            is_own = name in self._known_attributes or hasattr(type(self), str(name))
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or is_own:
                raise CheckpointError(f"{printable(name, 60)} is no attribute that a file may set")
        return attributes

    @classmethod
    def setting_names(cls) -> set[str]:
        """Names of the settings that files hold."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Arguments that make an agent like this one, but for its environment and its device."""
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
    ) -> Self:
        """An agent without a history, made as a file says."""
        if config["class"] != cls.__name__:
            raise CheckpointError(f"the file holds a {config['class']}: load it with {config['class']}.load()")
        if unknown := set(config["settings"]) - cls.setting_names():
            # Above all env, whose id would be imported.
            raise CheckpointError(f"the file has settings that no agent has: {printable(sorted(unknown), 200)}")
        settings = without_unused_settings(manifest.decode(config["settings"], given, trust=trust))
        # Where a file says nothing is to be written.
        settings |= {"tensorboard_log": None, **changes}
        observation_space, action_space = (
            manifest.decode(config[name], {}) for name in ("observation_space", "action_space")
        )
        check_count("n_envs", config["n_envs"], at_least=1)
        _check_networks(settings, observation_space, action_space, tree["policy"])
        return cls._rebuilt(settings, (observation_space, action_space, config["n_envs"]), device)

    @classmethod
    def _rebuilt(
        cls: type[Self],
        settings: Mapping[str, Any],
        spaces: tuple[Any, Any, int],
        device: torch.device | str,
    ) -> Self:
        """An agent without a history, with these spaces of observations and actions, and number of environments."""
        with unchanged_generators():
            agent = cls(**settings, device=device, _init_setup_model=False)
            agent.observation_space, agent.action_space, agent.n_envs = spaces
            agent._setup_model()
        return agent

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: no environment, and no random generators, which belong to the process."""
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


def _rebuild(kind: type[Self], state: Mapping[str, Any]) -> Self:
    """An agent from what its pickle holds."""
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
    """Refuse settings that do not make the networks whose weights a file holds, before memory is spent on them.

    Those of somebody's own classes are built as they are: whoever passes classes trusts the file.
    """
    kind = NAMED_POLICIES.get(settings["policy"], settings["policy"])
    kwargs = policy_arguments(settings["policy_kwargs"] or {}, settings.get("use_sde", False))
    own = [kind, *(value for value in kwargs.values() if callable(value))]
    if not all(manifest.is_known(each) for each in own):
        return
    net_arch = kwargs.get("net_arch") or []
    widths = net_arch.values() if isinstance(net_arch, dict) else [net_arch]
    if kwargs.get("n_lstm_layers", 1) + sum(map(len, widths)) > len(state):
        raise ValueError("it has more layers than weights")
    with unchanged_generators(), torch.device("meta"):
        networks = kind(observation_space, action_space, **kwargs).state_dict()
    shapes, given = ({name: tuple(t.shape) for name, t in each.items()} for each in (networks, state))
    if shapes != given:
        wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ValueError(f"its networks have other weights than it holds: {', '.join(wrong[:5])}")

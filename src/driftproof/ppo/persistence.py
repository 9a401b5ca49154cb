"""What an agent is, as one tree: saved, loaded, copied and inherited through it, and through nothing else."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from stable_baselines3.common.type_aliases import GymEnv

from driftproof._arguments import check_count
from driftproof._trust import Trust
from driftproof.nn.policies import NAMED_POLICIES
from driftproof.ppo import manifest, migration
from driftproof.ppo.base import AgentBase
from driftproof.ppo.components import load_state
from driftproof.ppo.environments import renormalized
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.normalizer import unchanged_on_error
from driftproof.ppo.settings import policy_arguments, without_unused_settings
from driftproof.settings.agent import HYPERPARAMETERS, AgentSettings
from driftproof.settings.definition import settings_of
from driftproof.state import CheckpointError, Stateful, copy_tree, printable, read, select, without, write

Self = TypeVar("Self", bound="Persistent")

OWN_PLACE = ("counters", "rollout", "random")
"""Where an agent is in its training, rather than what it has learned."""
_LAST = ("rollout", "random")
"""Environments begin with the statistics that were loaded, and nothing draws random numbers after."""
_CONFIG = {"class", "settings", "observation_space", "action_space", "n_envs"}
"""What a file says of how to build the agent."""
_NAMES = {"policy": "policy", "optimizer": "policy.optimizer", "hyperparams": "hyperparams"}
"""What Stable-Baselines3 calls components; others have ``_state`` behind their names."""


class Persistent(AgentBase):
    """Saving, loading and copying of an agent.

    A component that is given to :meth:`register` is part of files, copies and everything else.
    """

    _known_attributes: frozenset[str]
    """Names of attributes that every agent has, now or later."""
    _built_in: tuple[str, ...]
    """Components that every agent has."""

    def register(self, name: str, component: Stateful) -> None:
        """Make a component part of the agent's state.

        Args:
            name: Its place in the tree.
            component: Has ``state_dict()`` and ``load_state_dict()``, of tensors and plain values. If the agent was
                loaded from a file with a state of that name, it gets that. If it has ``check_state_dict()``, which
                raises an error for a wrong state, that is called before any component of the agent changes.
        """
        components = self.__dict__.setdefault("_components", {})
        if name in components:
            raise ValueError(f"there is a component {name!r} already")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(component, method, None)):
                raise TypeError(f"component {name!r} must have {method}(), {type(component).__name__} has not")
        unclaimed = self.__dict__.get("_unclaimed", {})
        if name in unclaimed:
            load_state(self.policy, {name: component}, {name: unclaimed[name]}, exact_match=True)
            del unclaimed[name]
        components[name] = component

    def components(self) -> dict[str, Stateful]:
        """Everything that makes the agent what it is, by name."""
        if not self._is_built:
            raise ValueError("there are no networks yet: call _setup_model() first")
        own: dict[str, Stateful] = self.__dict__["_components"]
        return {name: own[name] for name in (*(name for name in own if name not in _LAST), *_LAST)}

    def state_tree(self) -> dict[str, Any]:
        """A copy of the agent's whole state, which later training does not change."""
        return self._copied(self.components())

    def current_states(self) -> dict[str, Any]:
        """The agent's whole state itself, for those who copy or write it before training goes on."""
        return {name: dict(part.state_dict()) for name, part in self.components().items()}

    def load_state_tree(self, tree: Mapping[str, Any], exact_match: bool = True) -> None:
        """Become what the tree says; if a component does not take its state, nothing has changed.

        Args:
            tree: What :meth:`state_tree` returned, or part of it.
            exact_match: Whether a component without a state, or a state without a component, is an error instead of a
                warning.

        Raises:
            CheckpointError: A state is wrong; nothing has changed.
        """
        load_state(self.policy, self.components(), tree, exact_match)
        self.state_was_loaded()

    def get_parameters(self, include_optimizer: bool = True) -> dict[str, dict[str, Any]]:
        """A copy of everything that the agent has learned, by name, which later training does not change.

        Where it is in its training is not part of it: counters, where the environments are, random generators.

        Args:
            include_optimizer: Whether the optimizer's state is.
        """
        parts = {name: part for name, part in self.components().items() if name not in OWN_PLACE}
        if not include_optimizer:
            del parts["optimizer"]
        return {external_name(name): state for name, state in self._copied(parts).items()}

    def set_parameters(
        self,
        load_path_or_dict: str | os.PathLike[str] | io.BufferedIOBase | Mapping[str, Any],
        exact_match: bool = True,
        device: torch.device | str = "auto",
    ) -> None:
        """Take over what :meth:`get_parameters` of another agent returned, or what is in a file.

        If the policy changes, the recurrent state of running episodes is reset: it was another policy's.

        Parameters of earlier versions, which are a policy's state dict or have no hyper-parameters, are taken over with
        a ``FutureWarning`` that says what they lack. The optimizer's moments and the statistics of variance gradient
        scaling, if they are not given, begin anew, since they belong to the former weights.

        Args:
            load_path_or_dict: The states, or a file of :meth:`save`.
            exact_match: Whether a component without a state, or a state without a component, is an error instead of a
                warning.
            device: Is not needed: states go where the agent is.

        Raises:
            CheckpointError: The file, or a state, is wrong; nothing has changed.
        """
        parts = {name: part for name, part in self.components().items() if name not in OWN_PLACE}
        given: Mapping[str, Any]
        if isinstance(load_path_or_dict, Mapping):
            given = load_path_or_dict
        else:
            tree = _named_states(read(_with_suffix(load_path_or_dict)).tree, load_path_or_dict)
            given = tree if migration.is_policy_only(tree) else parameters_from(tree)
        with _as_checkpoint_error("the parameters"):
            states = self._states_from(_named_states(given, "the dict"), parts)
        before = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        load_state(self.policy, parts, states, exact_match, external=external_name)
        if any(not torch.equal(tensor, before[name]) for name, tensor in self.policy.state_dict().items()):
            self.reset_lstm_states_to_initial()
        self.state_was_loaded()
        if self.env is not None and self._last_obs is not None and "normalizer" in states:
            # Where wrappers made something else of what was normalised, only a new episode is right.
            self._last_obs = renormalized(self.env) if self.normalizer.is_used else self._last_obs

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
        write(_with_suffix(path, reading=False), tree, config=config, exact=exact)

    def _warn_of_what_is_lost(self, settings: Mapping[str, Any]) -> None:
        """Warn once of functions that must be given again, and of attributes that a file cannot hold."""
        functions = sorted(manifest.foreign_places(settings) & set(manifest.FUNCTIONS))
        values = [name for name, value in self._own_attributes().items() if not manifest.is_plain(value)]
        told: set[str] = self.__dict__.setdefault("_told", set())
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
            if message and message not in told:
                told.add(message)
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
        checkpoint = read(_with_suffix(path))
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
        with _as_checkpoint_error(path):
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
            with _as_checkpoint_error(path):
                if env is not None and "normalizer" in tree:
                    agent.normalizer.load_state_dict(tree["normalizer"])
            if env is not None:
                agent.set_env(env)
            with _as_checkpoint_error(path):
                load_state(agent.policy, parts, tree, exact_match=False)
        agent.__dict__["_unclaimed"] = {name: tree[name] for name in tree.keys() - agent.components().keys()}
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

    def state_was_loaded(self) -> None:
        """See to what depends on the state."""
        raise NotImplementedError

    def _states_from(self, given: Mapping[str, Any], parts: Mapping[str, Stateful]) -> dict[str, Any]:
        """States by the components' names, from what :meth:`set_parameters` was given."""
        is_policy_only = migration.is_policy_only(given)
        states = {"policy": given} if is_policy_only else {self._internal(name): x for name, x in given.items()}
        if not is_policy_only and not migration.is_earlier(given):
            return states
        states, notes = migration.completed(parts, states)
        what = "a policy only" if is_policy_only else "of an earlier version"
        told: set[str] = self.__dict__.setdefault("_told", set())
        message = f"the parameters are {what}: {'; '.join(notes)}"
        if notes and message not in told:
            told.add(message)
            warnings.warn(message, FutureWarning, stacklevel=3)
        return states

    def _internal(self, name: str) -> str:
        return name if name in self.components() else internal_name(name)

    @staticmethod
    def _copied(components: Mapping[str, Stateful]) -> dict[str, Any]:
        states: dict[str, Any] = copy_tree({name: dict(part.state_dict()) for name, part in components.items()})
        return states

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


@contextlib.contextmanager
def _as_checkpoint_error(path: object) -> Iterator[None]:
    """Whatever a component has against its state is an error of the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{path}: its state does not fit an agent with its settings: {error}") from error


def _named_states(tree: Any, source: object) -> Mapping[str, Any]:
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"{source} holds no states of an agent, but a {type(tree).__name__}")
    return tree


def _with_suffix(path: Any, reading: bool = True) -> Any:
    """A path with ``.zip`` if it has no ending, as Stable-Baselines3 has it; files stay what they are."""
    if not isinstance(path, str | os.PathLike):
        return path
    named = pathlib.Path(path)
    return named if named.suffix or (reading and named.is_file()) else named.with_suffix(".zip")


def parameters_from(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What :meth:`Persistent.get_parameters` would return, from an agent's whole tree.

    Files that were converted have the names that users know already.
    """
    named = {name if name in _NAMES.values() else external_name(internal_name(name)): x for name, x in tree.items()}
    return {name: state for name, state in named.items() if internal_name(name) not in OWN_PLACE}


def external_name(name: str) -> str:
    """What :meth:`Persistent.get_parameters` calls a component."""
    return _NAMES.get(name, f"{name}_state")


def internal_name(name: str) -> str:
    """A component's name in the tree, from either."""
    for internal, external in _NAMES.items():
        if name == external:
            return internal
    return name.removesuffix("_state")

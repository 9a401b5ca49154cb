"""State tree of an agent: the one form in which it is saved, loaded, copied and exploited."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from driftproof.ppo import migration
from driftproof.ppo.base import AgentBase
from driftproof.ppo.components import load_state
from driftproof.ppo.environments import renormalized
from driftproof.state import Checkpoint, CheckpointError, Stateful, copy_tree, read

OWN_PLACE = ("counters", "rollout", "random")
"""Components with the progress of training, rather than what was learned."""
_LAST = ("rollout", "random")
"""Loaded last: environments need the loaded statistics, and no random numbers may be drawn after ``random``."""
_NAMES = {"policy": "policy", "optimizer": "policy.optimizer", "hyperparams": "hyperparams"}
"""Stable-Baselines3's names of components; other names get the suffix ``_state``."""


class ComponentTree(AgentBase):
    """An agent's components by name; :meth:`register` adds one to files, copies and populations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._components: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        """States from the agent's file for components that are not registered yet."""
        self._told: set[str] = set()
        """Warnings that were issued."""
        super().__init__(*args, **kwargs)

    def register(self, name: str, component: Stateful) -> None:
        """Make a component part of the agent's state.

        Args:
            name: Name in the tree.
            component: Object with ``state_dict()`` and ``load_state_dict()``, of tensors and plain values. If the agent
                was loaded from a file with a state of that name, it is loaded. ``check_state_dict()``, if it has one,
                raises an error for an invalid state, and is called before any component of the agent changes.
        """
        if name in self._components:
            raise ValueError(f"there is a component {name!r} already")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(component, method, None)):
                raise TypeError(f"component {name!r} needs {method}(), which {type(component).__name__} lacks")
        if name in self._unclaimed:
            load_state(self.policy, {name: component}, {name: self._unclaimed[name]}, exact_match=True)
            del self._unclaimed[name]
        self._components[name] = component

    def components(self) -> dict[str, Stateful]:
        """All components of the agent's state, by name."""
        if not self._is_built:
            raise ValueError("there are no networks yet: call _setup_model() first")
        own = self._components
        return {name: own[name] for name in (*(name for name in own if name not in _LAST), *_LAST)}

    def state_tree(self) -> dict[str, Any]:
        """A copy of the agent's whole state."""
        return self._copied(self.components())

    def current_states(self) -> dict[str, Any]:
        """The agent's whole state without copying: copy or write it before training continues."""
        return {name: dict(part.state_dict()) for name, part in self.components().items()}

    def load_state_tree(self, tree: Mapping[str, Any], exact_match: bool = True) -> None:
        """Load the agent's whole state; if one component's state is invalid, nothing changes.

        Args:
            tree: Result of :meth:`state_tree`, or part of it.
            exact_match: Whether a component without a state, or a state without a component, is an error instead of a
                warning.

        Raises:
            CheckpointError: A state is invalid; nothing has changed.
        """
        load_state(self.policy, self.components(), tree, exact_match)
        self.state_was_loaded()

    def get_parameters(self, include_optimizer: bool = True) -> dict[str, dict[str, Any]]:
        """A copy of everything that the agent has learned, by name.

        The progress of training is not part of it: counters, states of environments, random generators.

        Args:
            include_optimizer: Include the optimizer's state.
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
        """Load the result of another agent's :meth:`get_parameters`, or a file.

        If the policy changes, the recurrent state of running episodes is reset.

        Parameters of earlier versions, which are a policy's state dict or have no hyper-parameters, are loaded with a
        ``FutureWarning`` that names what they lack. The optimizer's moments and the statistics of variance gradient
        scaling start anew if they are missing, since they belong to the former weights.

        Args:
            load_path_or_dict: The states, or a file of :meth:`save`.
            exact_match: Whether a component without a state, or a state without a component, is an error instead of a
                warning.
            device: Ignored: states go to the agent's device.

        Raises:
            CheckpointError: The file, or a state, is invalid; nothing has changed.
        """
        parts = {name: part for name, part in self.components().items() if name not in OWN_PLACE}
        given: Mapping[str, Any]
        if isinstance(load_path_or_dict, Mapping):
            given = load_path_or_dict
        else:
            checkpoint = read(with_suffix(load_path_or_dict))
            tree = _named_states(checkpoint.tree, load_path_or_dict)
            if "policy" in tree:
                check_layer_norm(self, checkpoint)
            given = tree if migration.is_policy_only(tree) else parameters_from(tree)
        with as_checkpoint_error("the parameters"):
            states = self._states_from(_named_states(given, "the dict"), parts)
        before = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        load_state(self.policy, parts, states, exact_match, external=external_name)
        if any(not torch.equal(tensor, before[name]) for name, tensor in self.policy.state_dict().items()):
            self.reset_lstm_states_to_initial()
        self.state_was_loaded()
        if self.env is not None and self._last_obs is not None and "normalizer" in states:
            # Where wrappers transform the normalised observations, they cannot be normalised again: start new episodes.
            self._last_obs = renormalized(self.env) if self.normalizer.is_used else self._last_obs

    def state_was_loaded(self) -> None:
        """Update what depends on the state."""
        raise NotImplementedError

    def _states_from(self, given: Mapping[str, Any], parts: Mapping[str, Stateful]) -> dict[str, Any]:
        """States by the components' names, from the argument of :meth:`set_parameters`."""
        is_policy_only = migration.is_policy_only(given)
        states = {"policy": given} if is_policy_only else {self._internal(name): x for name, x in given.items()}
        if not is_policy_only and not migration.is_earlier(given):
            return states
        states, notes = migration.completed(parts, states)
        what = "a policy only" if is_policy_only else "of an earlier version"
        message = f"the parameters are {what}: {'; '.join(notes)}"
        if notes and message not in self._told:
            self._told.add(message)
            warnings.warn(message, FutureWarning, stacklevel=3)
        return states

    def _internal(self, name: str) -> str:
        return name if name in self.components() else internal_name(name)

    @staticmethod
    def _copied(components: Mapping[str, Stateful]) -> dict[str, Any]:
        states: dict[str, Any] = copy_tree({name: dict(part.state_dict()) for name, part in components.items()})
        return states


@contextlib.contextmanager
def as_checkpoint_error(path: object) -> Iterator[None]:
    """Turn any error of loading a state into a ``CheckpointError`` that names the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{path}: its state does not fit an agent with its settings: {error}") from error


def _named_states(tree: Any, source: object) -> Mapping[str, Any]:
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"{source} does not hold states of an agent, but a {type(tree).__name__}")
    return tree


def check_layer_norm(agent: AgentBase, checkpoint: Checkpoint) -> None:
    """Refuse weights of networks with layer normalisation for an agent without it, and the other way round.

    It has no parameters, so that the weights would fit, and the agent act differently.

    Raises:
        CheckpointError: One has it, and the other has not.
    """
    settings = checkpoint.config.get("settings")
    if not isinstance(settings, Mapping):
        return
    own, given = bool(getattr(agent, "layer_norm", False)), bool(settings.get("layer_norm"))
    if own != given:
        has, lacks = ("agent's", "checkpoint's") if own else ("checkpoint's", "agent's")
        raise CheckpointError(
            f"the {has} networks have layer normalisation and the {lacks} do not: set layer_norm={given} "
            f"(in configurations drift.layer_norm: {str(given).lower()})"
        )


def with_suffix(path: Any, reading: bool = True) -> Any:
    """A path with ``.zip`` if it has no suffix, as in Stable-Baselines3; file objects are returned unchanged."""
    if not isinstance(path, str | os.PathLike):
        return path
    named = pathlib.Path(path)
    return named if named.suffix or (reading and named.is_file()) else named.with_suffix(".zip")


def parameters_from(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The result of :meth:`Persistent.get_parameters`, from an agent's whole tree.

    Converted files already have Stable-Baselines3's names.
    """
    named = {name if name in _NAMES.values() else external_name(internal_name(name)): x for name, x in tree.items()}
    return {name: state for name, state in named.items() if internal_name(name) not in OWN_PLACE}


def external_name(name: str) -> str:
    """A component's name in :meth:`Persistent.get_parameters`."""
    return _NAMES.get(name, f"{name}_state")


def internal_name(name: str) -> str:
    """A component's name in the tree, from its internal or external name."""
    for internal, external in _NAMES.items():
        if name == external:
            return internal
    return name.removesuffix("_state")

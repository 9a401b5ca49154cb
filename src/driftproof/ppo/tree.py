"""What an agent is, as one tree: saved, loaded, copied and inherited through it, and through nothing else."""

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
from driftproof.state import CheckpointError, Stateful, copy_tree, read

OWN_PLACE = ("counters", "rollout", "random")
"""Where an agent is in its training, rather than what it has learned."""
_LAST = ("rollout", "random")
"""Environments begin with the statistics that were loaded, and nothing draws random numbers after."""
_NAMES = {"policy": "policy", "optimizer": "policy.optimizer", "hyperparams": "hyperparams"}
"""What Stable-Baselines3 calls components; others have ``_state`` behind their names."""


class ComponentTree(AgentBase):
    """An agent's components by name. One that is given to :meth:`register` is part of files, copies and all else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._components: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        """States in the agent's file of components that are not registered yet."""
        self._told: set[str] = set()
        """Warnings that were given."""
        super().__init__(*args, **kwargs)

    def register(self, name: str, component: Stateful) -> None:
        """Make a component part of the agent's state.

        Args:
            name: Its place in the tree.
            component: Has ``state_dict()`` and ``load_state_dict()``, of tensors and plain values. If the agent was
                loaded from a file with a state of that name, it gets that. If it has ``check_state_dict()``, which
                raises an error for a wrong state, that is called before any component of the agent changes.
        """
        if name in self._components:
            raise ValueError(f"there is a component {name!r} already")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(component, method, None)):
                raise TypeError(f"component {name!r} must have {method}(), {type(component).__name__} has not")
        if name in self._unclaimed:
            load_state(self.policy, {name: component}, {name: self._unclaimed[name]}, exact_match=True)
            del self._unclaimed[name]
        self._components[name] = component

    def components(self) -> dict[str, Stateful]:
        """Everything that makes the agent what it is, by name."""
        if not self._is_built:
            raise ValueError("there are no networks yet: call _setup_model() first")
        own = self._components
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
            tree = _named_states(read(with_suffix(load_path_or_dict)).tree, load_path_or_dict)
            given = tree if migration.is_policy_only(tree) else parameters_from(tree)
        with as_checkpoint_error("the parameters"):
            states = self._states_from(_named_states(given, "the dict"), parts)
        before = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        load_state(self.policy, parts, states, exact_match, external=external_name)
        if any(not torch.equal(tensor, before[name]) for name, tensor in self.policy.state_dict().items()):
            self.reset_lstm_states_to_initial()
        self.state_was_loaded()
        if self.env is not None and self._last_obs is not None and "normalizer" in states:
            # Where wrappers made something else of what was normalised, only a new episode is right.
            self._last_obs = renormalized(self.env) if self.normalizer.is_used else self._last_obs

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


def with_suffix(path: Any, reading: bool = True) -> Any:
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

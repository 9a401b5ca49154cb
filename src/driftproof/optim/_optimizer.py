"""The optimizer behind UPGD, AdaptiveUPGD and UPGDW: state, checks, the step."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from driftproof._arguments import check_flag, check_number, check_option
from driftproof.optim._betas import check_agreement
from driftproof.optim._core import Gate, Group, NoiseReference, Settings, bias_correction, compute_dtype
from driftproof.optim._foreach import Scratch, pack
from driftproof.optim._metrics import step_metrics
from driftproof.optim._noise_ratio import warn_once
from driftproof.optim._traced import step as traced_step
from driftproof.optim.functional import upgd_step
from driftproof.settings.optimizers import BOUNDS, NOISE_DEFAULTS

SHARED_DEFAULTS: dict[str, Any] = {
    "gate": "anchored",
    "temperature": 1.0,
    **NOISE_DEFAULTS,
    "maximize": False,
    "foreach": None,
    "capturable": False,
}
"""Options of every group, and the values that state dicts written before an option existed are read with."""


_DEFAULT_BETAS = {"betas": (0.9, 0.999)}
_LISTS = ("params", "grads", "utilities", "steps", "first_moments", "second_moments", "norm_emas")


class _Prepared(NamedTuple):
    """A group as a step takes it. It is used again as long as parameters and state are the very same tensors."""

    sources: list[Any]
    addresses: list[int]
    """Where utilities and moments are, for the group has views of them."""
    group: Group

    def fits(self, sources: list[Any], settings: Settings) -> bool:
        """Whether the group would be the same again; on a device that is not for the host to say."""
        return (
            not (settings.capturable or self.group.settings.capturable)
            and settings.averages_norms == self.group.settings.averages_norms
            and len(sources) == len(self.sources)
            and all(map(operator.is_, sources, self.sources))
            and _addresses(self.group) == self.addresses
        )


class UPGDBase(Optimizer):
    """Base class of UPGD optimizers; subclasses add the constructor and the direction of steps."""

    moment_keys: ClassVar[tuple[str, str] | None] = None
    """Names of the two moments in the state, for Adam-like directions."""
    beta_names: ClassVar[dict[str, int]] = {}
    """Options that mean the same as one of the ``betas``, each with its index."""
    _warned_of_noise = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        defaults = {**SHARED_DEFAULTS, **defaults}
        _validate(defaults)
        self._merge_aliases(defaults, _DEFAULT_BETAS)
        self._scratch = Scratch()
        self._prepared: dict[int, _Prepared] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; its options are checked like those of the constructor.

        Raises:
            NotImplementedError: A parameter is a ``DTensor``, such as those of FSDP2.
        """
        _validate({**self.defaults, **param_group})
        param_group = dict(param_group)
        aliases = {name: (i, param_group.get(name), None) for name, i in self.beta_names.items()}
        check_agreement(param_group.get("betas"), aliases)
        self._merge_aliases(param_group, self.defaults)
        super().add_param_group(param_group)
        if any(map(_is_sharded, self.param_groups[-1]["params"])):
            self.param_groups.pop()
            raise NotImplementedError(
                f"{type(self).__name__} does not support DTensor parameters, such as those of FSDP2: the gate compares "
                "the utilities of all weights, which no process has. Use DistributedDataParallel"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step.

        Where an attribute ``found_inf`` is set, as for the fused optimizers of torch, nothing changes if it is not 0:
        such a step is not taken, and with ``capturable`` the host need not know.

        Args:
            closure: Re-evaluates the model and returns the loss.
        """
        compiling = torch.compiler.is_compiling()
        capturing = not compiling and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing and not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(f"{type(self).__name__} in a CUDA graph needs capturable=True in all parameter groups")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        proceed = None if found_inf is None else found_inf == 0
        if compiling:
            self._step_traced(proceed)
            return loss
        groups = [self._prepare(i, group, proceed) for i, group in enumerate(self.param_groups)]
        upgd_step(groups, scratch=self._scratch, proceed=proceed)
        for group in groups:
            group.grads = []  # What is kept for the next step must not keep gradients alive.
        return loss

    def _step_traced(self, proceed: Tensor | None) -> None:
        """The step as torch.compile sees it."""
        groups = []
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[], [], [], [], [], [], []]
            params, grads, utilities, steps, first_moments, second_moments, norm_emas = lists
            self._init_group(group, params, grads, utilities, steps, first_moments, second_moments, norm_emas)
            if group["maximize"]:
                grads = [-grad for grad in grads]
            settings = self.settings_of(group)
            groups.append(Group(settings, params, grads, utilities, steps, first_moments, second_moments, norm_emas))
        traced_step(groups, proceed)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        """Complete the state of a group, and append parameters, gradients and state to lists.

        The compiler knows methods of this name: it runs them while it traces the step, instead of compiling them.
        """
        self._complete_state(group, None)
        gathered = self._gather(group)
        for param in gathered.params:
            self.state[param]["step"] = self.state[param]["step"].to(param.device)
        gathered.grads = [param.grad for param in gathered.params if param.grad is not None]
        gathered.steps = [self.state[param]["step"] for param in gathered.params]
        for destination, name in zip(lists, _LISTS, strict=True):
            destination += getattr(gathered, name)

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the last step, as 0-dim tensors on the parameters' device.

        ``upgd/noise_to_direction`` is the expected norm of the noise over the norm of the direction, ``upgd/gate_mean``
        and ``upgd/gate_std`` describe the gate over all weights, and ``upgd/utility_p10``, ``_p50``, ``_p90`` are
        quantiles of the bias-corrected utility. Call it after :meth:`step` and before ``zero_grad``: it covers the
        parameters that have a gradient.
        """
        groups = [self._gather(group) for group in self.param_groups]
        if not any(group.params for group in groups):
            raise RuntimeError("metrics() found no gradients: call it after step() and before zero_grad()")
        return step_metrics([group for group in groups if group.params])

    def state_dict(self) -> dict[str, Any]:
        """The state, as for every optimizer; all utilities are plain tensors of their own."""
        state_dict = super().state_dict()
        return {**state_dict, "state": {key: _unpacked(state) for key, state in state_dict["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state. Groups from before an option existed keep the value that they have in this optimizer.

        Raises:
            ValueError: The state does not fit the parameters; nothing has changed.
        """
        checked: dict[str, Any] = {}

        def check(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            checked.update(self._checked_state_dict(loaded))
            return checked

        # After the pre-hooks of others and before their post-hooks, so that their changes to the state count.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._load_exactly(checked), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _checked_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose groups have all options, if its state fits the parameters."""
        saved_groups = state_dict["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in self.param_groups]:
            return state_dict  # torch raises the error.
        groups = []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            _validate({**options, **saved})
            saved = dict(saved)
            self._merge_aliases(saved, options)
            groups.append({**options, **saved})
            for key, param in zip(saved["params"], group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    _check_entry(name, value, key, param)
        return {**state_dict, "param_groups": groups}

    def _load_exactly(self, state_dict: dict[str, Any]) -> None:
        """Load the state again, unlike torch as copies and without casting to half precision."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self.state[param][name] = _load(name, value, param, group["capturable"])
        self._pack_state([param for group in self.param_groups for param in group["params"]])

    def __getstate__(self) -> dict[str, Any]:
        attributes = super().__getstate__()
        return {**attributes, "state": {param: _unpacked(state) for param, state in self.state.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = defaultdict(dict, self.state)
        self._scratch = Scratch()
        self._prepared = {}
        for name, value in SHARED_DEFAULTS.items():
            self.defaults.setdefault(name, value)
        self._merge_aliases(self.defaults, _DEFAULT_BETAS)
        for group in self.param_groups:
            self._merge_aliases(group, self.defaults)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._pack_state(list(self.state))

    def _prepare(self, i: int, group: dict[str, Any], proceed: Tensor | None) -> Group:
        """The tensors of those parameters that have a gradient, with complete state."""
        params = [p for p in group["params"] if p.grad is not None]
        if {p.grad.layout for p in params} - {torch.strided}:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        settings = self.settings_of(group)
        sources = [*params, *(entry for p in params for entry in self.state[p].values())]
        known = self._prepared.get(i)
        if known is None or not known.fits(sources, settings):
            self._complete_state(group, proceed)
            gathered = self._gather(group)
            sources = [*params, *(entry for p in params for entry in self.state[p].values())]
            self._prepared[i] = _Prepared(sources, _addresses(gathered), gathered)
            return gathered
        known.group.settings = settings
        known.group.grads = _gradients(known.group.params, group["maximize"])
        return known.group

    def _complete_state(self, group: dict[str, Any], proceed: Tensor | None) -> None:
        """Create missing state of parameters with a gradient; drop state that the options no longer need."""
        params = [p for p in group["params"] if p.grad is not None]
        if any(p.is_complex() for p in params):
            raise RuntimeError(f"{type(self).__name__} does not support complex parameters")
        settings = self.settings_of(group)
        names = ["avg_utility", *(self.moment_keys or ()), *(["grad_norm_ema"] if settings.averages_norms else [])]
        begun = []
        for param in params:
            state = self.state[param]
            home = _step_device(param, settings.capturable)
            late = "step" in state
            if not late:
                state["step"] = torch.zeros((), dtype=torch.float32, device=home)
            elif state["step"].device != home:
                state["step"] = state["step"].to(home)
            if not settings.averages_norms:
                state.pop("grad_norm_ema", None)
            missing = [name for name in names if name not in state]
            for name in missing:
                like = state["step"] if name == "grad_norm_ema" else param
                state[name] = torch.zeros_like(like, dtype=compute_dtype(param.dtype), device=param.device)
            if missing:
                begun.append(param)
                if late:
                    self._begin_late(param, missing, group["maximize"], settings, proceed)
        if begun:
            self._pack_state(begun)
            warn_once(self, begun, stacklevel=7)

    def _begin_late(
        self, param: Tensor, names: list[str], maximize: bool, settings: Settings, proceed: Tensor | None
    ) -> None:
        """Initialise averages that start late as if every gradient so far had been like this one.

        That happens if the state is of another optimizer, or if an option is switched on.
        """
        state = self.state[param]
        assert param.grad is not None
        grad = (-param.grad if maximize else param.grad).to(compute_dtype(param.dtype))
        if proceed is not None:
            grad = torch.where(proceed, grad, 0)
        averaged = {
            "avg_utility": (-grad * param, settings.beta_utility),
            "grad_norm_ema": (torch.linalg.vector_norm(grad), settings.noise_beta),
        }
        if self.moment_keys is not None and settings.betas is not None:
            averaged |= dict(zip(self.moment_keys, zip((grad, grad * grad), settings.betas, strict=True), strict=True))
        for name in names:
            value, beta = averaged[name]
            correction = bias_correction(beta, state["step"])
            state[name].copy_(torch.where(state["step"] > 0, value * correction, 0))

    def _pack_state(self, params: list[Tensor]) -> None:
        """Place step counts, utilities, and moments, side by side in memory, so that one operation covers them all."""
        for name in ("step", "avg_utility", *(self.moment_keys or ())):
            alike = defaultdict(list)
            for param in params:
                entry = self.state.get(param, {}).get(name)
                if isinstance(entry, Tensor) and entry.is_contiguous() and entry.numel() > 0:
                    alike[entry.device, entry.dtype].append(param)
            for together in alike.values():
                packed = pack([self.state[param][name] for param in together])
                for param, entry in zip(together, packed, strict=True):
                    self.state[param][name] = entry

    def _gather(self, group: dict[str, Any]) -> Group:
        """The tensors of those parameters that have a gradient and state."""
        settings, keys = self.settings_of(group), self.moment_keys
        present = [p for p in group["params"] if p.grad is not None and p.numel() > 0 and self.state.get(p)]
        states = [self.state[p] for p in present]
        return Group(
            settings,
            params=present,
            grads=_gradients(present, group["maximize"]),
            utilities=[state["avg_utility"] for state in states],
            steps=[state["step"] for state in states],
            first_moments=[state[keys[0]] for state in states] if keys else [],
            second_moments=[state[keys[1]] for state in states] if keys else [],
            norm_emas=[state["grad_norm_ema"] for state in states] if settings.averages_norms else [],
        )

    def settings_of(self, group: dict[str, Any]) -> Settings:
        """Hyper-parameters of a group as a step takes them."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.item() if lr.is_cpu and not group["capturable"] else lr.reshape(())
        return Settings(
            lr=lr,
            weight_decay=group["weight_decay"],
            sigma=group["sigma"],
            gate=group["gate"],
            temperature=group["temperature"],
            adaptive_noise=group["adaptive_noise"],
            noise_reference=group["noise_reference"],
            noise_beta=group["noise_beta"],
            min_noise_std=group["min_noise_std"],
            instant_noise_scale=group["instant_noise_scale"],
            foreach=group["foreach"] is not False,
            capturable=group["capturable"],
            **self._direction_settings(group),
        )

    def _merge_aliases(self, group: dict[str, Any], present: Mapping[str, Any]) -> None:
        """Replace options of a group, or some of them, by those that they are other names for.

        Args:
            group: Changed in place.
            present: The options that are in force where the group does not say.
        """

    def _direction_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Settings of the direction: ``beta_utility``, and the moments of Adam-like directions."""
        raise NotImplementedError


def _addresses(group: Group) -> list[int]:
    return [t.data_ptr() for t in (*group.utilities, *group.first_moments, *group.second_moments)]


def _gradients(params: list[Tensor], maximize: bool) -> list[Any]:
    return [-p.grad for p in params if p.grad is not None] if maximize else [p.grad for p in params]


def _is_sharded(param: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # Not imported where nobody uses it.
    return module is not None and isinstance(param, module.DTensor)


def _step_device(param: Tensor, capturable: bool) -> torch.device:
    return param.device if capturable else torch.device("cpu")


def _check_entry(name: str, value: Any, key: Any, param: Tensor) -> None:
    """Raise a ``ValueError`` if a saved entry of a parameter's state cannot be one of its own."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value) if isinstance(value, (int, float)) else None
    wanted = () if name in ("step", "grad_norm_ema") else tuple(param.shape)
    if value is None or (value.numel() != 1 if wanted == () else tuple(value.shape) != wanted):
        found = "no tensor" if value is None else f"shape {tuple(value.shape)}"
        raise ValueError(f"the state does not fit: {name!r} of parameter {key!r} has {found}, not {wanted}")


def _load(name: str, value: Any, param: Tensor, capturable: bool) -> Any:
    """A saved entry of a parameter's state as this optimizer keeps it."""
    value = torch.as_tensor(value).detach()
    if name == "step":
        return value.reshape(()).to(_step_device(param, capturable), torch.float32, copy=True)
    return value.to(param.device, compute_dtype(param.dtype), copy=True)


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """A state whose tensors have memory of their own."""
    own = {name for name, entry in state.items() if not isinstance(entry, Tensor) or name == "grad_norm_ema"}
    return {
        name: entry if name in own else entry.clone(memory_format=torch.preserve_format)
        for name, entry in state.items()
    }


def _validate(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Invalid lr: a tensor of shape {tuple(lr.shape)}; must have one element")
    if not isinstance(lr, Tensor) or lr.is_cpu:
        check_number("lr", lr.item() if isinstance(lr, Tensor) else lr, at_least=0)
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas!r}; must be two numbers")
    for name in BOUNDS.keys() & group.keys():
        check_number(name, group[name], **BOUNDS[name])
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, **BOUNDS["beta1"])
    for name in ("adaptive_noise", "instant_noise_scale", "maximize", "capturable"):
        check_flag(name, group[name])
    if group["foreach"] is not None:
        check_flag("foreach", group["foreach"])
    if group.get("amsgrad"):
        raise NotImplementedError("amsgrad=True is not supported")
    check_option("gate", group["gate"], get_args(Gate))
    check_option("noise_reference", group["noise_reference"], get_args(NoiseReference))

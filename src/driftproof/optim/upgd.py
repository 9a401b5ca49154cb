"""UPGD, AdaptiveUPGD and UPGDW: optimizers that protect useful weights and perturb useless ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from driftproof.optim._betas import check_agreement, merge_betas
from driftproof.optim._core import Gate, NoiseReference
from driftproof.optim._noise_ratio import warn_once
from driftproof.optim._optimizer import UPGDBase


class UPGD(UPGDBase):
    """Utility-based perturbed gradient descent along the gradient.

    Weights of high utility are protected, the others take a noisy step, so that a network keeps both what it knows and
    the ability to learn (Elsayed & Mahmood, ICLR 2024, arXiv 2404.00781). :mod:`driftproof.optim.functional` has the
    formulas.

    Args:
        params: Parameters, or groups of them, as for every ``torch.optim`` optimizer.
        lr: Step size; a number, or a tensor of one element. Typical: 1e-3 to 1e-1 for this class, and as for Adam for
            the other two.
        weight_decay: Decoupled decay, ``p * (1 - lr * weight_decay)``. Raise it to keep weights small over very
            long training.
        beta_utility: Decay of the utility's average, over about ``1 / (1 - beta_utility)`` steps. Shorter adapts faster
            to a change, longer protects weights that are rarely used.
        sigma: Standard deviation of the noise added to the direction, before ``lr`` and gate. 0 disables it.
        gate: How utility becomes protection. ``"anchored"`` leaves a weight of zero utility exactly as it would move
            without a gate; ``"minmax"`` ranks each weight between the extremes.
        temperature: Sharpness of the gate; higher protects more of the best weights and frees more of the worst.
        adaptive_noise: Make the noise of each tensor ``max(sigma * reference, min_noise_std)`` instead of ``sigma``.
        noise_reference: ``"direction"``, the root mean square of the direction: the ratio of noise to direction then
            survives any rescaling of the gradients. ``"gradient"``, the norm of the gradient.
        noise_beta: Decay of the averaged norms, for ``noise_reference="gradient"`` with ``instant_noise_scale=False``.
        min_noise_std: Smallest standard deviation of adaptive noise.
        instant_noise_scale: Take the norm of this step's gradient; ``False``: its average over time.
        maximize: Ascend instead of descend.
        foreach: ``False`` selects the slow single-tensor reference form.
        capturable: Keep step counts on the device, so that the step can be captured in a CUDA graph.
        betas: For code that passes AdamW's arguments to any optimizer: the second is ``beta_utility``, as for
            :class:`UPGDW`. The first is not used, because there is no momentum.
    """

    beta_names: ClassVar[dict[str, int]] = {"beta_utility": 1}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-5,
        weight_decay: float = 1e-3,
        beta_utility: float = 0.999,
        sigma: float = 1e-3,
        *,
        gate: Gate = "anchored",
        temperature: float = 1.0,
        adaptive_noise: bool = False,
        noise_reference: NoiseReference = "direction",
        noise_beta: float = 0.999,
        min_noise_std: float = 1e-6,
        instant_noise_scale: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        betas: tuple[float, float] | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "gate": gate,
            "temperature": temperature,
            "adaptive_noise": adaptive_noise,
            "noise_reference": noise_reference,
            "noise_beta": noise_beta,
            "min_noise_std": min_noise_std,
            "instant_noise_scale": instant_noise_scale,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            # For schedulers that cycle momentum: they refuse optimizers without. The step does not read it.
            "momentum": 0.0,
        }
        if betas is not None:
            check_agreement(betas, {"beta_utility": (1, beta_utility, 0.999)})
            defaults["betas"] = betas
        super().__init__(params, defaults)

    def check_noise(self) -> None:
        """Warn if a variance gradient scaler shrinks the gradients and the noise stays as it is.

        The first step does so too; every optimizer warns once.
        """
        warn_once(self, [param for group in self.param_groups for param in group["params"]], stacklevel=3)

    def _merge_aliases(self, group: dict[str, Any], present: Mapping[str, Any]) -> None:
        if "betas" in group:
            group["beta_utility"] = group.pop("betas")[1]
        group.setdefault("momentum", 0.0)

    def _direction_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"beta_utility": group["beta_utility"]}


class AdaptiveUPGD(UPGDBase):
    """UPGD along Adam's direction ``m̂ / (√v̂ + eps)``, with a separate decay for the utility.

    ``lr`` has the meaning of Adam's: with the default gate and no noise, a weight of zero utility takes Adam's step.

    Args:
        params: As for :class:`UPGD`, and so are ``lr``, ``weight_decay``, ``beta_utility``, ``sigma``, ``gate`` and all
            that is not named here.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        betas: Both decays, as for AdamW. Parameter groups have them under this name.
    """

    moment_keys = ("first_moment", "sec_moment")
    beta_names: ClassVar[dict[str, int]] = {"beta1": 0, "beta2": 1}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-5,
        weight_decay: float = 1e-3,
        beta_utility: float = 0.999,
        sigma: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        adaptive_noise: bool = False,
        noise_beta: float = 0.999,
        min_noise_std: float = 1e-6,
        instant_noise_scale: bool = True,
        *,
        gate: Gate = "anchored",
        temperature: float = 1.0,
        noise_reference: NoiseReference = "direction",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        betas: tuple[float, float] | None = None,
    ) -> None:
        if betas is not None:
            check_agreement(betas, {"beta1": (0, beta1, 0.9), "beta2": (1, beta2, 0.999)})
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta_utility": beta_utility,
            "sigma": sigma,
            **({"beta1": beta1, "beta2": beta2} if betas is None else {"betas": betas}),
            "eps": eps,
            "adaptive_noise": adaptive_noise,
            "noise_beta": noise_beta,
            "min_noise_std": min_noise_std,
            "instant_noise_scale": instant_noise_scale,
            "gate": gate,
            "temperature": temperature,
            "noise_reference": noise_reference,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def _merge_aliases(self, group: dict[str, Any], present: Mapping[str, Any]) -> None:
        merge_betas(group, present)

    def _direction_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        if "beta1" in group or "beta2" in group:
            # Set by hand: that is the latest.
            merge_betas(group, {"betas": group.pop("betas")})
        return {
            "beta_utility": group["beta_utility"],
            "betas": tuple(group["betas"]),
            "eps": group["eps"],
        }


class UPGDW(UPGDBase):
    """UPGD along Adam's direction with AdamW's arguments: a drop-in replacement for AdamW.

    Args:
        params: As for :class:`UPGD`, and so is all that is not named here.
        betas: Decays of the two moments; the second is also that of the utility.
        eps: Added to the root of the second moment.
        amsgrad: Not supported.
    """

    moment_keys = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        sigma: float = 1e-3,
        amsgrad: bool = False,
        *,
        gate: Gate = "anchored",
        temperature: float = 1.0,
        adaptive_noise: bool = False,
        noise_reference: NoiseReference = "direction",
        noise_beta: float = 0.999,
        min_noise_std: float = 1e-6,
        instant_noise_scale: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "sigma": sigma,
            "amsgrad": amsgrad,
            "gate": gate,
            "temperature": temperature,
            "adaptive_noise": adaptive_noise,
            "noise_reference": noise_reference,
            "noise_beta": noise_beta,
            "min_noise_std": min_noise_std,
            "instant_noise_scale": instant_noise_scale,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def _direction_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"beta_utility": group["betas"][1], "betas": tuple(group["betas"]), "eps": group["eps"]}

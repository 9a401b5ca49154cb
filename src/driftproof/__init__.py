"""Recurrent distributional PPO that keeps learning when the environment drifts.

Names are imported when they are first used, so that ``import driftproof`` is fast. It registers the environments,
such as ``driftproof/RegimeMarket-v0``, with ``gymnasium.make``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from driftproof import _environment_ids

if TYPE_CHECKING:
    from driftproof.adversarial import SAPPOConfig
    from driftproof.envs import drifting
    from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
    from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner, PBTScheduler
    from driftproof.ppo import DistributionalPPO

    load = DistributionalPPO.load
    __version__: str

__all__ = [
    "UPGD",
    "UPGDW",
    "AdaptiveUPGD",
    "DistributionalPPO",
    "HyperparamConfig",
    "PBTConfig",
    "PBTRunner",
    "PBTScheduler",
    "SAPPOConfig",
    "VarianceGradientScaler",
    "drifting",
    "load",
]

_PACKAGES = {
    "adversarial": ("SAPPOConfig",),
    "envs": ("drifting",),
    "optim": ("UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"),
    "pbt": ("HyperparamConfig", "PBTConfig", "PBTRunner", "PBTScheduler"),
    "ppo": ("DistributionalPPO",),
}
_PACKAGE_OF = {name: package for package, names in _PACKAGES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found = import_module("importlib.metadata").version("driftproof")
    elif name == "load":
        found = __getattr__("DistributionalPPO").load
    elif name in _PACKAGE_OF:
        found = getattr(import_module(f"driftproof.{_PACKAGE_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_environment_ids.register()

"""Registration of the environments' ids with ``gymnasium.make``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ENTRY_POINTS = {
    "driftproof/RegimeMarket-v0": "driftproof.envs.regime_market:RegimeMarketEnv",
    "driftproof/Market-v0": "driftproof.envs.market:MarketEnv",
    "driftproof/MemoryCue-v0": "driftproof.envs.memory:MemoryCue",
    "driftproof/RepeatPrevious-v0": "driftproof.envs.memory:RepeatPrevious",
    "driftproof/CartPoleNoVelocity-v0": "driftproof.envs.memory:cartpole_no_velocity",
}
_REGISTRY = "gymnasium.envs.registration"


def register() -> None:
    """Register the environments with Gymnasium: now, or, since importing it is slow, once it is imported."""
    if _REGISTRY not in sys.modules:
        if not any(isinstance(finder, _WhenGymnasiumIsImported) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenGymnasiumIsImported())
        return
    from gymnasium.envs.registration import register, registry

    for name, entry_point in ENTRY_POINTS.items():
        if name not in registry:
            # Both check the order of calls themselves, and Gymnasium's checker would take most of a step's time.
            register(name, entry_point, order_enforce=False, disable_env_checker=True)


class _WhenGymnasiumIsImported:
    """Registers the environments after the import of Gymnasium's registry, which has no plugins since version 1.0."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

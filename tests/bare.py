"""What works with the core dependencies alone: run in an environment that has no more, or where no more is found.

``python tests/bare.py`` refuses all other packages itself; ``python tests/bare.py --really`` has only the core.
"""

import sys
from importlib.machinery import PathFinder

CORE = {"numpy", "safetensors", "torch"}
OF_TORCH = {
    *("functorch", "torchgen", "triton"),
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing_extensions"),
}
OTHERS = {"gymnasium", "pandas", "plotly", "pydantic", "rich", "stable_baselines3", "tensorboard", "typer", "yaml"}

PACKAGES = ("adversarial", "backtest", "config", "envs", "export", "nn.policies", "pbt", "ppo", "report", "signals")


class CoreFinder(PathFinder):
    """Finds, of all installed packages, the core dependencies, what torch needs, and this package."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target)
        if path is not None or spec is None or fullname in {*CORE, *OF_TORCH, "driftproof"}:
            return spec
        return None if "site-packages" in str(spec.origin) else spec


def refuse_others():
    """Let later imports find the core only."""
    sys.meta_path[:] = [CoreFinder if finder is PathFinder else finder for finder in sys.meta_path]


def use_the_core():
    """Train with every optimizer, and write and read a state tree."""
    import tempfile
    from pathlib import Path

    import torch

    import driftproof.learner
    from driftproof import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
    from driftproof.state import compare, read, write

    for optimizer_class in (UPGD, UPGDW, AdaptiveUPGD):
        model = torch.nn.Linear(4, 2)
        before = model.weight.detach().clone()
        optimizer, scaler = optimizer_class(model.parameters()), VarianceGradientScaler(model.named_parameters())
        model(torch.ones(3, 4)).square().mean().backward()
        scaler.scale_gradients()
        optimizer.step()
        scaler.step()
        assert not torch.equal(model.weight, before)
        assert driftproof.learner.Learner
        with tempfile.TemporaryDirectory() as folder:
            tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
            write(Path(folder, "state.zip"), tree)
            assert not compare(read(Path(folder, "state.zip")).tree, tree)


def errors():
    """Error of importing each package that needs more, by its name."""
    from importlib import import_module

    found = {}
    for name in PACKAGES:
        try:
            import_module(f"driftproof.{name}")
        except ImportError as error:
            found[f"driftproof.{name}"] = str(error)
    return found


if __name__ == "__main__":
    if "--really" not in sys.argv:
        refuse_others()
    use_the_core()
    assert not OTHERS & set(sys.modules), OTHERS & set(sys.modules)
    for name, error in errors().items():
        print(f"{name}: {error}")

"""Nothing in the package runs what a file says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import driftproof

SOURCES = sorted(Path(driftproof.__file__).parent.rglob("*.py"))
PICKLES = ("pickle", "cloudpickle", "dill", "joblib", "marshal")
UNSAFE = ("eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load")


def unsafe_calls(source: str) -> list[str]:
    """Calls that could run code from a file. Methods of the same names, as in ``policy.eval()``, are none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            found.append(f"from {node.module} import")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        unpickles = module in PICKLES and function in ("load", "loads", "Unpickler")
        if name in UNSAFE or unpickles or (name == "torch.load" and not safe):
            found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(Path(driftproof.__file__).parent)))
def test_no_unsafe_calls(path):
    assert unsafe_calls(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "pickle.load(file)",
        "x = pickle.loads(data)",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "cloudpickle.load(file)",
    ],
)
def test_unsafe_calls_are_seen(source):
    assert len(unsafe_calls(source)) == 1


@pytest.mark.parametrize(
    "source", ["policy.eval()", "torch.load(path, weights_only=True)", "yaml.safe_load(text)", "json.load(f)"]
)
def test_safe_calls_are_let_be(source):
    assert unsafe_calls(source) == []

"""A training that is interrupted and resumed in another process equals one that is not, bit for bit."""

from __future__ import annotations

import multiprocessing

import pytest

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.state import compare, read

from . import resuming
from .resuming import ENVS, HALF, STEPS, first, rest, whole

LATER = STEPS * ENVS // 2
"""So many steps after a checkpoint the process dies."""


ATTACKED = SAPPOConfig(
    warmup_updates=2,
    epsilon_schedule="linear",
    perturbation=PerturbationConfig(attack_method="sgld"),
)

KIT = {
    "drift_kit": True,
    "exploration_floor": 0.01,
    "layer_norm": True,
    "init_decay": 0.5,
    "optimism": 0.5,
    "recycle_dormant": 0.3,
}
"""Every part of the drift kit."""

PROCESSES = multiprocessing.get_context("forkserver")
# New processes that begin with imports done; torch's optimizers would import the second.
PROCESSES.set_forkserver_preload([resuming.__name__, "torch._dynamo"])


def run(part, *arguments, expect=0):
    process = PROCESSES.Process(target=part, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == expect


def told(path):
    """All that an agent told, but for the time that episodes took, and an option that torch adds when loading."""
    tree = read(path).tree
    for group in tree["optimizer"]["param_groups"]:
        group.pop("differentiable", None)
    tree["rollout"]["episodes"].pop("t", None)
    return tree


def assert_equal_runs(scenario, tmp_path, deaths):
    """Resumed after it died at these steps, training ends as it does without dying."""
    run(whole, scenario, tmp_path / "whole")
    run(first, scenario, tmp_path / "cut", deaths[0], expect=17)
    for death in deaths[1:]:
        run(rest, scenario, tmp_path / "cut", death, expect=17)
    run(rest, scenario, tmp_path / "cut")
    differences = compare(told(tmp_path / "whole" / "whole.zip"), told(tmp_path / "cut" / "resumed.zip"))
    assert not differences, "\n".join(map(str, differences[:10]))


@pytest.mark.parametrize("continues", [False, True], ids=["restarts", "continues"])
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_resume_equals_uninterrupted(policy, normalize, continues, tmp_path):
    scenario = {"policy": policy, "normalize": normalize, "continues": continues}
    assert_equal_runs(scenario, tmp_path, [HALF + LATER])


@pytest.mark.parametrize(
    "scenario",
    [
        {"subproc": True, "normalize": True},
        {"subproc": True, "normalize": True, "continues": True},
        {"stack": True, "normalize": True, "continues": True, "policy": "MlpPolicy"},
        {"policy": "MlpGruPolicy", "continues": True, "settings": {"layer_norm": True, "recycle_dormant": 0.5}},
        {"continues": True, "settings": KIT},
        {"settings": KIT, "policy": "MlpPolicy"},
        {"remembers": True},
        {"remembers": True, "continues": True},
        {"drift": True, "normalize": True},
        {"drift": True, "continues": True, "subproc": True},
        {"drift": "sync"},
        pytest.param({"drift": "async"}, marks=pytest.mark.slow),
        {
            "settings": {
                "kl_penalty": True,
                "target_kl": 0.01,
                "ent_coef": 0.01,
                "ent_coef_final": 0.0,
                "ent_coef_start": "plateau",
                "ent_plateau_patience": 1,
                "ent_boost_factor": 2.0,
            },
            "vgs": {"statistic": "spatial_mean", "apply_to": "update"},
        },
        {"normalize": True, "continues": True, "settings": {"adversarial": ATTACKED}},
        {"continuous": True, "settings": {"use_sde": True, "exploration_floor": 0.01, "init_decay": 0.5}},
        {"continuous": True, "continues": True, "settings": {"use_sde": True, "sde_sample_freq": 5}},
    ],
    ids=[
        *("processes", "processes-continue", "stacked", "gru", "kit-continues", "kit", "memory", "memory-continues"),
        *("drift", "drift-continues", "drift-sync", "drift-async", "controllers", "attacked"),
        *("gsde", "gsde-continues"),
    ],
)
def test_whatever_the_environments_and_the_settings(scenario, tmp_path):
    assert_equal_runs(scenario, tmp_path, [HALF + LATER])


@pytest.mark.slow
def test_ten_interruptions(tmp_path):
    rollout = STEPS * ENVS
    deaths = [rollout + LATER, rollout + LATER, *(k * rollout + LATER for k in (1, 2, 2, 3, 3, 4, 4, 5))]
    assert_equal_runs({"normalize": True, "every": 1}, tmp_path, deaths)

"""``import driftproof``: what it offers, what it costs, and that Gymnasium knows the environments afterwards."""

import pytest

import driftproof
from tests.helpers import output_of

HEAVY = ("torch", "numpy", "gymnasium", "stable_baselines3", "pydantic", "rich", "yaml")


def test_importing_takes_no_time_and_nothing_heavy():
    assert output_of(f"import sys, driftproof; print([name for name in {HEAVY} if name in sys.modules])") == "[]"
    # Processor time, since other processes take turns with it.
    timed = "import time; start = time.process_time(); import driftproof; print(time.process_time() - start)"
    assert min(float(output_of(timed)) for _ in range(5)) < 0.05


@pytest.mark.parametrize("first", ["import driftproof, gymnasium", "import gymnasium, driftproof"])
@pytest.mark.parametrize("name", ["RegimeMarket", "Market"])
def test_gymnasium_knows_the_environments_in_either_order(first, name):
    code = f"{first}; print(gymnasium.spec('driftproof/{name}-v0').entry_point)"
    assert output_of(code).startswith("driftproof.envs.")


def test_gymnasium_makes_an_environment_after_a_plain_import():
    code = (
        "import driftproof, gymnasium; env = gymnasium.make('driftproof/RegimeMarket-v0'); "
        "print(type(env.unwrapped).__name__, env.reset(seed=1)[0].shape)"
    )
    assert output_of(code) == "RegimeMarketEnv (14,)"


def test_importing_again_registers_once():
    code = (
        "import sys, driftproof; del sys.modules['driftproof']; import driftproof, gymnasium, warnings; "
        "warnings.simplefilter('error'); import importlib; importlib.reload(driftproof); "
        "print(sum(name.startswith('driftproof/') for name in gymnasium.registry), "
        "[f for f in sys.meta_path if type(f).__module__.startswith('driftproof')])"
    )
    assert output_of(code) == "5 []"


@pytest.mark.parametrize("name", driftproof.__all__)
def test_every_name_is_offered(name):
    assert name in dir(driftproof)
    assert getattr(driftproof, name).__name__ == name


def test_load_is_the_agents():
    assert driftproof.load == driftproof.DistributionalPPO.load


def test_names_are_those_of_the_packages():
    from driftproof import AdaptiveUPGD, DistributionalPPO, PBTConfig, SAPPOConfig, drifting
    from driftproof.adversarial import SAPPOConfig as SAPPOConfigThere
    from driftproof.envs import drifting as drifting_there
    from driftproof.optim import AdaptiveUPGD as AdaptiveUPGDThere
    from driftproof.pbt import PBTConfig as PBTConfigThere
    from driftproof.ppo import DistributionalPPO as DistributionalPPOThere

    offered = (AdaptiveUPGD, DistributionalPPO, PBTConfig, SAPPOConfig, drifting)
    assert offered == (AdaptiveUPGDThere, DistributionalPPOThere, PBTConfigThere, SAPPOConfigThere, drifting_there)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'PPO'"):
        driftproof.PPO  # noqa: B018

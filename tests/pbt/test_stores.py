"""Parameters wait in a store as they were given."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from driftproof.pbt import FolderStore, MemoryStore, PBTConfig, PBTScheduler
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, compare, without, write


def tree(value=1.0):
    return {
        "policy": {"weight": torch.full((3, 2), value)},
        "policy.optimizer": {"state": {0: {"step": torch.tensor(value)}}, "param_groups": [{"lr": value}]},
        "vgs_state": {"step_count": 7},
    }


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "trees")


def test_what_comes_back_is_what_was_put_and_shares_nothing(store):
    given = tree()
    store.put(3, given, 5, "v2_full_parameters")
    given["policy"]["weight"].zero_()
    taken, kind = store.get(3)
    assert compare(taken, tree()) == []
    assert kind == "v2_full_parameters"
    taken["policy"]["weight"].zero_()
    assert compare(store.get(3)[0], tree()) == []


def test_the_latest_counts_and_members_are_apart(store):
    store.put(1, tree(1.0), 5, "v2_full_parameters")
    store.put(2, tree(2.0), 5, "v2_full_parameters")
    store.put(1, {"weight": torch.ones(2)}, 9, "v1_policy_only")
    assert compare(store.get(2)[0], tree(2.0)) == []
    assert store.get(1)[1] == "v1_policy_only"
    with pytest.raises(KeyError, match="no parameters of member 12"):
        store.get(12)


def test_a_folder_has_one_file_per_member_and_outlives_the_store(tmp_path):
    store = FolderStore(tmp_path)
    for step in (5, 10):
        for member in (0, 1):
            store.put(member, tree(step + member), step, "v2_full_parameters")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["member_0000.zip", "member_0001.zip"]
    assert compare(FolderStore(tmp_path).get(1)[0], tree(11)) == []


def test_a_failed_write_leaves_the_former_parameters(tmp_path):
    store = FolderStore(tmp_path)
    store.put(0, tree(), 5, "v2_full_parameters")
    with pytest.raises(TypeError):
        store.put(0, {"policy": object()}, 6, "v2_full_parameters")
    assert compare(store.get(0)[0], tree()) == []


def test_other_files_are_refused(tmp_path):
    write(tmp_path / "member_0000.zip", tree())
    (tmp_path / "member_0001.zip").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="not of a member"):
        FolderStore(tmp_path).get(0)
    with pytest.raises(CheckpointError):
        FolderStore(tmp_path).get(1)


def test_files_of_earlier_versions_are_read(tmp_path):
    data = {**tree(), "kl_penalty_state": None}
    full = {"format_version": "v2_full_parameters", "data": data, "step": 5, "performance": np.float64(3.0)}
    torch.save(full, tmp_path / "member_3_step_5.pt")
    for step in (90, 1000):
        state = {"weight": torch.full((2,), float(step))}
        torch.save({"format_version": "v1_policy_only", "data": state}, tmp_path / f"member_4_step_{step}.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "member_14.pt")
    by_hand = {"model_state_dict": tree()["policy"], "optimizer_state_dict": tree()["policy.optimizer"]}
    torch.save({**by_hand, "vgs_state_dict": None}, tmp_path / "member_5_step_2.pt")
    store = FolderStore(tmp_path)
    found, kind = store.get(3)
    assert compare(found, data) == []
    assert kind == "v2_full_parameters"
    with pytest.warns(FutureWarning, match="holds a policy only"):
        assert compare(store.get(4), ({"weight": torch.full((2,), 1000.0)}, "v1_policy_only")) == []
    store.get(4)  # It has been said.
    with pytest.warns(FutureWarning, match="holds a policy only"):
        assert compare(store.get(14), ({"weight": torch.ones(2)}, "v1_policy_only")) == []
    found, kind = store.get(5)
    assert compare(found, {**without(tree(), ["vgs_state"]), "vgs_state": None, "kl_penalty_state": None}) == []
    assert kind == "v2_full_parameters"
    store.put(3, tree(2.0), 5, "v2_full_parameters")
    assert compare(store.get(3)[0], tree(2.0)) == []


VGS = {"step_count": 320, "grad_mean_ema": 1.5e-05, "grad_var_ema": 1.7e-07, "grad_norm_ema": 0.030}
"""As it was when gradient statistics were averages over the whole gradient."""


def agent(seed):
    kwargs = {"net_arch": [8], "lstm_hidden_size": 4}
    small = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "vgs_kwargs": {"warmup_steps": 2}}
    return DistributionalPPO("MlpLstmPolicy", "CartPole-v1", seed=seed, policy_kwargs=kwargs, **small, device="cpu")


def literal(model, version):
    """What the earlier system gave to ``torch.save``."""
    if version == "bare":
        return model.policy.state_dict()
    data = model.policy.state_dict()
    if version == "v2_full_parameters":
        parameters = model.get_parameters()
        data = {name: parameters[name] for name in ("policy", "policy.optimizer")}
        data |= {"kl_penalty_state": {"kl_beta": 0.1}, "vgs_state": VGS}
    return {"format_version": version, "data": data, "step": 100, "performance": 200.0}


@pytest.mark.parametrize("version", ["v2_full_parameters", "v1_policy_only", "bare"])
def test_a_folder_of_an_earlier_version_is_exploited_from(tmp_path, version):
    donor, taker = agent(0).learn(64), agent(1).learn(64)
    torch.save(literal(donor, version), tmp_path / "member_0_step_100.pt")
    scheduler = PBTScheduler(PBTConfig(population_size=2, checkpoint_dir=tmp_path), seed=0)
    scheduler.update_performance(0, 2.0, 5)
    scheduler.update_performance(1, 1.0, 5)
    is_full = version == "v2_full_parameters"
    with nullcontext() if is_full else pytest.warns(FutureWarning, match="holds a policy only"):
        parameters, hyperparams, kind = scheduler.exploit_and_explore(1)
    assert kind == ("v2_full_parameters" if is_full else "v1_policy_only")
    assert hyperparams == scheduler.members[1].hyperparams
    assert taker.vgs.step_count > 2
    scale = taker.return_scale.state_dict()
    with pytest.warns(FutureWarning, match="the parameters are") as caught:
        taker.set_parameters(parameters)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "variance gradient scaling" in text
    assert "the drift alarm begins anew; no weights of earlier worlds are kept" in text
    assert "return_scale, entropy, observations, normalizer, hyperparams: the agent keeps its own" in text
    assert taker.learner.drift_response.state_dict()["good"] is None
    assert compare(dict(taker.policy.state_dict()), dict(donor.policy.state_dict())) == []
    moments = donor.policy.optimizer.state_dict()["state"] if is_full else {}
    assert compare(taker.policy.optimizer.state_dict()["state"], moments) == []
    assert compare(taker.return_scale.state_dict(), scale) == []
    assert taker.vgs.step_count == 0
    assert taker.vgs.get_normalized_variance() == 0
    assert float(taker.vgs.metrics()["vgs/grad_norm_ema"]) == pytest.approx(0.030 if is_full else 0)
    taker.learn(32, reset_num_timesteps=False)
    assert taker.vgs.step_count == 2

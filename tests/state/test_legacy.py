"""Earlier formats: everything in them is found, what is missing is said, and no code in them runs."""

from __future__ import annotations

import collections
import io
import os
import random
import zipfile

import numpy as np
import pytest
import torch

from driftproof.state import CheckpointError, compare, legacy
from tests.state import hostile


def agent():
    model = torch.nn.LSTM(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(2, 5, 3))[0].sum().backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def parameters():
    """What ``get_parameters()`` of the system that wrote these files returned."""
    policy, optimizer = agent()
    return {
        "policy": policy,
        "policy.optimizer": optimizer,
        "kl_penalty_state": {"beta": np.float64(0.5), "history": [0.1, 0.2]},
        "vgs_state": {"step_count": 320, "grad_mean_ema": 1.5e-05, "grad_var_ema": 1.7e-07, "grad_norm_ema": 0.030},
    }


def full():
    """A population's file as it was written, with a performance that NumPy computed."""
    return {
        "format_version": "v2_full_parameters",
        "data": parameters(),
        "step": 5,
        "performance": np.float64(123.5),
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_full_parameters(tmp_path, zipped):
    content, path = full(), tmp_path / "member_3_step_5.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    found = legacy.read(path)  # without a warning
    assert found.format == "v2_full_parameters"
    assert compare(found.components, content["data"]) == []
    assert found.extras == {"step": 5, "performance": 123.5}
    assert found.missing == ["return_scale", "normalizer"]
    assert found.empty == found.dropped == []


def test_components_that_the_agent_did_not_have_are_empty_and_not_missing(tmp_path):
    content = full()
    content["data"]["vgs_state"] = None
    torch.save(content, tmp_path / "member.pt")
    found = legacy.read(tmp_path / "member.pt")
    assert found.empty == ["vgs_state"]
    assert found.missing == ["return_scale", "normalizer"]


def test_parameters_without_the_envelope(tmp_path):
    content = parameters()
    torch.save(content, tmp_path / "x.pt")
    found = legacy.read(tmp_path / "x.pt")
    assert found.format == "parameters"
    assert compare(found.components, content) == []


def test_state_dicts_put_together_by_hand(tmp_path):
    policy, optimizer = agent()
    vgs = parameters()["vgs_state"]
    torch.save(
        {"model_state_dict": policy, "optimizer_state_dict": optimizer, "vgs_state_dict": vgs}, tmp_path / "x.pt"
    )
    found = legacy.read(tmp_path / "x.pt")
    assert compare(found.components, {"policy": policy, "policy.optimizer": optimizer, "vgs_state": vgs}) == []
    assert found.missing == ["kl_penalty", "return_scale", "normalizer"]


def test_scalars_pickled_by_numpy_1(tmp_path):
    """They name a module that NumPy 2 calls otherwise."""
    file = io.BytesIO()
    torch.save({"format_version": "v2_full_parameters", "data": parameters(), "performance": np.float64(2.5)}, file)
    assert b"numpy._core.multiarray" in file.getvalue()
    old = io.BytesIO()
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    (tmp_path / "old.pt").write_bytes(old.getvalue())
    assert legacy.read(tmp_path / "old.pt").extras == {"performance": 2.5}


def test_policy_only(tmp_path):
    policy, _ = agent()
    content = {"format_version": "v1_policy_only", "data": policy, "step": 3, "performance": 1.5}
    torch.save(content, tmp_path / "member.pt")
    with pytest.warns(FutureWarning, match="the state of optimizer, vgs, kl_penalty, return_scale, norm") as caught:
        found = legacy.read(tmp_path / "member.pt")
    assert len(caught) == 1
    assert found.format == "v1_policy_only"
    assert compare(found.components, {"policy": policy}) == []
    assert found.extras == {"step": 3, "performance": 1.5}


def test_bare_state_dict(tmp_path):
    policy, _ = agent()
    torch.save(policy, tmp_path / "policy.pt")
    with pytest.warns(FutureWarning, match="holds a policy only"):
        found = legacy.read(tmp_path / "policy.pt")
    assert found.format == "state_dict"
    assert compare(found.components, {"policy": policy}) == []


def test_stable_baselines3(tmp_path):
    from stable_baselines3 import PPO

    class Theirs(PPO):
        """As in the system that wrote these files."""

        def get_parameters(self):
            params = super().get_parameters()
            params["kl_penalty_state"] = parameters()["kl_penalty_state"]
            params["vgs_state"] = parameters()["vgs_state"]
            params["other_state"] = None
            return params

    model = Theirs("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).learn(8)
    model.save(tmp_path / "sb3.zip")
    found = legacy.read(tmp_path / "sb3.zip")
    assert found.format == "stable_baselines3"
    assert compare(found.components["policy"], dict(model.policy.state_dict())) == []
    assert compare(found.components["policy.optimizer"], model.policy.optimizer.state_dict()) == []
    for name in ("kl_penalty_state", "vgs_state"):
        assert compare(found.components[name], parameters()[name]) == []
    assert found.missing == ["return_scale", "normalizer"]
    assert found.empty == ["other_state"]
    assert compare(found.extras, {}) == []


def test_values_without_a_place_are_listed(tmp_path):
    content = full()
    content["data"]["policy"]["shape"] = torch.Size([2])
    content["device"] = torch.device("cpu")
    torch.save(content, tmp_path / "old.pt")
    found = legacy.read(tmp_path / "old.pt")
    assert found.components["policy"]["shape"] == (2,)
    assert found.dropped == ["device (device)"]


def test_match():
    state = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}
    wanted = {"a": torch.ones(2), "b": torch.ones(4), "d": torch.ones(1)}
    fitting, unused, missing, wrong_shape = legacy.match(state, wanted)
    assert list(fitting) == ["a"]
    assert fitting["a"] is state["a"]
    assert (unused, missing, wrong_shape) == (["c"], ["d"], ["b"])


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        legacy.read(path)
    assert "weights_only" not in str(caught.value)  # no advice to load it anyway
    return str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        *({}, [], 3, "text", {"a": 1}, torch.zeros(2), {"format_version": "v2_full_parameters"}),
        {"format_version": "v3_everything", "data": {"w": torch.zeros(1)}},
        {"format_version": "v1_policy_only", "data": 3},
        {"format_version": "v1_policy_only", "data": {}},
        {"format_version": "v1_policy_only", "w": torch.zeros(1)},
        {"format_version": ["v1_policy_only"], "data": {"w": torch.zeros(1)}},
        {"format_version": "v2_full_parameters", "data": {"policy.optimizer": {}}},
        {"format_version": "v2_full_parameters", "data": {"policy": 3}},
    ],
    ids=str,
)
def test_other_contents(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        lambda payload: payload,
        lambda payload: {"policy": {"w": payload}},
        lambda payload: {"format_version": "v2_full_parameters", "data": {"policy": {"w": payload}}},
        lambda payload: {payload: 1},
    ],
)
def test_code_in_pickles_is_not_run(tmp_path, monkeypatch, zipped, place):
    monkeypatch.chdir(tmp_path)
    torch.save(place(hostile.Payload()), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert "names io.open" in refused(tmp_path / "x.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


def test_arrays_of_objects_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"policy": {"w": np.array([hostile.Payload()], dtype=object)}}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


def test_code_in_files_of_stable_baselines3_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.zip").write_bytes(next(c for c in map(hostile.case, range(9999)) if c.name == "sb3").data)
    refused(tmp_path / "x.zip")
    assert os.listdir(tmp_path) == ["x.zip"]


def test_foreign_classes_are_refused(tmp_path):
    torch.save({"policy": collections.deque([1])}, tmp_path / "x.pt")
    assert "deque" in refused(tmp_path / "x.pt")


def test_the_same_list_twice_forty_times_over(tmp_path):
    bomb: list = [0]
    for _ in range(40):
        bomb = [bomb, bomb]
    torch.save({"policy": {"w": torch.zeros(1)}, "extra": bomb}, tmp_path / "x.pt")
    assert "too many values" in refused(tmp_path / "x.pt")
    for _ in range(200):
        bomb = [bomb]
    torch.save({"policy": {"w": torch.zeros(1)}, "extra": bomb}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")


def test_tensors_larger_than_the_file(tmp_path):
    torch.save({"policy": {"w": torch.zeros(1).expand(2**40)}}, tmp_path / "x.pt")
    assert "larger than the file" in refused(tmp_path / "x.pt")


def test_compressed_members(tmp_path):
    torch.save({"policy": {"w": torch.zeros(100_000)}}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as source,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert "compressed" in refused(tmp_path / "y.pt")


def test_missing_and_strange_paths(tmp_path):
    with pytest.raises(FileNotFoundError):
        legacy.read(tmp_path / "none.pt")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe")
    refused(tmp_path)


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*holds a policy only")
def test_damaged_files(tmp_path, monkeypatch, count):
    """Truncated and flipped files, and those of the other corpus: a CheckpointError, or what is left of the tensors."""
    monkeypatch.chdir(tmp_path)
    originals = []
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save(full(), file, _use_new_zipfile_serialization=zipped)
        originals.append(file.getvalue())
    rng, path, refused_count = random.Random(0), tmp_path / "x.pt", 0
    for seed in range(count):
        data = bytearray(originals[seed % 2])
        if seed % 3 == 0:
            data = data[: rng.randrange(len(data))]
        elif seed % 3 == 1:
            for _ in range(rng.choice([1, 3, 20])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            data = bytearray(hostile.case(seed).data)
        path.write_bytes(data)
        try:
            legacy.read(path)
        except CheckpointError:
            refused_count += 1
    assert refused_count > count / 2
    assert os.listdir(tmp_path) == ["x.pt"]

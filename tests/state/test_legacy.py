"""Earlier formats: everything in them is found, what is missing is said, and no code in them runs."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import warnings
import zipfile

import numpy as np
import pytest
import torch

from driftproof.state import CheckpointError, compare, legacy, read
from tests.state import hostile


def agent():
    model = torch.nn.LSTM(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(2, 5, 3))[0].sum().backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def full():
    """A population's file as earlier versions wrote it, NumPy scalars included."""
    policy, optimizer = agent()
    return {
        "format_version": "v2_full_parameters",
        "model_parameters": {
            "policy": policy,
            "policy.optimizer": optimizer,
            "vgs_state": {"step": 12, "means": {"weight": torch.ones(3)}},
            "kl_penalty_state": {"coefficient": np.float64(0.5), "history": [0.1, 0.2]},
        },
        "hyperparams": {"learning_rate": np.float32(3e-4), "batch_size": np.int64(64)},
        "performance": np.float64(123.5),
        "step": 5,
        "member_id": 3,
        "has_vgs": np.bool_(True),
        "history": np.arange(3.0),
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_full_parameters(tmp_path, zipped):
    content, path = full(), tmp_path / "member.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    found = legacy.read(path)  # without a warning
    assert found.format == "v2_full_parameters"
    assert compare(found.components, content["model_parameters"]) == []
    assert found.extras["hyperparams"] == content["hyperparams"]
    assert found.extras["performance"] == 123.5
    assert found.extras["history"].tolist() == [0, 1, 2]
    assert found.missing == ["return_scale", "normalizer"]
    assert found.dropped == []


def test_scalars_pickled_by_numpy_1(tmp_path):
    """They name a module that NumPy 2 calls otherwise."""
    data = pickle.dumps({"format_version": "v2_full_parameters", "performance": np.float64(2.5)}, protocol=2)
    assert b"numpy._core.multiarray" in data
    file = io.BytesIO()
    torch.save({"policy": {"w": torch.zeros(1)}, "performance": np.float64(2.5)}, file)
    old = io.BytesIO()
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    (tmp_path / "old.pt").write_bytes(old.getvalue())
    with pytest.warns(UserWarning, match="has no state of"):
        assert legacy.read(tmp_path / "old.pt").extras == {"performance": 2.5}


@pytest.mark.parametrize("key", ["model_state_dict", "policy_state_dict", "state_dict", "policy", "model_parameters"])
def test_policy_only(tmp_path, key):
    policy, _ = agent()
    torch.save({"format_version": "v1_policy_only", key: policy, "step": 3}, tmp_path / "member.pt")
    with pytest.warns(UserWarning, match="no state of optimizer, vgs, kl_penalty, return_scale, normalizer") as caught:
        found = legacy.read(tmp_path / "member.pt")
    assert len(caught) == 1
    assert found.format == "v1_policy_only"
    assert compare(found.components, {"policy": policy}) == []
    assert found.extras == {"step": 3}


def test_bare_state_dict(tmp_path):
    policy, _ = agent()
    torch.save(policy, tmp_path / "policy.pt")
    with pytest.warns(UserWarning, match="no state of optimizer"):
        found = legacy.read(tmp_path / "policy.pt")
    assert found.format == "state_dict"
    assert compare(found.components, {"policy": policy}) == []


def test_parameters_without_a_version(tmp_path):
    policy, optimizer = agent()
    torch.save({"policy": policy, "optimizer_state_dict": optimizer}, tmp_path / "x.pt")
    with pytest.warns(UserWarning, match="no state of vgs, kl_penalty, return_scale, normalizer"):
        found = legacy.read(tmp_path / "x.pt")
    assert list(found.components) == ["policy", "policy.optimizer"]
    assert compare(found.components["policy.optimizer"], optimizer) == []


def test_stable_baselines3(tmp_path):
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).learn(8)
    model.save(tmp_path / "sb3.zip")
    with pytest.warns(UserWarning, match="stable_baselines3"):
        found = legacy.read(tmp_path / "sb3.zip")
    assert compare(found.components["policy"], dict(model.policy.state_dict())) == []
    assert compare(found.components["policy.optimizer"], model.policy.optimizer.state_dict()) == []


def test_convert(tmp_path):
    content = full()
    content["model_parameters"]["policy"]["shape"] = torch.Size([2])
    content["hyperparams"]["device"] = torch.device("cpu")
    torch.save(content, tmp_path / "old.pt")
    report = legacy.convert(tmp_path / "old.pt", tmp_path / "new.zip")
    checkpoint = read(tmp_path / "new.zip")
    assert checkpoint.exact is False
    assert checkpoint.config == {"converted_from": "v2_full_parameters"}
    before = content["model_parameters"]
    before["policy"]["shape"] = (2,)
    assert compare({key: checkpoint.tree[key] for key in before}, before) == []
    assert checkpoint.tree["legacy"]["performance"] == 123.5
    text = "\n".join(report)
    assert "policy: 4 tensors" in text
    assert "not carried over: hyperparams/device (device)" in text
    assert "not in the file: normalizer" in text


def test_convert_says_what_is_missing_instead_of_warning(tmp_path):
    torch.save(agent()[0], tmp_path / "old.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = legacy.convert(tmp_path / "old.pt", tmp_path / "new.zip")
    assert "not in the file: optimizer" in report


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
        {"format_version": "v3_everything", "policy": {"w": torch.zeros(1)}},
        {"format_version": "v1_policy_only", "model_state_dict": 3},
        {"format_version": ["v1_policy_only"], "policy": {"w": torch.zeros(1)}},
        {"format_version": "v2_full_parameters", "model_parameters": {"policy.optimizer": {}}},
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
        lambda payload: {"format_version": "v2_full_parameters", "model_parameters": {"policy": {"w": payload}}},
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
    assert "more values" in refused(tmp_path / "x.pt")
    for _ in range(200):
        bomb = [bomb]
    torch.save({"policy": {"w": torch.zeros(1)}, "extra": bomb}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")


def test_tensors_larger_than_the_file(tmp_path):
    torch.save({"policy": {"w": torch.zeros(1).expand(2**40)}}, tmp_path / "x.pt")
    assert "larger than itself" in refused(tmp_path / "x.pt")


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
@pytest.mark.filterwarnings("ignore:.*has no state of")
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

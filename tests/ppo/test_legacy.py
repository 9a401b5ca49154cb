"""Agents from files of earlier formats, and from parameters of other agents: what goes over, and what is said."""

from __future__ import annotations

import contextlib
import io
import zipfile

import numpy as np
import pytest
import torch

from driftproof.optim.earlier_states import EARLIER_STATE
from driftproof.pbt import FolderStore
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.legacy import adopt
from driftproof.state import CheckpointError, compare, without, write

from .test_persistence import UPDATE, assert_same, cart_poles, learned, small

VGS = {"step_count": 320, "grad_mean_ema": 1.5e-05, "grad_var_ema": 1.7e-07, "grad_norm_ema": 0.030}
"""As it was when gradient statistics were averages over the whole gradient."""
KL_PENALTY = {"kl_beta": 0.25, "pid_integral": 1.5}
"""Nobody knows how it was called; it is not how it is called today."""


WITH_PENALTY = {"target_kl": 0.02, "kl_penalty": {"init_coef": 0.5}}


def envelope(version, data):
    return {"format_version": version, "data": data, "step": 7, "performance": np.float64(12.5)}


def parameters(agent, vgs=VGS, kl_penalty=KL_PENALTY):
    """What ``get_parameters()`` of the system that wrote these files returned."""
    own = agent.get_parameters()
    return {
        "policy": own["policy"],
        "policy.optimizer": own["policy.optimizer"],
        "kl_penalty_state": kl_penalty,
        "vgs_state": vgs,
    }


def write_zip(path, states):
    """As Stable-Baselines3's ``save`` does with what ``get_parameters()`` returns."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "{}")
        for name, state in {**states, "pytorch_variables": {}}.items():
            file = io.BytesIO()
            torch.save(state, file)
            archive.writestr(f"{name}.pth", file.getvalue())
        archive.writestr("_stable_baselines3_version", "2.0.0")


class TestLiteralFiles:
    """Files as the earlier system wrote them: read, taken over, and trained on."""

    @pytest.mark.parametrize("form", ["v2", "parameters", "zip"])
    def test_full_parameters(self, tmp_path, form):
        donor, agent = small(**WITH_PENALTY).learn(2 * UPDATE), small(seed=1, **WITH_PENALTY).learn(UPDATE)
        path = tmp_path / "member_0_step_7.pt"
        if form == "zip":
            write_zip(path, parameters(donor))
        else:
            torch.save(envelope("v2_full_parameters", parameters(donor)) if form == "v2" else parameters(donor), path)
        with pytest.warns(FutureWarning) as caught:
            lines = adopt(agent, path)
        assert [str(warning.message) for warning in caught] == [
            "the KL penalty begins anew: its state has another form ('kl_beta', 'pid_integral')",
            f"variance gradient scaling: {EARLIER_STATE}",
        ]
        text = "\n".join(lines)
        count = len(donor.policy.state_dict())
        assert f"policy: {count} of {count} tensors loaded" in text
        assert "policy.optimizer: loaded" in text
        assert "vgs_state: variance gradient scaling: the state is of an earlier version" in text
        assert "kl_penalty_state: the KL penalty begins anew" in text
        missing = [line for line in lines if line.endswith(": not in the file")]
        assert missing == ["return_scale: not in the file", "normalizer: not in the file"]
        if form == "zip":
            assert "pytorch_variables_state: not used by the agent" in text
        for name in ("policy", "optimizer"):
            assert not compare(learned(agent)[name], learned(donor)[name]), name
        assert float(agent.kl_penalty.coefficient) == 0.5
        assert agent.vgs.step_count == 0
        metrics = agent.vgs.metrics()
        assert float(metrics["vgs/grad_norm_ema"]) == pytest.approx(0.030)
        agent.learn(UPDATE, reset_num_timesteps=False)
        assert agent.vgs.step_count > 0
        agent.save(tmp_path / "new.zip")
        assert_same(DistributionalPPO.load(tmp_path / "new.zip", device="cpu"), agent)

    def test_an_agent_that_had_neither_scaling_nor_penalty(self, tmp_path):
        donor, agent = small().learn(UPDATE), small(seed=1).learn(UPDATE)
        torch.save(envelope("v2_full_parameters", parameters(donor, None, None)), tmp_path / "old.pt")
        lines = adopt(agent, tmp_path / "old.pt")
        assert "vgs_state: the agent in the file had none" in lines
        assert "kl_penalty_state: the agent in the file had none" in lines
        assert agent.vgs.step_count == 0

    def test_as_parameters_of_another_agent(self, tmp_path):
        """What ``exploit_and_explore`` returns of such files."""
        donor, agent = small(**WITH_PENALTY).learn(2 * UPDATE), small(seed=1, **WITH_PENALTY).learn(UPDATE)
        with pytest.warns(FutureWarning, match=r"earlier version: variance gradient scal.*; the KL penalty begins"):
            agent.set_parameters(parameters(donor))
        agent.set_parameters(parameters(donor))  # It has been said.
        assert not compare(learned(agent)["optimizer"], learned(donor)["optimizer"])

    @pytest.mark.parametrize(("theirs", "ours"), [("adam", "adaptive_upgd"), ("adaptive_upgd", "adam")])
    def test_moments_of_another_optimizer_are_not_taken_over(self, tmp_path, theirs, ours):
        donor = small(optimizer_class=theirs).learn(UPDATE)
        agent = small(seed=1, optimizer_class=ours).learn(UPDATE)
        torch.save(envelope("v2_full_parameters", parameters(donor, None, None)), tmp_path / "old.pt")
        with pytest.warns(FutureWarning, match="without moments: the state is of another optimizer, with 'step'"):
            lines = adopt(agent, tmp_path / "old.pt")
        assert not any(line.startswith("policy.optimizer: loaded") for line in lines)
        assert agent.policy.optimizer.state_dict()["state"] == {}
        agent.learn(UPDATE, reset_num_timesteps=False)

    def test_a_state_that_is_wrong_changes_nothing(self):
        donor, agent = small().learn(UPDATE), small(seed=1).learn(UPDATE)
        before = agent.state_tree()
        for wrong in ({**VGS, "grad_norm_ema": float("nan")}, {**VGS, "grad_var_ema": "0.1"}):
            with pytest.raises(ValueError, match=r"Invalid grad_(norm|var)_ema"):
                agent.set_parameters(parameters(donor, wrong, None))
        assert not compare(agent.state_tree(), before)


class TestOlderFiles:
    """Today's parameters in the envelopes of older files."""

    def v2(self, agent, path):
        torch.save(envelope("v2_full_parameters", agent.get_parameters()), path)

    def test_full_parameters_are_taken_over_whole(self, tmp_path):
        donor, agent = small().learn(2 * UPDATE), small(seed=1)
        self.v2(donor, tmp_path / "old.pt")
        lines = adopt(agent, tmp_path / "old.pt")
        for name in ("optimizer", "vgs", "return_scale", "entropy", "hyperparams", "normalizer"):
            assert not compare(learned(agent)[name], learned(donor)[name]), name
        assert not compare(learned(agent)["policy"], learned(donor)["policy"])
        assert any("policy.optimizer: loaded" in line for line in lines)
        agent.save(tmp_path / "new.zip")
        assert_same(DistributionalPPO.load(tmp_path / "new.zip", device="cpu"), agent)

    def test_a_policy_alone_lists_what_is_missing(self, tmp_path):
        donor, agent = small().learn(UPDATE), small(seed=1)
        torch.save(envelope("v1_policy_only", donor.policy.state_dict()), tmp_path / "1.pt")
        torch.save(donor.policy.state_dict(), tmp_path / "bare.pt")
        for name in ("1.pt", "bare.pt"):
            lines = adopt(agent, tmp_path / name)
            assert {f"{part}: not in the file" for part in ("optimizer", "vgs", "return_scale")} <= set(lines)
            assert not compare(learned(agent)["policy"], learned(donor)["policy"])

    def test_what_does_not_match_is_listed(self, tmp_path):
        donor = small(policy_kwargs={"net_arch": [9]}).learn(UPDATE)
        agent = small()
        self.v2(donor, tmp_path / "old.pt")
        before = learned(agent)["policy"]["action_head.weight"]
        lines = "\n".join(adopt(agent, tmp_path / "old.pt"))
        assert "of another shape" in lines
        assert "action_head.weight" in lines
        assert "policy.optimizer: not loaded" in lines
        assert torch.equal(learned(agent)["policy"]["action_head.weight"], before)
        name = "actor_core.recurrence.weight_hh_l0"
        assert torch.equal(agent.policy.state_dict()[name], donor.policy.state_dict()[name])

    def test_a_policy_of_which_nothing_fits_is_refused(self, tmp_path):
        agent = small()
        before = agent.state_tree()
        policy = {f"net.{name}": tensor for name, tensor in agent.policy.state_dict().items()}
        torch.save({"format_version": "v1_policy_only", "data": policy}, tmp_path / "old.pt")
        with pytest.raises(CheckpointError, match=r"no tensor .* fits .*; without a place: net\..*; wanted: .*Build"):
            adopt(agent, tmp_path / "old.pt")
        assert not compare(agent.state_tree(), before)

    def test_code_in_them_is_not_run(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return (open, (str(tmp_path / "trapped"), "w"))

        torch.save({"format_version": "v2_full_parameters", "data": {"policy": Trap()}}, tmp_path / "old.pt")
        with pytest.raises(CheckpointError):
            adopt(small(), tmp_path / "old.pt")
        assert not (tmp_path / "trapped").exists()


class TestParametersOfOthers:
    """What ``get_parameters()`` gives to ``set_parameters()`` of another agent, in today's form."""

    def test_recurrent_memory_of_running_episodes_is_forgotten(self):
        donor, taker = small(seed=1).learn(UPDATE), small().learn(UPDATE)
        assert any(tensor.any() for tensor in taker.state.actor)
        starts = taker._last_episode_starts.copy()
        assert not starts.all()
        taker.set_parameters(donor.get_parameters())
        assert not any(tensor.any() for part in taker.state for tensor in part)
        assert np.array_equal(taker._last_episode_starts, starts), "the next observations are not the first of episodes"

    def test_it_is_kept_with_ones_own_parameters(self):
        agent = small().learn(UPDATE)
        memory, starts = agent.state, agent._last_episode_starts.copy()
        agent.set_parameters(agent.get_parameters())
        assert not compare(tuple(agent.state), tuple(memory))
        assert np.array_equal(agent._last_episode_starts, starts)

    def test_torch_reads_them_without_running_anything(self, tmp_path):
        arguments = {**WITH_PENALTY, "ent_coef": 0.01, "ent_coef_final": 0.001, "ent_coef_start": "plateau"}
        arguments |= {"ent_plateau_patience": 1, "ent_boost_factor": 2.0, "ent_boost_below": 0.5}
        agent = small(cart_poles(normalize=True), **arguments)
        agent.learn(2 * UPDATE)
        torch.save(agent.get_parameters(), tmp_path / "parameters.pt")
        taken = torch.load(tmp_path / "parameters.pt", weights_only=True)
        other = small(cart_poles(normalize=True), seed=1, **arguments)
        other.set_parameters(taken)
        left, right = (without(each.get_parameters(), ["policy.optimizer/param_groups"]) for each in (agent, other))
        assert not compare(left, right)

    @pytest.mark.parametrize("is_attached", [True, False])
    def test_statistics_that_are_arrays_as_in_older_files(self, tmp_path, is_attached):
        agent = small(cart_poles(normalize=True)).learn(UPDATE)
        tree = agent.state_tree()
        for moments in (tree["normalizer"]["obs_rms"][""], tree["normalizer"]["ret_rms"]):
            moments |= {name: moments[name].numpy() for name in ("mean", "var")}
        write(tmp_path / "old.zip", tree, config=agent.config())
        loaded = DistributionalPPO.load(tmp_path / "old.zip", cart_poles() if is_attached else None, device="cpu")
        assert not compare(loaded.get_parameters()["normalizer_state"], agent.get_parameters()["normalizer_state"])


class TestDeadEnds:
    """Files that are no agents: what the error says to do works."""

    def test_files_of_members_are_given_to_an_agent(self, tmp_path):
        donor = small().learn(UPDATE)
        store = FolderStore(tmp_path)
        store.put(0, donor.get_parameters(), 1, "v2_full_parameters")
        store.put(1, donor.policy.state_dict(), 1, "v1_policy_only")
        for member in (0, 1):
            with pytest.raises(CheckpointError, match=r"agent\.set_parameters\(path, exact_match=False\)"):
                DistributionalPPO.load(store.path(member))
            agent = small(seed=1)
            with pytest.warns(FutureWarning, match="a policy only") if member else contextlib.nullcontext():
                agent.set_parameters(store.path(member), exact_match=False)
            assert not compare(learned(agent)["policy"], learned(donor)["policy"])

    def test_older_files_are_converted_or_adopted(self, tmp_path):
        donor = small().learn(UPDATE)
        torch.save({"format_version": "v1_policy_only", "data": donor.policy.state_dict()}, tmp_path / "old.pt")
        for load in (DistributionalPPO.load, small().set_parameters):
            with pytest.raises(
                CheckpointError, match=r"convert /.*/old.pt NEW.zip --env ID, or .*adopt\(agent, .*old.pt"
            ):
                load(tmp_path / "old.pt")
        write(tmp_path / "list.zip", [1, 2])
        with pytest.raises(CheckpointError, match="does not hold states of an agent"):
            small().set_parameters(tmp_path / "list.zip")

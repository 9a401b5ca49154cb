"""The drift alarm: raised when the world gets worse, and at no other time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftproof.learner.alarm import CalibrationAlarm, calibration
from driftproof.learner.episode_returns import EpisodeReturns
from driftproof.nn.heads import CategoricalHead, MeanHead, QuantileHead
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError

from .changing import agent_in, learned

CHANGE = 40


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ("wrong", {}),
        ("poor", {}),
        ("wrong", {"policy": "MlpLstmPolicy"}),
        ("poor", {"n_epochs": 8}),
    ],
    ids=["other action", "no reward", "recurrent", "critics that learn it in one update"],
)
def test_a_harmful_change_raises_it_within_five_updates(world, settings):
    alarms = learned(agent_in({0: "right", CHANGE: world}, **settings), CHANGE + 7).alarms()
    assert len(alarms) == 1
    assert CHANGE <= alarms[0] <= CHANGE + 5


@pytest.mark.parametrize("seed", [3, 4])
def test_neither_a_stationary_world_nor_improvement_raises_it(seed):
    metrics = learned(agent_in({0: "right", CHANGE: "rich"}, seed=seed), CHANGE + 20)
    assert metrics.alarms() == []
    assert metrics.column("drift/alarms")[-1] == 0
    rich = metrics.column("drift/calibration")[CHANGE + 1]
    assert rich > 0.8, "returns are above what the critics predict"


def test_there_is_no_alarm_without_the_setting():
    metrics = learned(agent_in({0: "right"}, drift_alarm=False), 2)
    assert metrics.updates == []


def test_it_is_saved_with_the_agent(tmp_path):
    agent = agent_in({0: "right", CHANGE: "wrong"})
    learned(agent, CHANGE + 5)
    agent.save(tmp_path / "agent.zip")
    other = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
    assert other.learner.drift_alarm.alarms == 1
    before, after = (each.state_tree()["drift_alarm"] for each in (agent, other))
    for name in ("sums", "calibration", "return", "untrained", "age", "look", "rate", "last_return"):
        assert before[name] == after[name]


class TestCalibration:
    @pytest.mark.parametrize("head", [QuantileHead(3, 8), CategoricalHead(3, 51, -3, 3), MeanHead()])
    def test_it_is_the_share_of_quantiles_below_the_return(self, head):
        predictions = torch.randn(5, 2, head.outputs)
        quantiles = head.quantiles(predictions)
        below, above = quantiles.min(-1).values - 1, quantiles.max(-1).values + 1
        valid = torch.ones(5, 2, dtype=torch.bool)
        assert calibration([head], [predictions], below, valid) == 0
        assert calibration([head], [predictions], above, valid) == 1
        valid[0, 0] = False
        some = torch.where(valid, below, above)
        assert calibration([head] * 2, [predictions] * 2, some, valid) == 0

    def test_equal_numbers_are_half_above(self):
        zeros = torch.zeros(4, 1, 1)
        assert calibration([MeanHead()], [zeros], zeros[..., 0], torch.ones(4, 1, dtype=torch.bool)) == 0.5


class _Steps:
    """What the alarm reads of a rollout."""

    def __init__(self, rewards, dones, starts, valid=None):
        self.rewards, self.dones = np.array(rewards, np.float32), np.array(dones, bool)
        self.starts = np.zeros_like(self.dones)
        self.starts[0] = starts
        self.valid = np.ones_like(self.dones) if valid is None else np.array(valid, bool)
        self.envs = self.rewards.shape[1]


class TestEpisodes:
    def test_returns_are_summed_across_rollouts(self):
        episodes = EpisodeReturns()
        first = _Steps([[1, 10], [2, 20], [3, 30], [4, 40]], [[0, 0], [1, 0], [1, 0], [0, 0]], True)
        assert episodes.of(first).tolist() == [3, 3]
        second = _Steps([[5, 50], [6, 60]], [[1, 0], [0, 1]], False)
        assert episodes.of(second).tolist() == [9, 210]
        assert episodes.of(_Steps([[1, 1]], [[1, 1]], False)).tolist() == [7, 1]

    def test_those_of_a_reset_environment_start_anew_and_resets_are_no_episodes(self):
        episodes = EpisodeReturns()
        assert episodes.of(_Steps([[1], [2]], [[0], [0]], True)).tolist() == []
        assert episodes.of(_Steps([[5], [9]], [[1], [1]], True, [[1], [0]])).tolist() == [5]

    def test_those_that_other_weights_began_do_not_count(self):
        episodes = EpisodeReturns()
        episodes.of(_Steps([[1, 1]], [[0, 0]], True))
        episodes.weights_were_replaced()
        assert episodes.of(_Steps([[1, 1], [2, 2]], [[1, 0], [1, 0]], False)).tolist() == [2]
        assert episodes.of(_Steps([[1, 1], [1, 1]], [[0, 1], [0, 1]], False)).tolist() == [1]

    def test_those_that_begin_with_the_new_weights_do(self):
        episodes = EpisodeReturns()
        episodes.of(_Steps([[1, 1]], [[0, 1]], True))
        episodes.weights_were_replaced()
        assert episodes.of(_Steps([[5, 7]], [[1, 1]], [False, True])).tolist() == [7]

    def test_what_running_ones_return_counts_from_when_the_weights_were_replaced(self):
        episodes = EpisodeReturns()
        episodes.of(_Steps([[1, 10], [2, 20]], [[0, 0], [0, 0]], True))
        assert episodes.recent.tolist() == [3, 30]
        episodes.weights_were_replaced()
        episodes.of(_Steps([[3, 30], [4, 40]], [[1, 0], [0, 0]], False))
        assert episodes.recent.tolist() == [4, 70]
        copy = EpisodeReturns()
        copy.load_state_dict(episodes.state_dict(), np.array([False, False]))
        for each in (episodes, copy):
            assert each.of(_Steps([[5, 50]], [[1, 1]], False)).tolist() == [9]
            assert each.recent.tolist() == [0, 0]


class TestLooks:
    """Short rollouts are put together until there are four episodes or 800 steps."""

    def alarm(self):
        alarm = CalibrationAlarm()
        for _ in range(40):
            alarm.observe(0.5, 100.0)
        return alarm

    def test_four_episodes_are_enough(self):
        alarm, seen = self.alarm(), []
        for i in range(6):
            alarm.update(0.5, _Steps([[90, 110], [0, 0]], [[1, 0], [0, 1]], i == 0))
            seen.append((alarm.has_seen, alarm.mean_return))
        assert seen == [(False, None), (True, 100)] * 3

    def test_and_so_are_800_steps_with_one_or_none(self):
        alarm = self.alarm()
        for ends in (True, False):
            for i in range(8):
                dones = np.zeros((100, 1), bool)
                dones[50] = ends and i == 3
                assert not alarm.update(0.5, _Steps(np.ones((100, 1)), dones, i == 0))
                assert alarm.has_seen == (i == 7)
            assert (alarm.mean_return is not None) == ends

    def test_a_short_rollout_alone_raises_nothing(self):
        alarm = self.alarm()
        bad = _Steps(np.zeros((8, 1)), np.ones((8, 1), bool), True)
        raised = [alarm.update(0.0, bad) for _ in range(5)]
        assert not raised[0]
        assert any(raised)

    def test_what_other_weights_began_does_not_count(self):
        alarm = self.alarm()
        alarm.update(0.5, _Steps(np.zeros((9, 2)), np.eye(9, 2, dtype=bool), True))
        alarm.weights_were_replaced()
        alarm.update(0.5, _Steps(np.full((9, 2), 1.0), np.eye(9, 2, -4, dtype=bool), False))
        assert not alarm.has_seen, "two episodes, both begun by others"


def test_one_rollout_alone_raises_nothing_and_returns_alone_need_twice_the_evidence():
    def watched(numbers):
        alarm, generator = CalibrationAlarm(), np.random.default_rng(0)
        for _ in range(40):
            assert not alarm.observe(0.5 + 0.05 * generator.normal(), 100 + generator.normal())
        return [alarm.observe(*each) for each in numbers]

    assert any(watched([(0.0, 10)] * 5))
    assert not any(watched([(0.0, 10), *[(0.5, 100)] * 10]))
    assert not any(watched([(0.0, 100)] * 20))
    assert watched([(0.5, 10)] * 4) == [False, False, False, True], "critics may learn it within one update"
    assert not any(watched([(1.0, 1000)] * 20))
    assert not any(watched([(1.0, 10)] * 20))


def test_wrong_states_are_refused():
    alarm = CalibrationAlarm()
    for wrong in ({"alarms": -1}, {"sums": {}}, {"untrained": float("nan")}, {"episodes": {}}):
        with pytest.raises(CheckpointError):
            alarm.load_state_dict({**alarm.state_dict(), **wrong})

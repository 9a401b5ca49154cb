"""One answer to who is best, and to how well an agent does."""

import math

import numpy as np
import pytest

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTScheduler
from driftproof.report.runs import Run
from driftproof.report.series import Life
from driftproof.runs.population_state import best_first
from driftproof.runs.ranking import episode_mean, ranking
from tests.helpers import output_of

SCORES = [
    ([1.0, 3.0, 2.0], [1, 2, 0], [0, 2, 1]),
    ([1.0, 1.0, 2.0], [2, 0, 1], [0, 1, 2]),
    ([None, -5.0, math.nan], [1, 0, 2], [1, 0, 2]),
    ([None, None, None], [0, 1, 2], [0, 1, 2]),
    ([-math.inf, 0.0, math.inf], [2, 1, 0], [0, 1, 2]),
]


class Member:
    def __init__(self, performance, file="member_0000_000000001.zip"):
        self.performance, self.file = performance, file


@pytest.mark.parametrize(("scores", "most", "least"), SCORES)
def test_everybody_agrees_who_is_best(scores, most, least):
    for order, mode in ((most, "max"), (least, "min")):
        assert ranking(scores, mode == "min") == order
        assert best_first([Member(score) for score in scores], mode) == order
        numbers = {i: math.nan if score is None else score for i, score in enumerate(scores)}
        members = {i: Life([{"step": 1}]) for i in range(len(scores))}
        run = Run("run", None, members, Life([]), performance=numbers, lower_is_better=mode == "min")
        assert run.ranking == order
        if any(score is not None and math.isinf(score) for score in scores):
            continue  # which the scheduler takes for diverged
        config = PBTConfig(
            population_size=3, hyperparams=[HyperparamConfig("x", 0.0, 1.0)], metric_mode=mode, checkpoint_dir=None
        )
        scheduler = PBTScheduler(config, seed=0)
        for member, score in enumerate(scores):
            scheduler.update_performance(member, score, 1, {"policy": {}})
        assert scheduler.ranking() == order


def test_members_that_were_never_saved_are_not_ranked():
    assert best_first([Member(5.0, None), Member(1.0), Member(2.0)], "max") == [2, 1]


def test_many_members_are_ranked_at_once():
    scores = np.random.default_rng(0).normal(size=4096)
    assert ranking(scores) == np.argsort(-scores, kind="stable").tolist()


def test_means_of_episodes():
    episodes = [{"r": 1.0, "l": 10}, {"r": 4.0, "l": 20}]
    assert episode_mean(episodes) == 2.5
    assert episode_mean(episodes, "l") == 15.0
    assert episode_mean([]) is episode_mean(None) is None


def test_the_layout_is_known_without_torch():
    code = "import sys, driftproof.runs; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert output_of(code) == "[]"

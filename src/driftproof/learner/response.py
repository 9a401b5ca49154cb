"""The response to a drift alarm: it grows for as long as returns stay low, up to a restart from fresh weights.

:class:`DriftResponse` decides, from the mean return of completed episodes; ``renewal.py`` has what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from driftproof.learner.alarm import LARGEST_LENGTH, CalibrationAlarm
from driftproof.learner.earlier import EarlierWeights
from driftproof.learner.episode_returns import FEW_EPISODES, LARGEST_RETURN, LOOK, Look, expected_return
from driftproof.learner.renewal import renew, restart_optimizer, rewire, soften
from driftproof.learner.response_progress import Progress
from driftproof.learner.rewiring import LARGEST, TransitionModel
from driftproof.learner.rollout import Rollout
from driftproof.learner.usual_rewards import Span, UsualRewards, span_of
from driftproof.learner.worlds import Worlds, starts_of
from driftproof.state import copy_tree
from driftproof.state.schema import Rule, check, count, fail, items, number, optional, table

if TYPE_CHECKING:
    from driftproof.learner.learner import Learner, UpdateSettings

_OF_SENSORS = ("observations", "model")
"""What belongs to the sensors as they are now, whichever weights read them."""
_FULL = 512
"""Steps of a rollout that count as an update; shorter rollouts count as a part of one."""
_FADE = 20
"""Updates until additional exploration has faded, or until a restart counts as done."""
_PROGRESS = 0.1
"""Improvement of a window over the one before, as a share of what was lost, that is worth waiting for."""
_FAR_BELOW = 0.25
"""Share of the former gain below which weights are of little use."""
_WINDOWS = 2
"""Windows without improvement before the next level if weights still earn more than that."""
_LONGEST_TRIAL, _LENGTHS = 3 * LOOK, 2
"""Steps, or typical lengths of episodes, in which weights on trial may complete an episode."""


class DriftResponse:
    """Response to the alarm, in levels.

    While there is no suspicion, the weights that last earned what is usual are kept. When the alarm's sums exceed their
    thresholds, these act on trial, reordered first if that explains the transitions. If they earn what they used to as
    they were, the world has not changed, but training has spoiled the present weights: the good ones stay, and no alarm
    is raised. If they do not:

    - Archived weights of earlier worlds are tried, and adopted if they earn at least half of what they used to. The
      weights before the alarm join the archive.
    - Level 1: the optimizer's moments, the statistics of variance gradient scaling and the scale of returns start anew;
      the exploration floor rises and fades over 20 updates.
    - Level 2: heads and last layers move halfway to fresh ones.
    - Level 3: all weights are fresh, as are return scale and KL penalty.

    A trial ends with the fourth completed episode, or with the first after 800 steps. It ends with none, too, once the
    weights had time for two episodes.

    Rewards may also become others without making returns fall. Then archived weights that used to earn more are tried,
    without an alarm; if none earns half of that, the present ones go on, with a scale of returns that starts anew.

    The response ends once half of the former gain is back, the difference between the typical return before the alarm
    and that of an untrained policy in the first rollout. Weights that earn less than a quarter of it, and did not
    improve in ``patience`` updates, are of little use: level 3 follows. Others go to level 2 after twice as many
    updates without improvement. A world may also just be poorer, with nothing to learn: where weights earn less than
    those that they replaced, after twice the patience at level 2 and 20 updates at level 3, the former ones come back.

    Args:
        patience: Updates, of 512 steps or more, whose mean return is compared with that of as many updates before.
            Fewer: restarts sooner.
        exploration: Added to ``exploration_floor`` after an alarm.
        worlds: Number of archived worlds.
        rewiring: Look for sensors and actions that were swapped or inverted.
    """

    def __init__(self, patience: int = 4, exploration: float = 0.02, worlds: int = 3, rewiring: bool = True) -> None:
        self.patience, self.exploration, self.worlds, self.rewiring = patience, exploration, worlds, rewiring
        self.model: TransitionModel | None = None
        """Model of the world's steps; ``None``: sensors and actions are not looked at."""
        self.rewirings = 0
        """How often reordered sensors or actions were adopted."""
        self.recoveries = 0
        """How often the last good weights were taken back in a world that had not changed."""
        self.archive: list[dict[str, Any]] = []
        """Weights of earlier worlds with their typical ``return``, oldest first."""
        self.earlier = EarlierWeights(worlds)
        self._good: dict[str, Any] | None = None
        """The last good weights of the present world, with the ``return`` and ``length`` of their episodes."""
        self._acting: dict[str, Any] | None = None
        """Weights that act since the alarm last looked at returns; good ones if these are."""
        self._held: dict[str, Any] | None = None
        """Weights to return to, with the ``return`` that they earned, if others do not earn more."""
        self._rewards = UsualRewards()
        self._progress = Progress()
        self._worlds = Worlds({}, None)

    @property
    def level(self) -> int:
        """Level of the response in progress; 0: none."""
        return self._progress.level

    def attach(self, learner: Learner) -> None:
        """Act on this learner."""
        sensors = None if learner.normalizer is None else learner.normalizer.sensors
        wiring = learner.policy.wiring() if self.rewiring and sensors is not None else None
        if sensors is not None and wiring is not None and max(sensors.size, wiring.actions) <= LARGEST:
            self.model = TransitionModel(sensors.size, wiring)
        self._worlds = Worlds(learner.components(), self.model)

    def adjusted(self, settings: UpdateSettings) -> UpdateSettings:
        """Settings of an update with the additional exploration."""
        share = self._progress.exploration
        floor = settings.exploration_floor + self.exploration * share
        return settings._replace(exploration_floor=floor) if share > 0 else settings

    def update(
        self, learner: Learner, alarm: CalibrationAlarm, is_suspicious: bool, rollout: Rollout
    ) -> tuple[bool, bool]:
        """Respond to what the alarm has seen in an update.

        Returns:
            Whether the world is now known to have changed, and whether other weights act from now on.
        """
        now = self._progress
        if self.model is not None and learner.normalizer is not None:
            recorded = learner.normalizer.recorded(rollout.steps)
            if recorded is not None:
                rows, starts = recorded
                self.model.observe(rows.reshape(*starts.shape, -1), starts, rollout.actions)
        update = min(1.0, rollout.valid.sum() / _FULL)
        now.exploration = max(0.0, now.exploration - update / _FADE)
        if now.trial is not None:
            return self._judge(learner, alarm, rollout)
        rewards = span_of(rollout)
        if is_suspicious:
            return self._check(learner, alarm, rewards)
        if alarm.has_seen and self._rewards.are_others(rewards) and self._look_back(learner, alarm):
            return False, True
        if now.level:
            if alarm.has_seen:
                self._rewards.observe(rewards)
            return False, self._grow(learner, alarm, update)
        if alarm.has_seen:
            self._remember(alarm, rewards)
        return False, False

    def _remember(self, alarm: CalibrationAlarm, rewards: Span | None) -> None:
        """Keep the weights that have acted, if they are good ones, and what was seen of their world."""
        typical, mean = alarm.typical_return, alarm.mean_return
        is_usual = typical is not None and (mean is None or mean >= typical - alarm.noise)
        if is_usual and (mean is not None or not self._rewards.are_others(rewards)):
            self._rewards.observe(rewards)  # Others wait for an episode that tells what they return.
        if is_usual and self.model is not None:
            self.model.learn()
        now = self._worlds.copy()
        if is_usual and alarm.is_quiet and self._acting is not None:
            sensors = {name: now[name] for name in _OF_SENSORS if name in now}
            self._good = {**self._acting, **sensors, "return": typical, "length": alarm.typical_length}
            if self.model is not None:
                self.earlier.observe(self._good)
        self._acting = now

    def metrics(self) -> dict[str, float]:
        """Numbers of the response, by the names that are logged."""
        return {
            "drift/level": float(self.level),
            "drift/trial": float(self._progress.trial is not None),
            "drift/archived": float(len(self.archive)),
            "drift/rewired": float(self.rewirings),
            "drift/recovered": float(self.recoveries),
        }

    def _look_back(self, learner: Learner, alarm: CalibrationAlarm) -> bool:
        """Try archived weights where rewards are others than usual, but returns have not fallen; whether they act now.

        An agent that has learned to end episodes, as rewards were negative, earns more when they are positive again,
        but not what it could. If returns have fallen, the alarm will see it.
        """
        before, after = alarm.typical_return, alarm.mean_return
        if before is None or after is None or after < before - alarm.noise:
            return False
        enough = after + 2 * alarm.noise
        better = [world for world in self.archive if world["return"] > enough]
        if not better:
            return False
        self._held = {**self._worlds.copy(), "return": before, "length": alarm.typical_length}
        rest = [world for world in self.archive if world["return"] <= enough]
        if self._good is not None:
            rest.append({**self._good, "return": before})
        room = self.worlds - len(better)
        self.archive = [*better, *rest[max(0, len(rest) - room) :]]
        exploration = self._progress.exploration
        self._progress = now = Progress(
            before=before, floor=after, previous=after, of_rewards=True, exploration=exploration
        )
        now.trials, self._good, self._rewards = len(better), None, UsualRewards()
        alarm.restart()
        return self._try(learner, alarm, 0)

    def _check(self, learner: Learner, alarm: CalibrationAlarm, rewards: Span | None) -> tuple[bool, bool]:
        """Let reordered weights act, if any explain the world, then the last good ones, as they were."""
        before, after = alarm.typical_return, alarm.last_return
        assert before is not None
        assert after is not None
        after = min(after, before - 2 * alarm.noise)
        untrained = alarm.untrained
        if untrained is not None and before - untrained <= 2 * alarm.noise:
            untrained = None  # The agent began with weights that were trained before.
        floor = after if untrained is None else untrained
        self._progress = now = Progress(
            before=before, floor=floor, untrained=untrained, previous=after, exploration=self._progress.exploration
        )
        if self.model is not None and self._rewards.have_scaled(rewards, before, after):
            now.of_rewards = self.model.is_usual(alarm.typical_length)
        self._held, good = {**self._worlds.copy(), "return": before, "length": alarm.typical_length}, self._good
        if good is None:
            return True, self._begin(learner, alarm)
        rewired = self._rewired(learner, good)
        self.archive[:0] = [*rewired, {**good, "return": before}]
        self._good, now.checking, now.matched = None, True, bool(rewired)
        now.rewired, now.trials = len(rewired), len(rewired) + 1
        return False, self._try(learner, alarm, 0)

    def _begin(self, learner: Learner, alarm: CalibrationAlarm, good: dict[str, Any] | None = None) -> bool:
        """Respond to a world that has changed: archive the last good weights, then try others, or go to level 1."""
        now, rewired, earlier = self._progress, list[dict[str, Any]](), list[dict[str, Any]]()
        now.checking = False
        self._rewards = UsualRewards()
        if good is not None:
            rewired = [] if now.matched else self._rewired(learner, good)
            if self.model is not None and not rewired:
                earlier = self.earlier.fitting(self.model, good, (now.floor + now.before) / 2)
            self._archive(good)
        others = len(self.archive) - (good is not None and self.worlds > 0)
        self.archive[:0] = [*rewired, *earlier]
        now.rewired, now.earlier = len(rewired), len(earlier)
        now.trials = now.rewired + now.earlier + others
        alarm.restart()
        if now.trials:
            return self._try(learner, alarm, 0)
        return self._to_level_1(learner, alarm)

    def _archive(self, good: dict[str, Any]) -> None:
        self.archive.append(good)
        del self.archive[: max(0, len(self.archive) - self.worlds)]

    def _rewired(self, learner: Learner, good: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The last good weights for sensors or actions in orders that explain the world now."""
        if self.model is None:
            return []
        worlds = []
        for found in self.model.match(starts_of(good)):
            self._worlds.put(good)
            rewire(learner, found)
            self.model.rewire(found)
            worlds.append({**self._worlds.copy(), "return": good["return"], "length": good["length"]})
        return worlds

    def _try(self, learner: Learner, alarm: CalibrationAlarm, index: int) -> bool:
        """Act with archived weights."""
        now = self._progress
        now.trial, now.steps, now.seen = index, 0, Look()
        recent = [] if self.model is None else self.model.recent
        self._worlds.put(self.archive[index])
        if self.model is not None and now.checking and not now.matched:
            self.model.recent = recent  # The world may have changed some rollouts ago.
        self._replaced(learner, alarm)
        return True

    def _judge(self, learner: Learner, alarm: CalibrationAlarm, rollout: Rollout) -> tuple[bool, bool]:
        """Adopt the archived weights that acted, or try the next ones, or go to level 1 with the former weights."""
        now = self._progress
        assert now.trial is not None
        tried = self.archive[now.trial]
        now.steps += rollout.steps
        now.seen.add(rollout, alarm.completed)
        longest = max(_LONGEST_TRIAL / rollout.envs, _LENGTHS * tried["length"])
        has_time = now.steps < longest
        mean = expected_return(now.seen, alarm.episodes.recent, has_time)
        if not now.seen.is_enough or (mean is None and has_time):
            return False, False
        is_check = now.checking and not now.rewired
        floor = now.previous if is_check else min(now.floor, now.previous)
        is_adopted = mean is not None and mean >= (floor + tried["return"]) / 2
        if is_adopted and now.seen.episodes < FEW_EPISODES and now.steps < min(longest, tried["length"]):
            return False, False  # No episode had time to be as long as they used to be.
        if is_check and not is_adopted and has_time and self.model is not None and self.model.is_waiting:
            return False, False  # With more transitions, reordered weights may explain the world.
        if is_check:
            good = self.archive.pop(0)
            if is_adopted:
                self.recoveries += 1
                self._good = good
                alarm.dismiss()
                return False, self._end(alarm)
            if mean is not None and mean > now.previous:
                self._held = {**self._worlds.copy(), "return": now.before, "length": tried["length"]}
                now.previous = mean
            return True, self._begin(learner, alarm, good)
        if is_adopted:
            del self.archive[: now.rewired + now.earlier]
            if now.checking:
                self._archive(self.archive.pop(0))
            if now.rewired:
                self.rewirings += 1
            elif not now.earlier:
                del self.archive[now.trial]
            alarm.restart()
            return now.checking, self._end(alarm)
        following = now.trial + 1
        if now.rewired or now.earlier:
            del self.archive[0]
            now.rewired, now.earlier = max(now.rewired - 1, 0), now.earlier - (not now.rewired)
            now.trials, following = now.trials - 1, 0
        if following < now.trials:
            return False, self._try(learner, alarm, following)
        return False, self._to_level_1(learner, alarm)

    def _to_level_1(self, learner: Learner, alarm: CalibrationAlarm) -> bool:
        """Go on with the weights from before all trials, and with fresh statistics."""
        assert self._held is not None
        self._worlds.put(self._held)
        self._held, self._progress.trial, self._progress.waited = None, None, 0.0
        self._replaced(learner, alarm)
        learner.return_scale.forget()
        if self._progress.of_rewards:
            self._end(alarm)
            return True
        self._raise(1)
        if learner.normalizer is not None:
            learner.normalizer.forget()
        return True

    def _grow(self, learner: Learner, alarm: CalibrationAlarm, update: float) -> bool:
        """End the response once returns are back, or go to the next level if they do not improve."""
        now, mean = self._progress, alarm.mean_return
        now.waited += update
        if mean is not None:
            now.window.append(mean)
        lost = now.before - now.floor
        if len(now.window) > 1 and sum(now.window[-2:]) / 2 >= now.floor + lost / 2:
            return self._end(alarm)
        if now.level > 1:
            return self._compare(learner, alarm)
        if now.waited < self.patience or not now.window:
            return False
        level = sum(now.window) / len(now.window)
        now.stuck = 0 if level - now.previous > _PROGRESS * lost else now.stuck + 1
        now.previous, now.window, now.waited = level, [], 0.0
        is_useless = now.untrained is not None and level < now.floor + _FAR_BELOW * lost
        if now.stuck < (1 if is_useless else _WINDOWS):
            return False
        self._held = {**self._worlds.copy(), "return": level, "length": alarm.typical_length}
        if is_useless:
            now.level, now.exploration = 3, 0.0  # A fresh policy explores by itself.
            renew(learner)
            if self.model is not None:
                self.model.restart()
            alarm.untrained = None
            self._replaced(learner, alarm)
            return True
        self._raise(2)
        soften(learner)
        restart_optimizer(learner)
        return False

    def _compare(self, learner: Learner, alarm: CalibrationAlarm) -> bool:
        """Put the former weights back if the new ones, after some time, earn less."""
        now = self._progress
        if now.waited < (_FADE if now.level == 3 else _WINDOWS * self.patience) or not now.window:
            return False
        recent = now.window[-self.patience :]
        assert self._held is not None
        if sum(recent) / len(recent) >= self._held["return"]:
            return self._end(alarm)
        self._worlds.put(self._held)
        self._replaced(learner, alarm)
        self._end(alarm)
        return True

    def _end(self, alarm: CalibrationAlarm) -> bool:
        alarm.rearm()
        self._progress, self._held = Progress(exploration=self._progress.exploration), None
        return False

    def _raise(self, level: int) -> None:
        self._progress.level, self._progress.exploration = level, 1.0

    def _replaced(self, learner: Learner, alarm: CalibrationAlarm) -> None:
        """After all weights were replaced, restart what belongs to the former ones."""
        restart_optimizer(learner)
        self._acting = None
        if not self._progress.checking:
            alarm.restart()
        alarm.weights_were_replaced()

    def state_dict(self) -> dict[str, Any]:
        """Archived weights, the last good ones, and where the response stands. Settings are not part of it."""
        worlds = {"archive": list(self.archive), "good": self._good, "acting": self._acting, "held": self._held}
        state = {**worlds, **self._progress.state_dict()}
        state |= {"rewirings": self.rewirings, "recoveries": self.recoveries}
        state["rewards"] = self._rewards.state_dict()
        if self.model is None:
            return state
        return {**state, "model": self.model.state_dict(), "earlier_weights": self.earlier.state_dict()}

    def initial_state_dict(self) -> dict[str, Any]:
        """The state before the first update."""
        fresh = DriftResponse()
        if self.model is not None:
            fresh.model = TransitionModel(self.model.sensors, self.model.wiring)
        return fresh.state_dict()

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of a response with such networks."""
        value = number(at_least=-LARGEST_RETURN, at_most=LARGEST_RETURN)
        parts = self._worlds.rules()
        of_world = {"return": value, "length": number(at_least=0, at_most=LARGEST_LENGTH), **parts}
        world = optional(table(of_world))
        model = {} if self.model is None else {"model": self.model.rule()}
        if self.model is not None:
            model["earlier_weights"] = EarlierWeights.rule(of_world)
        rules: dict[str, Rule] = {
            "archive": items(world),
            "good": world,
            "acting": optional(table(parts)),
            "held": world,
            **Progress.rules(),
            "rewirings": count(),
            "recoveries": count(),
            "rewards": UsualRewards.rule(),
            **model,
        }
        check("drift_response", state_dict, table(rules))
        archived, trial = len(state_dict["archive"]), state_dict["trial"]
        is_known = trial is None or (
            trial < state_dict["trials"] <= archived
            and state_dict["rewired"] + state_dict["earlier"] <= state_dict["trials"]
            and state_dict["held"] is not None
            and (not state_dict["checking"] or state_dict["rewired"] < state_dict["trials"])
        )
        if None in state_dict["archive"] or not is_known:
            fail(("drift_response", "trial"), trial, f"the index of one of {archived} archived worlds, or None")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the archive, and where the response stood.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        own = copy_tree(dict(state_dict))
        self.archive = [self._worlds.whole(world) for world in own.pop("archive")]
        self._good, self._held, self._acting = (
            self._worlds.whole(own.pop(name)) for name in ("good", "held", "acting")
        )
        self.rewirings, self.recoveries = own.pop("rewirings"), own.pop("recoveries")
        self._rewards = UsualRewards.of(own.pop("rewards"))
        if self.model is not None:
            self.model.load_state_dict(own.pop("model"))
            self.earlier.load_state_dict(own.pop("earlier_weights"), self._worlds.whole)
        self._progress = Progress.of(own)

"""``driftproof evaluate``, and the evaluation after training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof._text import table
from driftproof.cli import agents, scopes
from driftproof.cli.arenas import Arena, Subject, arena, normalized
from driftproof.cli.errors import CommandError, Stopped, say
from driftproof.cli.interrupts import interrupts
from driftproof.cli.options import Agent, Best, EnvId, Member, Overrides, RunsDir, Trusted, changes
from driftproof.cli.returns import interval_told, play, summary
from driftproof.cli.threads import use_threads
from driftproof.runs import ATTACK_RESULTS, EVALUATION, PHASE_RESULTS, own_file

if TYPE_CHECKING:
    import numpy as np
    from stable_baselines3.common.vec_env import VecEnv

    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO

_MARKETS = ("driftproof/RegimeMarket-v0", "driftproof/Market-v0")
ATTACKS = ("random", "mad", "critic", "learned")


def evaluate(
    run: Agent,
    episodes: Annotated[
        int | None, typer.Option("--episodes", min=1, help="Number of episodes. Default: run.evaluation_episodes.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Seed of the first environment. Default: one not used in training."),
    ] = None,
    member: Member = None,
    best: Best = False,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the most probable ones.")
    ] = False,
    attack: Annotated[
        list[str] | None,
        typer.Option("--attack", help=f"Attack the observations: {', '.join(ATTACKS)}, all; repeatable."),
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option("--epsilon", help="Perturbation size; repeatable. Default: 0.025, 0.05, 0.075."),
    ] = None,
    phase: Annotated[
        int | None, typer.Option("--phase", min=0, help="Drift phase to evaluate in. Default: the last of training.")
    ] = None,
    phases: Annotated[
        str | None, typer.Option("--phases", metavar="all", help="Evaluate in every drift phase.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="JSON file to write. Default: in the run folder.")
    ] = None,
    env: EnvId = None,
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Evaluate an agent, out of sample where possible. With --attack, evaluate it under adversarial attack.

    The first line of output tells the scope: split and dates of market data, seeds, and the drift phase, which is held
    fixed; data seen in training are marked IN SAMPLE. Without a split, market data are evaluated on the last 30% of
    bars, which training leaves out.
    """
    from driftproof.state import read

    _check_attacks(attack or [], epsilon or [])
    _check_phases(phase, phases, bool(attack))
    found = agents.find(run, runs_dir, member, best, trust)
    if found.folder is None and env is None:
        raise CommandError(f"{run} is not in a run folder: name the environment to evaluate in with --env ID")
    changed = changes(env, overrides)
    settings = found.config_to_play(changed)
    use_threads(settings)
    trained = scopes.trained_on(found.folder, found.config())
    lasting = lasting_of(read(found.checkpoint).tree)
    subject = Subject(found.load(settings.run.device), settings, lasting, trained)
    episodes = episodes or settings.run.evaluation_episodes or 20
    say(f"{found.checkpoint}: {episodes} episodes of {settings.env.id}")
    if attack:
        name, result = ATTACK_RESULTS, _attacked(subject, attack, epsilon, episodes, seed, not stochastic, phase)
    elif phases:
        from driftproof.cli.phases import measure_phases, phase_table

        name, result = PHASE_RESULTS, measure_phases(subject, episodes, seed, not stochastic)
        scopes.show(result["scope"])
        say(phase_table(result))
    else:
        name, result = EVALUATION, measure(subject, episodes, seed, not stochastic, phase)
        show(result)
    # Save results in the run folder only if the run was evaluated with its own settings in the last drift phase of
    # training.
    belongs = found.folder is not None and found.is_run and not changed and phase is None
    in_folder = own_file(found.folder, name) if found.folder is not None and belongs else None
    if target := output or in_folder:
        write_json(target, result)
        say(f"written to {target}")


def lasting_of(tree: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Drift state of the environments in a checkpoint; ``None``: not recorded."""
    rollout = tree.get("rollout")
    lasting = rollout.get("lasting") if isinstance(rollout, Mapping) else None
    is_known = isinstance(lasting, list) and all(isinstance(state, Mapping) for state in lasting)
    return lasting if is_known else None


def _check_attacks(attacks: list[str], epsilons: list[float]) -> None:
    if wrong := [name for name in attacks if name not in (*ATTACKS, "all")]:
        raise CommandError(f"--attack {wrong[0]!r} must be one of {', '.join(ATTACKS)}, or all")
    if epsilons and not attacks:
        raise CommandError("--epsilon is the perturbation size of --attack: give --attack too")
    if far := [epsilon for epsilon in epsilons if not 0 < epsilon < math.inf]:
        raise CommandError(f"--epsilon {far[0]:g} must be above 0")


def _check_phases(phase: int | None, phases: str | None, is_attacked: bool) -> None:
    if phases not in (None, "all"):
        raise CommandError(f"--phases {phases!r} must be all; for a single phase use --phase N")
    if phases is not None and phase is not None:
        raise CommandError("--phase and --phases exclude each other: give only one")
    if phases is not None and is_attacked:
        raise CommandError("--phases and --attack cannot be combined: run two evaluations")


def finish(agent: DistributionalPPO, settings: Config, folder: Path, is_new: bool) -> None:
    """Evaluate a trained agent unless it has been evaluated already, and print its run folder."""
    from driftproof.ppo.environments import lasting_states

    target = own_file(folder, EVALUATION)
    if target.exists() and not is_new:
        say(f"{folder} is done: use driftproof evaluate {folder} to evaluate it again")
        return
    if episodes := settings.run.evaluation_episodes:
        lasting = None if agent.env is None else lasting_states(agent.env)
        if not agent.ep_info_buffer:
            say("evaluating, though no episode ended in training; if none ends now, press Ctrl-C: training is saved")
        try:
            interrupts.check()  # A signal may have come at the very end of training.
            result = measure(Subject(agent, settings, lasting, scopes.trained_on(folder, settings)), episodes)
        except KeyboardInterrupt:
            how = "to limit episodes that do not end, add --set env.kwargs.max_episode_steps=1000"
            raise Stopped(
                f"trained and saved in {folder}, not evaluated: driftproof evaluate {folder}; {how}"
            ) from None
        write_json(target, result)
        show(result)
    say(f"done: {folder}")


def measure(
    subject: Subject, episodes: int, seed: int | None = None, deterministic: bool = True, phase: int | None = None
) -> dict[str, Any]:
    """Evaluate an agent and baselines in the same episodes.

    Args:
        subject: The agent and its settings.
        episodes: Number of episodes.
        seed: Seed of the first episode; ``None``: one that training does not use.
        deterministic: Whether the agent takes its most probable actions.
        phase: Drift phase; ``None``: the one in which training ended.
    """
    settings = subject.settings
    with arena(subject, episodes, seed) as place:
        scope = place.enter(phase)

        def result_of(player: Any, seen: VecEnv) -> dict[str, Any]:
            place.restart()
            return summary(play(player, seen, episodes, place.seed, deterministic), place.times)

        result = result_of(subject.agent, normalized(subject.agent, place.venv))
        baselines = {name: result_of(player, place.venv) for name, player in _baselines(place).items()}
    facts = {"episodes": episodes, "env": settings.env.id, "seed": place.seed, "scope": scope}
    return {**facts, **result, "baselines": baselines}


def show(result: Mapping[str, Any]) -> None:
    """Print the scope of the evaluation, the results as a table, and how intervals were estimated."""
    scopes.show(result["scope"])
    rows = [("", "return", "95% interval", "deviation")]
    for name, each in {"agent": result, **result["baselines"]}.items():
        rows.append((name, f"{each['mean']:.4g}", interval_told(each), f"{each['std']:.3g}"))
    say(table(rows))
    say(f"interval: {result['interval_note'].removeprefix('no interval: ')}")


class _Constant:
    """Policy that always takes the same action."""

    def __init__(self, action: Any) -> None:
        self._action = action

    def predict(self, observation: Any, **_: Any) -> tuple[np.ndarray[Any, Any], None]:
        import numpy as np

        return np.repeat(np.asarray(self._action)[None], _count(observation), axis=0), None


class _Random:
    """Policy that takes random actions."""

    def __init__(self, space: Any, seed: int) -> None:
        self._space = space
        self._space.seed(seed)

    def predict(self, observation: Any, **_: Any) -> tuple[np.ndarray[Any, Any], None]:
        import numpy as np

        return np.stack([np.asarray(self._space.sample()) for _ in range(_count(observation))]), None


def _count(observation: Any) -> int:
    return len(next(iter(observation.values())) if isinstance(observation, dict) else observation)


def _baselines(place: Arena) -> dict[str, Any]:
    """Baseline policies: buy and hold, and no position, in a market; random actions elsewhere."""
    if place.subject.settings.env.id not in _MARKETS:
        return {"random": _Random(place.venv.action_space, place.seed)}
    if place.venv.get_attr("actions")[0] == "discrete":
        return {"buy and hold": _Constant(2), "flat": _Constant(1)}
    return {"buy and hold": _Constant([1.0]), "flat": _Constant([0.0])}


def _attacked(
    subject: Subject,
    attacks: list[str],
    epsilons: list[float] | None,
    episodes: int,
    seed: int | None,
    deterministic: bool,
    phase: int | None,
) -> dict[str, Any]:
    from driftproof.adversarial import Robustness, evaluate_under_attack

    names = list(ATTACKS[:-1]) if "all" in attacks else attacks
    with arena(subject, episodes, seed) as place:
        scope = place.enter(phase)
        place.restart()
        is_history = place.times is not None
        robustness = evaluate_under_attack(
            subject.agent,
            place.venv,
            ["clean", *names],  # type: ignore[list-item]
            epsilons or (0.025, 0.05, 0.075),
            episodes,
            deterministic=deterministic,
            seed=place.seed,
        )
    if is_history:
        results = [replace(result, low=math.nan, high=math.nan) for result in robustness.results]
        robustness = Robustness(tuple(results))
    scopes.show(scope)
    say(str(robustness))
    if is_history:
        say("no confidence intervals: episodes share bars")
    return {"scope": scope, **robustness.to_dict()}


def write_json(target: Path, result: Mapping[str, Any]) -> None:
    """Write results as JSON, with ``null`` for non-finite numbers."""
    from driftproof.state import write_atomically

    write_atomically(target, [json.dumps(_finite(dict(result)), allow_nan=False).encode()])


def _finite(value: Any) -> Any:
    """Values for JSON, with ``null`` for non-finite numbers, such as the return of a diverged agent."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

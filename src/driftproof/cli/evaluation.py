"""``driftproof evaluate``, and the evaluation after training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof._files import DAMAGES, described
from driftproof._text import table
from driftproof.cli import agents
from driftproof.cli.errors import CommandError, Stopped, say
from driftproof.cli.interrupts import interrupts
from driftproof.cli.options import Agent, Best, EnvId, Member, Overrides, RunsDir, Trusted, changes, use_threads
from driftproof.runs import ATTACK_RESULTS, EVALUATION, PHASE_RESULTS, own_file

if TYPE_CHECKING:
    import numpy as np
    from stable_baselines3.common.vec_env import VecEnv

    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO

_UNSEEN = 2**30
"""Added to the run's seed, so that evaluation uses other seeds than training."""
_DRAWS = 10_000
"""Samples of the bootstrap."""
_MARKETS = ("driftproof/RegimeMarket-v0", "driftproof/Market-v0")
ATTACKS = ("random", "mad", "critic", "learned")


def evaluate(
    run: Agent,
    episodes: Annotated[int | None, typer.Option("--episodes", min=1, help="Default: as configured.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the episodes.")] = None,
    member: Member = None,
    best: Best = False,
    stochastic: Annotated[bool, typer.Option("--stochastic", help="Sample actions; default: the likeliest.")] = False,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help=f"Perturb observations: {', '.join(ATTACKS)}, all; repeatable.")
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option("--epsilon", help="Perturbation size; repeatable. Default: 0.025, 0.05, 0.075."),
    ] = None,
    phases: Annotated[
        bool, typer.Option("--phases", help="Evaluate in every phase of the environment's drift, earlier ones too.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file. Default: in the run's folder.")] = None,
    env: EnvId = None,
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Evaluate an agent in new episodes. --attack perturbs its observations, --phases holds the drift."""
    from driftproof.state import read

    _check_attacks(attack or [], epsilon or [])
    if phases and attack:
        raise CommandError("--phases and --attack are two evaluations: give one of them at a time")
    found = agents.find(run, runs_dir, member, best, trust)
    if found.folder is None and env is None:
        raise CommandError(f"{run} is not in a run folder: give --env, the environment to evaluate in")
    changed = changes(env, overrides)
    settings = found.config(changed)
    use_threads(settings)
    agent = found.load(settings.run.device)
    episodes = episodes or settings.run.evaluation_episodes or 20
    say(f"{found.checkpoint}: {episodes} episodes of {settings.env.id}")
    if attack:
        result, name = _attacked(agent, settings, attack, epsilon, episodes, seed, not stochastic), ATTACK_RESULTS
    else:
        lasting = _lasting(read(found.checkpoint).tree)
        if phases:
            from driftproof.cli.phases import measure_phases, phase_table

            name, result = PHASE_RESULTS, measure_phases(agent, settings, episodes, seed, not stochastic, lasting)
            say(phase_table(result))
        else:
            name, result = EVALUATION, measure(agent, settings, episodes, seed, not stochastic, lasting)
            say(summary_table(result))
    # Results are saved in the run folder only if the run itself was evaluated, with its own settings.
    belongs = found.folder is not None and found.is_run and not changed
    in_folder = own_file(found.folder, name) if found.folder is not None and belongs else None
    if target := output or in_folder:
        _write(target, result)
        say(f"written to {target}")


def _lasting(tree: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """The state of the environments' drift in a checkpoint; ``None`` if it has none."""
    rollout = tree.get("rollout")
    lasting = rollout.get("lasting") if isinstance(rollout, Mapping) else None
    is_known = isinstance(lasting, list) and all(isinstance(state, Mapping) for state in lasting)
    return lasting if is_known else None


def _check_attacks(attacks: list[str], epsilons: list[float]) -> None:
    if wrong := [name for name in attacks if name not in (*ATTACKS, "all")]:
        raise CommandError(f"--attack {wrong[0]!r} must be one of {', '.join(ATTACKS)}, or all")
    if epsilons and not attacks:
        raise CommandError("--epsilon is the size of an --attack's perturbations: give --attack")
    if far := [epsilon for epsilon in epsilons if not 0 < epsilon < math.inf]:
        raise CommandError(f"--epsilon {far[0]:g} must be above 0")


def finish(agent: DistributionalPPO, settings: Config, folder: Path, is_new: bool) -> None:
    """Evaluate a trained agent, unless that has been done already, and print where the run is."""
    from driftproof.ppo.environments import lasting_states

    target = own_file(folder, EVALUATION)
    if target.exists() and not is_new:
        say(f"{folder} is done: use driftproof evaluate {folder} to evaluate it again")
        return
    if episodes := settings.run.evaluation_episodes:
        lasting = None if agent.env is None else lasting_states(agent.env)
        if not agent.ep_info_buffer:
            say("no episode has ended yet; if none does, Ctrl-C: training is saved")
        try:
            interrupts.check()  # A signal may have come at the very end of training.
            result = measure(agent, settings, episodes, lasting=lasting)
        except KeyboardInterrupt:
            how = "for episodes that do not end, --set env.kwargs.max_episode_steps=1000"
            raise Stopped(
                f"trained and saved in {folder}, not evaluated: driftproof evaluate {folder}; {how}"
            ) from None
        _write(target, result)
        say(summary_table(result))
    say(f"done: {folder}")


def measure(
    agent: DistributionalPPO,
    settings: Config,
    episodes: int,
    seed: int | None = None,
    deterministic: bool = True,
    lasting: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Returns of an agent and of baselines, in the same episodes.

    Args:
        agent: The agent.
        settings: Configuration with the environment.
        episodes: Number of episodes.
        seed: Seed of the first episode; ``None``: one that training does not use.
        deterministic: Whether the agent takes its most probable actions.
        lasting: States of the environments' drift at the end of training; evaluation continues from them.
    """
    first = first_seed(settings, seed)
    with evaluation_env(agent, settings, episodes) as venv:

        def play(player: Any, seen: VecEnv) -> dict[str, Any]:
            let_drift(venv, lasting)
            return summary(returns_of(player, seen, episodes, first, deterministic))

        result = play(agent, normalized(agent, venv))
        baselines = {name: play(player, venv) for name, player in _baselines(settings, venv, first).items()}
    return {"episodes": episodes, "env": settings.env.id, "seed": first, **result, "baselines": baselines}


def first_seed(settings: Config, seed: int | None) -> int:
    """Seed of the first episode: as given, or else one that training does not use."""
    return settings.run.seed + _UNSEEN if seed is None else seed


@contextmanager
def evaluation_env(agent: DistributionalPPO, settings: Config, episodes: int) -> Iterator[VecEnv]:
    """Environments to evaluate an agent in, at most one per episode.

    Raises:
        CommandError: The agent has other spaces.
    """
    from driftproof.cli.played import Played
    from driftproof.config import build_env

    with interrupts.held():
        envs = build_env(settings, n_envs=min(settings.env.n_envs, episodes), is_evaluation=True)
    venv = Played(envs, settings.env.id)
    try:
        _check_spaces(agent, venv, settings.env.id)
        yield venv
    finally:
        venv.close()


def _check_spaces(agent: DistributionalPPO, venv: VecEnv, env_id: str) -> None:
    """Refuse environments with other spaces; bounds of observations may differ, as under drift."""
    for what, known, given in (
        ("observation", agent.observation_space, venv.observation_space),
        ("action", agent.action_space, venv.action_space),
    ):
        if _kind(known) != _kind(given):
            raise CommandError(f"the agent has the {what} space {known}, but {env_id} has {given}")


def _kind(space: Any) -> tuple[Any, ...]:
    """What two spaces must have in common; agents have images' channels first, environments last."""
    return type(space), sorted(space.shape or ()), getattr(space, "n", None)


def let_drift(venv: VecEnv, lasting: Sequence[Mapping[str, Any]] | None) -> bool:
    """Restore the environments' drift as of the end of training.

    Returns:
        Whether there is a state that fits; otherwise, drift starts from the beginning.
    """
    from driftproof.ppo.environments import restore_lasting

    if not lasting:
        return False
    try:
        return restore_lasting(venv, [lasting[0]] * venv.num_envs)
    except (*DAMAGES, AssertionError, RuntimeError) as error:
        what = f"the checkpoint's state of the drift does not fit the environment: {described(error)}"
        raise CommandError(f"{what}; give --env, to evaluate without the state of the drift") from error


def summary(returns: list[float]) -> dict[str, Any]:
    """Mean, standard deviation, and 95% confidence interval of the mean by bootstrap over episodes."""
    import numpy as np

    values = np.asarray(returns)
    means = np.random.default_rng(0).choice(values, size=(_DRAWS, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return {"mean": float(values.mean()), "std": float(values.std()), "interval": [low, high], "returns": returns}


def summary_table(result: dict[str, Any]) -> str:
    """Results as a text table."""
    rows = [("", "return", "95% interval", "deviation")]
    for name, each in {"agent": result, **result["baselines"]}.items():
        low, high = each["interval"]
        rows.append((name, f"{each['mean']:.4g}", f"[{low:.4g}, {high:.4g}]", f"{each['std']:.3g}"))
    return table(rows)


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


def _baselines(settings: Config, venv: VecEnv, seed: int) -> dict[str, Any]:
    """Baseline policies: buy and hold, and no position, in a market; random actions elsewhere."""
    if settings.env.id not in _MARKETS:
        return {"random": _Random(venv.action_space, seed)}
    if venv.get_attr("actions")[0] == "discrete":
        return {"buy and hold": _Constant(2), "flat": _Constant(1)}
    return {"buy and hold": _Constant([1.0]), "flat": _Constant([0.0])}


def returns_of(player: Any, venv: VecEnv, episodes: int, seed: int, deterministic: bool = True) -> list[float]:
    """Returns of a policy in so many episodes."""
    from stable_baselines3.common.evaluation import evaluate_policy

    venv.seed(seed)
    returns, _ = evaluate_policy(player, venv, episodes, deterministic, return_episode_rewards=True)
    return [float(value) for value in returns]  # type: ignore[union-attr]


def normalized(agent: DistributionalPPO, venv: VecEnv) -> VecEnv:
    """The environments with the agent's observation normaliser, not updated."""
    from stable_baselines3.common.vec_env import VecNormalize

    wrapped = agent.normalizer.wrapped(venv)
    if isinstance(wrapped, VecNormalize):
        wrapped.training = False
    return wrapped


def _attacked(
    agent: DistributionalPPO,
    settings: Config,
    attacks: list[str],
    epsilons: list[float] | None,
    episodes: int,
    seed: int | None,
    deterministic: bool,
) -> dict[str, Any]:
    from driftproof.adversarial import evaluate_under_attack

    names = list(ATTACKS[:-1]) if "all" in attacks else attacks
    with evaluation_env(agent, settings, episodes) as venv:
        robustness = evaluate_under_attack(
            agent,
            venv,
            ["clean", *names],  # type: ignore[list-item]
            epsilons or (0.025, 0.05, 0.075),
            episodes,
            deterministic=deterministic,
            seed=first_seed(settings, seed),
        )
    say(str(robustness))
    return robustness.to_dict()


def _write(target: Path, result: dict[str, Any]) -> None:
    from driftproof.state import write_atomically

    write_atomically(target, [json.dumps(_finite(result), allow_nan=False).encode()])


def _finite(value: Any) -> Any:
    """Plain values for JSON, with ``null`` for numbers that are not finite, as the return of a diverged agent."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

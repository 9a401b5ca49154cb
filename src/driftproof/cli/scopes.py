"""Scope of an evaluation: split and dates, seeds, or drift phase, and whether it is in sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from driftproof._text import printable, shortlist
from driftproof.runs.sources import History, Sources, history_of, read_sources

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from driftproof.cli.origins import Origin
    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO

IN_SAMPLE = "IN SAMPLE"
_SPLITS = {"train": "training split", "held_out": "held-out split", "all": "all bars", "test": "test split"}
_LONGEST = 200


def scope_of(
    agent: DistributionalPPO,
    venv: VecEnv,
    settings: Config,
    seed: int,
    trained: Sources | None,
    *,
    drift: Mapping[str, Any] | None = None,
    normalizer: str = "frozen",
) -> dict[str, Any]:
    """Scope of an evaluation, as plain values.

    Args:
        agent: The agent.
        venv: Environments of the evaluation.
        settings: Configuration of the evaluation.
        seed: Seed of the first environment.
        trained: What the agent was trained on; ``None``: unknown.
        drift: Drift phase and values, with a ``note`` about them; ``None``: the environment does not drift.
        normalizer: Whether the observation normaliser is ``"frozen"`` or ``"follows"`` shifts of the observations.
    """
    if venv.has_attr("history"):
        scope = _of_history(history_of(venv.get_attr("history", indices=[0])[0]), trained)
    else:
        scope = _of_seeds(settings, agent.seed, seed, venv.num_envs)
    if drift is not None:
        values = ", ".join(f"{name} {value:.4g}" for name, value in drift["values"].items())
        at = f"in phase {drift['phase']} of the drift ({values}), held, {drift['note']}"
        scope |= {"phase": drift["phase"], "values": dict(drift["values"])}
        scope["text"] = f"{at}; {scope['text']}" if scope["in_sample"] is False else f"{scope['text']}; {at}"
    if agent.learner.normalizer is not None or agent.normalizer.is_used:
        scope["normalizer"] = normalizer
        how = "frozen" if normalizer == "frozen" else "follows shifts, as in training"
        scope["text"] += f"; observation normaliser {how}"
    scope["text"] = printable(scope["text"], _LONGEST * 2)
    return scope


def training_histories(settings: Config) -> list[History]:
    """Bars that training in the configured environment uses; empty unless it replays market data."""
    from driftproof.config.names import MARKET, make_env

    if settings.env.id.rpartition(":")[2] != MARKET:
        return []
    env = make_env(settings.env, settings.trust)
    try:
        return [history_of(env.get_wrapper_attr("history"))]
    finally:
        env.close()


def trained_on(folder: Path | None, settings: Config) -> Sources | None:
    """What the agent of a run was trained on; ``None``: unknown."""
    from driftproof.config import ConfigError

    if folder is None:
        return None
    if (sources := read_sources(folder)) is not None:
        return sources
    try:
        return Sources(histories=training_histories(settings))  # of runs of earlier versions
    except ConfigError:
        return None


def plan(settings: Config, folder: Path | None = None, origin: Origin | None = None, trials: int = 1) -> Sources:
    """Print the bars for training and for evaluation; returns the record for the run folder.

    Args:
        settings: The configuration.
        folder: Folder of the run, if it is resumed.
        origin: The agent that it starts from.
        trials: Number of trials that its hyper-parameters were selected from.

    Raises:
        ConfigError: There are no bars to evaluate on.
    """
    from driftproof.cli.errors import say
    from driftproof.cli.provenance import provenance
    from driftproof.config.names import make_env

    own = training_histories(settings)
    sources = None if folder is None else read_sources(folder)
    if sources is None:
        earlier = Sources() if origin is None else origin.sources() or Sources(is_complete=False)
        sources = provenance(settings, [*own, *earlier.histories]).model_copy(
            update={"is_complete": earlier.is_complete, "trials": max(trials, earlier.trials)}
        )
    if own:
        say(f"trains on {described(own[0])}")
        if settings.run.evaluation_episodes:
            kwargs = settings.env.kwargs | settings.env.evaluation_kwargs
            if not {"split", "fractions", "dates"} & set(kwargs):
                say("env.kwargs.split is not set: the last 30% of the bars are held out for evaluation")
            env = make_env(settings.env, settings.trust, is_evaluation=True)
            show(_of_history(history_of(env.get_wrapper_attr("history")), sources), "will be evaluated")
            env.close()
    return sources


def show(scope: Mapping[str, Any], what: str = "evaluated") -> None:
    """Print the scope of an evaluation, in red if it is in sample."""
    colour = typer.colors.RED if scope["in_sample"] else None
    typer.secho(printable(f"{what} {scope['text']}", 580), fg=colour, bold=bool(scope["in_sample"]))


def described(history: History) -> str:
    """A history as text."""
    first, last = history.span
    symbols = shortlist([printable(name, 30) or "prices" for name in history.symbols])
    return f"{_SPLITS.get(history.split, history.split)} of {symbols}, {first} to {last} ({history.bars:,} bars)"


def _of_history(history: History, trained: Sources | None) -> dict[str, Any]:
    where, seen = described(history), [] if trained is None else trained.histories
    is_seen: bool | None = True
    if any(history.overlaps(other) for other in seen):
        text = f"{IN_SAMPLE} on {where}: training saw these bars; without env.kwargs.split, the last 30% are held out"
    elif same := next((other for other in seen if history.is_of_the_time_of(other)), None):
        # The same prices may have another name, and markets move together.
        names = shortlist([printable(name, 30) or "prices" for name in same.symbols], 3)
        text = f"{IN_SAMPLE} on {where}: training saw bars of the same time, of {names}; env.kwargs.dates splits all "
        text += "markets at one time"
    elif trained is None or not trained.is_complete:
        text, is_seen = f"on {where}; whether training saw these bars is not recorded", None
    else:
        text, is_seen = f"out of sample on {where}", False
    return {"text": text, "in_sample": is_seen, "split": history.split, "symbols": history.symbols}


def _of_seeds(settings: Config, trained: int | None, seed: int, count: int) -> dict[str, Any]:
    seeds = f"seed {seed}" if count == 1 else f"seeds {seed} to {seed + count - 1}"
    is_seen = trained is not None and trained - count < seed < trained + settings.env.n_envs
    if is_seen:
        text = f"{IN_SAMPLE} in {settings.env.id} with {seeds}, of which training used some: leave out --seed"
    else:
        text = f"in new episodes of {settings.env.id} ({seeds}, not used in training)"
    return {"text": text, "in_sample": is_seen, "seeds": [seed, seed + count - 1]}

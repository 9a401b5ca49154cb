"""The market with hidden regimes: what agents learn in it, and how fast it is.

    python benchmarks/market.py                    # three agents of each kind, about 8 minutes
    python benchmarks/market.py --rates            # speed instead; --device cuda for many markets on a GPU
    python benchmarks/market.py --quick            # both, in a minute

Agents train in markets of some seeds and are asked, without noise, in 512 markets of others. Next to them: doing
nothing, buying and holding, the sign of the last 64 bars' change, and someone who knows what every bar is expected to
do. All pay the costs. Intervals are over markets, of the mean over agents. Times are of one core, so that other work on
the machine does not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import console, interval, show_table, write_result
from stable_baselines3.common.env_util import make_vec_env

from driftproof.envs import (
    REGIMES,
    FeatureConfig,
    RegimeMarketBatch,
    RegimeMarketEnv,
    RegimeParameters,
    compute_features,
    load_market_data,
    regime_bars,
    write_csv,
)
from driftproof.envs.regimes import Noise, simulate
from driftproof.ppo import DistributionalPPO

ID = "driftproof/RegimeMarket-v0"
ENVS = 16
SETTINGS: dict[str, Any] = {"n_steps": 128, "batch_size": 512, "n_epochs": 4, "gamma": 0.9, "gae_lambda": 0.8}
AGENTS = {
    "no memory, positions": ("MlpPolicy", "continuous", 400_000),
    "LSTM, positions": ("MlpLstmPolicy", "continuous", 200_000),
    "no memory, SELL/HOLD/BUY": ("MlpPolicy", "discrete", 400_000),
}
UNSEEN = 1_000_000
"""Seeds from here on are never trained on."""

Asked = Callable[[np.ndarray, int], np.ndarray]
"""From observations ``[N, F]`` and the bar to positions ``[N, 1]``, or actions ``[N]``."""


def play(ask: Asked, markets: int, actions: str = "continuous") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards and regimes ``[N, T]`` of markets never trained on, and what was traded per bar ``[N]``."""
    envs = [RegimeMarketEnv(actions=actions) for _ in range(markets)]
    observations = np.stack([env.reset(seed=UNSEEN + i)[0] for i, env in enumerate(envs)])
    rewards, regimes, traded = [], [], np.zeros(markets)
    for bar in range(envs[0].episode_length):
        steps = [env.step(action) for env, action in zip(envs, ask(observations, bar), strict=True)]
        observations = np.stack([step[0] for step in steps])
        rewards.append([step[1] for step in steps])
        regimes.append([step[4]["regime"] for step in steps])
        traded += [step[4]["traded"] for step in steps]
    return np.array(rewards).T, np.array(regimes).T, traded / len(rewards)


def trained(policy: str, actions: str, steps: int, seed: int) -> tuple[Asked, float]:
    """An agent, and how long it took."""
    env = make_vec_env(ID, ENVS, seed=seed * ENVS, env_kwargs={"actions": actions})
    agent = DistributionalPPO(policy, env, seed=seed, device="cpu", drift_kit=False, **SETTINGS)
    start = time.process_time()
    agent.learn(steps)
    seconds = time.process_time() - start
    memory: Any = None

    def ask(observations: np.ndarray, bar: int) -> np.ndarray:
        nonlocal memory
        starts = np.full(len(observations), bar == 0)
        done, memory = agent.predict(observations, memory, starts, deterministic=True)
        return done

    return ask, seconds


def expected(markets: int) -> np.ndarray:
    """Expected changes ``[N, T]``, which nobody in a market knows."""
    env = RegimeMarketEnv()
    rows, first = env.features.lookback + env.episode_length, env.features.lookback
    noises = (Noise.draw(np.random.default_rng(np.random.PCG64(UNSEEN + i)), rows) for i in range(markets))
    return np.array([simulate(noise, RegimeParameters()).drift[first:] for noise in noises])


def baselines(markets: int) -> dict[str, Asked]:
    momentum, drift = FeatureConfig().names.index("momentum_64"), expected(markets)
    return {
        "doing nothing": lambda observations, bar: np.zeros((len(observations), 1)),
        "buying and holding": lambda observations, bar: np.ones((len(observations), 1)),
        "sign of the last 64 bars": lambda observations, bar: np.sign(observations[:, [momentum]]),
        "knowing what is expected": lambda observations, bar: np.sign(drift[:, [bar]]),
    }


def row(name: str, seconds: str, plays: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[str]:
    """Of one agent, or of several in the same markets."""
    rewards, regimes, traded = (np.stack(part) for part in zip(*plays, strict=True))
    totals = rewards.sum(2)
    mean, low, high = interval(totals.mean(0))
    each = "" if len(plays) == 1 else f"{totals.mean(1).min():+.3f} to {totals.mean(1).max():+.3f}"
    gains = f"{np.mean(totals > 0):.0%}" if totals.any() else ""
    by_regime = [f"{1e4 * rewards[regimes == number].mean():+.1f}" for number in range(len(REGIMES))]
    return [name, seconds, f"{mean:+.3f} ({low:+.3f} to {high:+.3f})", each, gains, *by_regime, f"{traded.mean():.3f}"]


def learning_section(seeds: int, markets: int, shrink: int) -> str:
    rows = [row(name, "", [play(ask, markets)]) for name, ask in baselines(markets).items()]
    for name, (policy, actions, steps) in AGENTS.items():
        plays, times = [], []
        for seed in range(seeds):
            ask, seconds = trained(policy, actions, steps // shrink, seed)
            plays.append(play(ask, markets, actions))
            times.append(seconds)
            console.print(f"{name}, seed {seed}: {plays[-1][0].sum(1).mean():+.3f} after {seconds:.0f} s")
        rows.append(row(f"agent: {name}, {steps // shrink:,} steps", f"{np.mean(times):.0f}", plays))
    columns = ["", "s to train", "log-return of 512 bars", "worst to best agent", "episodes that gain"]
    columns += [f"{regime}, bp a bar" for regime in REGIMES] + ["traded a bar"]
    return show_table(f"{markets} markets never trained on, {seeds} agents of each kind", columns, rows)


def per_second(call: Callable[[], int], device: str = "cpu") -> float:
    """Items per second of one core's time, or of a GPU's."""
    rates = []
    call()
    for _ in range(5):
        cuda = device == "cuda"
        clock = time.perf_counter if cuda else time.process_time
        start = clock()
        count = call()
        if cuda:
            torch.cuda.synchronize()
        rates.append(count / (clock() - start))
    return float(np.median(rates))


def single(**options: Any) -> Callable[[], int]:
    env = RegimeMarketEnv(**options)

    def call() -> int:
        action = np.array([0.5], np.float32)
        for _ in range(20):
            env.reset()
            for _ in range(env.episode_length):
                env.step(action)
        return 20 * env.episode_length

    return call


def batch(markets: int, device: str) -> Callable[[], int]:
    envs = RegimeMarketBatch(markets, device=device)

    def call() -> int:
        envs.reset()
        actions = torch.full((markets,), 0.5, device=envs.device)
        for _ in range(envs.episode_length):
            envs.step(actions)
        return markets * envs.episode_length

    return call


def features(rows: int) -> Callable[[], int]:
    prices = regime_bars(rows).prices

    def call() -> int:
        compute_features(*prices, FeatureConfig())
        return rows

    return call


def reading(path: Path, rows: int) -> Callable[[], int]:
    def call() -> int:
        load_market_data(path)
        return rows

    return call


def rates_section(device: str, quick: bool) -> str:
    rows_of_files = 20_000 if quick else 200_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prices.csv"
        write_csv(path, regime_bars(rows_of_files))
        candidates = {
            "one market, steps": single(),
            "one market with its position observed, steps": single(observe_position=True),
            "features, rows": features(1_000_000),
            "reading and checking CSV, rows": reading(path, rows_of_files),
        }
        sizes = (64, 1024) if device == "cpu" else (1024, 16384)
        candidates |= {f"{size:,} markets at once, steps": batch(size, device) for size in sizes}
        rows = [[name, f"{per_second(call, device):,.0f}"] for name, call in candidates.items()]
    return show_table(
        f"A second of {'one core' if device == 'cpu' else 'the GPU, and what feeds it'}", ["", "per second"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one agent of each kind, a tenth of the steps, no file of results"
    )
    parser.add_argument("--rates", action="store_true", help="speed instead of learning")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="for many markets at once")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        rates_section(args.device, quick=True)
        learning_section(seeds=1, markets=64, shrink=10)
        return
    name, command = "market", " ".join(["python", *sys.argv])
    if args.rates:
        name += "_rates" if args.device == "cpu" else "_rates_cuda"
        write_result(name, command, [rates_section(args.device, quick=False)])
    else:
        write_result(name, command, [learning_section(args.seeds, markets=512, shrink=1)])


if __name__ == "__main__":
    main()

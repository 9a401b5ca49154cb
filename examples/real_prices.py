"""Trains agents on twenty years of the S&P 500 and evaluates them out of sample.

    pip install ".[all]" arch                      # arch ships the prices
    python examples/real_prices.py                 # three seeds, a few minutes
    python examples/real_prices.py --quick         # half a minute: shows that it runs, not what it earns

Daily bars from 1999 to 2018. Agents train on the first 70 % of the days, and are evaluated once, with deterministic
actions, on the last 15 %, on which nothing was tuned. Costs are 0.01 % of commission and as much slippage on the value
traded. Do not expect to get rich: daily prices of an index are close to unpredictable, and 3,500 days are few.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from arch.data import nasdaq, sp500
from stable_baselines3.common.env_util import make_vec_env

from driftproof.envs import MarketEnv
from driftproof.ppo import DistributionalPPO

LOAD = {"columns": {"timestamp": "Date"}}
DAYS = 252
"""Trading days per year."""


def train(path: Path, seed: int, steps: int) -> DistributionalPPO:
    """Trains an agent on the training split."""
    options = {"data": path, "split": "train", "episode_length": 252, "load": LOAD}
    env = make_vec_env(MarketEnv, 8, seed=seed, env_kwargs=options)
    agent = DistributionalPPO(
        "MlpLstmPolicy",
        env,
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        gamma=0.9,
        gae_lambda=0.8,
        seed=seed,
        device="cpu",
    )
    return agent.learn(steps)


def rewards(env: MarketEnv, agent: DistributionalPPO | float) -> np.ndarray:
    """Daily log-returns, after costs, of an agent or of a fixed position over a whole split."""
    observation, _ = env.reset(seed=0)
    state, start, truncated, earned = None, np.ones(1, bool), False, []
    while not truncated:
        action = np.array([agent]) if isinstance(agent, float) else None
        if isinstance(agent, DistributionalPPO):
            action, state = agent.predict(observation, state, start, deterministic=True)
        observation, reward, _, truncated, _ = env.step(action)
        earned.append(reward)
        start = np.zeros(1, bool)
    return np.array(earned)


def line(name: str, parts: list[np.ndarray]) -> str:
    """Log-return and Sharpe ratio of each split."""
    cells = []
    for earned in parts:
        spread = earned.std()
        sharpe = f"{earned.mean() / spread * np.sqrt(DAYS):+.2f}" if spread > 0 else "    "
        cells.append(f"{earned.sum():+8.3f}  {sharpe}")
    return f"{name:24}" + "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", choices=["sp500", "nasdaq"], default="sp500")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 4_096, 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{args.index}.csv"
        {"sp500": sp500, "nasdaq": nasdaq}[args.index].load().to_csv(path)
        splits = ("train", "validation", "test")
        envs = [MarketEnv(path, split, episode_length=None, load=LOAD) for split in splits]
        for split, env in zip(splits, envs, strict=True):
            bars, rows = env.markets[args.index], env.rows[args.index]
            first, last = (str(bars.timestamps[row])[:10] for row in (rows.start, rows.stop - 1))
            print(f"{split}: {first} to {last}, {len(rows)} days")
        print(
            f"\nlog-return after costs, and Sharpe ratio a year\n{'':24}"
            + "".join(f"{split:>8}{'':9}" for split in splits)
        )
        print(line("doing nothing", [rewards(env, 0.0) for env in envs]))
        print(line("buying and holding", [rewards(env, 1.0) for env in envs]))
        earned = []
        for seed in range(args.seeds):
            agent = train(path, seed, args.steps)
            earned.append([rewards(env, agent) for env in envs])
            print(line(f"agent, seed {seed}", earned[-1]))
    if args.seeds > 1:
        # An account that is rebalanced to equal shares of all agents every day.
        print(
            line("all agents, equal shares", [np.log(np.mean(np.exp(part), 0)) for part in zip(*earned, strict=True)])
        )


if __name__ == "__main__":
    main()

"""Writes synthetic prices of two markets, as input for `driftproof infer`.

python examples/made_up_prices.py prices.csv
driftproof infer RUN prices.csv
"""

from __future__ import annotations

import sys

from driftproof.envs import regime_bars, write_csv

if __name__ == "__main__":
    write_csv(
        sys.argv[1], regime_bars(3_000, seed=10**6, symbol="ONE"), regime_bars(2_000, seed=10**6 + 1, symbol="TWO")
    )
    print(f"written to {sys.argv[1]}")

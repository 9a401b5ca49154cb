"""``driftproof/Market-v0``: trading in a market with your own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from driftproof._arguments import check_count, check_number, check_option
from driftproof.envs.features import FeatureConfig, compute_features
from driftproof.envs.market_data import Bars, MarketDataError, part_rows
from driftproof.envs.market_files import load_market_data
from driftproof.envs.trading import Actions, TradingEnv

Split = Literal["train", "validation", "test", "held_out", "all"]


class MarketEnv(TradingEnv):
    """Trading at real prices of one or several markets. Each episode is in one market, within a split of its time.

    Features of the first bars of a part look back into the part before it, never ahead. ``reset(options={"symbol": ...,
    "row": ...})`` says which market, and at which row of all its rows the episode begins; otherwise both are drawn.

    Args:
        data: A file, see :func:`load_market_data`; bars; or bars by symbol.
        split: Part of the time: ``"train"``, ``"validation"``, ``"test"``, ``"held_out"`` (the last two) or ``"all"``.
        fractions: Fractions of rows for training, validation and test.
        dates: Start of validation and test, as ISO dates in UTC, instead of ``fractions``.
        period: Start and end of the time that is split, as ISO dates in UTC, the end not included; ``None``: all.
        symbols: Symbols to use; ``None``: all.
        episode_length: Steps of an episode, which begins anywhere in the split; ``None``: from its first bar to its
            last. Episodes in ``"held_out"`` are shorter if it has fewer bars.
        actions: See :class:`TradingEnv`, as for the following arguments.
        commission: Commission of trading.
        slippage: Slippage of trading.
        observe_position: Whether the position is observed.
        features: Observed features.
        render_mode: ``None`` or ``"rgb_array"``.
        load: Arguments of :func:`load_market_data`, if ``data`` is a file.
    """

    def __init__(
        self,
        data: str | Path | Bars | Mapping[str, Bars],
        split: Split = "train",
        fractions: Sequence[float] = (0.7, 0.15, 0.15),
        dates: Sequence[str] | None = None,
        period: Sequence[str] | None = None,
        symbols: Sequence[str] | None = None,
        episode_length: int | None = 512,
        actions: Actions = "continuous",
        commission: float = 0.0001,
        slippage: float = 0.0001,
        observe_position: bool = False,
        features: FeatureConfig | Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        load: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(actions, commission, slippage, observe_position, features, render_mode)
        check_option("split", split, get_args(Split))
        _check_split(fractions, dates, period)
        if episode_length is not None:
            check_count("episode_length", episode_length, at_least=1)
        self.split, self.episode_length = split, episode_length
        self.markets = _chosen(markets_of(data, load), symbols)
        self.rows: dict[str, range] = {}
        """Rows that may be observed, by symbol."""
        self._features: dict[str, npt.NDArray[np.float32]] = {}
        for symbol, bars in self.markets.items():
            check_volume(bars, self.features)
            part = part_rows(bars, split, fractions, dates, period)
            self.rows[symbol] = range(max(part.start, self.features.lookback - 1), part.stop)
            steps = len(self.rows[symbol]) - 1
            if split == "held_out" and self.episode_length is not None and steps > 0:
                self.episode_length = episode_length = min(self.episode_length, steps)
            if steps < (episode_length or 1):
                raise ValueError(
                    f"{split} of {symbol!r} has {len(part)} rows, {max(steps, 0)} of which can be steps: features look "
                    f"back {self.features.lookback - 1} rows, and the last row is only seen. Episodes need "
                    f"{episode_length or 1}: choose a shorter episode_length or window, or a larger part"
                )
            self._features[symbol] = compute_features(*bars.prices, self.features).astype(np.float32)
        self._symbol, self._row = next(iter(self.markets)), -1

    @property
    def history(self) -> dict[str, Any]:
        """The split, and for each symbol the time of its first and its last bar and their number."""
        symbols = {}
        for symbol, rows in self.rows.items():
            times = self.markets[symbol].timestamps
            symbols[symbol] = (str(times[rows.start]), str(times[rows.stop - 1]), len(rows))
        return {"split": self.split, "symbols": symbols}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        options = dict(options or {})
        symbols = list(self.markets)
        symbol = options.pop("symbol", None) or symbols[int(self.np_random.integers(len(symbols)))]
        if symbol not in self.markets:
            raise ValueError(f"Invalid symbol: {symbol!r}; there are {', '.join(map(repr, symbols))}")
        rows = self.rows[symbol]
        starts = range(rows.start, rows.start + 1 if self.episode_length is None else rows.stop - self.episode_length)
        row = options.pop("row", None)
        row = int(self.np_random.integers(starts.start, starts.stop)) if row is None else row
        if row not in starts:
            raise ValueError(
                f"Invalid row: {row!r}; episodes of {symbol!r} begin at {starts.start} to {starts.stop - 1}"
            )
        if options:
            raise ValueError(f"Invalid options: {', '.join(options)}; there are symbol and row")
        self._begin(symbol, row)
        return self._observe(), self._info()

    def _begin(self, symbol: str, row: int) -> None:
        self._symbol, self._row = symbol, row
        stop = self.rows[symbol].stop if self.episode_length is None else row + self.episode_length + 1
        self._enter(self._features[symbol][row:stop], self.markets[symbol].close[row:stop])

    def _info(self) -> dict[str, Any]:
        info = super()._info()
        info["symbol"], info["row"] = self._symbol, self._row + self._bar
        return info

    def state_dict(self) -> dict[str, Any]:
        """State of the market and the account."""
        return {
            "symbol": self._symbol,
            "row": self._row,
            "account": self._account_state(),
            "generator": self.np_random.bit_generator.state,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state, with the same data."""
        self.np_random.bit_generator.state = state_dict["generator"]
        if state_dict["row"] < 0:
            return
        if state_dict["symbol"] not in self.markets or state_dict["row"] not in self.rows[state_dict["symbol"]]:
            raise ValueError(
                f"the state is of {state_dict['symbol']!r} at row {state_dict['row']}, which is not here; "
                "for a new training with other prices: load(path, env, warm_start=True), or driftproof train --from"
            )
        self._begin(state_dict["symbol"], state_dict["row"])
        self._load_account(state_dict["account"])


def markets_of(data: Any, load: Mapping[str, Any] | None = None) -> dict[str, Bars]:
    """Bars by symbol, of a file, of bars, or of bars by symbol.

    Args:
        data: A file, bars, or bars by symbol.
        load: Arguments of :func:`load_market_data`, for a file.
    """
    if isinstance(data, str | Path):
        return _loaded_once(Path(data), dict(load or {}))
    if load:
        raise ValueError("load is for files, and data is none")
    if isinstance(data, Bars):
        return {data.symbol: data}
    if isinstance(data, Mapping) and data and all(isinstance(bars, Bars) for bars in data.values()):
        return dict(data)
    raise TypeError(f"data must be a file, Bars, or a mapping of Bars by symbol, not {type(data).__name__}")


_loaded: dict[tuple[Any, ...], dict[str, Bars]] = {}
_MOST_FILES = 4


def _loaded_once(path: Path, load: dict[str, Any]) -> dict[str, Bars]:
    """Bars of a file, which all environments of a process share until the file changes."""
    if not path.is_file():
        return load_market_data(path, **load)
    stat = path.stat()
    key = (path.resolve(), stat.st_mtime_ns, stat.st_size, repr(sorted(load.items())))
    if key not in _loaded:
        markets = load_market_data(path, **load)
        while len(_loaded) >= _MOST_FILES:
            del _loaded[next(iter(_loaded))]
        _loaded[key] = markets
    return dict(_loaded[key])


def check_volume(bars: Bars, features: FeatureConfig) -> None:
    """Refuse bars without volume where a feature needs it.

    Raises:
        MarketDataError: Says how to do without.
    """
    if features.volume and not bars.has_volume:
        raise MarketDataError(
            f"{bars.symbol or 'bars'}: there is no volume, which is one of the features; train without it: "
            "features={'volume': False}, or --set env.kwargs.features={volume: false}"
        )


def _chosen(markets: dict[str, Bars], symbols: Sequence[str] | None) -> dict[str, Bars]:
    if symbols is None:
        return markets
    if missing := [symbol for symbol in symbols if symbol not in markets]:
        raise ValueError(f"Invalid symbols: {missing}; there are {', '.join(map(repr, markets))}")
    return {symbol: markets[symbol] for symbol in symbols}


def _check_split(fractions: Sequence[float], dates: Sequence[str] | None, period: Sequence[str] | None) -> None:
    if period is not None and len(period) != 2:
        raise ValueError(f"Invalid period: {list(period)}; must be two dates, its start and its end")
    if dates is not None and len(dates) != 2:
        raise ValueError(f"Invalid dates: {list(dates)}; must be two, when validation and when the test begins")
    if len(fractions) != 3 or abs(sum(fractions) - 1) > 1e-9:
        raise ValueError(f"Invalid fractions: {list(fractions)}; must be three, of the sum 1")
    for fraction in fractions:
        check_number("fractions", fraction, at_least=0)

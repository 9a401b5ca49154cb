"""Recognises the columns of price files by the names that programs give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from driftproof.envs._specs import nearest
from driftproof.envs.market_data import COLUMNS, MarketDataError

SPELLINGS: dict[str, tuple[str, ...]] = {
    "timestamp": ("timestamp", "datetime", "date time", "date", "time", "open time", "day", "unix", "t"),
    "open": ("open", "open price", "opening price", "o"),
    "high": ("high", "high price", "h"),
    "low": ("low", "low price", "l"),
    "close": ("close", "close last", "close price", "closing price", "last", "price", "c"),
    "volume": ("volume", "vol", "total volume", "tick volume", "tickvol", "v"),
    "symbol": ("symbol", "ticker", "instrument", "asset", "pair", "code", "name"),
}
"""Spellings of each column, the preferred one first. Case, digits and punctuation do not count."""
ADJUSTED = ("adj close", "adjclose", "adjusted close", "close adj", "close adjusted")
"""Spellings of the close adjusted for splits and dividends."""
_OPTIONAL = ("volume", "symbol")
_SHOWN = 12


@dataclass(frozen=True)
class Columns:
    """Where the columns of a file are.

    Attributes:
        markets: Indices of the columns by our names, by symbol; the symbol is ``None`` where a column or the file names
            it.
        names: Names of the columns in the file by our names.
        clock: Index of a column with the time of day, if it is apart from the date.
        adjusted: Indices of the adjusted closes, by symbol.
        unused: Names of columns that are not read.
    """

    markets: dict[str | None, dict[str, int]]
    names: dict[str, str]
    clock: int | None
    adjusted: dict[str | None, int]
    unused: tuple[str, ...]


def find_columns(source: object, header: Sequence[Sequence[str]], given: Mapping[str, str]) -> Columns:
    """Find the columns of a file.

    Args:
        source: Name of the file, for messages.
        header: Rows of names; two where columns have a name and a symbol, as of ``yfinance`` and ``pandas``.
        given: Names of columns in the file by our names, which need not be recognised.

    Raises:
        MarketDataError: A column is missing, or there more than once.
    """
    if unknown := set(given) - SPELLINGS.keys():
        raise ValueError(f"columns: {', '.join(sorted(unknown))} is none of {', '.join((*COLUMNS, 'symbol'))}")
    if len(header) == 1:
        return _single(source, header[0], given)
    # Either level may hold the names of prices.
    names, symbols = sorted(header, key=lambda level: -sum(_is_price(name) for name in level))
    first = next((i for i, symbol in enumerate(symbols) if not symbol.strip()), 0)
    markets: dict[str | None, dict[str, int]] = {}
    adjusted: dict[str | None, int] = {}
    found: Columns | None = None
    for symbol in dict.fromkeys(symbol for i, symbol in enumerate(symbols) if i != first and symbol.strip()):
        own = [i for i in range(len(names)) if symbols[i] == symbol and i != first]
        found = _single(source, [given.get("timestamp", "timestamp"), *(names[i] for i in own)], given)
        places = [first, *own]
        ((_, mine),) = found.markets.items()
        markets[symbol] = {name: places[i] for name, i in mine.items()}
        if found.adjusted:
            adjusted[symbol] = places[found.adjusted[None]]
    if found is None:
        raise MarketDataError(f"{source}, row 1: two rows of names, but no symbols in them")
    return Columns(markets, found.names, None, adjusted, found.unused)


def _single(source: object, header: Sequence[str], given: Mapping[str, str]) -> Columns:
    plain = [_plain(name) for name in header]
    lower = [name.strip().lower() for name in header]
    places: dict[str, int] = {}
    for ours, spellings in SPELLINGS.items():
        place = _named(source, lower, given[ours]) if ours in given else _spelled(source, header, plain, spellings)
        if place is None and ours == "timestamp" and ours not in given and lower.count("") == 1:
            place = lower.index("")  # The index of a table of pandas often has no name.
        if place is None and ours == "close" and ours not in given:
            place = _spelled(source, header, plain, ADJUSTED)
        if place is not None:
            places[ours] = place
        elif ours in given or ours not in _OPTIONAL:
            raise _missing(source, header, lower, ours, given.get(ours, ours))
    clock = None
    if "timestamp" not in given and plain[places["timestamp"]] == "date" and plain.count("time") == 1:
        clock = plain.index("time")
    adjusted = next((plain.index(name) for name in ADJUSTED if name in plain), None)
    if adjusted == places["close"]:
        adjusted = None
    used = {*places.values(), clock, adjusted}
    return Columns(
        {None: places},
        {ours: header[place] for ours, place in places.items()},
        clock,
        {} if adjusted is None else {None: adjusted},
        tuple(name for i, name in enumerate(header) if i not in used),
    )


def _named(source: object, lower: Sequence[str], name: str) -> int | None:
    """Index of the column that the user named."""
    if lower.count(name.strip().lower()) > 1:
        raise MarketDataError(f"{source}, row 1: the column {name!r} is there more than once")
    return lower.index(name.strip().lower()) if name.strip().lower() in lower else None


def _spelled(source: object, header: Sequence[str], plain: Sequence[str], spellings: Iterable[str]) -> int | None:
    """Index of the column with the best of some spellings."""
    for spelling in spellings:
        if plain.count(spelling) > 1:
            raise MarketDataError(
                f"{source}, row 1: the column {header[plain.index(spelling)].lower()!r} is there more than once"
            )
        if spelling in plain:
            return plain.index(spelling)
    return None


def _missing(source: object, header: Sequence[str], lower: Sequence[str], ours: str, wanted: str) -> MarketDataError:
    shown = [repr(name) for name in header[:_SHOWN]]
    if len(header) > _SHOWN:
        shown.append(f"{len(header) - _SHOWN} more")
    return MarketDataError(
        f"{source}, row 1: there is no column {wanted!r}{nearest(wanted, lower)}; there are {', '.join(shown)}. If it "
        f"has another name: columns={{{ours!r}: ...}}, or --column {ours}=..."
        + ("; values must be separated by commas, semicolons or tabs" if len(header) == 1 else "")
    )


def _plain(name: str) -> str:
    """A name without case, digits and punctuation."""
    return re.sub(r"[^a-z]+", " ", name.lower()).strip()


def _is_price(name: str) -> bool:
    kinds = [SPELLINGS[ours] for ours in ("open", "high", "low", "close", "volume")]
    return any(_plain(name) in spellings for spellings in (*kinds, ADJUSTED))


def is_time(name: str) -> bool:
    """Whether a name is one that timestamps have."""
    return _plain(name) in SPELLINGS["timestamp"]

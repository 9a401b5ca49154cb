"""Prices are checked before anything is learned from them, and errors name the file and the row."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftproof.envs import Bars, MarketDataError, from_columns, load_market_data, regime_bars, write_csv

HEADER = "timestamp,open,high,low,close,volume"
GOOD = [
    "2024-01-01,10,11,9,10.5,100",
    "2024-01-02,10.5,12,10,11,200",
    "2024-01-03,11,11.5,10,10.2,0",
]


@pytest.fixture
def load(tmp_path):
    """Loads a CSV file of these lines."""

    def load_lines(lines, header=HEADER, **options):
        path = tmp_path / "prices.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        return load_market_data(path, **options)

    return load_lines


def test_a_file_is_what_it_says(load):
    bars = load(GOOD)["prices"]
    assert bars.symbol == "prices"
    assert bars.timestamps.tolist() == [datetime.datetime(2024, 1, day) for day in (1, 2, 3)]
    assert bars.close.tolist() == [10.5, 11, 10.2]
    assert bars.volume.tolist() == [100, 200, 0]


def test_columns_may_be_in_any_order_and_among_others(load):
    header, *lines = (f"x,{'|'.join(reversed(line.split(',')))}".replace("|", ",") for line in [HEADER, *GOOD])
    assert load(lines, header.upper())["prices"].open.tolist() == [10, 10.5, 11]


def test_columns_may_have_other_names(load):
    bars = load(GOOD, HEADER.replace("timestamp", "Date"), columns={"timestamp": "date"})
    assert len(bars["prices"]) == 3


def test_several_markets_in_one_file(load):
    lines = [f"{symbol},{line}" for line in GOOD for symbol in ("B", "A")]
    markets = load(lines, "symbol," + HEADER)
    assert list(markets) == ["B", "A"]
    assert markets["A"].close.tolist() == markets["B"].close.tolist() == [10.5, 11, 10.2]
    with pytest.raises(MarketDataError, match=r"prices.csv, row 7: high is below open or close"):
        load([*lines[:5], "A,2024-01-03,11,10.5,10,10.2,0"], "symbol," + HEADER)


@given(st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=20), st.integers(1, 10**12), st.text(min_size=1))
def test_what_is_written_is_read_to_the_last_digit(tmp_path_factory, closes, microseconds, symbol):
    path = tmp_path_factory.mktemp("data") / "prices.csv"
    close = np.array(closes)
    times = np.datetime64("1999-12-31T23:59", "us") + np.arange(len(close)) * np.timedelta64(microseconds, "us")
    bars = Bars(times, close, close, close, close, close, symbol.replace("\x00", "0").replace("\r", ""))
    if not bars.symbol or len(bars.symbol.splitlines()) > 1:
        return
    write_csv(path, bars)
    (read,) = load_market_data(path, max_gap=datetime.timedelta(days=365)).values()
    assert read.symbol == bars.symbol
    for name in ("timestamps", "open", "close", "volume"):
        np.testing.assert_array_equal(getattr(read, name), getattr(bars, name))


WRONG = {
    "nan": (["2024-01-02,nan,12,10,11,200"], "row 3: open is nan"),
    "infinite": (["2024-01-02,10.5,inf,10,11,200"], "row 3: high is inf"),
    "no number": (["2024-01-02,10.5,12,ten,11,200"], "row 3: low 'ten' is not a number"),
    "empty cell": (["2024-01-02,10.5,12,10,,200"], "row 3: close is empty"),
    "zero price": (["2024-01-02,10.5,12,0,11,200"], "row 3: low is 0; it must be above 0"),
    "negative volume": (["2024-01-02,10.5,12,10,11,-1"], "row 3: volume is -1; it must be 0 or more"),
    "high too low": (["2024-01-02,10.5,10.9,10,11,1"], "row 3: high is below open or close"),
    "low too high": (["2024-01-02,10.5,12,10.6,11,1"], "row 3: low is above open or close"),
    "duplicate": (["2024-01-01,10.5,12,10,11,1"], "row 3: 2024-01-01T00:00:00 is already in row 2"),
    "unsorted": (["2023-12-31,10.5,12,10,11,1"], "row 3: 2023-12-31T00:00:00 comes after 2024-01-01"),
    "gap": ([*GOOD[1:], "2024-01-11,10.5,12,10,11,1"], "row 5: nothing between 2024-01-03T00:00:00 and 2024-01-11"),
    "no date": (["yesterday,10.5,12,10,11,1"], "row 3: timestamp 'yesterday' is no date in a format that is known"),
    "no such date": (["2024-02-30,10.5,12,10,11,1"], "row 3: timestamp '2024-02-30': day is out of range"),
    "american date": (["01/02/2024,10.5,12,10,11,1"], "row 3: timestamp '01/02/2024' has another format than"),
    "number as time": (["1704153600,10.5,12,10,11,1"], "row 3: timestamp '1704153600' has another format"),
    "other zone": (
        ["2024-01-02T00:00+02:00,10.5,12,10,11,1"],
        r"row 3: timestamp '2024-01-02T00:00\+02:00' is not in UTC",
    ),
    "too few columns": (["2024-01-02,10.5,12,10,11"], "row 3: has 5 columns, and the header 6"),
    "too many columns": (["2024-01-02,10.5,12,10,11,1,1"], "row 3: has 7 columns, and the header 6"),
    "empty row": (["", *GOOD[1:]], "row 3: is empty; remove it"),
    "quotes": (['2024-01-02,"10.5,12,10,11,1', *GOOD[2:]], "row 3: is not CSV"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_are_named(load, case):
    lines, message = WRONG[case]
    with pytest.raises(MarketDataError, match=f"prices.csv(, |: ){message}"):
        load([GOOD[0], *lines])


@given(st.integers(0, 9999), st.sampled_from(["open", "high", "low", "close", "volume"]))
def test_a_wrong_row_anywhere_is_found(row, column):
    bars = regime_bars(10_000)
    columns = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close", "volume")}
    columns[column][row] = np.nan
    with pytest.raises(MarketDataError, match=f"numbers, row {row + 1}: {column} is nan"):
        from_columns({"timestamp": bars.timestamps, **columns}, "numbers")


def test_rows_far_down_a_file_are_counted_right(tmp_path):
    write_csv(tmp_path / "prices.csv", regime_bars(10_000))
    lines = (tmp_path / "prices.csv").read_text().splitlines()
    lines[8765] = lines[8765].replace("REGIME", "REGIME,")
    (tmp_path / "prices.csv").write_text("\n".join(lines))
    with pytest.raises(MarketDataError, match="row 8766: has 8 columns"):
        load_market_data(tmp_path / "prices.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (HEADER, "has a header, but no rows"),
        (HEADER + "\n\n\n", "has a header, but no rows"),
        ("when,open,high,low,close,volume\n", "no column 'timestamp'; there are 'when', 'open'"),
        ("timestamp,opens,high,low,close,volume\n", r"no column 'open' \(did you mean 'opens'\?\)"),
        ("timestamp,open,high,low,volume\n", "no column 'close'"),
        ("timestamp,open,high,low,close,volume,Open\n", "'open' is there more than once"),
        (HEADER.replace(",", "|") + "\n", "separated by commas"),
        ("\n" + HEADER, "row 1: there is no column 'timestamp'"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    path = tmp_path / "some prices.csv"
    path.write_text(text)
    with pytest.raises(MarketDataError, match=f"some prices.csv.*{message}"):
        load_market_data(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(MarketDataError, match="there is no such file"):
        load_market_data(tmp_path / "none.csv")
    (tmp_path / "prices.xls").write_bytes(b"")
    with pytest.raises(MarketDataError, match=r"neither .csv nor .parquet"):
        load_market_data(tmp_path / "prices.xls")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    with pytest.raises(MarketDataError, match=r"binary.csv, after row 0: is not CSV in UTF-8"):
        load_market_data(tmp_path / "binary.csv")


def test_time_zones_are_converted_when_told(load):
    lines = [f"2024-07-0{day}T09:30{offset},10,11,9,10,1" for day, offset in ((1, ""), (2, ""))]
    times = load(lines, timezone="America/New_York")["prices"].timestamps
    assert str(times[0]) == "2024-07-01T13:30:00.000000"
    lines = [
        f"2024-07-0{day} 09:30:00.5{offset},10,11,9,10,1"
        for day, offset in ((1, "+02:00"), (2, "-0500"), (3, "+01"), (4, "Z"))
    ]
    times = load(lines, timezone="Europe/Berlin")["prices"].timestamps
    assert [str(time)[11:21] for time in times] == ["07:30:00.5", "14:30:00.5", "08:30:00.5", "09:30:00.5"]
    with pytest.raises(ValueError, match="Invalid timezone: 'Mars'"):
        load(lines, timezone="Mars")


@pytest.mark.parametrize("stamp", ["0001-01-01T00:00", "9999-12-31T23:00:00-05:00"])
def test_times_that_no_calendar_has_in_utc_are_named(load, stamp):
    with pytest.raises(MarketDataError, match=f"row 3: timestamp '{stamp}': "):
        load([GOOD[0], f"{stamp},10.5,12,10,11,1"], timezone="Asia/Tokyo")


def test_the_hour_that_comes_twice_is_found(load):
    lines = [f"2024-10-27T{hour},10,11,9,10,1" for hour in ("01:30", "02:30", "02:30", "03:30")]
    with pytest.raises(MarketDataError, match="row 4: 2024-10-27T00:30:00 is already in row 3"):
        load(lines, timezone="Europe/Berlin")


def hours(*when):
    times = np.array(when, "datetime64[h]").astype("datetime64[us]")
    ones = np.ones(len(times))
    return {"timestamp": times, "open": ones, "high": ones, "low": ones, "close": ones, "volume": ones}


def test_gaps_depend_on_the_market():
    monday = np.datetime64("2024-01-01", "h")
    always = [monday + hour for hour in range(24 * 8)]
    from_columns(hours(*always))
    from_columns(hours(*always[:50], *always[52:]))
    with pytest.raises(MarketDataError, match=r"row 51: nothing between .*, 4:00:00, and more than 3:00:00 is a gap"):
        from_columns(hours(*always[:50], *always[53:]))
    weekdays = [hour for hour in always if hour.astype("datetime64[D]").astype(int) % 7 not in (2, 3)]
    from_columns(hours(*weekdays))
    with pytest.raises(MarketDataError, match=r"2 days, 1:00:00, and more than 1 day is a gap.*max_gap"):
        from_columns(hours(*weekdays), max_gap=datetime.timedelta(days=1))
    from_columns(hours(*weekdays), max_gap=2.5)
    with pytest.raises(MarketDataError, match="more than 12:00:00 is a gap"):
        from_columns(hours(*weekdays), max_gap=0.5)
    with pytest.raises(ValueError, match="Invalid max_gap: 0"):
        from_columns(hours(*weekdays), max_gap=0)
    from_columns(hours(*(monday + 7 * 24 * week for week in (0, 1, 2, 4))))


def test_columns_in_memory_are_checked_too():
    columns = hours("2024-01-01", "2024-01-02")
    with pytest.raises(MarketDataError, match="mine: lacks close; has timestamp, open"):
        from_columns({name: column for name, column in columns.items() if name != "close"}, "mine")
    with pytest.raises(MarketDataError, match=r"timestamp has 2 rows, but \{'low': 1\}"):
        from_columns({**columns, "low": [1]}, "mine")
    with pytest.raises(MarketDataError, match=r"timestamp has 2 rows, but \{'symbol': 1\}"):
        from_columns({**columns, "symbol": ["A"]}, "mine")
    with pytest.raises(MarketDataError, match="has no rows"):
        from_columns({name: column[:0] for name, column in columns.items()})
    with pytest.raises(MarketDataError, match="row 2: timestamp is empty"):
        from_columns({**columns, "timestamp": np.array(["2024-01-01", "NaT"], "M8[us]")})


class TestParquet:
    """The same from Parquet."""

    @pytest.fixture
    def save(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")

        def save_columns(**changes):
            columns = {**{name: list(column) for name, column in hours("2024-01-01", "2024-01-02").items()}, **changes}
            columns["timestamp"] = changes.get("timestamp", hours("2024-01-01", "2024-01-02")["timestamp"])
            pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "prices.parquet")
            return tmp_path / "prices.parquet"

        return save_columns

    @pytest.mark.parametrize("kind", ["text", "date", "timestamp", "utc", "nanoseconds"])
    def test_times_of_every_type(self, save, kind):
        import pyarrow

        days = [datetime.datetime(2024, 1, day) for day in (1, 2)]
        column = {
            "text": ["2024-01-01", "2024-01-02T00:00Z"],
            "date": [day.date() for day in days],
            "timestamp": days,
            "utc": pyarrow.array(days, pyarrow.timestamp("ms", "UTC")),
            "nanoseconds": pyarrow.array(days, pyarrow.timestamp("ns")),
        }[kind]
        bars = load_market_data(save(timestamp=column, volume=[1, 2]))["prices"]
        assert bars.timestamps.tolist() == days
        assert bars.volume.dtype == np.float64

    def test_several_markets(self, save):
        assert list(load_market_data(save(symbol=["A", "B"]))) == ["A", "B"]
        assert list(load_market_data(save(symbol=[7, 8]))) == ["7", "8"]

    def test_errors_name_file_and_row(self, save):
        days = [datetime.datetime(2024, 1, day) for day in (1, 2)]
        for columns, message in (
            ({"close": [1.0, None]}, "row 2: close is empty"),
            ({"close": [1.0, float("nan")]}, "row 2: close is nan"),
            ({"close": ["1", "x"]}, "row 2: close 'x' is not a number"),
            ({"timestamp": days[::-1]}, "row 2: 2024-01-01T00:00:00 comes after"),
            ({"timestamp": [1, 2]}, "row 1: timestamp '1' is no date"),
            ({"timestamp": [1.5, 2.5]}, "timestamp is of type double"),
        ):
            with pytest.raises(MarketDataError, match=f"prices.parquet(, |: ){message}"):
                load_market_data(save(**columns))

    def test_zones_are_converted(self, save):
        import pyarrow

        days = [datetime.datetime(2024, 1, day) for day in (1, 2)]
        path = save(timestamp=pyarrow.array(days, pyarrow.timestamp("us", "Asia/Tokyo")))
        assert load_market_data(path, timezone="Asia/Tokyo")["prices"].timestamps.tolist() == days
        assert load_market_data(path)["prices"].timestamps.tolist() == days
        path = save(timestamp=days)
        assert (
            str(load_market_data(path, timezone="Asia/Tokyo")["prices"].timestamps[0]) == "2023-12-31T15:00:00.000000"
        )

    def test_what_is_not_parquet(self, tmp_path, save):
        (tmp_path / "prices.parquet").write_bytes(b"PAR1 no")
        with pytest.raises(MarketDataError, match="is not a Parquet file"):
            load_market_data(tmp_path / "prices.parquet")
        import pyarrow

        empty = pyarrow.table({name: pyarrow.array([], pyarrow.float64()) for name in HEADER.split(",")})
        pyarrow.parquet.write_table(empty, tmp_path / "prices.parquet")
        with pytest.raises(MarketDataError, match="has columns, but no rows"):
            load_market_data(tmp_path / "prices.parquet")


def test_gaps_longer_than_any_market_are_refused(load):
    with pytest.raises(ValueError, match="Invalid max_gap"):
        load(GOOD, max_gap=1e300)

"""Price files as programs write them: names of columns, dates, zones, and what is told about them."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftproof.envs import (
    FeatureConfig,
    MarketDataError,
    MarketEnv,
    check_market_data,
    from_columns,
    load_market_data,
    read_bars,
    regime_bars,
)
from driftproof.envs.market_data import Place
from driftproof.envs.market_files import recorded_load
from driftproof.envs.market_times import parse_times
from driftproof.envs.periods import add_period, frequency_of, is_same_frequency, parse_period

DAYS = [datetime.date(2024, 1, day) for day in (29, 30, 31)] + [datetime.date(2024, 2, day) for day in (1, 2)]


def write(path, header, dates=DAYS, form="%Y-%m-%d", cells="10,11,9,10.5,100"):
    path.write_text("\n".join([header, *(f"{date.strftime(form)},{cells}" for date in dates)]) + "\n")
    return path


@pytest.mark.parametrize(
    "header",
    [
        "Date,Open,High,Low,Close,Volume",
        "datetime,open,high,low,close,vol",
        "TIMESTAMP,OPEN,HIGH,LOW,CLOSE,VOLUME",
        "<DATE>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>",
        "t,o,h,l,c,v",
        ",1. open,2. high,3. low,4. close,5. volume",
        "date_time,Open Price,High Price,Low Price,Close/Last,Volume",
    ],
)
def test_common_names_of_columns_are_recognised(tmp_path, header):
    bars = load_market_data(write(tmp_path / "prices.csv", header))["prices"]
    assert [array[0] for array in bars.prices] == [10, 11, 9, 10.5, 100]
    assert bars.timestamps.astype("datetime64[D]").tolist() == DAYS


def test_semicolons_with_decimal_commas_and_tabs(tmp_path):
    path, lines = tmp_path / "prices.csv", []
    for separator, cells in ((";", "10;11,25;9;10,5;1000"), ("\t", "10\t11.25\t9\t10.5\t1000")):
        lines = [f"{day:%d.%m.%Y}{separator}{cells}" for day in DAYS]
        header = separator.join(["Date", "Open", "High", "Low", "Close", "Volume"])
        path.write_text("\n".join([header, *lines]) + "\n")
        bars = load_market_data(path)["prices"]
        assert [array[1] for array in bars.prices] == [10, 11.25, 9, 10.5, 1000]
        assert bars.timestamps.astype("datetime64[D]").tolist() == DAYS
        assert [bar.close[0] for bar in read_bars([header, *lines])] == [10.5] * len(DAYS)
    path.write_text("Date\tOpen\tHigh\tLow\tClose\tVolume\n2024-01-29\t10\t11,25\t9\t10.5\t1000\n")
    with pytest.raises(MarketDataError, match="high '11,25' is not a number"):
        load_market_data(path)


def test_the_newest_row_may_be_first(tmp_path):
    path = write(tmp_path / "prices.csv", "Date,Open,High,Low,Close,Volume", DAYS[::-1])
    assert load_market_data(path)["prices"].timestamps.astype("M8[D]").tolist() == DAYS
    checked = check_market_data(path)
    assert checked.refusal is None
    assert "the newest row is first; rows are read in the order of time" in checked.notes
    lines = [
        f"{day},{symbol},{i},{i},{i},{i}" for symbol in "ab" for i, day in zip((5, 4, 3, 2, 1), DAYS[::-1], strict=True)
    ]
    path.write_text("\n".join(["Date,Symbol,Open,High,Low,Close", *lines]))
    for bars in load_market_data(path).values():
        assert bars.close.tolist() == [1, 2, 3, 4, 5]
    # Neither way round: that is an error, which names the row of the file.
    with pytest.raises(MarketDataError, match=r"row 3: .*sort rows by time"):
        load_market_data(write(path, "Date,Open,High,Low,Close", [DAYS[1], DAYS[0], DAYS[2]], cells="1,1,1,1"))
    # A wrong cell is named by its place in the file, not by its place in time.
    path.write_text("Date,Open,High,Low,Close\n2024-01-03,1,1,1,1\n2024-01-02,1,1,1,-1\n2024-01-01,1,1,1,1\n")
    with pytest.raises(MarketDataError, match="row 3"):
        load_market_data(path)


def test_numbers_as_web_sites_show_them(tmp_path):
    path = tmp_path / "prices.csv"
    rows = [
        '"Dec 31, 2018","$1,010.50","$1,020","$1,000.25","$1,015","45.2M"',
        '"Jan 2, 2019",999,999,999,999,"1,234,567"',
    ]
    path.write_text("\n".join(["Date,Open,High,Low,Close/Last,Volume", *rows]))
    bars = load_market_data(path)["prices"]
    assert [array[0] for array in bars.prices] == [1010.5, 1020, 1000.25, 1015, 45.2e6]
    assert bars.volume[1] == 1_234_567
    assert check_market_data(path).dates == "Mon DD, YYYY"
    for wrong in ("1,2", "$", "1.2.3", "12,34,567"):
        path.write_text(f'Date,Open,High,Low,Close\n2024-01-02,1,1,1,"{wrong}"\n')
        with pytest.raises(MarketDataError, match=r"row 2: close '.*' is not a number"):
            load_market_data(path)


@pytest.mark.parametrize("name", ["Ticker", "symbol", "Name", "INSTRUMENT"])
def test_columns_of_symbols_are_recognised(tmp_path, name):
    path = tmp_path / "prices.csv"
    lines = [f"{day},{symbol},10,11,9,10,1" for day in DAYS for symbol in ("A", "B")]
    path.write_text("\n".join([f"Date,{name},Open,High,Low,Close,Volume", *lines]))
    assert list(load_market_data(path)) == ["A", "B"]


def test_unknown_columns_of_symbols_are_asked_for_and_nothing_is_to_be_deleted(tmp_path):
    path = tmp_path / "prices.csv"
    lines = [f"{day},{symbol},10,11,9,10,1" for day in DAYS for symbol in ("A", "B")]
    path.write_text("\n".join(["Date,which,Open,High,Low,Close,Volume", *lines]))
    with pytest.raises(
        MarketDataError, match=r"already in row 2; if the file holds several markets, name .*'which'"
    ) as e:
        load_market_data(path)
    assert "remove" not in str(e.value)
    assert "several markets? --column symbol=..., one of 'which'" in str(check_market_data(path))
    assert list(load_market_data(path, columns={"symbol": "which"})) == ["A", "B"]


def test_date_and_time_may_be_apart(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("Date,Time,Open,High,Low,Close\n02.01.2024,09:30,1,1,1,1\n02.01.2024,09:35,1,1,1,1\n")
    assert str(load_market_data(path)["prices"].timestamps[1]) == "2024-01-02T09:35:00.000000"


def test_tables_of_yfinance(tmp_path):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    rows = [f"{day},10.0,10.5,11.0,9.0,10.0,100" for day in DAYS]
    top = ["Price,Adj Close,Close,High,Low,Open,Volume", "Ticker" + ",AAPL" * 6, "Date,,,,,,"]
    one.write_text("\n".join([*top, *rows]))
    bars = load_market_data(one, adjust=False)["AAPL"]
    assert bars.close[0] == 10.5
    assert load_market_data(one)["AAPL"].close[0] == pytest.approx(10.0)
    names = [f"{name},{name}" for name in ("Close", "High", "Low", "Open", "Volume")]
    two.write_text(
        "\n".join(
            [
                "Price," + ",".join(names),
                "Ticker" + ",A,C" * 5,
                "Date" + "," * 10,
                f"{DAYS[0]},1,,1,,1,,1,,5,",
                *(f"{day},1,2,1,2,1,2,1,2,5,6" for day in DAYS[1:]),
            ]
        )
    )
    markets = load_market_data(two)
    assert (len(markets["A"]), len(markets["C"])) == (5, 4)
    assert markets["C"].close.tolist() == [2] * 4
    lines = two.read_text().splitlines()
    lines[5] = lines[5].replace(",1,2,1", ",1,,1", 1)
    two.write_text("\n".join(lines))
    with pytest.raises(MarketDataError, match=r"two.csv, row 6: close is empty"):
        load_market_data(two)


def test_tables_of_pandas_in_parquet(tmp_path):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    index = pandas.DatetimeIndex(DAYS, name="Date")
    fields = ("Open", "High", "Low", "Close")
    frame = pandas.DataFrame({(field, symbol): 1.5 for field in fields for symbol in "AB"}, index)
    frame.to_parquet(tmp_path / "two.parquet")
    assert list(load_market_data(tmp_path / "two.parquet")) == ["A", "B"]
    plain = pandas.DataFrame(dict.fromkeys(fields, 1.5), pandas.DatetimeIndex(DAYS))
    plain.to_parquet(tmp_path / "plain.parquet")
    assert load_market_data(tmp_path / "plain.parquet")["plain"].timestamps.astype("M8[D]").tolist() == DAYS


def test_adjusted_closes_scale_all_prices(tmp_path):
    path = write(tmp_path / "prices.csv", "Date,Open,High,Low,Close,Volume,Adj Close", cells="10,12,8,10,7,5")
    bars = load_market_data(path)["prices"]
    assert [array[0] for array in bars.prices] == [5, 6, 4, 5, 7]
    assert "prices are scaled to the adjusted close, by factors from 0.5" in str(check_market_data(path))
    assert load_market_data(path, adjust=False)["prices"].close[0] == 10


FORMATS = {
    "%Y-%m-%d": "YYYY-MM-DD",
    "%Y/%m/%d": "YYYY/MM/DD",
    "%Y%m%d": "YYYYMMDD",
    "%d.%m.%Y": "DD.MM.YYYY",
    "%d/%m/%Y": "DD/MM/YYYY",
    "%m/%d/%Y": "MM/DD/YYYY",
    "%m-%d-%Y": "MM-DD-YYYY",
    "%d %b %Y": "DD Mon YYYY",
    "%d-%b-%Y": "DD Mon YYYY",
    "%m/%d/%Y 12:00 AM": "MM/DD/YYYY",
    "%d %B %Y": "DD Mon YYYY",
    "%b %d %Y": "Mon DD, YYYY",
}


@pytest.mark.parametrize("form", FORMATS)
def test_dates_of_every_format(tmp_path, form):
    path = write(tmp_path / "prices.csv", "Date,Open,High,Low,Close,Volume", form=form)
    assert load_market_data(path)["prices"].timestamps.astype("M8[D]").tolist() == DAYS
    assert check_market_data(path).dates == FORMATS[form]


PLACE = Place("stamps", np.arange(1, 1000))


@given(
    st.lists(st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2200, 1, 1)), min_size=1, max_size=20),
    st.sampled_from(["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%fZ", "%d.%m.%Y %H:%M", "%Y-%m-%d %H:%M:%S+0200"]),
)
def test_times_are_those_of_the_standard_library(times, form):
    texts = [time.strftime(form) for time in times]
    zone = datetime.timezone.utc
    expected = [datetime.datetime.strptime(text, form.replace("Z", "").replace("+0200", "%z")) for text in
                (text.removesuffix("Z") for text in texts)]  # fmt: skip
    aware = [each if each.tzinfo else each.replace(tzinfo=zone) for each in expected]
    found, _ = parse_times(texts, PLACE)
    assert found.tolist() == [each.astimezone(zone).replace(tzinfo=None) for each in aware]


@pytest.mark.parametrize(
    ("unit", "factor"), [("seconds", 1), ("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)]
)
def test_numbers_since_1970(unit, factor):
    found, how = parse_times([str(1704153600 * factor), str(1704240000 * factor)], PLACE)
    assert found.astype("M8[D]").tolist() == [datetime.date(2024, 1, 2), datetime.date(2024, 1, 3)]
    assert how.format == f"{unit} since 1970"
    assert parse_times(["1704153600.25"], PLACE)[0].tolist() == [datetime.datetime(2024, 1, 2, 0, 0, 0, 250_000)]


def test_the_order_of_day_and_month_is_decided_or_told(tmp_path):
    # In time's order only if the day is first.
    assert parse_times(["11/01/2024", "12/01/2024", "01/02/2024"], PLACE)[1].day_first is True
    assert parse_times(["01/11/2024", "01/12/2024", "02/01/2024"], PLACE)[1].day_first is False
    times, how = parse_times(["01/02/2024", "02/02/2024"], PLACE)
    assert how.is_guess
    assert times[0].astype("M8[D]") == np.datetime64("2024-01-02")
    times, how = parse_times(["01/02/2024", "02/02/2024"], PLACE, day_first=True)
    assert not how.is_guess
    assert times[0].astype("M8[D]") == np.datetime64("2024-02-01")
    with pytest.raises(MarketDataError, match=r"row 2: .* cannot both be day first or both be month first"):
        parse_times(["13/01/2024", "01/13/2024"], PLACE)
    with pytest.raises(MarketDataError, match=r"row 1: .*day_first is false, but the first number is no month"):
        parse_times(["13/01/2024"], PLACE, day_first=False)
    days = [datetime.date(2024, 2, 1), datetime.date(2024, 2, 2)]
    path = write(tmp_path / "prices.csv", "Date,Open,High,Low,Close,Volume", days, "%d/%m/%Y")
    assert "read as MM/DD/YYYY. If the day is first: day_first=True, or --day-first" in str(check_market_data(path))


@pytest.mark.parametrize(
    ("stamps", "message"),
    [
        (["2024-01-01", "2024-13-01"], "row 2: timestamp '2024-13-01': month"),
        (["2024-01-01 25:00"], "row 1: .*no such time of day"),
        (["01/02/2024 13:00 PM"], "row 1: .*no such time of day"),
        (["2024-01-01", "01.02.2024"], "row 2: .*another format than '2024-01-01' in row 1"),
        (["2024-01-01T00:00+99:00"], "row 1: .*offset"),
        (["2024-01-0é"], "row 1: timestamp '2024-01-0é' is no date"),
        (["x" * 10_000], "row 1: timestamp 'xxx"),
        (["1704153600", "999999999999999999", "1704153601"], "row 2: .*not in seconds since 1970"),
    ],
)
def test_wrong_times_are_named(stamps, message):
    with pytest.raises(MarketDataError, match=message):
        parse_times(stamps, PLACE)


def test_offsets_are_converted(tmp_path):
    path = tmp_path / "prices.csv"
    rows = ["2024-03-08 09:30:00-05:00,1,1,1,1", "2024-03-11 09:30:00-04:00,1,1,1,1"]
    path.write_text("\n".join(["Datetime,Open,High,Low,Close", *rows]))
    times = load_market_data(path)["prices"].timestamps
    assert [str(time)[11:16] for time in times] == ["14:30", "13:30"]
    assert check_market_data(path).zone == "offsets, converted to UTC"


def test_volume_is_needed_only_where_it_is_a_feature(tmp_path):
    bars = regime_bars(200)
    columns = {name: getattr(bars, name) for name in ("open", "high", "low", "close")}
    market = from_columns({"timestamp": bars.timestamps, **columns})
    with pytest.raises(MarketDataError, match=r"no volume.*features={'volume': False}"):
        MarketEnv(market, "all", episode_length=16)
    features = FeatureConfig(volume=False)
    env = MarketEnv(market, "all", episode_length=16, features={"volume": False})
    whole = MarketEnv(bars, "all", episode_length=16)
    assert features.names == FeatureConfig().names[:-1]
    np.testing.assert_array_equal(env.reset(seed=0)[0], whole.reset(seed=0)[0][:-1])


@pytest.mark.parametrize(
    ("step", "name"), [("1min", "1min"), ("5min", "5min"), ("1h", "1h"), ("1d", "1d"), ("1w", "1w"), ("30s", "30s")]
)
def test_frequencies_are_recognised(step, name):
    times = np.array([np.datetime64("2024-01-01", "us")] * 5)
    for i in range(1, 5):
        times[i] = add_period(times[i - 1], step)
    assert frequency_of(times) == name


def test_periods_of_the_calendar():
    day = np.datetime64("2024-01-31T12:00", "us")
    assert add_period(day, "1mo") == np.datetime64("2024-02-29T12:00")
    assert add_period(day, "3y") == np.datetime64("2027-01-31T12:00")
    months = np.arange("2020-01", "2021-01", dtype="M8[M]").astype("M8[us]")
    assert frequency_of(months) == "1mo"
    assert not is_same_frequency("1d", "5min")
    assert is_same_frequency("60min", "1h")
    with pytest.raises(ValueError, match="Invalid train: '3 years'"):
        parse_period("train", "3 years")


def test_bars_of_another_frequency_are_refused_unless_asked(tmp_path):
    path = write(tmp_path / "prices.csv", "Date,Open,High,Low,Close,Volume")
    assert load_market_data(path, frequency="1d")
    with pytest.raises(MarketDataError, match=r"prices.csv: bars of 'prices' are 1d apart, but 5min is expected"):
        load_market_data(path, frequency="5min")
    lines = ["Date,Open,High,Low,Close", *(f"2024-01-02 09:{minute}:00,1,1,1,1" for minute in range(30, 40, 5))]
    with pytest.raises(MarketDataError, match=r"row 3: the bar is 300 seconds after .*, but 1d is expected"):
        list(read_bars(lines, frequency="1d"))
    weeks = [f"{datetime.date(2024, 1, 1) + datetime.timedelta(weeks=i)},1,1,1,1" for i in range(12)]
    with pytest.raises(MarketDataError, match=r"row 10: the bar is 604800 seconds after"):
        list(read_bars([lines[0], *weeks], frequency="1d"))
    assert len(list(read_bars(lines))) == 2


def test_what_was_decided_is_recorded_and_reads_the_file_again(tmp_path):
    path = write(tmp_path / "prices.csv", "Date,Open,High,Low,Last,Volume", form="%d/%m/%Y")
    recorded = recorded_load(path, {"timezone": "America/New_York"})
    assert recorded["columns"]["timestamp"] == "Date"
    assert recorded["columns"]["close"] == "Last"
    assert (recorded["day_first"], recorded["frequency"]) == (True, "1d")
    one, again = load_market_data(path, timezone="America/New_York"), load_market_data(path, **recorded)
    np.testing.assert_array_equal(one["prices"].timestamps, again["prices"].timestamps)


def test_a_check_finds_everything_at_once(tmp_path):
    bars = regime_bars(400, seed=3)
    close, open_ = bars.close.copy(), bars.open.copy()
    close[200:], open_[200:] = close[200:] / 2, open_[200:] / 2
    open_[200] = close[199] / 2
    volume = bars.volume.copy()
    volume[7] = 0
    high, low = np.maximum(open_, close), np.minimum(open_, close)
    high[50] = low[50] / 2
    times = np.arange("2020-01-01", "2021-02-04", dtype="M8[D]").astype("M8[us]")
    times[300:] += np.timedelta64(90, "D")
    path = tmp_path / "prices.csv"
    path.write_text(
        "\n".join(
            ["Date,Open,High,Low,Close,Volume"]
            + [",".join(map(str, row)) for row in zip(times, open_, high, low, close, volume, strict=True)]
        )
    )
    found = check_market_data(path)
    text = str(found)
    assert "highs below open or close: 1, in row 52" in text
    assert "gaps longer than 3 days: 1, in row 302" in text
    assert "bars with a volume of 0: 1, in row 9" in text
    assert "changes that look like splits not adjusted for: 1, in row 202" in text
    assert found.refusal is not None
    assert found.refusal.startswith("row 52: high is below")

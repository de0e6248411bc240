import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from edge.config import load_config, parse_config
from edgewater.base.errors import InvalidConfig
from tests.refusals import refused

YAML = """
edge: jfk
labels: {site: new-york}
center:
  address: center.example:7400
  token: {env: EDGE_TOKEN}
  tls: {ca: ca.pem, cert: edge.pem, key: edge.key}
  bandwidth: 64KiB
  daily: 1GB
state_dir: ./state/jfk
http: {listen: 127.0.0.1:0}
streams:
  flights:
    columns: {carrier: string, distance: int64, dep_delay: float64}
    time: {column: time_ms, unit: ms, min_time: 1990-01-01T00:00:00Z, max_skew: 2h}
    disorder: 5s
    replay: {speed: 86400, start: 2013-01-01T00:00:00Z, at: 2024-01-01T00:00:00+01:00}
    sources:
      - file: {path: "/data/*.csv.gz", csv: {delimiter: ";", nulls: [NA]}}
      - stdin:
      - http: {}
limits: {max_pending_bytes: 32MiB, checkpoint: 2s}
"""


def given(**changes: Any) -> dict[str, Any]:
    stream = {"columns": {"a": "int64"}, "time": {"column": "t"}, "sources": [{"http": {}}]}
    return {"edge": "jfk", "state_dir": "state", "streams": {"flights": stream}, **changes}


def in_stream(**changes: Any) -> dict[str, Any]:
    config = given()
    config["streams"]["flights"].update(changes)
    return config


def test_a_full_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text(YAML)
    config = load_config(path, {"EDGE_TOKEN": "s3cret"})
    stream = config.streams["flights"]
    assert config.center.token is not None
    assert config.center.token.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(config)
    assert (config.center.bandwidth, config.center.daily) == (65_536, 1_000_000_000)
    assert (config.limits.max_pending_bytes, config.limits.checkpoint_ms) == (32 << 20, 2000)
    assert stream.arrow_columns == {"carrier": pa.string(), "distance": pa.int64(), "dep_delay": pa.float64()}
    assert (stream.disorder_ms, stream.idle_rule_ms) == (5000, None)
    assert stream.replay is not None
    assert (stream.replay.start, stream.replay.at) == (1_356_998_400_000, 1_704_063_600_000)
    assert stream.sources[0].file is not None
    assert stream.sources[0].file.format == "csv"
    time = stream.record_schema.time
    assert (time.column, time.unit, time.min_ms, time.max_skew_ms) == ("time_ms", "ms", 631_152_000_000, None)


def test_a_short_one_has_defaults_that_work() -> None:
    config = parse_config(given())
    assert config.center.address == "127.0.0.1:7400"
    assert config.http.listen == "127.0.0.1:7410"
    assert config.streams["flights"].idle_rule_ms == 10_000
    assert config.streams["flights"].record_schema.time.max_skew_ms == 600_000


def test_quoted_times_and_times_without_a_zone_are_taken() -> None:
    for start in ("2013-01-01T00:00:00Z", "2013-01-01T00:00:00", "2013-01-01 01:00:00+01:00"):
        config = parse_config(in_stream(replay={"speed": 1.5, "start": start}))
        assert config.streams["flights"].replay is not None
        assert config.streams["flights"].replay.start == 1_356_998_400_000


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (given(centre={}), "centre: {} is not accepted; unknown key, did you mean center?"),
        (given(center={"adress": "a:1"}), "center.adress: 'a:1' is not accepted; unknown key, did you mean address?"),
        (in_stream(time={"colum": "t"}), "streams.flights.time.colum: 't' is not accepted; unknown key, "
                                          "did you mean column?; expected one of the keys column"),
        (in_stream(time={"colum": "t"}), "; also streams.flights.time.column: missing key"),
        (in_stream(dissorder="5s"), "flights.dissorder: '5s' is not accepted; unknown key, did you mean disorder?"),
        (in_stream(sources=[{"file": {"path": "a.csv", "folow": True}}]),
         "streams.flights.sources.0.file.folow: True is not accepted; unknown key, did you mean follow?"),
        (given(limits={"zzz": 1}), "limits.zzz: 1 is not accepted; unknown key; expected one of the keys max_pending"),
        ({"edge": "jfk", "state_dir": "s"}, "streams: missing key; expected a value"),
        (in_stream(time={}), "streams.flights.time.column: missing key"),
        (in_stream(time={"column": "t", "unit": "minutes"}), "streams.flights.time.unit: 'minutes' is not accepted"),
        (in_stream(columns={"a": "int"}),
         "streams.flights.columns.a: 'int' is not accepted; unknown type, did you mean int64?; expected a type among"),
        (in_stream(columns={"a": "int", "b": "text"}), "; also streams.flights.columns.b: 'text' is not accepted"),
        (in_stream(columns={}), "at least one column"),
        (in_stream(columns={"event_time_ms": "int64"}), "expected another name than event_time_ms"),
        (in_stream(columns={"t": "string"}), "expected the type int64 or float64 for column t"),
        (in_stream(columns={"t": "int64"}, time={"column": "t", "unit": "iso8601"}), "expected the type string"),
        (in_stream(disorder="5"), "streams.flights.disorder: '5' is not accepted; expected a duration such as"),
        (in_stream(disorder=5), "a duration needs a unit"),
        (in_stream(replay={"speed": 0}), "streams.flights.replay.speed: 0 is not accepted; expected a positive number"),
        (in_stream(replay={"speed": 2}), "start is missing"),
        (in_stream(replay={"speed": 2, "start": "noon"}), "replay.start: 'noon' is not accepted; expected an ISO 8601"),
        (in_stream(sources=[]), "streams.flights.sources"),
        (in_stream(sources=[{"kafka": {}}]), "sources.0.kafka"),
        (in_stream(sources=["stdin"]), "expected one of file: {path: …}, stdin: {format: …}, http: {}"),
        (in_stream(sources=[{"http": {}}, {"http": {}}]), "would be counted twice"),
        (in_stream(sources=[{"file": {"path": "a.csv"}}] * 2), "would be counted twice"),
        (in_stream(sources=[{"file": {"path": "a.log"}}]), "file.format: missing key"),
        (given(edge="j f k"), "edge: 'j f k' is not accepted; expected text that matches"),
        (given(center={"address": "nowhere"}), "center.address: 'nowhere' is not accepted; expected host:port"),
        (given(center={"bandwidth": "fast"}), "center.bandwidth: 'fast' is not accepted; expected a size such as"),
        (given(center={"link": "a b"}), "center.link: 'a b' is not accepted"),
        (given(center={"tls": {"cert": "a.pem"}}), "expected cert and key together"),
        (given(center={"token": {"env": "NOT_SET"}}), "expected the environment variable NOT_SET to be set"),
        (given(center={"token": {"file": "/no/such/file"}}), "expected a readable text file"),
        (given(center={"token": {"vault": "x"}}), "expected the secret itself, {env: NAME} or {file: PATH}"),
        (given(streams={"Flights": in_stream()["streams"]["flights"]}), "'Flights' could not be used in a query"),
        (given(streams={}), "streams: {} is not accepted"),
        (None, "edge: missing key; expected a value; also state_dir: missing key"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_key_its_value_and_what_is_accepted(config: object, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_config(config, {})
    assert says in caught.value.message


def test_faults_of_a_file_are_named_together_each_with_its_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text(
        "edge: j f k\ncenter:\n  adress: a:1\nstate_dir: s\nstreams:\n  flights:\n    columns: {a: int}\n    time: {}\n"
        "    sources:\n      - http: {}\n      - file: {path: x.csv, folow: true}\n"
    )
    with pytest.raises(InvalidConfig) as caught:
        load_config(path)
    places = [line.removeprefix(f"{path}:").split(": ")[:2] for line in caught.value.faults()]
    assert places == [
        ["3:3", "center.adress"], ["11:29", "streams.flights.sources.1.file.folow"], ["1:1", "edge"],
        ["7:15", "streams.flights.columns.a"], ["8:5", "streams.flights.time.column"],
    ]  # fmt: skip
    path.write_text(YAML.replace("disorder: 5s", "disorder: fast").replace("carrier: string", "carrier: text"))
    with refused(InvalidConfig, "streams.flights.columns.carrier"):
        load_config(path, {"EDGE_TOKEN": "x"})
    path.write_text("edge: jfk\nedge: lga\n")
    with refused(InvalidConfig, ""):
        load_config(path)


def test_a_secret_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    config = parse_config(given(center={"token": {"file": str(tmp_path / "token")}}))
    assert config.center.token is not None
    assert config.center.token.get_secret_value() == "s3cret"


def test_nothing_but_secrets_is_substituted() -> None:
    assert parse_config(given(state_dir="${HOME}/x"), {"HOME": "/root"}).state_dir == "${HOME}/x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("edge: [", "expected YAML"),
        ("edge: *.log", "needs quotes"),
        ("edge: {path: %x}", "needs quotes"),
        ("edge: jfk\nedge: lga\n", "duplicate key edge"),
        ("\xff", "a readable YAML file in UTF-8"),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "edge.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidConfig) as caught:
        load_config(path)
    assert says in caught.value.message
    assert str(path) in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(InvalidConfig, ""):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["edge: {{ name }}", "edge: a\nmin_time: 2013-02-30", "a: " + "[" * 3000])
def test_a_file_that_yaml_stumbles_over_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text(text)
    with refused(InvalidConfig, ""):
        load_config(path)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_query_bytes": "60MiB"},
        {"max_query_bytes": 0},
        {"checkpoint": "0s"},
        {"max_pending_bytes": 0},
        {"max_push_bytes": 0},
        {"max_push_bytes": "1GiB"},
    ],
)
def test_a_limit_with_which_nothing_would_go_is_refused(limits: dict[str, object]) -> None:
    with refused(InvalidConfig, f"limits.{next(iter(limits))}"):
        parse_config(given(limits=limits))


@pytest.mark.parametrize("http", [{"origins": ["*"]}, {"origins": ["shop.example"], "tokens": ["t"]}])
def test_origins_without_tokens_or_without_a_scheme_are_refused(http: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_config(given(http=http))
    assert caught.value.field.startswith("http")


def test_a_bandwidth_below_the_heartbeats_is_refused() -> None:
    with refused(InvalidConfig, "center.bandwidth"):
        parse_config(given(center={"bandwidth": 0}))


@pytest.mark.parametrize("delimiter", ["é", "→", '"', "\n", "\0", ""])
def test_a_delimiter_is_one_plain_character(delimiter: str) -> None:
    with refused(InvalidConfig, "delimiter"):
        parse_config(in_stream(sources=[{"file": {"path": "a.csv", "csv": {"delimiter": delimiter}}}]))


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:7400",
        "https://center.example:7400",
        "grpc://c:7400",
        "center.example",
        "center.example:0",
        7400,
    ],
)
def test_the_address_of_the_center_is_a_host_and_a_port(address: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_config(given(center={"address": address}))
    assert (caught.value.field, caught.value.value) == ("center.address", address)
    (offered,) = re.findall(r"\d+\.\S+", caught.value.accepted)
    assert parse_config(given(center={"address": offered})).center.address == offered


def test_an_address_to_listen_at_is_no_url() -> None:
    with refused(InvalidConfig, "http.listen"):
        parse_config(given(http={"listen": "http://127.0.0.1:7410"}))


@pytest.mark.parametrize("word", ["off", "klink"])
def test_the_scheduling_of_an_older_file_is_named_and_has_no_effect(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_config(given(limits={"scheduling": word, "checkpoint": "1s"}))
    assert config == parse_config(given(limits={"checkpoint": "1s"}))
    assert "limits.scheduling" in caplog.text


def test_a_value_of_a_file_that_yaml_cuts_at_a_comma_is_refused_with_the_quotes_that_it_needs() -> None:
    document = yaml.safe_load("{edge: a, labels: {site: New York (JFK, LGA)}}")
    with pytest.raises(InvalidConfig) as caught:
        parse_config({**given(), **document})
    assert caught.value.field == "labels.site"
    assert '"New York (JFK, LGA)"' in caught.value.accepted


def test_a_constant_has_the_type_of_its_column() -> None:
    columns = {"site": "string", "rack": "int64", "spare": "bool"}
    config = parse_config(in_stream(columns=columns, constants={"site": "north", "rack": 7, "spare": False}))
    (stream,) = config.streams.values()
    assert dict(stream.record_schema.constants) == {"site": "north", "rack": 7, "spare": False}


@pytest.mark.parametrize(
    ("constants", "field"),
    [
        *(({name: value}, "flights") for name, value in (
            ("side", "north"), ("site", 7), ("site", "n" * 257), ("rack", True), ("rack", 1 << 63), ("load", 1)
        )),
        ({"load": 1.5}, "constants.load.str"),
    ],
)  # fmt: skip
def test_a_constant_that_is_not_of_its_column_is_refused(constants: dict[str, object], field: str) -> None:
    columns = {"site": "string", "rack": "int64", "load": "float64"}
    with refused(InvalidConfig, field):
        parse_config(in_stream(columns=columns, constants=constants))


@pytest.mark.parametrize(("kind", "near"), [("files", "file"), ("kafak", "kafka"), ("sys_log", "syslog")])
def test_a_source_of_a_kind_with_a_wrong_name_is_met_with_the_right_one(kind: str, near: str) -> None:
    streams = {"s": {"columns": {"a": "string"}, "time": {"column": "t"}, "sources": [{kind: {"path": "x"}}]}}
    with pytest.raises(InvalidConfig) as refused:
        parse_config({"edge": "jfk", "state_dir": "x", "streams": streams})
    assert f"did you mean {near}?" in refused.value.reason


def test_rules_of_values_name_columns() -> None:
    rules = {"nulls": {"a": ["NA"]}, "on_nan": {"f": None}, "decimal": ",", "rejects": {"by": "a"}}
    config = parse_config(in_stream(columns={"a": "int64", "f": "float64"}, **rules))
    schema = config.streams["flights"].record_schema
    assert (schema.nulls, schema.on_nan) == ({"a": ("NA",)}, {"f": "null"})
    assert (schema.decimal, schema.rejects_by) == (",", "a")


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ({"nulls": {"flag": ["NA"]}}, "flights"), ({"nulls": {"a": []}}, "nulls.a"),
        ({"on_nan": {"a": "null"}}, "flights"), ({"on_nan": {"delay": "drop"}}, "on_nan.delay"),
        ({"lenient": ["delay"]}, "flights"), ({"rejects": {"by": "delays"}}, "flights"), ({"decimal": ";"}, "decimal"),
    ],
)  # fmt: skip
def test_rules_of_values_that_fit_no_column_are_refused(rules: dict[str, Any], field: str) -> None:
    with refused(InvalidConfig, field):
        parse_config(in_stream(columns={"a": "int64", "delays": "float64"}, **rules))

"""Columns from a file: joined by key, with the version of the file that each record has seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config import LookupConfig, StreamConfig, parse_config
from edge.preflight import check
from edge.records import Chunk
from edge.sources.lookups import FileTable, Lookup, StreamLookups, load_table
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.base.streams import TIME_COLUMN
from edgewater.model import lookups as module
from edgewater.model.lookups import LookupTable
from tests.edge.agent_process import AgentProcess, lines
from tests.examples import examples
from tests.query_specs import query_spec
from tests.refusals import refused

SITES = "device,site,floor\na,Köln,1\nb,Bonn,\nc,,3\n"


def config_of(path: Path, **changes: Any) -> LookupConfig:
    options = {"file": str(path), "key": "device", "columns": {"site": "string", "floor": "int64"}, **changes}
    return LookupConfig.model_validate(options)


def lookup_of(path: Path, now_ms: Callable[[], int] = lambda: 1_000, **changes: Any) -> Lookup:
    return Lookup("s", config_of(path, **changes), pa.string(), now_ms)


KEYS = st.text(max_size=3) | st.integers(0, 60).map(str)


@examples(200)
@given(st.lists(KEYS, unique=True, max_size=40), st.lists(KEYS | st.none(), max_size=60))
def test_each_value_finds_the_row_with_its_key(keys: list[str], values: list[str | None]) -> None:
    table = LookupTable(pa.array(keys, pa.string()), {"n": pa.array(range(len(keys)), pa.int64())})
    rows = table.rows_of(pa.array(values, pa.string()))
    assert table.take(rows)["n"].to_pylist() == [keys.index(v) if v in keys else None for v in values]


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_()])
def test_keys_may_be_numbers_and_booleans(kind: pa.DataType) -> None:
    table = LookupTable(pa.array([0, 1]).cast(kind), {"x": pa.array(["no", "yes"])})
    rows = table.rows_of(pa.array([1, 0, None, 1]).cast(kind))
    assert table.take(rows)["x"].to_pylist() == ["yes", "no", None, "yes"]


def test_two_keys_with_one_hash_are_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.hash_values
    monkeypatch.setattr(module, "hash_values", lambda values, seed: real(values, seed) // (1 if seed else 1 << 63))
    table = LookupTable(pa.array(list("abcd")), {"n": pa.array(range(4))})
    assert table.take(table.rows_of(pa.array(list("dxba"))))["n"].to_pylist() == [3, None, 1, 0]


@pytest.mark.parametrize("format_", ["csv", "ndjson", "parquet"])
def test_a_file_is_read_in_each_format(tmp_path: Path, format_: str) -> None:
    path = tmp_path / f"sites.{format_}"
    rows = [{"device": "a", "site": "Köln", "floor": 1}, {"device": "b", "site": "Bonn", "floor": None}]
    if format_ == "csv":
        path.write_text(SITES)
    elif format_ == "ndjson":
        path.write_text("".join(json.dumps({**row, "more": [1]}) + "\n" for row in rows))
    else:
        pa.parquet.write_table(pa.table({"more": [1, 2], **pa.Table.from_pylist(rows).to_pydict()}), path)
    table = load_table(config_of(path), pa.string())
    got = table.take(table.rows_of(pa.array(["b", "a", "z"])))
    assert {name: column.to_pylist() for name, column in got.items()} == {
        "site": ["Bonn", "Köln", None], "floor": [None, 1, None],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ("d,Trier,top", 1),
        ("d,Trier,0x10", 1),
        ("d,Trier,1.5", 1),
        (",Trier,4", 1),
        ("d,Trier,4,5", 1),
        ("d,Trier", 1),
        ('d,"Tri\ner,4', 2),
        ("d\xff,Trier,4", 1),
        ("a,Trier,4", 2),
    ],
)
def test_a_bad_row_of_a_file_costs_only_itself(tmp_path: Path, row: str, count: int) -> None:
    path = tmp_path / "sites.csv"
    path.write_bytes((SITES + "e,Ulm,+7\n" + row + "\n").encode("latin-1" if "\xff" in row else "utf-8"))
    if "\xff" in row:
        path.write_bytes(SITES.encode() + b"e,Ulm,+7\n" + row.encode("latin-1"))
    lookup = lookup_of(path)
    lookup.refresh()
    assert (lookup.failure, lookup.rejected_rows) == (None, count)
    got = lookup.columns_for(pa.array(["a", "b", "d", "e"]))
    assert got["site"].to_pylist() == [None if row.startswith("a,") else "Köln", "Bonn", None, "Ulm"]
    assert got["floor"].to_pylist() == [None if row.startswith("a,") else 1, None, None, 7]


def test_a_bad_row_of_ndjson_and_parquet_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "sites.ndjson"
    path.write_text('{"device":"a","site":"x","floor":1}\n7\n{"device":"b","floor":"top"}\n{"device":"c"}\n')
    table = load_table(config_of(path), pa.string())
    assert (len(table), sum(each.count for each in table.rejected)) == (2, 2)
    path = tmp_path / "sites.parquet"
    floors = pa.array([1, 1 << 63, 2, 3], pa.uint64())
    pa.parquet.write_table(pa.table({"device": ["a", "b", "c", None], "site": list("wxyz"), "floor": floors}), path)
    table = load_table(config_of(path), pa.string())
    assert (len(table), sum(each.count for each in table.rejected)) == (2, 2)


def test_a_line_break_in_quotes_is_a_part_of_the_value(tmp_path: Path) -> None:
    path = tmp_path / "sites.csv"
    path.write_text(SITES + 'd,"two\nlines",4\n')
    lookup = lookup_of(path)
    lookup.refresh()
    assert lookup.columns_for(pa.array(["d"]))["site"].to_pylist() == ["two\nlines"]


BROKEN = {
    "no row with a key": "device,site,floor\n,Trier,4\n",
    "a column missing": "device,site\na,Köln\n",
    "no row that can be read": "device,site,floor\na,b,c\n",
    "empty": "",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_and_leaves_the_version_before_in_use(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sites.csv"
    path.write_text(BROKEN[name])
    with pytest.raises(InvalidConfig) as caught:
        load_table(config_of(path), pa.string())
    assert caught.value.field == "file" and caught.value.value == str(path)
    path.write_text(SITES)
    lookup = lookup_of(path)
    lookup.refresh()
    assert lookup.failure is None and lookup.rows == 3
    path.write_text(BROKEN[name])
    assert lookup.refresh() and not lookup.refresh()
    assert lookup.failure is not None and lookup.rows == 3
    path.unlink()
    assert lookup.refresh() and not lookup.refresh()
    assert lookup.failure is not None and lookup.rows == 3
    path.write_text(SITES + "d,Trier,4\n")
    assert lookup.refresh() and not lookup.refresh()
    assert lookup.failure is None and lookup.rows == 4


def test_a_file_that_is_being_written_is_read_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sites.csv"
    path.write_text(SITES)
    lookup = lookup_of(path)
    assert not lookup.refresh() and lookup.rows == 3
    path.write_text(SITES.splitlines(keepends=True)[0] + "a,Köl")
    assert lookup.refresh()
    path.write_text(SITES + "d,Trier,4\n")
    assert lookup.refresh() and lookup.rows == 3

    def read(config: LookupConfig, key_type: pa.DataType) -> FileTable:
        table = load_table(config, key_type)
        path.write_text(SITES)  # while it is read
        return table

    with monkeypatch.context() as patched:
        patched.setattr("edge.sources.lookups.load_table", read)
        assert lookup.refresh() and lookup.rows == 3 and lookup.failure is None
    path.write_text(SITES + "d,Trier,4\ne,Ulm,5\n")
    assert lookup.refresh() and not lookup.refresh()
    assert lookup.rows == 5


def test_files_and_tables_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sites.csv"
    path.write_text(SITES)
    for limit in ("MAX_ROWS", "MAX_FILE_BYTES"):
        with monkeypatch.context() as limited, refused(InvalidConfig, "file"):
            limited.setattr(f"edge.sources.lookups.{limit}", 2)
            load_table(config_of(path), pa.string())


def test_a_key_may_be_a_column_of_an_earlier_lookup(tmp_path: Path) -> None:
    ads, campaigns = tmp_path / "ads.csv", tmp_path / "campaigns.csv"
    ads.write_text("ad,campaign\n1,x\n2,y\n3,z\n")
    campaigns.write_text("id,owner\nx,Ann\ny,Bo\n")
    first = LookupConfig.model_validate({"file": str(ads), "key": "ad", "columns": {"campaign": "string"}})
    second = LookupConfig.model_validate(
        {"file": str(campaigns), "key": {"campaign": "id"}, "columns": {"owner": "string"}}
    )
    lookups = [Lookup("s", first, pa.int64(), lambda: 0), Lookup("s", second, pa.string(), lambda: 0)]
    stream = StreamLookups(lookups, ["ad", "campaign", "owner"])
    batch = pa.record_batch({"ad": [3, 1, None, 9], TIME_COLUMN: [1, 2, 3, 4]})
    with pytest.raises(StorageError):
        stream.join(batch)
    for lookup in lookups:
        lookup.refresh()
    chunk = stream.joined(Chunk("s:file", batch, None, {"offset": 1}, (), 10))
    assert chunk.keep and chunk.batch.to_pydict() == {
        "ad": [3, 1, None, 9], "campaign": ["z", "x", None, None], "owner": [None, "Ann", None, None],
        TIME_COLUMN: [1, 2, 3, 4],
    }  # fmt: skip
    assert [lookup.unmatched for lookup in lookups] == [1, 1]


def stream_of(path: Path, **changes: Any) -> dict[str, Any]:
    lookup = {"file": str(path), "key": "device", "columns": {"site": "string"}, **changes}
    return {
        "columns": {"device": "string", "x": "float64"},
        "time": {"column": "at", "unit": "ms"},
        "lookups": [lookup],
        "sources": [{"http": {}}],
    }


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"key": "nothing"}, "one of the columns device"),
        ({"key": "x"}, "one of the columns device"),
        ({"key": {"device": "a", "x": "b"}}, "one column"),
        ({"columns": {"device": "string"}}, "columns without the key"),
        ({"key": {"device": "id"}, "columns": {"device": "string"}}, "columns that the stream lacks"),
        ({"columns": {TIME_COLUMN: "int64"}}, "columns that the stream lacks"),
        ({"columns": {"site": "text"}}, "a type among"),
        ({"columns": {}}, "at least 1"),
        ({"refresh": "10ms"}, "greater than or equal to 1000"),
        ({"file": "sites.xls"}, "format"),
    ],
)
def test_a_lookup_that_does_not_fit_its_stream_is_refused(
    tmp_path: Path, changes: dict[str, Any], accepted: str
) -> None:
    document = {"edge": "e", "state_dir": str(tmp_path), "streams": {"s": stream_of(tmp_path / "s.csv", **changes)}}
    with pytest.raises(InvalidConfig) as caught:
        parse_config(document)
    assert caught.value.field.startswith("streams.s")
    assert accepted in str(caught.value)


def test_check_loads_the_files_of_lookups(tmp_path: Path) -> None:
    path = tmp_path / "sites.csv"
    document = {"edge": "e", "state_dir": str(tmp_path), "streams": {"s": stream_of(path)}}
    config = parse_config(document)
    assert list(StreamConfig.model_validate(document["streams"]["s"]).stream_columns) == ["device", "x", "site"]
    (problem,) = check(config, lambda: 0).problems
    assert problem.startswith("streams.s.lookups.0.file")
    path.write_text(SITES)
    assert check(config, lambda: 0).ok


BY_SITE = query_spec(name="n", stream="events", group_by="site", window={"tumbling": "1h"}, lateness="1h")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    lookup = {"file": str(tmp_path / "sites.csv"), "key": "x", "columns": {"site": "string"}, "refresh": "1s"}
    followed = {"file": {"path": str(tmp_path / "events.ndjson"), "follow": True}}
    agent = AgentProcess(tmp_path, [followed, {"http": {}}], stream={"lookups": [lookup]}, query=BY_SITE)
    yield agent
    agent.close()


@pytest.mark.nightly
def test_a_restart_counts_each_record_with_the_version_that_it_has_seen(agent: AgentProcess, tmp_path: Path) -> None:
    sites, events = tmp_path / "sites.csv", tmp_path / "events.ndjson"
    events.write_text(lines(0, 30))
    agent.start()
    agent.until(lambda: "sites.csv" in agent.log)
    assert agent.records() == 0, "the stream waits for its first version"
    sites.write_text("x,site\n" + "".join(f"{n},old\n" for n in range(30)))
    agent.until(lambda: agent.records() == 30)
    agent.push(lines(25, 10))
    agent.kill()
    sites.write_text("x,site\n" + "".join(f"{n},new\n" for n in range(100)))
    with events.open("a") as file:
        file.write(lines(30, 20))
    agent.start()
    agent.until(lambda: agent.records() == 60)
    unmatched = f'edgewater_edge_lookup_unmatched_total{{file="{sites}",stream="events"}}'
    assert (agent.metrics() or {})[unmatched] == 0
    sites.write_text("no lookup")
    agent.until(lambda: (agent.metrics() or {})[unmatched.replace("unmatched_total", "failed")] == 1)
    agent.push(lines(90, 20))
    agent.kill()
    assert agent.recovered_groups() == {"old": 35, None: 15, "new": 30}

"""A column whose type has changed: the edge says what to do, instead of mixing types or failing at each start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore, JournalGroupCommit
from edge.uplink.outbox import UplinkOutbox
from edgewater.base.errors import StorageError
from edgewater.base.streams import TIME_COLUMN, Constant
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef

TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64()}
QUERY = {"name": "q", "from": "s", "group_by": ["k"], "measures": {"m": "max(x)"}, "window": {"tumbling": "10s"}}


def edge(directory: Path, constants: Mapping[str, Constant] = MappingProxyType({}), **columns: str) -> DurableCore:
    """Starts the agent on a directory, as `open_agent` does."""
    spec = StreamSpec({name: TYPES[kind] for name, kind in columns.items()}, constants=constants)
    durable = DurableCore(
        directory, lambda: EdgeCore({"s": spec}), lambda *_: pytest.fail("nothing is read again"), "i"
    )
    types = {name: stream.column_types for name, stream in durable.core.streams.items()}
    durable.handle(SourcesOpened((("s", "http"),), columns=types))
    if not durable.core.configured:
        durable.handle(Configured(((QueryRef("q", 1), QuerySpec.from_mapping(QUERY)),)))
    return durable


def push(durable: DurableCore, **values: Any) -> None:
    batch = pa.record_batch({**{name: pa.array([v]) for name, v in values.items()}, TIME_COLUMN: pa.array([1_000])})
    durable.ingest_payload(Ingested("s", "http", batch, 1 << 40))
    durable.sync()


@pytest.mark.parametrize("changed", [{"k": "string"}, {"x": "float64"}])
@pytest.mark.parametrize("clean", [True, False])
def test_a_type_that_a_query_has_counted_with_cannot_change_under_it(
    tmp_path: Path, changed: dict[str, str], clean: bool
) -> None:
    before = {"k": "int64", "x": "int64"}
    durable = edge(tmp_path, **before)
    push(durable, k=1, x=2)
    if clean:
        durable.checkpoint()
    durable.close()
    says = "delete the query at the center" if clean else "restore them until the edge has run once more"
    for _ in range(2):
        with pytest.raises(StorageError, match=says):
            edge(tmp_path, **{**before, **changed})
    again = edge(tmp_path, **before)
    push(again, k=1, x=3)
    again.handle(Configured(()))  # the query was deleted
    again.checkpoint()
    again.close()
    edge(tmp_path, **{**before, **changed}).close()


@pytest.mark.parametrize("clean", [True, False])
def test_columns_that_no_query_counts_with_come_and_go(tmp_path: Path, clean: bool) -> None:
    durable = edge(tmp_path, k="int64", x="int64", y="int64")
    push(durable, k=1, x=2, y=1)
    if clean:
        durable.checkpoint()
    durable.close()
    edge(tmp_path, k="int64", x="int64", z="string").close()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("changed", [{}, {"k": 2}])
def test_a_constant_by_which_a_query_groups_cannot_change_under_it(
    tmp_path: Path, changed: dict[str, Constant], clean: bool
) -> None:
    columns = {"k": "int64", "x": "int64"}
    durable = edge(tmp_path, {"k": 1}, **columns)
    push(durable, k=1, x=2)
    if clean:
        durable.checkpoint()
    durable.close()
    with pytest.raises(StorageError, match="delete the query at the center" if clean else "restore them"):
        edge(tmp_path, changed, **columns)
    again = edge(tmp_path, {"k": 1}, **columns)
    again.handle(Configured(()))  # the query was deleted
    again.checkpoint()
    again.close()
    edge(tmp_path, changed, **columns).close()


def test_a_hello_states_the_constants_of_its_streams(tmp_path: Path) -> None:
    durable = edge(tmp_path, {"k": 1}, k="int64", x="int64")
    outbox = UplinkOutbox("a", {}, durable, JournalGroupCommit(durable), lambda: 1_000)
    assert [dict(stream.constants) for stream in outbox.hello().streams] == [{"k": "1"}]
    durable.close()

"""The example of a sink that a package provides keeps the contract, and a sink that breaks it is found out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from center.sinks import SinkAnswer, SinkContext, SinkRunner, SinkStore, definitions, read_definition
from center.sinks.base import GROUP, Sink, SinkKinds
from center.sinks.testing import CASES, REF, Contents, Subject, a_write_that_ends_anywhere_loses_and_doubles_nothing
from edgewater.base.errors import InvalidConfig
from edgewater.wire import QueryRef
from tests.center.api.conftest import HOUR, T0, Desk

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as an installed package."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    kinds = SinkKinds(lambda: [EntryPoint("sqlite", "sqlite_sink:KIND", GROUP)])
    monkeypatch.setattr(definitions, "KINDS", kinds)
    return __import__("sqlite_sink")


def rows_of(path: Path, query: str) -> list[tuple[int, dict[str, object]]]:
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT start_ms, row FROM answers WHERE query = ? ORDER BY rowid", [query]).fetchall()
    return [(start_ms, json.loads(row)) for start_ms, row in rows]


class File:
    """A file that the example writes."""

    only_final = False

    def __init__(self, path: Path, kind: type[Sink] | None = None) -> None:
        self._path, self._kind = path, kind

    def sink(self, context: SinkContext) -> Sink:
        made = read_definition("kit", {"kind": "sqlite", "path": str(self._path)})
        return made.make(context) if self._kind is None else self._kind(made.options, context)  # type: ignore[call-arg]

    def contents(self) -> Contents:
        found: dict[int, dict[str | None, int]] = {}
        for start_ms, row in rows_of(self._path, REF.name):
            window = found.setdefault(start_ms, {})
            assert row["k"] not in window, "a double"
            window[row["k"]] = row["n"]  # type: ignore[index, assignment]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_example_keeps_the_contract(case: Callable[[Subject], None], tmp_path: Path) -> None:
    case(File(tmp_path / "answers.db"))


def test_a_sink_whose_position_is_durable_before_its_rows_is_found_out(package: ModuleType, tmp_path: Path) -> None:
    class Early(package.SqliteSink):  # type: ignore[name-defined, misc]
        def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
            super().write([], positions)
            super().write(answers, positions)

    Early.__module__ = package.__name__  # so that the lines of the example are the sink's
    with pytest.raises(AssertionError):
        a_write_that_ends_anywhere_loses_and_doubles_nothing(File(tmp_path / "answers.db", Early))


def test_the_example_writes_what_a_center_answers(tmp_path: Path) -> None:
    desk, path = Desk(tmp_path), tmp_path / "out.db"
    query = desk.register_over("jfk")
    definition = read_definition("file", {"kind": "sqlite", "path": str(path)})
    store = SinkStore(desk.results.engine)
    runner = SinkRunner(definition, desk.catalog, desk.results, store, owner="host:1", now_ms=lambda: desk.now)
    desk.report(query, "jfk", T0, {"UA": 3, None: 1})
    desk.report(query, "jfk", T0 + HOUR, {"AA": 2})
    while runner.step() == 0:
        pass
    runner.stop()
    found = {(start_ms, row["carrier"], row["n"], row["n_lower"]) for start_ms, row in rows_of(path, "flights")}
    assert found == {(T0, "UA", 3, 3), (T0, None, 1, 1), (T0 + HOUR, "AA", 2, 2)}


def test_a_wrong_option_of_the_example_is_named() -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_definition("file", {"kind": "sqlite", "paht": "x"})
    assert refused.value.field == "sinks.file.paht" and "path" in refused.value.message

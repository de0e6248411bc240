"""Built-in sources, Kafka, MQTT and the example package keep the promises of `edge.testing`."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from edge.config import edge_config
from edge.config import sources as source_config
from edge.source_kinds import GROUP, SourceKinds
from edge.sources import factory
from edge.testing import CASES, SECRET, Subject
from sim.demo.ports import free_port
from tests.brokers import KafkaBroker, MqttBroker, until_open
from tests.edge.sources.object_store import ObjectStore

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def example_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    points = {"sqlite": "sqlite_source:KIND", "kafka": "edge.sources.kafka:KIND", "mqtt": "edge.sources.mqtt:KIND"}
    points["syslog"] = "edge.sources.syslog:KIND"
    kinds = SourceKinds(lambda: [EntryPoint(name, value, GROUP) for name, value in points.items()])
    monkeypatch.setattr(edge_config, "KINDS", kinds)
    monkeypatch.setattr(source_config, "KINDS", kinds)
    monkeypatch.setattr(factory, "KINDS", kinds)


def lines(records: Sequence[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


class FileSubject(Subject):
    def __init__(self, directory: Path, _: ExitStack) -> None:
        self._path = directory / "a.ndjson"
        self._path.touch()
        self.entry = {"file": {"path": str(self._path), "follow": True}}

    def produce(self, records: Sequence[dict[str, Any]]) -> None:
        with self._path.open("ab") as file:
            file.write(b"\n".join(lines(records)) + b"\n")


class SqliteSubject(Subject):
    def __init__(self, directory: Path, _: ExitStack) -> None:
        self._path = directory / "rows.db"
        with sqlite3.connect(self._path) as connection:
            connection.execute("CREATE TABLE events (x INTEGER, at REAL)")
        self.entry = {"sqlite": {"path": str(self._path), "table": "events"}}

    def produce(self, records: Sequence[dict[str, Any]]) -> None:
        with sqlite3.connect(self._path) as connection:
            connection.executemany("INSERT INTO events VALUES (:x, :at)", records)

    def cut(self) -> None:
        self._path.rename(self._path.with_suffix(".away"))

    def mend(self) -> None:
        self._path.with_suffix(".away").rename(self._path)


class KafkaSubject(Subject):
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        store = stack.enter_context(ObjectStore())
        self.broker = stack.enter_context(KafkaBroker(directory, store=store.environ))
        self.broker.create("t")
        self.entry = {"kafka": {"brokers": [self.broker.address], "topic": "t"}}

    def produce(self, records: Sequence[dict[str, Any]]) -> None:
        self.broker.send("t", 0, lines(records))

    def cut(self) -> None:
        self.broker.kill()

    def mend(self) -> None:
        self.broker.start()


class MqttSubject(Subject):
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.broker = stack.enter_context(MqttBroker(directory))
        options = {"topics": ["t"], "client_id": "e", "username": "u", "password": SECRET}
        self.entry = {"mqtt": {"broker": self.broker.address, **options}}
        self._has_session = False

    def produce(self, records: Sequence[dict[str, Any]]) -> None:
        if not self._has_session:  # before the first subscription, the broker keeps nothing for the edge
            self.broker.wait_for_session("e")
            self._has_session = True
        self.broker.send("t", lines(records))

    def cut(self) -> None:
        self.broker.stop()

    def mend(self) -> None:
        self.broker.start()


class SyslogSubject(Subject):
    survives_kills = False

    def __init__(self, directory: Path, _: ExitStack) -> None:
        self._port = free_port()
        self.entry = {"syslog": {"listen": f"127.0.0.1:{self._port}", "format": "ndjson", "columns": {}}}

    def produce(self, records: Sequence[dict[str, Any]]) -> None:
        until_open(self._port)
        with socket.create_connection(("127.0.0.1", self._port)) as sender:
            sender.sendall(b"".join(b"<13>Oct 11 22:14:15 h a: %s\n" % line for line in lines(records)))


SUBJECTS = (
    FileSubject, SqliteSubject, KafkaSubject, pytest.param(MqttSubject, marks=pytest.mark.program), SyslogSubject,
)  # fmt: skip


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.__name__)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    if request.param is MqttSubject:
        request.getfixturevalue("mosquitto")
    with ExitStack() as stack:
        yield request.param(tmp_path, stack)


@pytest.mark.product
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_source_keeps_its_promises(case: Callable[[Subject, Path], None], subject: Subject, tmp_path: Path) -> None:
    case(subject, tmp_path)

"""The MQTT source against a real mosquitto."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pyarrow as pa
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import ValidationError

from edge.codecs import EventTime, RecordSchema
from edge.records import Chunk, Position
from edge.source_kinds import SourceContext
from edge.sources.mqtt import KIND, MqttConfig, MqttFailed, MqttSource
from tests.edge.agent_process import AgentProcess, lines

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
if MOSQUITTO is None and not os.environ.get("CI"):
    pytest.skip("mosquitto is not installed (Debian's package mosquitto)", allow_module_level=True)

AT_MS = 1_700_000_000_000
SCHEMA = RecordSchema({"n": pa.int64(), "device": pa.string()}, EventTime("at", max_skew_ms=None))
TIMEOUT_S = 60.0


class Broker:
    """mosquitto, which keeps its sessions in a file."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.log = directory / "mosquitto.log"
        self.log.touch()
        self._config = directory / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\n"
            f"persistence true\npersistence_location {directory}/\n"
            f"log_dest file {self.log}\nlog_type subscribe\n"
            "autosave_interval 1\nautosave_on_changes true\nmax_queued_messages 0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        assert MOSQUITTO is not None
        self._process = subprocess.Popen([MOSQUITTO, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ends the broker as a restart does: it writes its sessions."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
        self._process = None

    def wait_for_session(self, client_id: str) -> None:
        """Waits until a client has subscribed, as the broker's log says."""
        deadline = time.monotonic() + TIMEOUT_S
        while f"{client_id} 1 " not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def send(self, topic: str, bodies: list[bytes], retain: bool = False) -> None:
        """Publishes with QoS 1, and waits for the acknowledgements."""
        client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        for each in [client.publish(topic, body, qos=1, retain=retain) for body in bodies]:
            each.wait_for_publish(TIMEOUT_S)
        client.disconnect()
        client.loop_stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    made.start()
    yield made
    made.kill()


def source(broker: Broker, *topics: str, **options: Any) -> MqttSource:
    given = {"broker": broker.address, "topics": list(topics), "client_id": "edge-1", **options}
    (made,) = KIND.sources(MqttConfig.model_validate(given), SourceContext("s", SCHEMA, lambda: AT_MS))
    assert isinstance(made, MqttSource)
    return made


def read(
    made: MqttSource, enough: Callable[[list[Chunk]], bool], position: Position | None = None, *, commits: bool = True,
    connected: Callable[[], object] = lambda: None,
) -> list[Chunk]:  # fmt: skip
    """Reads until there is enough.

    Args:
        connected: called in a thread once the session is there.
    """

    async def collect() -> list[Chunk]:
        chunks: list[Chunk] = []
        stream = made.chunks(position)
        async with asyncio.timeout(TIMEOUT_S):
            first = asyncio.ensure_future(anext(stream))
            while made._client is None or not made._client.is_connected():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(connected)
            chunks.append(await first)
            while True:
                if commits:
                    made.committed(chunks[-1].end or {})
                if enough(chunks):
                    break
                chunks.append(await anext(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        return chunks

    return asyncio.run(collect())


def numbers(chunks: list[Chunk]) -> list[int]:
    return [n for chunk in chunks for n in chunk.batch.column("n").to_pylist()]


def bodies(*values: int) -> list[bytes]:
    return [b'{"n": %d, "at": %d}' % (n, AT_MS + n) for n in values]


def test_levels_of_the_topic_are_columns_and_bad_messages_cost_only_themselves(broker: Broker) -> None:
    def publish() -> None:
        broker.send("devices/a-1/temp", [*bodies(1), b"oops", *bodies(2)])
        broker.send("devices/b/temp", bodies(3))
        broker.send("devices/b/other", bodies(99))

    made = source(broker, "devices/{device}/temp")
    chunks = read(made, lambda c: len(numbers(c)) == 3, connected=publish)
    rows = [(row["n"], row["device"]) for chunk in chunks for row in chunk.batch.to_pylist()]
    assert rows == [(1, "a-1"), (2, "a-1"), (3, "b")]
    assert sum(r.count for chunk in chunks for r in chunk.rejected) == 1


def test_messages_that_were_journaled_but_not_acknowledged_count_once(broker: Broker) -> None:
    publish = lambda: broker.send("t", bodies(*range(20)))  # noqa: E731
    first = read(source(broker, "t"), lambda c: len(numbers(c)) == 20, commits=False, connected=publish)
    broker.send("t", bodies(20))
    second = read(source(broker, "t"), lambda c: bool(numbers(c)), first[-1].end)
    assert numbers(first) + numbers(second) == list(range(21))
    broker.send("t", bodies(21))
    third = read(source(broker, "t"), lambda c: bool(numbers(c)), second[-1].end)
    assert numbers(third) == [21]


def test_messages_that_were_not_journaled_come_again(broker: Broker) -> None:
    publish = lambda: broker.send("t", bodies(1, 2))  # noqa: E731
    read(source(broker, "t"), lambda c: len(numbers(c)) == 2, commits=False, connected=publish)
    assert numbers(read(source(broker, "t"), lambda c: len(numbers(c)) == 2)) == [1, 2]


@pytest.mark.parametrize("retained", [False, True])
def test_retained_messages_count_only_if_asked_for(broker: Broker, retained: bool) -> None:
    broker.send("t", bodies(1), retain=True)
    made = source(broker, "t", retained=retained)
    chunks = read(made, lambda c: 2 in numbers(c), connected=lambda: (time.sleep(0.3), broker.send("t", bodies(2))))
    assert numbers(chunks) == ([1, 2] if retained else [2])


def test_a_broker_that_is_away_is_a_failure_that_names_it(broker: Broker) -> None:
    broker.kill()
    made = source(broker, "t")
    with pytest.raises(MqttFailed, match=broker.address):
        asyncio.run(asyncio.wait_for(anext(made.chunks(None)), TIMEOUT_S))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"topics": ["$share/g/t"]},
        {"topics": ["a/#/b"]},
        {"topics": ["a/b+"]},
        {"topics": ["{a}/x", "{b}/y"]},
        {"topics": ["f/+", "f/1"]},
        {"topics": ["a/#", "a"]},
        {"topics": ["pre{a}/x"]},
        {"topics": [""]},
        {"topics": []},
        {"client_id": ""},
        {"broker": "mqtt://h:1883"},
        {"format": "csv"},
        {"session": "1s"},
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MqttConfig.model_validate({"broker": "127.0.0.1:1883", "topics": ["t"], "client_id": "e", **options})


@pytest.mark.slow
def test_each_message_counts_once_through_kills_of_the_agent(broker: Broker, tmp_path: Path) -> None:
    options = {"broker": broker.address, "topics": ["t"], "client_id": "edge-1"}
    agent = AgentProcess(tmp_path, [{"mqtt": options}])
    sent = 0
    try:
        agent.start()
        read_once = agent.records
        for kill in range(5):
            broker.send("t", lines(sent, 600).encode().splitlines())
            sent += 600
            seen = sent - 600 + 100 * kill
            agent.until(lambda seen=seen: read_once() > seen)  # type: ignore[misc]
            agent.kill()
            agent.start()
        agent.until(lambda: agent.records() >= sent)
        broker.send("t", lines(sent, 1).encode().splitlines())
        agent.until(lambda: agent.records() == sent + 1)
    finally:
        agent.close()

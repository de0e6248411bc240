"""The MQTT source against a real mosquitto."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pyarrow as pa
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import ValidationError

from edge.codecs.schema import EventTime, RecordSchema
from edge.records import Chunk, Position
from edge.source_kinds import SourceCheck, SourceContext, SourceFailed
from edge.sources.mqtt import ANSWER_S, KIND, MqttConfig, MqttSource
from edgewater.base.errors import InvalidConfig
from tests.brokers import TIMEOUT_S, MqttBroker
from tests.certificates import make_certificates
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("mosquitto")
AT_MS = 1_700_000_000_000
SCHEMA = RecordSchema({"n": pa.int64(), "device": pa.string()}, EventTime("at", max_skew_ms=None))
PASSWORD = "s3cret-of-the-test"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[MqttBroker]:
    with MqttBroker(tmp_path) as made:
        yield made


def source(broker: MqttBroker, *topics: str, **options: Any) -> MqttSource:
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
        connected: called in a thread once the session, which must be new, has its subscriptions.
    """

    async def collect() -> list[Chunk]:
        chunks: list[Chunk] = []
        stream = made.chunks(position)
        async with asyncio.timeout(TIMEOUT_S):
            async for chunk in stream:
                if not chunks:
                    await asyncio.to_thread(connected)
                chunks.append(chunk)
                if commits:
                    made.committed(chunk.end or {})
                if enough(chunks):
                    break
        await stream.aclose()  # type: ignore[attr-defined]
        return chunks

    return asyncio.run(collect())


def check(made: MqttBroker, *topics: str, **options: Any) -> SourceCheck:
    given = {"broker": made.address, "topics": list(topics), "client_id": "edge-1", **options}
    return KIND.check(MqttConfig.model_validate(given), SourceContext("s", SCHEMA, lambda: AT_MS), 1)


def numbers(chunks: list[Chunk]) -> list[int]:
    return [n for chunk in chunks for n in chunk.batch.column("n").to_pylist()]


def bodies(*values: int) -> list[bytes]:
    return [b'{"n": %d, "at": %d}' % (n, AT_MS + n) for n in values]


def test_levels_of_the_topic_are_columns_and_bad_messages_cost_only_themselves(broker: MqttBroker) -> None:
    def publish() -> None:
        broker.send("devices/a-1/temp", [*bodies(1), b"oops", *bodies(2)])
        broker.send("devices/b/temp", bodies(3))
        broker.send("devices/b/other", bodies(99))

    made = source(broker, "devices/{device}/temp")
    chunks = read(made, lambda c: len(numbers(c)) == 3, connected=publish)
    rows = [(row["n"], row["device"]) for chunk in chunks for row in chunk.batch.to_pylist()]
    assert rows == [(1, "a-1"), (2, "a-1"), (3, "b")]
    assert sum(r.count for chunk in chunks for r in chunk.rejected) == 1


def test_an_empty_payload_deletes_a_retained_message_and_is_no_record(broker: MqttBroker) -> None:
    def publish() -> None:
        broker.send("devices/a/temp", [b"", *bodies(1)])
        broker.send("devices/b/temp", [b""], retain=True)
        broker.send("devices/c/temp", [bodies(2)[0] + b"\0", *bodies(3)])

    made = source(broker, "devices/{device}/temp")
    chunks = read(made, lambda c: len(numbers(c)) == 3, connected=publish)
    rows = [(row["n"], row["device"]) for chunk in chunks for row in chunk.batch.to_pylist()]
    assert rows == [(1, "a"), (2, "c"), (3, "c")]
    assert not any(chunk.rejected for chunk in chunks)


def test_messages_that_were_journaled_but_not_acknowledged_count_once(broker: MqttBroker) -> None:
    publish = lambda: broker.send("t", bodies(*range(20)))  # noqa: E731
    first = read(source(broker, "t"), lambda c: len(numbers(c)) == 20, commits=False, connected=publish)
    broker.send("t", bodies(20))
    second = read(source(broker, "t"), lambda c: bool(numbers(c)), first[-1].end)
    assert numbers(first) + numbers(second) == list(range(21))
    # The broker may have used a packet identifier again for an equal message, so this is a guess.
    assert sum(g.count for chunk in second for g in chunk.guessed if g.reason == "assumed-repetition") == 20
    assert [g.spans for chunk in first for g in chunk.guessed] == []
    broker.send("t", bodies(21))
    third = read(source(broker, "t"), lambda c: bool(numbers(c)), second[-1].end)
    assert numbers(third) == [21]


def test_a_message_that_the_same_process_has_not_acknowledged_is_repeated_for_certain(broker: MqttBroker) -> None:
    publish = lambda: broker.send("t", bodies(*range(20)))  # noqa: E731
    one = source(broker, "t")
    first = read(one, lambda c: len(numbers(c)) == 20, commits=False, connected=publish)
    broker.send("t", bodies(20))
    second = read(one, lambda c: bool(numbers(c)), first[-1].end)
    assert (numbers(second), [chunk.guessed for chunk in second if chunk.guessed]) == ([20], [])


def test_messages_that_were_not_journaled_come_again(broker: MqttBroker) -> None:
    publish = lambda: broker.send("t", bodies(1, 2))  # noqa: E731
    read(source(broker, "t"), lambda c: len(numbers(c)) == 2, commits=False, connected=publish)
    assert numbers(read(source(broker, "t"), lambda c: len(numbers(c)) == 2)) == [1, 2]


@pytest.mark.parametrize("retained", [False, True])
def test_retained_messages_count_only_if_asked_for(broker: MqttBroker, retained: bool) -> None:
    broker.send("t", bodies(1), retain=True)
    made = source(broker, "t", retained=retained)
    chunks = read(made, lambda c: 2 in numbers(c), connected=lambda: (time.sleep(0.3), broker.send("t", bodies(2))))
    assert numbers(chunks) == ([1, 2] if retained else [2])


def failure(made: MqttSource) -> SourceFailed:
    """Returns how reading fails."""
    with pytest.raises(SourceFailed) as failed:
        read(made, lambda c: False)
    return failed.value


def test_a_broker_that_is_away_is_a_failure_that_names_it(broker: MqttBroker) -> None:
    broker.kill()
    fault = failure(source(broker, "t")).fault
    assert (fault.field, fault.value, fault.reason) == ("broker", broker.address, "Connection refused")
    with pytest.raises(InvalidConfig) as refused:
        check(broker, "t")
    assert (refused.value.field, refused.value.reason) == ("broker", "Connection refused")


def test_a_broker_that_accepts_and_says_nothing_is_named_within_5_s_and_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ANSWER_S < 5
    monkeypatch.setattr("edge.sources.mqtt.ANSWER_S", 0.3)
    marked: list[str] = []

    @contextlib.contextmanager
    def idle(name: str) -> Iterator[None]:
        marked.append(name)
        yield

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        config = MqttConfig.model_validate({"broker": address, "topics": ["t"], "client_id": "e"})
        fault = failure(MqttSource(config, SourceContext("s", SCHEMA, lambda: AT_MS, idle=idle))).fault
    assert (fault.field, fault.value, marked) == ("broker", address, [])


def test_a_quiet_session_is_marked_as_idle_again_and_again(broker: MqttBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.source_kinds.LOOK_S", 0.02)
    marks = 0

    @contextlib.contextmanager
    def idle(_: str) -> Iterator[None]:
        nonlocal marks
        marks += 1
        if marks == 5:
            broker.send("t", bodies(1))
        yield

    config = MqttConfig.model_validate({"broker": broker.address, "topics": ["t"], "client_id": "e"})
    made = MqttSource(config, SourceContext("s", SCHEMA, lambda: AT_MS, idle=idle))
    assert numbers(read(made, lambda c: bool(numbers(c)))) == [1]
    assert marks >= 5


@pytest.fixture
def guarded(tmp_path: Path, mosquitto_passwd: str) -> Iterator[MqttBroker]:
    """A broker with one user."""
    passwords = tmp_path / "passwords"
    subprocess.run([mosquitto_passwd, "-c", "-b", str(passwords), "edge", PASSWORD], check=True, capture_output=True)
    with MqttBroker(tmp_path, f"password_file {passwords}", "allow_anonymous false") as made:
        yield made


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"password": "wrong"}, "username", "edge"),
        ({"username": "other"}, "username", "other"),
        ({"username": None, "password": None}, "username", None),
    ],
)
def test_what_the_broker_refuses_is_named_and_the_password_is_not(
    guarded: MqttBroker, options: dict[str, Any], field: str, value: str
) -> None:
    given = {"username": "edge", "password": PASSWORD, **options}
    assert check(guarded, "t", username="edge", password=PASSWORD).problems == ()
    failed = failure(source(guarded, "t", **given))
    assert (failed.fault.field, failed.fault.value) == (field, value)
    assert "authorized" in failed.fault.reason and PASSWORD not in str(failed) and "wrong" not in str(failed)
    with refused(InvalidConfig, field, value):
        check(guarded, "t", **given)


def test_a_session_that_the_broker_no_longer_has_is_a_stated_loss(tmp_path: Path) -> None:
    with MqttBroker(tmp_path, saves=False) as forgetful:
        first = read(source(forgetful, "t"), lambda c: bool(c))
        assert (first[0].losses, first[0].keep, first[0].end is not None) == ((), True, True)
        forgetful.send("t", bodies(1))
        same = read(source(forgetful, "t"), lambda c: bool(numbers(c)), first[-1].end)
        assert (numbers(same), same[0].losses) == ([1], ())
        forgetful.kill()
        forgetful.start()
        publish = lambda: forgetful.send("t", bodies(2))  # noqa: E731
        after = read(source(forgetful, "t"), lambda c: bool(numbers(c)), same[-1].end, connected=publish)
        assert (after[0].losses, numbers(after)) == (("input-gone",), [2])


def test_another_client_with_the_same_client_id_is_named(broker: MqttBroker) -> None:
    def take_over() -> None:
        other = mqtt.Client(CallbackAPIVersion.VERSION2, "edge-1", protocol=mqtt.MQTTv5)
        other.connect("127.0.0.1", broker.port)
        other.loop_start()
        time.sleep(0.2)
        other.loop_stop()

    with pytest.raises(SourceFailed) as failed:
        read(source(broker, "t"), lambda c: False, connected=take_over)
    fault = failed.value.fault  # mosquitto 2.0 gives no reason
    assert (fault.field, "another client" in fault.reason) == ("broker", True)
    config = MqttConfig.model_validate({"broker": broker.address, "topics": ["t"], "client_id": "edge-1"})
    assert config.refusal_fault("Session taken over").field == "client_id"


def test_the_check_subscribes_in_a_session_of_its_own_and_takes_no_message_from_the_edge(
    broker: MqttBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(source(broker, "t"), lambda c: bool(c))
    broker.send("t", bodies(1))
    broker.send("t", bodies(2), retain=True)
    found = check(broker, "t", retained=True)
    assert [n for sample in found.samples for n in sample.batch.column("n").to_pylist()] == [2]
    assert numbers(read(source(broker, "t"), lambda c: len(numbers(c)) == 2, first[-1].end)) == [1, 2]


@pytest.fixture
def sockets_of_paho() -> Iterator[None]:
    """Collects the sockets that paho leaves open after a refused handshake. Their warning would fail another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"good": "DNS:localhost", "expired": "DNS:localhost", "other": "DNS:other.example", "edge": "DNS:edge"}
    return make_certificates(tmp_path_factory.mktemp("tls"), names, expired=["expired"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paho leaves a socket open
@pytest.mark.parametrize(
    ("server", "files", "reason"),
    [
        ("good", {"ca": "ca", "cert": "edge", "key": "edge"}, None),
        ("expired", {"ca": "ca", "cert": "edge", "key": "edge"}, "expired"),
        ("other", {"ca": "ca", "cert": "edge", "key": "edge"}, "Hostname mismatch"),
        ("good", {"ca": "edge", "cert": "edge", "key": "edge"}, "certificate verify failed"),
        ("good", {}, "certificate verify failed"),
        ("good", {"ca": "no-such"}, "No such file"),
        ("good", {"ca": "ca", "cert": "edge", "key": "good"}, "KEY_VALUES_MISMATCH"),
        ("good", {"ca": "ca"}, ""),
    ],
)
@pytest.mark.usefixtures("sockets_of_paho")
def test_tls_needs_the_ca_of_the_broker_its_host_name_and_a_client_certificate_if_asked_for(
    tmp_path: Path, certificates: Path, server: str, files: dict[str, str], reason: str | None
) -> None:
    made = MqttBroker(
        tmp_path, f"cafile {certificates / 'ca.pem'}", f"certfile {certificates / server}.pem",
        f"keyfile {certificates / server}.key", "require_certificate true", "allow_anonymous true",
    )  # fmt: skip
    tls = {key: str(certificates / f"{name}.{'key' if key == 'key' else 'pem'}") for key, name in files.items()}
    with made:
        if reason is None:
            assert check(made, "t", broker=f"localhost:{made.port}", tls=tls).problems == ()
            return
        with pytest.raises(InvalidConfig) as refused:
            check(made, "t", broker=f"localhost:{made.port}", tls=tls)
        assert refused.value.field == ("tls" if reason else "broker")
        assert reason in refused.value.reason


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

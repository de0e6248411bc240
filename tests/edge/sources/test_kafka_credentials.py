"""TLS to a real Kafka broker behind `stunnel`, and credentials that a real broker refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.sources.kafka_client import KafkaConfig
from edgewater.base.errors import InvalidConfig
from sim.demo.ports import free_port
from tests.brokers import KafkaBroker, until_open
from tests.certificates import make_certificates
from tests.edge.sources.test_kafka import check, record
from tests.programs import running
from tests.refusals import refused

pytestmark = pytest.mark.slow
PASSWORD = "s3cret-of-the-test"


class Relays:
    """A broker behind relays with the certificates `good`, `expired` and `other`. `mutual` asks for a client's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = {name: free_port() for name in ("good", "expired", "other", "mutual")}
        self.broker = KafkaBroker(directory, advertised=f"localhost:{self.ports['good']}")

    def options(self, relay: str, **tls: str) -> dict[str, Any]:
        files = {key: str(self.directory / name) for key, name in tls.items()}
        return {"brokers": [f"localhost:{self.ports[relay]}"], "tls": files}


@contextlib.contextmanager
def tls_relay(
    stunnel: str, directory: Path, port: int, target: int, certificate: str, *, client_ca: bool = False
) -> Iterator[None]:
    """Runs `stunnel`, which ends TLS before a broker.

    Args:
        stunnel: path of the program.
        directory: of `make_certificates`.
        certificate: name of the relay's certificate.
        client_ca: clients need a certificate of the CA.
    """
    options = [f"accept = 127.0.0.1:{port}", f"connect = 127.0.0.1:{target}"]
    options += [f"cert = {directory / certificate}.pem", f"key = {directory / certificate}.key"]
    options += [f"CAfile = {directory / 'ca.pem'}", "verifyChain = yes"] if client_ca else []
    config, log = directory / f"{port}.conf", directory / f"{port}.log"
    config.write_text("\n".join(["foreground = yes", "pid =", "[relay]", *options, ""]))
    with log.open("ab") as output, running([stunnel, str(config)], stdout=output, stderr=output) as process:
        until_open(port, process, log)
        yield


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory, stunnel: str) -> Iterator[Relays]:
    directory = tmp_path_factory.mktemp("tls")
    names = {"good": "DNS:localhost", "expired": "DNS:localhost", "other": "DNS:other.example", "edge": "DNS:edge"}
    make_certificates(directory, names, expired=["expired"])
    made = Relays(directory)
    relay = {name: (port, made.broker.port) for name, port in made.ports.items()}
    with (
        made.broker,
        tls_relay(stunnel, directory, *relay["good"], "good"),
        tls_relay(stunnel, directory, *relay["expired"], "expired"),
        tls_relay(stunnel, directory, *relay["other"], "other"),
        tls_relay(stunnel, directory, *relay["mutual"], "good", client_ca=True),
    ):
        tls = {"security.protocol": "SSL", "ssl.ca.location": str(directory / "ca.pem")}
        address = {"bootstrap.servers": f"localhost:{made.ports['good']}"}
        made.broker.create("t", **address, **tls)
        made.broker.send("t", 0, [record(n) for n in range(3)], properties={**address, **tls})
        yield made


def test_records_are_read_over_tls_if_the_ca_of_the_broker_is_named(relays: Relays) -> None:
    found = check(relays.broker, "t", **relays.options("good", ca="ca.pem"))
    assert [sample.batch.num_rows for sample in found.samples] == [3]


def test_a_client_certificate_is_sent(relays: Relays) -> None:
    mutual = relays.options("mutual", ca="ca.pem", cert="edge.pem", key="edge.key")
    assert not check(relays.broker, "t", **mutual).problems


@pytest.mark.parametrize(
    ("relay", "tls", "field", "reason"),
    [
        ("expired", {"ca": "ca.pem"}, "tls.ca", "certificate verify failed"),
        ("other", {"ca": "ca.pem"}, "tls.ca", "certificate verify failed"),
        ("good", {"ca": "edge.pem"}, "tls.ca", "certificate verify failed"),
        ("good", {}, "tls.ca", "certificate verify failed"),
        ("mutual", {"ca": "ca.pem"}, "tls.ca", "SSL"),
        ("good", {"ca": "no-such.pem"}, "tls", "ssl.ca.location"),
        ("good", {"ca": "ca.pem", "cert": "edge.pem", "key": "good.key"}, "tls", "key"),
    ],
)
def test_tls_that_cannot_be_right_is_refused(
    relays: Relays, relay: str, tls: dict[str, str], field: str, reason: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        check(relays.broker, "t", **relays.options(relay, **tls))
    assert refused.value.field == field
    assert reason in refused.value.reason


def test_a_client_without_tls_is_told_that_the_broker_ends_the_connection(relays: Relays) -> None:
    with pytest.raises(InvalidConfig) as refused:
        check(relays.broker, "t", brokers=[f"localhost:{relays.ports['good']}"])
    assert (refused.value.field, "Disconnected" in refused.value.reason) == ("brokers", True)


@pytest.mark.parametrize(
    ("mechanism", "user"), [("SCRAM-SHA-512", "edge"), ("SCRAM-SHA-256", "edge"), ("PLAIN", "edge")]
)
def test_credentials_that_the_broker_refuses_are_named_and_the_password_is_not(
    tmp_path: Path, mechanism: str, user: str
) -> None:
    with KafkaBroker(tmp_path, "--authentication") as broker:
        with pytest.raises(InvalidConfig) as caught:
            check(broker, "t", username=user, password=PASSWORD, mechanism=mechanism)
        assert (caught.value.field, caught.value.value) == ("username", user)
        assert "SASL" in caught.value.reason and PASSWORD not in str(caught.value)
        with refused(InvalidConfig, "brokers"):
            check(broker, "t")


def test_credentials_and_files_become_properties_of_the_client() -> None:
    config = KafkaConfig.model_validate(
        {"brokers": ["k:9092"], "topic": "t", "username": "u", "password": PASSWORD, "mechanism": "PLAIN",
         "tls": {"ca": "ca.pem", "cert": "e.pem", "key": "e.key"}, "properties": {"fetch.max.bytes": "1000000"}}
    )  # fmt: skip
    wanted = {
        "security.protocol": "SASL_SSL", "sasl.mechanisms": "PLAIN", "sasl.username": "u", "sasl.password": PASSWORD,
        "ssl.ca.location": "ca.pem", "ssl.certificate.location": "e.pem", "ssl.key.location": "e.key",
        "fetch.max.bytes": "1000000", "isolation.level": "read_committed",
    }  # fmt: skip
    assert wanted.items() <= config.client().items()
    assert PASSWORD not in repr(config)

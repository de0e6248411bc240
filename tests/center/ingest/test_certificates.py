"""Certificates with live TLS sessions: revocation, renewal, and files that cannot be used."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import grpc
import pytest

from center.config import TlsSection
from center.ingest.credential_files import CredentialFiles
from edgewater.base.errors import InvalidConfig
from edgewater.wire import uplink_pb2_grpc
from tests.center.gateway_world import Center, RawEdge, center, eventually
from tests.insides import reading
from tests.refusals import refused

pytest.importorskip("cryptography", reason="part of the extra center")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = dt.datetime.now(dt.UTC)  # noqa: TID251
DAY = dt.timedelta(days=1)


class Authority:
    """A certificate authority that keeps its files in a directory."""

    def __init__(self, path: Path, name: str = "ca") -> None:
        self.path = path
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.pem = path / f"{name}.pem"
        built = self._builder(self.name, self.key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.pem.write_bytes(built.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        serial = x509.random_serial_number()
        return builder.serial_number(serial).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)

    def issue(self, file: str, *names: x509.GeneralName) -> int:
        """Writes FILE.pem and FILE.key; returns the serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([]), key).add_extension(x509.SubjectAlternativeName(names), critical=True)
        issued = builder.sign(self.key, hashes.SHA256())
        (self.path / f"{file}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (self.path / f"{file}.pem").write_bytes(issued.public_bytes(serialization.Encoding.PEM))
        return issued.serial_number

    def revoke(self, *serials: int) -> Path:
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.name)
        builder = builder.last_update(NOW - DAY).next_update(NOW + DAY)
        for serial in serials:
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW - DAY).build()
            builder = builder.add_revoked_certificate(revoked)
        path = self.path / "crl.pem"
        path.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

    def tls(self, **files: Path) -> TlsSection:
        return TlsSection(
            cert=self.path / "localhost.pem", key=self.path / "localhost.key", client_ca=self.pem, **files
        )


class TlsEdge(RawEdge):
    def __init__(self, port: int, authority: Authority, file: str, trusted: Path | None = None) -> None:
        credentials = grpc.ssl_channel_credentials(
            (trusted or authority.pem).read_bytes(),
            (authority.path / f"{file}.key").read_bytes(),
            (authority.path / f"{file}.pem").read_bytes(),
        )
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.secure_channel(f"localhost:{port}", credentials, options)
        self.call = uplink_pb2_grpc.UplinkStub(self._channel).Session()
        self.received = []
        self.budget = None


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.issue("localhost", x509.DNSName("localhost"))
    return made


async def reloaded(c: Center, times: int = 1) -> None:
    await eventually(lambda: reading(c.gateway.metrics.credential_reloads) >= times)


async def test_a_revoked_certificate_ends_its_session_and_a_renewed_one_connects(
    tmp_path: Path, authority: Authority
) -> None:
    old = authority.issue("old", x509.UniformResourceIdentifier("spiffe://example.org/jfk"))
    authority.issue("new", x509.UniformResourceIdentifier("spiffe://example.org/jfk"))
    authority.issue("lga", x509.DNSName("lga"))
    tokens_file = tmp_path / "tokens.yaml"
    tokens_file.write_text("jfk: {identity: 'spiffe://example.org/jfk'}\nlga: {}\n")
    settings: dict[str, Any] = {"tls": authority.tls(crl=authority.revoke()), "tokens_file": tokens_file}
    async with (
        center(tmp_path, reload_ms=20, **settings) as c,
        TlsEdge(c.port, authority, "old") as edge,
        TlsEdge(c.port, authority, "lga") as lga,
    ):
        await edge.hello()
        await lga.hello("lga")
        authority.revoke(old)
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
        assert f"serial number {old:x} is revoked" in message
        async with TlsEdge(c.port, authority, "old") as again:
            with pytest.raises(grpc.aio.AioRpcError, match="is revoked"):
                await again.hello()
        async with TlsEdge(c.port, authority, "new") as renewed:
            await renewed.hello()
        assert not lga.call.done()
        # A day later the certificates have expired, and so has the list.
        c.clock[0] = int((NOW + 2 * DAY).timestamp() * 1000)
        assert "the client certificate has expired" in (await lga.refusal())[2]
        await eventually(c.catalog.alarms.latest)
        assert [(a.kind, a.edge) for a in c.catalog.alarms.latest()] == [("revocations-overdue", "")]
        c.clock[0] = int(NOW.timestamp() * 1000)
        await eventually(lambda: c.catalog.alarms.latest() == [])


async def test_a_renewed_server_certificate_and_another_client_ca_are_used_without_a_restart(
    tmp_path: Path, authority: Authority
) -> None:
    authority.issue("jfk", x509.DNSName("jfk"))
    tls = authority.tls()
    async with center(tmp_path, reload_ms=20, tls=tls) as c, TlsEdge(c.port, authority, "jfk") as edge:
        await edge.hello()
        # Another authority signs the server's certificate. A key that does not fit yet changes nothing.
        (tmp_path / "other").mkdir()
        other = Authority(tmp_path / "other")
        other.issue("localhost", x509.DNSName("localhost"))
        tls.cert.write_bytes((other.path / "localhost.pem").read_bytes())
        await eventually(lambda: reading(c.gateway.metrics.credentials_stale) == 1)
        async with TlsEdge(c.port, authority, "jfk") as half:
            await half.hello()
        tls.key.write_bytes((other.path / "localhost.key").read_bytes())
        await reloaded(c)
        async with TlsEdge(c.port, authority, "jfk", trusted=other.pem) as again:
            await again.hello()
            # Another client CA: the sessions of the old one end, and its certificates are refused.
            authority.pem.write_bytes(other.pem.read_bytes())
            assert "the client CA has changed" in (await again.refusal())[2]
        async with TlsEdge(c.port, authority, "jfk", trusted=other.pem) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stranger.hello()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_files_that_do_not_fit_are_refused_at_the_start(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "other").mkdir()
    foreign = Authority(tmp_path / "other", "stranger").revoke(1)
    with refused(InvalidConfig, "tls.crl"):
        CredentialFiles({}, None, authority.tls(crl=foreign))
    (tmp_path / "localhost.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    with refused(InvalidConfig, "tls.cert"):
        CredentialFiles({}, None, authority.tls())

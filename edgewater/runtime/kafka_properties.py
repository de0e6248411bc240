"""The properties of librdkafka that a user may set. They load no code, run no program, and read only files of TLS."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgewater.runtime.configuration import refusal

FILES = tuple(
    "ssl.ca.location ssl.certificate.location ssl.key.location ssl.keystore.location ssl.crl.location".split()
)
"""Properties whose value is the path of a file that librdkafka reads."""
_PREFIXES = tuple(
    (
        "batch. broker. client. compression. enable.ssl.certificate. fetch. linger. message. metadata. "
        "queue.buffering. queued. receive.message. reconnect.backoff. retry.backoff. socket. topic.metadata."
    ).split()
)
_NAMES = frozenset(FILES).union(
    (
        "acks allow.auto.create.topics api.version.request api.version.request.timeout.ms check.crcs "
        "connections.max.idle.ms delivery.timeout.ms enable.sasl.oauthbearer.unsecure.jwt heartbeat.interval.ms "
        "max.in.flight max.in.flight.requests.per.connection max.partition.fetch.bytes max.poll.interval.ms "
        "message.send.max.retries partitioner request.required.acks request.timeout.ms retries sasl.mechanism "
        "sasl.mechanisms sasl.oauthbearer.client.id sasl.oauthbearer.client.secret sasl.oauthbearer.config "
        "sasl.oauthbearer.extensions sasl.oauthbearer.method sasl.oauthbearer.scope "
        "sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol session.timeout.ms "
        "ssl.ca.pem ssl.certificate.pem ssl.cipher.suites ssl.curves.list ssl.endpoint.identification.algorithm "
        "ssl.key.password ssl.key.pem ssl.keystore.password ssl.sigalgs.list statistics.interval.ms "
        "sticky.partitioning.linger.ms transaction.timeout.ms"
    ).split()
)
# A later release of librdkafka may add a property that reads a file or runs code below an allowed prefix.
_DANGEROUS = re.compile(r"\.(path|paths|location|cmd|file|interceptor|cb)(\.|$)")


def require_allowed(names: Iterable[str]) -> None:
    """Refuses other properties, such as ``plugin.library.paths`` and ``sasl.kerberos.kinit.cmd``. For validators."""
    for name in names:
        if name not in _NAMES and (not name.startswith(_PREFIXES) or _DANGEROUS.search(name) is not None):
            raise refusal("properties of librdkafka about its connections and buffers", f"{name} is not allowed")

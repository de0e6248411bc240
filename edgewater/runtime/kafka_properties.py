"""The properties of librdkafka that a user may set: they load no code, run no program and read no file."""

from __future__ import annotations

import re
from collections.abc import Iterable

FILES = (
    "ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location", "ssl.crl.location",
)  # fmt: skip
"""Properties whose value is the path of a file that librdkafka reads."""
_PREFIXES = (
    "batch.", "broker.", "client.", "compression.", "enable.ssl.certificate.", "fetch.", "linger.", "message.",
    "metadata.", "queue.buffering.", "queued.", "receive.message.", "reconnect.backoff.", "retry.backoff.", "socket.",
    "topic.metadata.",
)  # fmt: skip
_NAMES = frozenset(
    (
        *("acks", "check.crcs", "delivery.timeout.ms", "max.in.flight", "max.in.flight.requests.per.connection"),
        *("api.version.request", "api.version.request.timeout.ms", "allow.auto.create.topics", "partitioner"),
        *("request.required.acks", "request.timeout.ms", "retries", "message.send.max.retries", "security.protocol"),
        *("max.partition.fetch.bytes", "session.timeout.ms", "heartbeat.interval.ms", "max.poll.interval.ms"),
        *(
            "transaction.timeout.ms",
            "connections.max.idle.ms",
            "statistics.interval.ms",
            "sticky.partitioning.linger.ms",
        ),
        *("ssl.cipher.suites", "ssl.curves.list", "ssl.sigalgs.list", "ssl.endpoint.identification.algorithm"),
        *("ssl.key.password", "ssl.keystore.password", "ssl.ca.pem", "ssl.certificate.pem", "ssl.key.pem"),
        *(
            "sasl.mechanism",
            "sasl.mechanisms",
            "sasl.username",
            "sasl.password",
            "enable.sasl.oauthbearer.unsecure.jwt",
        ),
        *("sasl.oauthbearer.config", "sasl.oauthbearer.method", "sasl.oauthbearer.client.id"),
        *("sasl.oauthbearer.client.secret", "sasl.oauthbearer.scope", "sasl.oauthbearer.extensions"),
        *("sasl.oauthbearer.token.endpoint.url", *FILES),
    )
)
# A later release of librdkafka may add such a property below an allowed prefix.
_DANGEROUS = re.compile(r"\.(path|paths|location|cmd|file|interceptor|cb)(\.|$)")


def refused_properties(names: Iterable[str]) -> list[str]:
    """Returns the names that are not allowed, such as ``plugin.library.paths`` and ``sasl.kerberos.kinit.cmd``."""
    return [
        name
        for name in names
        if name not in _NAMES and (not name.startswith(_PREFIXES) or _DANGEROUS.search(name) is not None)
    ]

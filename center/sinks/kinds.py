"""The kinds of sinks in this package, and the configuration keys of each kind. A kind imports its sink, and so the
library of the sink, at the first use.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from center.sinks.base import Sink, SinkContext
from edgewater.base.errors import InvalidConfig, installation
from edgewater.model.key_texts import label_names
from edgewater.runtime.configuration import ProxyUrl, Secret, Section, read_secret, refusal
from edgewater.runtime.kafka_properties import require_allowed

FILES_WAIT_MS = 300_000
"""The time in ms for which sinks that write files collect answers."""


@dataclass(slots=True)
class BuiltInKind:
    """A kind of sinks of this package. Implements `center.sinks.base.SinkKind`.

    Attributes:
        target: module and name of the sink, or of a function that returns it. Its arguments are valid options and the
            context.
        extra: the extra of this package that installs the library.
    """

    name: str
    config: type[BaseModel]
    target: str
    extra: str
    min_phase: str = "early"
    begin: str = "beginning"
    batch_ms: int = 0

    def sink(self, options: Any, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        try:
            sink: Sink = resolve_name(self.target)(options, context)
        except ImportError as exc:
            accepted = f"another kind, or {installation(self.extra)}"
            raise InvalidConfig("kind", self.name, accepted, str(exc)) from exc
        return sink


class PostgresConfig(Section):
    """The keys of a sink of the kind `postgres`."""

    url: Secret
    """``postgresql://user:password@host/database``, with libpq's parameters such as ``?sslmode=verify-full``."""
    db_schema: str = Field(default="edgewater", min_length=1, max_length=63, alias="schema")
    """The schema of all tables and views. It is created if it is missing."""


_SECRET_PROPERTY = re.compile(r"password|secret|\.pem$|^sasl\.oauthbearer\.config$")


class KafkaSinkConfig(Section):
    """The keys of a sink of the kind `kafka`."""

    brokers: list[str] = Field(min_length=1)
    """host:port of one or more brokers."""
    topic: str = Field(default="edgewater.answers", pattern=r"^[A-Za-z0-9._{}-]{1,249}$")
    """The topic. `{query}` is replaced with the name of the query. Missing topics are created as compacted topics."""
    partitions: int = Field(default=1, ge=1, le=1_000)
    """Partitions of topics that the sink creates."""
    replication: int = Field(default=-1, ge=-1)
    """Replicas of topics that the sink creates. With -1, the default of the brokers."""
    format: Literal["json", "connect"] = "json"
    """`connect` wraps each value as `{"schema": …, "payload": …}`, with types, for Kafka Connect's JSON converter."""
    username: str | None = None
    """User of SASL. Unset: no SASL."""
    password: Secret | None = None
    """Password of SASL."""
    properties: dict[str, str] = {}
    """Further properties of librdkafka, such as `security.protocol` and `ssl.ca.location`."""
    secrets: dict[str, Secret] = {}
    """Further properties of librdkafka that are secrets, such as `ssl.key.password`."""

    @field_validator("properties", "secrets", mode="before")
    @classmethod
    def _allowed(cls, properties: object, info: ValidationInfo) -> object:
        if not isinstance(properties, Mapping):
            return properties
        require_allowed(map(str, properties))
        if info.field_name == "properties":
            return properties
        environ = (info.context or {}).get("environ", os.environ)
        return {n: read_secret(v, environ, is_pem=True) if n.endswith(".pem") else v for n, v in properties.items()}

    @field_validator("properties")
    @classmethod
    def _without_secrets(cls, properties: dict[str, str]) -> dict[str, str]:
        for name in properties:
            if _SECRET_PROPERTY.search(name):
                raise refusal(f"{name} in `secrets`", "it is a secret, and properties are stored and shown as text")
        return properties


class RemoteWriteSinkConfig(Section):
    """The keys of a sink of the kind `remote_write`."""

    url: str = Field(pattern=r"^https?://\S+$")
    """Such as ``http://127.0.0.1:9090/api/v1/write``."""
    token: Secret | None = None
    """A bearer token."""
    labels: dict[str, str] = {}
    """Labels of each series, except `query` and `version`, which the sink sets."""
    proxy: ProxyUrl | None = None
    """An HTTP proxy on the way to the URL. Unset: no proxy."""

    @property
    def target(self) -> str:
        """Names the series that the sink writes."""
        return json.dumps([self.url, sorted(self.labels.items())])

    @field_validator("labels")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for name in labels:
            if label_names([name], {"query", "version"}) != [name]:
                raise refusal("letters, digits and _, and not query, version or __…", f"{name!r} is no label")
        return labels


class ParquetConfig(Section):
    """The keys of a sink of the kind `parquet`."""

    path: Path
    """Directory of the files. A file is ``{query}_v{version}/day={day}/answers-{first}-{last}.parquet``, with the ids
    of its first and last answer."""


class DeltaConfig(Section):
    """The keys of a sink of the kind `delta`."""

    path: str = Field(min_length=1)
    """Directory or URL, such as ``s3://bucket/answers``, that contains a table per query and version."""
    options: dict[str, Secret] = {}
    """Options of the storage, such as ``AWS_ACCESS_KEY_ID``."""


class IcebergConfig(Section):
    """The keys of a sink of the kind `iceberg`."""

    catalog: dict[str, Secret] = Field(min_length=1)
    """Properties of PyIceberg's catalog: ``{type: rest, uri: …}``, or ``{type: sql, uri: …, warehouse: …}``."""
    name: str = "edgewater"
    """The name of the catalog. Readers of an SQL catalog must use the same name."""
    namespace: str = Field(default="edgewater", pattern=r"^[a-z][a-z0-9_]*$")
    """The namespace of the tables. It is created if it is missing."""


_AT = "center.sinks"
POSTGRES = BuiltInKind("postgres", PostgresConfig, f"{_AT}.postgresql:PostgresSink", "postgres")
KAFKA = BuiltInKind("kafka", KafkaSinkConfig, f"{_AT}.kafka:KafkaSink", "kafka")
REMOTE_WRITE = BuiltInKind(
    "remote_write", RemoteWriteSinkConfig, f"{_AT}.remote_write:RemoteWriteSink", "remote-write", "final", begin="now"
)
PARQUET = BuiltInKind("parquet", ParquetConfig, f"{_AT}.lake:parquet", "center", "final", batch_ms=FILES_WAIT_MS)
DELTA = BuiltInKind("delta", DeltaConfig, f"{_AT}.lake:delta", "delta", "final", batch_ms=FILES_WAIT_MS)
ICEBERG = BuiltInKind("iceberg", IcebergConfig, f"{_AT}.lake:iceberg", "iceberg", "final", batch_ms=FILES_WAIT_MS)

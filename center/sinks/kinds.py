"""The kinds of sinks in this package, and the configuration keys of each kind. A kind imports its library at the first
use.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from center.sinks.base import Sink, SinkContext
from edgewater.model.errors import InvalidConfig, installation
from edgewater.model.key_texts import label_names
from edgewater.runtime.configuration import ProxyUrl, Secret, Section, read_secret, refusal
from edgewater.runtime.kafka_properties import require_allowed
from edgewater.wire import QueryRef

FILES_WAIT_MS = 300_000
"""The time in ms for which sinks that write files collect answers."""


def _missing(kind: str, extra: str, exc: ImportError) -> InvalidConfig:
    return InvalidConfig("kind", kind, f"another kind, or {installation(extra)}", str(exc))


class PostgresConfig(Section):
    """The keys of a sink of the kind `postgres`."""

    url: Secret
    """``postgresql://user:password@host/database``, with libpq's parameters such as ``?sslmode=verify-full``."""
    db_schema: str = Field(default="edgewater", min_length=1, max_length=63, alias="schema")
    """The schema of all tables and views. It is created if it is missing."""


class PostgresKind:
    """The sink kind `postgres`."""

    name = "postgres"
    config = PostgresConfig

    def sink(self, options: PostgresConfig, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        try:
            import psycopg

            from center.sinks.postgresql import PostgresSink
        except ImportError as exc:
            raise _missing(self.name, "postgres", exc) from exc
        url, accepted = options.url.get_secret_value(), "postgresql://user:password@host/database"
        # libpq's messages quote the text that libpq cannot read. This text may be a part of the password.
        try:
            parts = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise InvalidConfig("url", "…", accepted, "libpq cannot read it") from None
        if "@" in str(parts.get("host")) or not re.fullmatch(r"[\d,]*", str(parts.get("port") or "")):
            raise InvalidConfig("url", "…", f"{accepted}, with %40 for @ and %2F for / in the password")
        return PostgresSink(url, options.db_schema, context)


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


class KafkaKind:
    """The sink kind `kafka`."""

    name = "kafka"
    config = KafkaSinkConfig

    def sink(self, options: KafkaSinkConfig, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        try:
            from center.sinks.kafka import KafkaSink
        except ImportError as exc:
            raise _missing(self.name, "kafka", exc) from exc
        return KafkaSink(options, context)


class RemoteWriteConfig(Section):
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


class RemoteWriteKind:
    """The sink kind `remote_write`."""

    name = "remote_write"
    config = RemoteWriteConfig
    min_phase = "final"
    begin = "now"

    def sink(self, options: RemoteWriteConfig, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        try:
            from center.sinks.remote_write import RemoteWriteSink
        except ImportError as exc:
            raise _missing(self.name, "remote-write", exc) from exc
        return RemoteWriteSink(options, context)


class ParquetConfig(Section):
    """The keys of a sink of the kind `parquet`."""

    path: Path
    """Directory of the files. A file is ``{query}_v{version}/day={day}/answers-{first}-{last}.parquet``, with the ids
    of its first and last answer."""


class ParquetKind:
    """The sink kind `parquet`."""

    name = "parquet"
    config = ParquetConfig
    min_phase = "final"
    batch_ms = FILES_WAIT_MS

    def sink(self, options: ParquetConfig, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        from center.sinks.lake import LakeSink, ParquetFiles

        return LakeSink(lambda query, name: ParquetFiles(options.path / name, query, context))


class DeltaConfig(Section):
    """The keys of a sink of the kind `delta`."""

    path: str = Field(min_length=1)
    """Directory or URL, such as ``s3://bucket/answers``, that contains a table per query and version."""
    options: dict[str, Secret] = {}
    """Options of the storage, such as ``AWS_ACCESS_KEY_ID``."""


class DeltaKind:
    """The sink kind `delta`."""

    name = "delta"
    config = DeltaConfig
    min_phase = "final"
    batch_ms = FILES_WAIT_MS

    def sink(self, options: DeltaConfig, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        try:
            import deltalake  # noqa: F401
        except ImportError as exc:
            raise _missing(self.name, "delta", exc) from exc
        from center.sinks.lake import DeltaAnswers, LakeSink

        storage = {name: value.get_secret_value() for name, value in options.options.items()}

        def table(query: QueryRef, name: str) -> DeltaAnswers:
            return DeltaAnswers(f"{options.path.rstrip('/')}/{name}", query, context, storage)

        return LakeSink(table)


class IcebergConfig(Section):
    """The keys of a sink of the kind `iceberg`."""

    catalog: dict[str, Secret] = Field(min_length=1)
    """Properties of PyIceberg's catalog: ``{type: rest, uri: …}``, or ``{type: sql, uri: …, warehouse: …}``."""
    name: str = "edgewater"
    """The name of the catalog. Readers of an SQL catalog must use the same name."""
    namespace: str = Field(default="edgewater", pattern=r"^[a-z][a-z0-9_]*$")
    """The namespace of the tables. It is created if it is missing."""


class IcebergKind:
    """The sink kind `iceberg`."""

    name = "iceberg"
    config = IcebergConfig
    min_phase = "final"
    batch_ms = FILES_WAIT_MS

    def sink(self, options: IcebergConfig, context: SinkContext) -> Sink:
        """Implements `SinkKind.sink`."""
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError as exc:
            raise _missing(self.name, "iceberg", exc) from exc
        from center.sinks.lake import IcebergAnswers, LakeSink

        properties = {name: value.get_secret_value() for name, value in options.catalog.items()}
        catalogs: list[Any] = []

        def table(query: QueryRef, name: str) -> IcebergAnswers:
            if not catalogs:
                catalogs.append(load_catalog(options.name, **properties))
                catalogs[0].create_namespace_if_not_exists(options.namespace)
            return IcebergAnswers(catalogs[0], (options.namespace, name), query, context)

        return LakeSink(table)


POSTGRES, KAFKA, REMOTE_WRITE = PostgresKind(), KafkaKind(), RemoteWriteKind()
PARQUET, DELTA, ICEBERG = ParquetKind(), DeltaKind(), IcebergKind()

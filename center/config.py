"""`CenterConfig` is the configuration of a center. Flags override the environment, which overrides one YAML file.

All components of a center (gateway, job, API) read the same configuration. Unknown keys are refused. Every error is an
`InvalidConfig` that names the key by its path in the file. In the environment, a key's path is written like
``EDGEWATER_CENTER__API__TOKEN``. So the file need not contain secrets.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from center.api_access import OidcSection, PrincipalEntry
from center.edge_access import AccessEntry, EdgeAccess, read_tokens_file, without_secret
from edgewater.base.errors import InvalidConfig
from edgewater.base.quantities import duration_ms
from edgewater.guard.frame_work import WORK_PER_S
from edgewater.runtime.configuration import (
    Address,
    Duration,
    Instant,
    Secret,
    Section,
    Size,
    is_loopback,
    naming_places,
    parsed_by,
    read_yaml,
    refusal,
    validate,
    with_present_keys,
)

DEFAULT_DATA_DIR = Path(".edgewater/center")
ENVIRONMENT_PREFIX = "EDGEWATER_CENTER__"
_SPARK_PROPERTIES = "spark.conf."
"""Prefix of keys. The rest of such a key is one name that contains dots."""


class TlsSection(Section):
    """PEM files of the gateway. They are read again when they change."""

    cert: Path
    """The gateway's certificate."""
    key: Path
    """The key of `cert`."""
    client_ca: Path | None = None
    """The authority that signed the client certificates. None: edges need no certificate."""
    crl: Path | None = None
    """Revocation lists of `client_ca`, as PEM."""

    @model_validator(mode="after")
    def _crl_of_ca(self) -> Self:
        if self.crl is not None and self.client_ca is None:
            raise refusal("client_ca, the authority that signed crl", "client_ca is missing")
        return self


class GatewaySection(Section):
    """The address that edges connect to, and limits per edge."""

    listen: Address = "127.0.0.1:7400"
    """Address that edges connect to."""
    credit_bytes: Size = Field(default=4 << 20, ge=1 << 16)
    """The most bytes of frames that an edge has sent and the gateway has not acknowledged."""
    max_frame_bytes: Size = Field(default=4 << 20, ge=1 << 16)
    """Largest message of an edge, before compression."""
    heartbeat_ms: Duration = Field(default=5_000, ge=1_000, le=20_000)
    """Interval of an edge's heartbeats while it has nothing else to send. An edge is unreachable after 2.5 intervals
    without a heartbeat or a frame, but not before 5 s. It is unreachable at once if its connection ends. The interval
    is longer if a gateway has more than 2,500 edges."""
    compression_bytes: Size = Field(default=256 << 20, ge=0)
    """Memory in which the gateway decompresses the data of edges, over all sessions. 0: edges compress each frame
    alone."""
    work_per_s: int = Field(default=WORK_PER_S, ge=1_000)
    """Units of work per second of an edge's frames. Frames with more work are delayed."""
    open_windows: Annotated[int, Field(ge=1)] = 20_000
    """The most windows of a query that an edge may keep open, besides the windows within the query's lateness. Data for
    more windows is refused. By default, an edge has memory for 8,000 open slices of a query."""
    metrics: Address | None = None
    """Address that serves /livez, /readyz and /metrics. None: they are not served."""


class ReplaySection(Section):
    """The clock of a replay, with the keys of an edge's `replay`: event time `start` is reached at wall time `at`."""

    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Event time that passes per unit of wall time."""
    start: Instant
    """Event time at which the replay begins."""
    at: Instant
    """Wall time at which the replay begins."""


class ColumnEntry(Section):
    """A column of a stream."""

    type: Literal["string", "int64", "float64", "bool"]
    """The type of the column's values."""
    description: Annotated[str, Field(max_length=400)] = ""
    """A text for people, which the API shows."""


def _column(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Columns = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=256)], Annotated[ColumnEntry, BeforeValidator(_column)]],
    Field(min_length=1, max_length=1_024),
]
"""Type by name, or ``{type: int64, description: …}`` by name."""


class StreamSection(Section):
    """The columns and event times that the center accepts for a stream."""

    columns: Columns | None = None
    """The columns that the stream's edges may have, and their types. None: the columns that an admin has set at the
    API. If there are none, the first edge that has a column decides its type."""

    replay: ReplaySection | Literal["edges"] | None = None
    """The replay's clock, or `edges`: the clock that edges report. None: event time is wall time. However, a gateway
    that only this machine can reach uses the clocks of edges."""
    ahead_ms: Duration = Field(default=86_400_000, ge=0)
    """The longest time by which the event time of a record may be ahead of the stream's clock."""


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path, field: str) -> None:
    """Loads a certificate and its key.

    Raises:
        InvalidConfig: the files cannot be used. The error names the configuration key `field`.
    """
    try:
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as exc:
        raise InvalidConfig(field, str(cert), f"a certificate with its key in {key}", str(exc)) from exc


class ApiTlsSection(Section):
    """PEM files of the API. They are read again when they change."""

    cert: Path
    """The API's certificate."""
    key: Path
    """The key of `cert`."""


Rate = Annotated[str, Field(pattern=r"^[1-9]\d{0,8}/(second|minute|hour|day)$")]
"""Written as 10/second."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class ApiLimitsSection(Section):
    """The resources that clients may use in one API process."""

    connections: Count = 4096
    """The most connections. Beyond this number, the connection that has had no request for the longest time is
    closed."""
    live: Count = 2000
    """The most live streams."""
    live_per_principal: Count = 500
    """The most live streams of one principal."""
    response_bytes: Size = Field(default=256 << 20, ge=1 << 20)
    """The most bytes of responses that clients have not received yet."""
    headers_ms: Duration = 10_000
    """Time in which a request's headers must arrive."""
    body_ms: Duration = 30_000
    """Time in which a query must arrive. In the same time, a client must receive a part of its response."""
    reads_at_once: Count = 8
    """The most requests of one principal that read at the same time. Further requests wait."""
    reads: Rate = "200/second"
    """The most requests per principal that change nothing."""
    changes: Rate = "20/second"
    """The most requests per principal that change something."""
    registrations: Rate = "1000/day"
    """The most new queries per principal. A query counts until one day after its deletion. The catalog holds at most
    10,000 queries."""


class ApiSection(Section):
    """The REST API. If other machines can reach it, it needs credentials: `token`, `principals`, `tokens_file` or
    `oidc`.
    """

    listen: Address = "127.0.0.1:7480"
    """Address of the API and the console."""
    hosts: tuple[str, ...] = ()
    """Names by which requests without credentials may address the server, such as a proxy's name. Loopback names are
    always allowed."""
    token: Secret | None = None
    """The token of the principal `admin`: the token itself, `{env: NAME}` or `{file: PATH}`."""
    principals: dict[str, PrincipalEntry] = {}
    """Principals that may use the API with a token, by name."""
    tokens_file: Path | None = None
    """A YAML file with more `principals`. It is read again when it changes."""
    oidc: OidcSection | None = None
    """Accepts the JWTs of an OpenID Connect issuer. None: no JWT is accepted."""
    tls: ApiTlsSection | None = None
    """TLS of the API. None: no TLS."""
    metrics: Address | None = None
    """Address that serves /livez, /readyz and /metrics without credentials. None: only `listen` serves them."""
    audit: Path | Literal["log"] = "log"
    """Target of the JSON lines that record changes and refused requests: a file, or `log` for the process' log."""
    audit_required: bool = False
    """Whether a change is refused while it cannot be recorded."""
    limits: ApiLimitsSection = ApiLimitsSection()
    """The resources that clients may use in one API process."""
    cache_bytes: Size = 64 << 20
    """Memory of rendered answers that the API keeps between requests."""
    progress_ms: Duration = Field(default=2_000, ge=100)
    """Interval of the `progress` events of live streams."""

    @property
    def authenticates(self) -> bool:
        """Whether a request without credentials is refused."""
        return any((self.token, self.principals, self.tokens_file, self.oidc))

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def require_credentials(self) -> None:
        """Checks that the API has credentials if other machines can reach it.

        Raises:
            InvalidConfig: every client on another machine could do everything.
        """
        if not self.authenticates and not is_loopback(self.listen):
            accepted = "api.token, api.principals, api.tokens_file or api.oidc"
            reason = f"api.listen {self.listen} can be reached from other machines"
            raise InvalidConfig("api.token", None, accepted, reason)


class SparkSection(Section):
    """The Spark application of the job. `conf` is passed to Spark unchanged."""

    master: str = "local[2]"
    """Spark's master: `local[2]` runs Spark on this machine with two threads."""
    driver_memory: Annotated[str, Field(pattern=r"^\d+[kmgt]$")] = "1g"
    """Memory of the driver's JVM, such as `1g`."""
    hang_ms: Duration = Field(default=300_000, ge=10_000)
    """A job that makes no step for this time is killed and started again. The time for which it waits for a core is not
    counted."""
    metrics: Address | None = None
    """Address that serves /livez, /readyz and /metrics of the job. None: they are not served. The other drivers of
    `edgewater center run` use the next ports."""
    standby: bool = False
    """Whether `edgewater center run` starts one more driver, which takes over when another driver dies."""
    lease_ms: Duration = Field(default=3_000, ge=1_000, le=60_000)
    """Time without a sign of life after which another driver takes over from a driver that leads."""
    drivers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of drivers that lead at the same time. Each leads a partition of the queries, by their names. The number
    must be the same for all drivers of a center. `edgewater center run` starts this number of drivers. More than one
    driver is useful with PostgreSQL and several cores."""
    max_answer_bytes: Size = Field(default=64 << 20, ge=1 << 20)
    """The largest size of one answer. A query with a larger answer gets no answers until the job starts again."""
    conf: dict[str, str] = {}
    """Further properties of Spark."""


def _retained_ms(value: object, field: str) -> int | None:
    """Reads a duration of at least a minute, so that readers have time to read answers. None stays None."""
    return None if value is None else duration_ms(value, field, minimum_ms=60_000)


class SinkProcessSection(Section):
    """The process that writes answers to other systems. The key `sinks` defines these systems."""

    metrics: Address | None = None
    """Address that serves /livez, /readyz and /metrics. None: they are not served."""
    secrets: list[str] = []
    """Names of variables and paths of files that sinks defined by the API may use: as `{env: NAME}`, `{file: PATH}` or
    `ca`, or as a path of Kafka's TLS. An administrator of the API can send these secrets to any server."""


class RetentionSection(Section):
    """The time for which applied frames and final answers are stored."""

    frames_ms: Duration = 0
    """Time for which frames are stored after the result store has applied them."""
    answers_ms: Annotated[int | None, parsed_by(_retained_ms)] = 30 * 86_400_000
    """Time for which answers of final windows are stored after they were given. None: for ever."""
    sinks_ms: Duration = 7 * 86_400_000
    """Additional time for which answers are stored that a sink has not written yet. After this time, the sink's status
    states the gap."""


class CenterConfig(Section):
    """The whole configuration. Every field has a default that works on one machine."""

    data_dir: Path = DEFAULT_DATA_DIR
    """Directory of the data that the center stores on this machine."""
    given_catalog_url: Secret | None = Field(default=None, alias="catalog_url")
    """URL of the catalog's database, for SQLAlchemy: the URL itself, `{env: NAME}` or `{file: PATH}`. None: an SQLite
    file in `data_dir`."""
    given_results_url: Secret | None = Field(default=None, alias="results_url")
    """URL of the result store's database, in the same forms as `catalog_url`. None: an SQLite file in `data_dir`."""
    given_log_dir: Path | None = Field(default=None, alias="log_dir")
    """Directory of the frame log, on a disk that all gateways and drivers share. None: `log` in `data_dir`."""
    given_deltas_dir: Path | None = Field(default=None, alias="deltas_dir")
    """Directory of large results of the job's tasks, on a disk that all drivers and executors share and write. None:
    `deltas` in `log_dir`."""
    gateway: GatewaySection = GatewaySection()
    """The address that edges connect to, and limits per edge."""
    api: ApiSection = ApiSection()
    """The REST API and the console."""
    tokens: dict[str, AccessEntry] = {}
    """By edge, the credentials that the edge must present and what it may serve: a token, or the long form
    `EdgeAccess`."""
    tokens_file: Path | None = None
    """A YAML file with more `tokens`, which can be mounted as a secret. It is read again when it changes."""
    tls: TlsSection | None = None
    """TLS of the gateway. None: no TLS."""
    streams: dict[str, StreamSection] = {}
    """Settings of streams by name, for streams with fixed columns, a replay, or event times ahead of the clock."""
    spark: SparkSection = SparkSection()
    """The Spark application of the job."""
    sinks: dict[str, dict[str, Any]] = {}
    """Systems that answers are written to, by name: `kind`, the keys of all sinks, and the keys of the kind."""
    sink: SinkProcessSection = SinkProcessSection()
    """The process that runs the sinks."""
    retention: RetentionSection = RetentionSection()
    """The time for which applied frames and final answers are stored."""

    @property
    def catalog_url(self) -> str:
        """URL of the catalog's database."""
        return _given(self.given_catalog_url) or f"sqlite:///{self.data_dir.resolve() / 'catalog.db'}"

    @property
    def results_url(self) -> str:
        """URL of the result store's database. By default it has a file of its own, so that the two stores never wait
        for one lock.
        """
        return _given(self.given_results_url) or f"sqlite:///{self.data_dir.resolve() / 'results.db'}"

    @property
    def columns(self) -> dict[str, Columns]:
        """By stream, the columns that the configuration defines."""
        return {name: section.columns for name, section in self.streams.items() if section.columns is not None}

    @property
    def log_dir(self) -> Path:
        """Directory of the frame log's segments."""
        return (self.given_log_dir or self.data_dir / "log").resolve()

    @property
    def deltas_dir(self) -> Path:
        """Directory of the segments of large deltas."""
        return (self.given_deltas_dir or self.log_dir / "deltas").resolve()

    @property
    def work_dir(self) -> Path:
        """Directory of the job. No file in it is needed after a run."""
        return (self.data_dir / "spark").resolve()

    @property
    def progress_dir(self) -> Path:
        """Directory of the progress files of the job's drivers (`center.storage.progress`). The files outlive the
        drivers.
        """
        return (self.data_dir / "progress").resolve()

    @property
    def pids_dir(self) -> Path:
        """Directory of the `<component>.pid` files that `edgewater center run` writes."""
        return (self.data_dir / "pids").resolve()

    @classmethod
    def from_mapping(cls, document: object, environment: Mapping[str, str] | None = None) -> Self:
        """Validates the content of a configuration file.

        Args:
            environment: variables for ``{env: NAME}``; None for the environment of this process.

        Raises:
            InvalidConfig: the content is not valid. The error names the key.
        """
        document = with_present_keys(document)
        try:
            config = validate(cls, document, None if environment is None else {"environ": environment})
        except InvalidConfig as exc:
            secret = ("tokens.", "api.principals.", "api.token", "catalog_url", "results_url")
            raise exc.changed(lambda e: without_secret(e) if e.field.startswith(secret) else e) from None
        config._require_tokens()
        return config

    @classmethod
    def load(
        cls,
        path: Path | None,
        overrides: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Reads a YAML file. The environment overrides the file, and `overrides` overrides the environment.

        Args:
            path: path of the file; None if there is no file.
            overrides: values by dotted key, such as ``{"api.listen": "127.0.0.1:0"}``, or
                ``{"spark.conf.spark.executor.instances": "1"}``.
            environment: variables of the process. Variables with the prefix `ENVIRONMENT_PREFIX` are keys. ``{env:
                NAME}`` refers to the other variables. If None, no variables are keys, and ``{env: NAME}`` refers to
                this process' environment.

        Raises:
            InvalidConfig: the file cannot be read, is not valid YAML, or has a key or value that is not accepted.
        """
        document = read_yaml(path, "--config") if path is not None else {}
        merged = {**_from_environment(environment or {}), **(overrides or {})}
        if merged and isinstance(document, Mapping | None):
            document = _with_overrides(dict(document or {}), merged)
        with naming_places(path) if path is not None else nullcontext():
            return cls.from_mapping(document, environment)

    def edge_access(self) -> dict[str, EdgeAccess]:
        """Returns the entries of `tokens` and `tokens_file` together, by edge.

        Raises:
            InvalidConfig: `tokens_file` cannot be read or is not valid.
        """
        return self.tokens | (read_tokens_file(self.tokens_file) if self.tokens_file is not None else {})

    def _require_tokens(self) -> None:
        by_certificate = self.tls is not None and self.tls.client_ca is not None
        if not self.tokens and self.tokens_file is None and not by_certificate and not is_loopback(self.gateway.listen):
            accepted = "a token per edge, such as {jfk: a-long-secret}, a tokens_file, or tls.client_ca"
            reason = f"gateway.listen {self.gateway.listen} can be reached from other machines"
            raise InvalidConfig("tokens", {}, accepted, reason)


def _given(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def _with_overrides(document: dict[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    for key, value in overrides.items():
        if key.startswith(_SPARK_PROPERTIES):
            sections, last = ["spark", "conf"], key.removeprefix(_SPARK_PROPERTIES)
        else:
            *sections, last = key.split(".")
        inner = document
        for section in sections:
            value_there = inner.get(section)
            if value_there is not None and not isinstance(value_there, Mapping):
                raise InvalidConfig(key, value, "a key whose outer keys are sections", f"{section} is a value")
            inner[section] = inner = dict(value_there or {})
        inner[last] = value
    return document

"""`CenterConfig`: the configuration of a center. Flags override the environment, which overrides one YAML file.

All components of a center (gateway, job, API) read the same configuration. Unknown keys are refused, and every error
is an `InvalidConfig` that names the key by its path in the file. In the environment a key's path is written
``EDGEWATER_CENTER__API__TOKEN``, so that the file need not contain secrets.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from center.api_access import OidcSection, PrincipalEntry
from center.edge_access import AccessEntry, EdgeAccess, read_tokens_file, without_secret
from edgewater.guard.frame_work import WORK_PER_S
from edgewater.model.errors import InvalidConfig
from edgewater.model.quantities import duration_ms
from edgewater.runtime.configuration import (
    Address,
    Duration,
    Instant,
    Section,
    Size,
    is_loopback,
    parsed_by,
    read_yaml,
    refusal,
    validate,
)

DEFAULT_DATA_DIR = Path(".edgewater/center")
ENVIRONMENT_PREFIX = "EDGEWATER_CENTER__"
_SPARK_PROPERTIES = "spark.conf."
"""Prefix of the keys whose rest is one name that contains dots."""


class TlsSection(Section):
    """PEM files of the gateway. They are read again when they change."""

    cert: Path
    """The gateway's certificate."""
    key: Path
    """The key of `cert`."""
    client_ca: Path | None = None
    """The authority that signed the certificates that edges must present. None: edges need no certificate."""
    crl: Path | None = None
    """Revocation lists of `client_ca`, PEM."""

    @model_validator(mode="after")
    def _crl_of_ca(self) -> Self:
        if self.crl is not None and self.client_ca is None:
            raise refusal("client_ca, the authority that signed crl", "client_ca is missing")
        return self


DEFAULT_OPEN_WINDOWS = 20_000
"""The default of `gateway.open_windows`. The memory that an edge's configuration gives a query by default is enough for
8,000 open slices."""


class GatewaySection(Section):
    """The address that edges connect to, and limits per edge."""

    listen: Address = "127.0.0.1:7400"
    """Address that edges connect to."""
    credit: Annotated[Size, Field(ge=1 << 16)] = 4 << 20
    """Bytes of frames in flight."""
    max_frame: Annotated[Size, Field(ge=1 << 16)] = 4 << 20
    """Largest message of an edge, before compression."""
    heartbeat: Annotated[Duration, Field(ge=1_000, le=20_000)] = 5_000
    """Interval of an edge's heartbeats while it has no news. An edge is unreachable after 2.5 intervals without any,
    not before 5 s, and at once if its connection ends. With over 2,500 edges of a gateway the interval is longer."""
    compression_memory: Annotated[Size, Field(ge=0)] = 256 << 20
    """Memory in which the gateway decompresses what edges send, over all sessions. 0: edges compress frames alone."""
    work: Annotated[int, Field(ge=1_000)] = WORK_PER_S
    """Units of work per second of an edge's frames; more is delayed."""
    open_windows: Annotated[int, Field(ge=1)] = DEFAULT_OPEN_WINDOWS
    """Windows of a query that an edge may keep open, besides the windows within the query's lateness. More are
    refused."""
    metrics: Address | None = None
    """Address of /livez, /readyz and /metrics; None: not served."""


class ReplaySection(Section):
    """The clock of a replay, in the words of an edge's `replay`: event time `start` is reached at wall time `at`."""

    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Event time per wall time."""
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
"""Name -> type, or ``{type: int64, description: …}``."""


class StreamSection(Section):
    """What the center accepts of a stream."""

    columns: Columns | None = None
    """The columns that its edges may have, and their types. None: the columns that an admin has set at the API. Without
    these, the first edge that has a column decides its type."""

    replay: ReplaySection | Literal["edges"] | None = None
    """The replay's clock, or `edges`: the clock that edges state. None: event time is wall time, except that a gateway
    that only this machine can reach takes edges' clocks."""
    ahead: Annotated[Duration, Field(ge=0)] = 86_400_000
    """How far the event time of a record may be ahead of the stream's clock."""


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path, field: str) -> None:
    """Loads a certificate and its key. Raises InvalidConfig, which names the key `field`, if they cannot be used."""
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
    """What clients may cost one API process."""

    connections: Count = 4096
    """Beyond it, the connection that has been without a request the longest is closed."""
    live: Count = 2000
    """Live streams."""
    live_per_principal: Count = 500
    """Live streams of one principal."""
    evaluate: Count = 64
    """Streams of questions."""
    evaluate_per_principal: Count = 16
    """Streams of questions of one principal."""
    responses: Annotated[Size, Field(ge=1 << 20)] = 256 << 20
    """Bytes of responses that clients have not taken yet."""
    headers: Duration = 10_000
    """Time in which a request's headers must arrive."""
    body: Duration = 30_000
    """Time in which a query must arrive, and in which a client must take a part of its response."""
    idle: Duration = 300_000
    """Time without a question after which a stream of questions is ended."""
    reads_at_once: Count = 8
    """Requests of one principal that read at the same time; further ones wait."""
    reads: Rate = "200/second"
    """Requests per principal that change nothing."""
    changes: Rate = "20/second"
    """Requests per principal that change something."""
    registrations: Rate = "1000/day"
    """New queries per principal. A query counts until a day after its deletion, and the catalog holds 10,000."""


class ApiSection(Section):
    """The REST API. Off loopback it needs credentials: `token`, `principals`, `tokens_file` or `oidc`."""

    listen: Address = "127.0.0.1:7480"
    """Address of the API and the console."""
    hosts: tuple[str, ...] = ()
    """Names besides loopback by which requests without credentials may address the server, such as a proxy's name."""
    token: SecretStr | None = None
    """The token of the principal `admin`."""
    principals: dict[str, PrincipalEntry] = {}
    """Who may use the API with a token, by name."""
    tokens_file: Path | None = None
    """A YAML mapping like `principals`, in addition to it. Read again when it changes."""
    oidc: OidcSection | None = None
    """Accepts the JWTs of an OpenID Connect issuer. None: no JWT is accepted."""
    tls: ApiTlsSection | None = None
    """TLS of the API. None: no TLS."""
    metrics: Address | None = None
    """Address of /livez, /readyz and /metrics without credentials, besides those at `listen`; None: not served."""
    audit: Path | Literal["log"] = "log"
    """Where changes and refused requests are recorded as JSON lines: a file, or the process' log."""
    audit_required: bool = False
    """Whether a change is refused while it cannot be recorded."""
    limits: ApiLimitsSection = ApiLimitsSection()
    """What clients may cost one API process."""
    cache: Size = 64 << 20
    """Memory of rendered answers that the API keeps between requests."""
    progress: Annotated[Duration, Field(ge=100)] = 2000
    """Interval of the `progress` events of live streams."""

    @property
    def authenticates(self) -> bool:
        """Whether a request without credentials is refused."""
        return any((self.token, self.principals, self.tokens_file, self.oidc))

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def require_credentials(self) -> None:
        """Raises InvalidConfig if whoever reaches the address could do everything."""
        if not self.authenticates and not is_loopback(self.listen):
            raise InvalidConfig(
                "api.token",
                None,
                "api.token, api.principals, api.tokens_file or api.oidc",
                f"api.listen {self.listen} can be reached from other machines",
            )


class SparkSection(Section):
    """The Spark application of the job. `conf` is passed to Spark unchanged."""

    master: str = "local[2]"
    """Spark's master: `local[2]` runs Spark on this machine with two threads."""
    driver_memory: Annotated[str, Field(pattern=r"^\d+[kmgt]$")] = "1g"
    """Memory of the driver's JVM, such as `1g`."""
    hang: Annotated[Duration, Field(ge=10_000)] = 300_000
    """A job that makes no step for so long is killed and started again; time for which it waits for a core aside."""
    trigger: Duration = 0
    """Least time between the starts of two micro-batches; 0: one after the other."""
    metrics: Address | None = None
    """Address of the job's /livez, /readyz and /metrics; None: not served. The other drivers of `edgewater
    center run` take the ports after it."""
    standby: bool = False
    """Whether `edgewater center run` starts one more driver, which takes over when one dies."""
    lease: Annotated[Duration, Field(ge=1_000, le=60_000)] = 3_000
    """How long the driver that leads may be silent before another takes over."""
    drivers: Annotated[int, Field(ge=1, le=64)] = 1
    """How many drivers lead at the same time, each a partition of the queries by their names; the same for all drivers
    of a center. `edgewater center run` starts so many. More than one is of use with PostgreSQL and several cores."""
    max_answer: Annotated[Size, Field(ge=1 << 20)] = 64 << 20
    """Size of the slices that make one answer. A query beyond it is paused. All others wait while it is answered,
    for about a second with the default."""
    conf: dict[str, str] = {}
    """Further properties of Spark."""


def _retained_ms(value: object, field: str) -> int | None:
    """A duration of at least a minute, so that readers have seen the answers; None stays None."""
    return None if value is None else duration_ms(value, field, minimum_ms=60_000)


class SinkProcessSection(Section):
    """The process that brings answers to other systems. `sinks` says which."""

    metrics: Address | None = None
    """Address of /livez, /readyz and /metrics; None: not served."""


class RetentionSection(Section):
    """How long applied frames and final answers are kept."""

    frames: Duration = 0
    """Frames that the result store has applied."""
    answers: Annotated[int | None, parsed_by(_retained_ms)] = 30 * 86_400_000
    """Answers of final windows, from the time they were given; None: for ever."""
    sinks: Duration = 7 * 86_400_000
    """How much longer an answer is kept that a sink has not written yet. Then the sink's status states the gap."""


class CenterConfig(Section):
    """The whole configuration; every field has a default that works on one machine."""

    data_dir: Path = DEFAULT_DATA_DIR
    """Directory of what the center stores on this machine."""
    catalog_url: str | None = None
    """URL of the catalog's database, for SQLAlchemy. None: an SQLite file in `data_dir`."""
    results_url: str | None = None
    """URL of the result store's database. None: an SQLite file in `data_dir`."""
    log_dir: Path | None = None
    """Directory of the frame log, on a disk that all gateways and drivers share. None: `log` in `data_dir`."""
    gateway: GatewaySection = GatewaySection()
    """The address that edges connect to, and limits per edge."""
    api: ApiSection = ApiSection()
    """The REST API and the console."""
    tokens: dict[str, AccessEntry] = {}
    """What each edge must present and may serve: a token, or the long form `EdgeAccess`."""
    tokens_file: Path | None = None
    """A YAML mapping like `tokens`, in addition to it: a file that can be mounted as a secret. Read again when it
    changes."""
    tls: TlsSection | None = None
    """TLS of the gateway. None: no TLS."""
    streams: dict[str, StreamSection] = {}
    """Only the streams that need it: their columns, a replay, or event time that is ahead of the clock."""
    spark: SparkSection = SparkSection()
    """The Spark application of the job."""
    sinks: dict[str, dict[str, Any]] = {}
    """Systems that answers are written to, by name: `kind`, the keys of all sinks and those of the kind."""
    sink: SinkProcessSection = SinkProcessSection()
    """The process that runs the sinks."""
    retention: RetentionSection = RetentionSection()
    """How long applied frames and final answers are kept."""

    @property
    def catalog(self) -> str:
        """URL of the catalog's database."""
        return self.catalog_url or f"sqlite:///{self.data_dir.resolve() / 'catalog.db'}"

    @property
    def results(self) -> str:
        """URL of the result store's database: a file of its own, so that the two never wait for one lock."""
        return self.results_url or f"sqlite:///{self.data_dir.resolve() / 'results.db'}"

    @property
    def columns(self) -> dict[str, Columns]:
        """The columns of the streams that have them in the configuration."""
        return {name: section.columns for name, section in self.streams.items() if section.columns is not None}

    @property
    def frames_dir(self) -> Path:
        """Directory of the frame log's segments."""
        return (self.log_dir or self.data_dir / "log").resolve()

    @property
    def spark_dir(self) -> Path:
        """Directory for Spark's files; nothing in it outlives a run."""
        return (self.data_dir / "spark").resolve()

    @property
    def progress_dir(self) -> Path:
        """Directory of what each driver of the job is doing (`center.storage.progress`); it outlives them."""
        return (self.data_dir / "progress").resolve()

    @property
    def pids_dir(self) -> Path:
        """Directory of the `<component>.pid` files that `edgewater center run` writes."""
        return (self.data_dir / "pids").resolve()

    @classmethod
    def from_mapping(cls, document: object) -> Self:
        """Raises InvalidConfig, naming the key."""
        try:
            config = validate(cls, document)
        except InvalidConfig as exc:
            secret = exc.field.startswith(("tokens.", "api.principals.", "api.token"))
            raise without_secret(exc) if secret else exc from None
        config._require_tokens()
        return config

    @classmethod
    def load(
        cls,
        path: Path | None,
        overrides: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Reads a YAML file (None: defaults), overridden by the environment, overridden by `overrides`.

        Args:
            overrides: dotted key -> value, such as ``{"api.listen": "127.0.0.1:0"}``, or
                ``{"spark.conf.spark.executor.instances": "1"}``.
            environment: variables of the process; those without the prefix are ignored.

        Raises:
            InvalidConfig: unreadable file, invalid YAML, or a key or value that is not accepted.
        """
        document = read_yaml(path, "--config") if path is not None else {}
        merged = {**_from_environment(environment or {}), **(overrides or {})}
        if merged and isinstance(document, Mapping | None):
            document = _with_overrides(dict(document or {}), merged)
        return cls.from_mapping(document)

    def edge_access(self) -> dict[str, EdgeAccess]:
        """The entries of `tokens` and `tokens_file` together, by edge. Raises InvalidConfig."""
        return self.tokens | (read_tokens_file(self.tokens_file) if self.tokens_file is not None else {})

    def _require_tokens(self) -> None:
        by_certificate = self.tls is not None and self.tls.client_ca is not None
        if not self.tokens and self.tokens_file is None and not by_certificate and not is_loopback(self.gateway.listen):
            raise InvalidConfig(
                "tokens",
                {},
                "a token per edge, such as {jfk: a-long-secret}, a tokens_file, or tls.client_ca",
                f"gateway.listen {self.gateway.listen} can be reached from other machines",
            )


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
            held = inner.get(section)
            if held is not None and not isinstance(held, Mapping):
                raise InvalidConfig(key, value, "a key whose outer keys are sections", f"{section} is a value")
            inner[section] = inner = dict(held or {})
        inner[last] = value
    return document

"""`CenterConfig`: what a center is told. Flags stand over the environment, that over one YAML file.

All parts of a center (gateway, job, API) read the same configuration. Unknown keys are refused, and every
error is an `InvalidConfig` that names the key by its path in the file. In the environment a key's path is
written ``EDGEWATER_CENTER__API__TOKEN``, so that secrets need not stand in the file.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from edgewater.errors import InvalidConfig, InvalidInput
from edgewater.plain_yaml import load_yaml
from edgewater.quantities import duration_ms, size_bytes

DEFAULT_DATA_DIR = Path(".edgewater/center")
ENVIRONMENT_PREFIX = "EDGEWATER_CENTER__"


def _quantity(read: Any) -> BeforeValidator:
    """A validator that reads text with one of `edgewater.quantities`, keeping its error message."""

    def validate(value: object) -> object:
        try:
            return read(value)
        except InvalidInput as exc:
            raise PydanticCustomError("quantity", "{accepted}", {"accepted": exc.accepted}) from exc

    return BeforeValidator(validate)


Millis = Annotated[int, _quantity(lambda v: duration_ms(v, ""))]
"""A duration as text (``200ms``, ``7d``); whole ms once read."""
Bytes = Annotated[int, _quantity(lambda v: size_bytes(v, ""))]
"""A size as text (``64MiB``) or a number; bytes once read."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(address)
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach what listens there."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(value: object) -> object:
    try:
        split_address(value)  # type: ignore[arg-type]  # anything but text fails below
    except (ValueError, AttributeError) as exc:
        accepted = "host:port, such as 127.0.0.1:7480; port 0 takes any that is free"
        raise PydanticCustomError("address", "{accepted}", {"accepted": accepted}) from exc
    return value


Address = Annotated[str, BeforeValidator(_address)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsFiles(_Section):
    """Server certificate and key as PEM files; with `client_ca`, edges must show a certificate of it."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class GatewaySection(_Section):
    """Where edges connect, and how much each may have in flight."""

    listen: Address = "127.0.0.1:7400"
    credit: Annotated[Bytes, Field(ge=1 << 16)] = 4 << 20
    max_frame: Annotated[Bytes, Field(ge=1 << 16)] = 4 << 20
    metrics: Address | None = None
    """Where Prometheus may scrape the gateway; None: nowhere."""


class ApiSection(_Section):
    """The REST API. With a token, requests to /v1 must carry it as a bearer token."""

    listen: Address = "127.0.0.1:7480"
    token: SecretStr | None = None
    cache: Bytes = 64 << 20
    progress: Annotated[Millis, Field(ge=100)] = 2000


class SparkSection(_Section):
    """The Spark application that merges. `conf` is passed on to Spark as it stands."""

    master: str = "local[2]"
    driver_memory: Annotated[str, Field(pattern=r"^\d+[kmgt]$")] = "1g"
    trigger: Millis = 0
    """Least time between the starts of two micro-batches; 0: one after the other."""
    metrics: Address | None = None
    """Where Prometheus may scrape the job; None: nowhere."""
    conf: dict[str, str] = {}


def _kept_ms(value: object) -> int | None:
    """A duration in which whoever reads answers has seen them; None stays None."""
    return None if value is None else duration_ms(value, "", minimum_ms=60_000)


class RetentionSection(_Section):
    """How long what nobody needs for answering is kept."""

    frames: Millis = 0
    """Frames that count in the result store already."""
    answers: Annotated[int | None, _quantity(_kept_ms)] = 30 * 86_400_000
    """Answers of final windows, since they were given; None: for ever."""


class CenterConfig(_Section):
    """The whole configuration; every field has a default that works on one machine."""

    data_dir: Path = DEFAULT_DATA_DIR
    catalog_url: str | None = None
    results_url: str | None = None
    log_dir: Path | None = None
    gateway: GatewaySection = GatewaySection()
    api: ApiSection = ApiSection()
    tokens: dict[str, SecretStr] = {}
    tokens_file: Path | None = None
    """A YAML mapping of edge to token, beside `tokens`: a file that may be kept apart as a secret."""
    tls: TlsFiles | None = None
    spark: SparkSection = SparkSection()
    retention: RetentionSection = RetentionSection()

    @property
    def catalog(self) -> str:
        """URL of the catalog's database."""
        return self.catalog_url or f"sqlite:///{self.data_dir.resolve() / 'catalog.db'}"

    @property
    def results(self) -> str:
        """URL of the result store's database: a file of its own, so that the two never wait for one lock."""
        return self.results_url or f"sqlite:///{self.data_dir.resolve() / 'results.db'}"

    @property
    def frames_dir(self) -> Path:
        """Directory of the frame log's segments."""
        return (self.log_dir or self.data_dir / "log").resolve()

    @property
    def spark_dir(self) -> Path:
        """Directory for what Spark writes; nothing in it outlives a run."""
        return (self.data_dir / "spark").resolve()

    @property
    def pids_dir(self) -> Path:
        """Directory of the `<part>.pid` files that `edgewater center run` writes."""
        return (self.data_dir / "pids").resolve()

    @classmethod
    def from_mapping(cls, given: object) -> Self:
        """Raises InvalidConfig, naming the key."""
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise InvalidConfig("", given, f"a mapping with the keys {', '.join(cls.model_fields)}")
        try:
            config = cls.model_validate(given)
        except ValidationError as exc:
            raise _invalid(cls, exc.errors()[0]) from None
        config._require_tokens()
        return config

    @classmethod
    def load(
        cls,
        path: Path | None,
        overrides: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Reads a YAML file (None: defaults) and puts the environment, then `overrides`, over it.

        Args:
            overrides: dotted key -> value, such as ``{"api.listen": "127.0.0.1:0"}``.
            environment: variables of the process; those without the prefix are passed over.

        Raises:
            InvalidConfig: unreadable file, no YAML, or a key or value that is not accepted.
        """
        given = _read_yaml(path, "--config") if path is not None else {}
        over = {**_from_environment(environment or {}), **(overrides or {})}
        if over and isinstance(given, Mapping | None):
            given = _with_overrides(dict(given or {}), over)
        return cls.from_mapping(given)

    def edge_tokens(self) -> dict[str, str]:
        """Bearer token by edge, of `tokens` and `tokens_file` together. Raises InvalidConfig."""
        tokens = {edge: token.get_secret_value() for edge, token in self.tokens.items()}
        if self.tokens_file is None:
            return tokens
        read = _read_yaml(self.tokens_file, "tokens_file")
        if not isinstance(read, Mapping) or not all(isinstance(t, str) for t in read.values()):
            # Not the content: it holds secrets.
            raise InvalidConfig("tokens_file", str(self.tokens_file), "a file with a YAML mapping of edge to token")
        return tokens | {str(edge): token for edge, token in read.items()}

    def _require_tokens(self) -> None:
        by_certificate = self.tls is not None and self.tls.client_ca is not None
        if not self.tokens and self.tokens_file is None and not by_certificate and not is_loopback(self.gateway.listen):
            raise InvalidConfig(
                "tokens",
                {},
                "a token per edge, such as {jfk: a-long-secret}, a tokens_file, or tls.client_ca",
                f"gateway.listen {self.gateway.listen} can be reached from other machines",
            )


def _read_yaml(path: Path, field: str) -> object:
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidConfig(field, str(path), "a readable YAML file", exc.strerror or "") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise InvalidConfig(field, str(path), "YAML", str(exc).replace("\n", " ")) from exc


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def _with_overrides(given: dict[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    for key, value in overrides.items():
        *sections, last = key.split(".")
        inner = given
        for section in sections:
            held = inner.get(section)
            if held is not None and not isinstance(held, Mapping):
                raise InvalidConfig(key, value, "a key whose outer keys are sections", f"{section} is a value")
            inner[section] = inner = dict(held or {})
        inner[last] = value
    return given


def _invalid(model: type[BaseModel], error: ErrorDetails) -> InvalidConfig:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        keys = _keys_at(model, error["loc"][:-1])
        return InvalidConfig(field, error["input"], f"one of the keys {', '.join(keys)}", "unknown key")
    if error["type"] == "missing":
        return InvalidConfig(field, None, "a value", "missing key")
    return InvalidConfig(field, error["input"], error["msg"])


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at `loc`."""
    for part in loc:
        kinds = [model.model_fields[str(part)].annotation]
        kinds += getattr(kinds[0], "__args__", ())
        model = next(k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
    return list(model.model_fields)

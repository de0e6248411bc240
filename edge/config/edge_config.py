"""The whole configuration of an edge, and how it is read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from edge.config.connections import HttpConfig, LimitsConfig, UplinkConfig
from edge.config.section import Model
from edge.config.sources import PackageSourceConfig
from edge.config.streams import StreamConfig
from edge.config.text import TextConfig
from edge.source_kinds import BUILT_IN, KINDS
from edgewater.base.errors import InvalidConfig, did_you_mean
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.runtime.configuration import (
    is_loopback,
    naming_places,
    read_yaml,
    refusal,
    text_or_referenced,
    validate,
    with_present_keys,
)


class EdgeConfig(Model):
    """The whole configuration of an edge agent."""

    edge: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """This edge's id, at most 63 letters, digits, `.`, `_` and `-`. It may also be `{env: NAME}` or `{file: PATH}`."""
    labels: dict[str, str] = {}
    """Names and texts that the center shows with the edge."""
    center: UplinkConfig = UplinkConfig()
    """The connection to the center."""
    state_dir: str = Field(min_length=1)
    """Directory of the journal. It has the whole state of the edge that must survive a restart."""
    http: HttpConfig = HttpConfig()
    """The HTTP server of the agent."""
    streams: dict[str, StreamConfig] = Field(min_length=1)
    """The streams that this edge serves, by name."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of memory, time and CPU."""

    @field_validator("edge", mode="before")
    @classmethod
    def _id(cls, value: object, info: ValidationInfo) -> object:
        return text_or_referenced(value, (info.context or {}).get("environ", os.environ), "an id such as jfk")

    @field_validator("streams")
    @classmethod
    def _names(cls, streams: dict[str, StreamConfig]) -> dict[str, StreamConfig]:
        for name in streams:
            if not NAME.fullmatch(name):
                raise refusal(NAME_ACCEPTED, f"the stream's name {name!r} could not be used in a query")
        stdin = [name for name, stream in streams.items() for source in stream.sources if source.stdin]
        if len(stdin) > 1:
            raise refusal("stdin in one stream only", f"it is a source of {', '.join(stdin)}")
        return streams

    @model_validator(mode="after")
    def _package_sources(self, info: ValidationInfo) -> EdgeConfig:
        for name, stream in self.streams.items():
            for number, source in enumerate(stream.sources):
                if source.package is not None:
                    path = f"streams.{name}.sources.{number}.{source.package.kind}"
                    options = _package_options(source.package, path, stream, info.context)
                    object.__setattr__(source.package, "options", options)
        return self

    @model_validator(mode="after")
    def _pushes_are_authenticated(self) -> EdgeConfig:
        pushed = any(source.is_pushed for stream in self.streams.values() for source in stream.sources)
        if self.http.grpc is not None and not any(s.has_receivers for st in self.streams.values() for s in st.sources):
            raise InvalidConfig("http.grpc", self.http.grpc, "a source that is received over gRPC, such as otlp")
        for key, address in (("http.listen", self.http.listen), ("http.grpc", self.http.grpc)):
            if pushed and address is not None and not self.http.authenticates and not is_loopback(address):
                accepted = "a loopback address, or http.tokens or http.tls.client_ca"
                reason = "other machines could push records without credentials"
                raise InvalidConfig(key, address, accepted, reason)
        return self


_NEVER_SECRET = tuple(
    "topic topics brokers broker format client_id session start signal columns metrics max_series".split()
)


def _without_secrets(path: str, options: object, error: InvalidConfig) -> InvalidConfig:
    """Returns an error of a package's options under its path, without values that may be secrets.

    A user may misspell the key of a password. So a value is shown only for known keys, and the reason only if it quotes
    no other text of the options.
    """
    is_plain = isinstance(error.value, int | float | str) and "@" not in str(error.value)
    known = error.field.split(".")[0] in _NEVER_SECRET
    is_shown = error.value is None or (is_plain and known)
    quotes = any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", error.reason) for text in _texts(options))
    field = f"{path}.{error.field}".rstrip(".")
    return InvalidConfig(
        field, error.value if is_shown else "(not shown)", error.accepted, "" if quotes else error.reason
    )


def _texts(value: object) -> Iterator[str]:
    """Yields all texts in options that may be secrets."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name not in _NEVER_SECRET:
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) and value:
        yield value


def _package_options(
    source: PackageSourceConfig, path: str, stream: StreamConfig, context: Mapping[str, Any] | None
) -> BaseModel:
    """Returns the validated options of a source. Raises InvalidConfig for invalid options, and for a kind that is not
    installed.
    """
    kind = KINDS.get(source.kind)
    if kind is None:
        accepted = f"one of the kinds {', '.join((*BUILT_IN, *KINDS.names))}"
        near = did_you_mean(source.kind, (*BUILT_IN, *KINDS.names)).lstrip(", ")
        raise InvalidConfig(path, source.kind, accepted, near or KINDS.hint())
    if stream.replay is not None:
        raise InvalidConfig(path, source.kind, "no replay in the stream: the source has no recorded data")
    try:
        options = validate(kind.config, source.options, context)
    except InvalidConfig as exc:
        raise _without_secrets(path, source.options, exc) from None
    if isinstance(options, TextConfig):
        fault = options.column_fault(list(stream.record_schema.textual))
        if fault is not None:
            raise InvalidConfig(path, source.kind, *fault)
    return options


def parse_config(document: object, environ: Mapping[str, str] = os.environ) -> EdgeConfig:
    """Validates a configuration.

    Args:
        environ: the variables for ``{env: NAME}``.

    Raises:
        InvalidConfig: names the key's path, its value and what is accepted.
    """
    return validate(EdgeConfig, with_present_keys(document), {"environ": environ})


def load_config(path: str | Path, environ: Mapping[str, str] = os.environ) -> EdgeConfig:
    """Reads a configuration file.

    Raises:
        InvalidConfig: the file cannot be read, is not YAML, or has a value that is not accepted.
    """
    document = read_yaml(path, "")
    with naming_places(path):
        return parse_config(document, environ)

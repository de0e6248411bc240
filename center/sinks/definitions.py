"""`SinkDefinition` is a sink as a user defines it, in ``center.yaml`` or by the API."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, SecretStr

from center.sinks.base import KINDS, Sink, SinkContext, SinkKind
from edgewater.answers import Phase
from edgewater.base.errors import InvalidConfig, did_you_mean
from edgewater.model.json_types import Document
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.runtime.configuration import Duration, Section, validate
from edgewater.runtime.http_exchange import LEAST_SECRET
from edgewater.runtime.kafka_properties import FILES


class CommonOptions(Section):
    """The keys that every sink has in addition to the keys of its kind."""

    queries: Literal["all"] | list[str] = Field(default="all", min_length=1)
    """Names of the queries whose answers are written. `all`: every query, also a query that is registered later. For a
    sink of the kind `alerts`, `all` means every query of its rules."""
    min_phase: Phase | None = None
    """The least phase of a window's newest answer. Windows before this phase are not written. Unset: `final` for
    `parquet`, `delta` and `iceberg`, otherwise `early`."""
    batch: Duration | None = None
    """Time for which an answer may wait for other answers, so that they are written together. Unset: 5m for `parquet`,
    `delta` and `iceberg`, otherwise 0s."""
    begin: Literal["beginning", "now"] | None = None
    """Where a new sink begins: `beginning` is the oldest stored answer, `now` is the next answer. Unset: `now` for the
    kind `alerts`, otherwise `beginning`."""


PLAIN_OPTIONS = tuple(
    f".{name}"
    for name in (
        *("aws_region", "aws_default_region", "aws_endpoint_url", "aws_allow_http", "aws_s3_allow_unsafe_rename"),
        *("aws_s3_locking_provider", "aws_virtual_hosted_style_request", "azure_storage_account_name"),
        *("catalog.type", "catalog.uri", "catalog.warehouse", "s3.region", "s3.endpoint", "client.region"),
    )
)
"""Ends of the names of options that are no secrets, and with which no library reads a file or loads code."""
_MAY_HIDE = re.compile("[@?]")
"""Marks of the password in a URL, and of parameters: a parameter such as `passfile` names a file."""
_USER = re.compile(r"://[^/?#]*@")
COMMON_KEYS = tuple(CommonOptions.model_fields)


@dataclass(frozen=True, slots=True)
class SinkDefinition:
    """A valid definition of a sink.

    Attributes:
        queries: names of queries; None for all queries.
        document: the definition as the user wrote it. Secrets are only references.
    """

    name: str
    kind: SinkKind
    options: BaseModel
    queries: frozenset[str] | None
    min_phase: Phase
    begins_now: bool
    batch_ms: int
    document: Document

    def includes(self, query: str) -> bool:
        return self.queries is None or query in self.queries

    def make(self, context: SinkContext) -> Sink:
        """Builds the sink.

        Raises:
            InvalidConfig: an option cannot be used.
        """
        try:
            return self.kind.sink(self.options, context)
        except InvalidConfig as exc:
            raise InvalidConfig(f"sinks.{self.name}.{exc.field}", exc.value, exc.accepted, exc.reason) from None

    @property
    def key(self) -> str:
        """A text that is different for different definitions."""
        return json.dumps(self.document, sort_keys=True)


def read_definition(
    name: str,
    document: object,
    *,
    environ: Mapping[str, str] = os.environ,
    listed: Collection[str] | None = None,
    reads_secrets: bool = True,
    field: str = "sinks",
) -> SinkDefinition:
    """Reads the definition of a sink, such as ``{kind: postgres, queries: […], …}``.

    Args:
        environ: the variables for ``{env: NAME}``.
        listed: for a definition of the API, the setting `sink.secrets`. A secret must be ``{env: NAME}`` or
            ``{file: PATH}``, and the name or the path must be listed, as must the path of each other file that the sink
            reads. None: the definition is in ``center.yaml``.
        reads_secrets: whether the secrets are read. False if another process will run the sink.

    Raises:
        InvalidConfig: the definition is not valid. The error's field is the path of the key, such as
            ``sinks.warehouse.url``.
    """
    at = f"{field}.{name}" if field else name
    if not NAME.fullmatch(name):
        raise InvalidConfig(at, name, NAME_ACCEPTED, "invalid name of a sink")
    if not isinstance(document, Mapping):
        raise InvalidConfig(at, document, "a mapping with kind and the keys of this kind")
    kind = KINDS.get(document["kind"]) if isinstance(document.get("kind"), str) else None
    if kind is None:
        known = ", ".join(KINDS.names)
        given = document.get("kind")
        near = did_you_mean(given, KINDS.names) if isinstance(given, str) else ""
        raise InvalidConfig(f"{at}.kind", given, f"one of {known}", near.lstrip(",; ") or KINDS.hint())
    common = {key: value for key, value in document.items() if key in COMMON_KEYS}
    own = {key: value for key, value in document.items() if key not in COMMON_KEYS and key != "kind"}
    shared = _validated(CommonOptions, common, at, {})
    if listed is not None or not reads_secrets:
        checked = _checked(own, [kind.config], at, listed)
        own = own if reads_secrets else checked
    options = _validated(kind.config, own, at, {"environ": environ})
    needed: frozenset[str] | None = getattr(options, "reads", None)
    queries = needed if shared.queries == "all" else frozenset(shared.queries)
    if needed is not None and queries is not None and not needed <= queries:
        accepted = f"`all`, or a list with {', '.join(sorted(needed))}"
        raise InvalidConfig(f"{at}.queries", sorted(queries), accepted, "rules are about other queries")
    begin = shared.begin or getattr(kind, "begin", "beginning")
    least = Phase(getattr(kind, "min_phase", Phase.EARLY))
    min_phase = shared.min_phase or least
    if min_phase.rank < least.rank:
        accepted = f"{least.value}: a sink of the kind {kind.name} only adds rows"
        raise InvalidConfig(f"{at}.min_phase", min_phase.value, accepted)
    batch_ms = getattr(kind, "batch_ms", 0) if shared.batch is None else shared.batch
    return SinkDefinition(name, kind, options, queries, min_phase, begin == "now", batch_ms, dict(document))


def read_definitions(documents: Document, environ: Mapping[str, str] = os.environ) -> list[SinkDefinition]:
    """Reads the mapping ``sinks`` of ``center.yaml``, and builds each sink once to check its options.

    Raises:
        InvalidConfig: definitions are not valid. The error names the faults of all of them.
    """
    definitions, faults = list[SinkDefinition](), list[InvalidConfig]()
    for name, document in documents.items():
        try:
            definitions.append(read_definition(name, document, environ=environ))
            definitions[-1].make(SinkContext(name))
        except InvalidConfig as exc:
            faults.append(exc)
    if faults:
        faults[0].others += tuple(faults[1:])
        raise faults[0]
    return definitions


def _validated(model: Any, document: Document, at: str, context: Document) -> Any:
    try:
        return validate(model, document, context)
    except InvalidConfig as exc:
        secrets = secrets_of(model)

        def at_path(fault: InvalidConfig) -> InvalidConfig:
            path = f"{at}.{fault.field}" if fault.field else at
            is_secret = any(fault.field == name or fault.field.endswith(f".{name}") for name in secrets)
            return InvalidConfig(path, "…" if is_secret else fault.value, fault.accepted, fault.reason)

        raise exc.changed(at_path) from None


def secrets_of(model: type[BaseModel]) -> set[str]:
    """Returns the names of keys that have secrets, in a model and in all models within it."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        for kind in _types(field.annotation):
            if kind is SecretStr:
                names.add(field.alias or name)
            elif isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not model:
                names |= secrets_of(kind)
    return names


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(inner for part in getattr(annotation, "__args__", ()) for inner in _types(part))]


def _checked(value: Any, kinds: Sequence[Any], at: str, listed: Collection[str] | None) -> Any:
    """Returns an option in which a placeholder replaces each reference to a secret.

    Args:
        kinds: the types of the option and of its members.

    Raises:
        InvalidConfig: the option has a secret itself instead of a reference, or names a file or a variable that is not
            listed.
    """
    if isinstance(value, Mapping) and list(value) in (["env"], ["file"]) and SecretStr in kinds:
        ((_, name),) = value.items()
        _require_listed(name, at, listed)
        return "referenced"
    if isinstance(value, Mapping):
        fields = _fields(kinds)
        inner = [kind for given in kinds if get_origin(given) is dict for kind in _types(get_args(given)[-1])]
        return {key: _checked(each, fields.get(str(key), inner), f"{at}.{key}", listed) for key, each in value.items()}
    if isinstance(value, list):
        inner = [kind for given in kinds if get_origin(given) is list for kind in _types(get_args(given)[-1])]
        return [_checked(each, inner, f"{at}.{number}", listed) for number, each in enumerate(value)]
    if isinstance(value, str) and at.lower().endswith(PLAIN_OPTIONS) and not _MAY_HIDE.search(value):
        return value
    if value is not None and SecretStr in kinds:
        accepted = "{env: NAME} or {file: PATH} of the process `edgewater center sink`"
        raise InvalidConfig(at, "…", accepted, "a stored definition must not contain a secret")
    if isinstance(value, str) and _USER.search(value):
        raise InvalidConfig(at, "…", "a URL without a user", "a stored definition must not contain a secret")
    if value is not None and at.endswith((".ca", *FILES)):
        _require_listed(value, at, listed)
    return value


def has_secret(document: object, model: type[BaseModel]) -> bool:
    """Returns whether a section has a secret itself, not only references to secrets. So it must not be stored."""
    try:
        _checked(document, [model], "", None)
    except InvalidConfig:
        return True
    return False


def _fields(kinds: Sequence[Any]) -> dict[str, list[Any]]:
    """Returns the types of the keys of the models among the types."""
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return {f.alias or name: _types(f.annotation) for model in models for name, f in model.model_fields.items()}


def _require_listed(name: object, at: str, listed: Collection[str] | None) -> None:
    if listed is not None and name not in listed:
        accepted = f"one of {', '.join(sorted(listed))}" if listed else "a name in sink.secrets, which is empty"
        raise InvalidConfig(at, name, accepted, "a definition of the API may use only what sink.secrets lists")


def masked(text: str, options: object) -> str:
    """Returns a text in which `…` replaces each secret of the options. A library or a server may quote a secret."""
    for secret in sorted(_secret_values(options), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _secret_values(options: object) -> Iterator[str]:
    if isinstance(options, SecretStr):
        if len(options) >= LEAST_SECRET:
            yield options.get_secret_value()
    elif isinstance(options, BaseModel):
        for name in type(options).model_fields:
            yield from _secret_values(getattr(options, name))
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _secret_values(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _secret_values(value)

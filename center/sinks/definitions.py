"""`SinkDefinition` is a sink as a user defines it, in ``center.yaml`` or by the API."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr

from center.ledger import Phase
from center.sinks.base import KINDS, Sink, SinkContext, SinkKind
from edgewater.model.errors import InvalidConfig, did_you_mean
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.runtime.configuration import Duration, Section, validate


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
    document: Mapping[str, Any]

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
    only_references: bool = False,
    field: str = "sinks",
) -> SinkDefinition:
    """Reads the definition of a sink, such as ``{kind: postgres, queries: […], …}``.

    Args:
        environ: the variables for ``{env: NAME}``.
        only_references: whether a secret must be ``{env: NAME}`` or ``{file: PATH}``, because the definition is stored.
            The secret is not read here, because another process will run the sink.

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
    if only_references:
        own = {name: _checked_references(value, at, name, secrets_of(kind.config)) for name, value in own.items()}
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


def read_definitions(documents: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[SinkDefinition]:
    """Reads the mapping ``sinks`` of ``center.yaml``, and builds each sink once to check its options.

    Raises:
        InvalidConfig: a definition is not valid.
    """
    definitions = [read_definition(name, document, environ=environ) for name, document in documents.items()]
    for definition in definitions:
        definition.make(SinkContext(definition.name))
    return definitions


def _validated(model: Any, document: Mapping[str, Any], at: str, context: Mapping[str, Any]) -> Any:
    try:
        return validate(model, document, context)
    except InvalidConfig as exc:
        path = f"{at}.{exc.field}" if exc.field else at
        is_secret = any(exc.field == name or exc.field.endswith(f".{name}") for name in secrets_of(model))
        raise InvalidConfig(path, "…" if is_secret else exc.value, exc.accepted, exc.reason) from None


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


def _checked_references(value: object, at: str, name: str, secrets: set[str]) -> object:
    """Returns an option in which a placeholder replaces each reference to a secret.

    Raises:
        InvalidConfig: the option has a secret itself instead of a reference.
    """
    path = f"{at}.{name}"
    if name in secrets and isinstance(value, Mapping) and list(value) in (["env"], ["file"]):
        return "referenced"
    if name in secrets and value is not None and not isinstance(value, Mapping | list):
        accepted = "{env: NAME} or {file: PATH} of the process `edgewater center sink`"
        raise InvalidConfig(path, "…", accepted, "a stored definition must not contain a secret")
    if isinstance(value, Mapping):
        inside = {*secrets, *map(str, value)} if name in secrets else secrets
        return {key: _checked_references(inner, path, str(key), inside) for key, inner in value.items()}
    if isinstance(value, list):
        return [_checked_references(inner, path, str(n), secrets) for n, inner in enumerate(value)]
    return value

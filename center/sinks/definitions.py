"""`SinkDefinition`: a sink as a user writes it, in ``center.yaml`` or to the API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr

from center.ledger import Phase
from center.sinks.base import KINDS, Sink, SinkContext, SinkKind
from edgewater.model.errors import InvalidConfig, did_you_mean
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.runtime.configuration import Section, validate


class CommonOptions(Section):
    """The keys of every sink, besides those of its kind."""

    queries: Literal["all"] | list[str] = Field(default="all", min_length=1)
    """Names of the queries whose answers are written. `all`: every query, also one that is registered later."""
    min_phase: Phase = Phase.EARLY
    """Only windows whose newest answer has reached this phase."""
    begin: Literal["beginning", "now"] = "beginning"
    """Where a new sink begins: with the oldest stored answer, or with the next one."""


COMMON_KEYS = tuple(CommonOptions.model_fields)


@dataclass(frozen=True, slots=True)
class SinkDefinition:
    """A valid definition.

    Attributes:
        queries: names; None: all queries.
        document: the definition as written. Secrets are the references that a user wrote.
    """

    name: str
    kind: SinkKind
    options: BaseModel
    queries: frozenset[str] | None
    min_phase: Phase
    begins_now: bool
    document: Mapping[str, Any]

    def includes(self, query: str) -> bool:
        return self.queries is None or query in self.queries

    def make(self, epoch: int) -> Sink:
        """Builds the sink. Raises InvalidConfig."""
        return self.kind.sink(self.options, SinkContext(self.name, epoch))

    @property
    def key(self) -> str:
        """Differs for definitions that differ."""
        return json.dumps(self.document, sort_keys=True)


def read_definition(
    name: str,
    document: object,
    *,
    environ: Mapping[str, str] = os.environ,
    only_references: bool = False,
    field: str = "sinks",
) -> SinkDefinition:
    """Reads ``{kind: postgres, queries: […], …}``.

    Args:
        environ: where ``{env: NAME}`` is looked up.
        only_references: a secret must be ``{env: NAME}`` or ``{file: PATH}``, since the definition is stored. It is
            not read: another process will run the sink.

    Raises:
        InvalidConfig: the field is the path of the key, such as ``sinks.warehouse.url``.
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
        raise InvalidConfig(f"{at}.kind", given, f"one of {known}", near.lstrip("; ") or KINDS.hint())
    common = {key: value for key, value in document.items() if key in COMMON_KEYS}
    own = {key: value for key, value in document.items() if key not in COMMON_KEYS and key != "kind"}
    shared = _validated(CommonOptions, common, at, {})
    if only_references:
        _require_references(kind.config, own, at)
    given = {k: "referenced" if only_references and k in _secrets(kind.config) else v for k, v in own.items()}
    options = _validated(kind.config, given, at, {"environ": environ})
    queries = None if shared.queries == "all" else frozenset(shared.queries)
    return SinkDefinition(name, kind, options, queries, shared.min_phase, shared.begin == "now", dict(document))


def read_definitions(documents: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[SinkDefinition]:
    """Reads the mapping ``sinks`` of ``center.yaml``. Raises InvalidConfig."""
    return [read_definition(name, document, environ=environ) for name, document in documents.items()]


def _validated(model: Any, document: Mapping[str, Any], at: str, context: Mapping[str, Any]) -> Any:
    try:
        return validate(model, document, context)
    except InvalidConfig as exc:
        path = f"{at}.{exc.field}" if exc.field else at
        value = exc.value if exc.field.partition(".")[0] not in _secrets(model) else "…"
        raise InvalidConfig(path, value, exc.accepted, exc.reason) from None


def _secrets(model: type[BaseModel]) -> Iterable[str]:
    return [name for name, field in model.model_fields.items() if SecretStr in _types(field.annotation)]


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(inner for part in getattr(annotation, "__args__", ()) for inner in _types(part))]


def _require_references(model: type[BaseModel], document: Mapping[str, Any], at: str) -> None:
    for name in _secrets(model):
        given = document.get(name)
        is_reference = isinstance(given, Mapping) and list(given) in (["env"], ["file"])
        if name in document and not is_reference:
            accepted = "{env: NAME} or {file: PATH} of the process `edgewater center sink`"
            raise InvalidConfig(f"{at}.{name}", "…", accepted, "a stored definition must not contain a secret")

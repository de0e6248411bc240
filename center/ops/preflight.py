"""`edgewater center check`: whether this machine has what a configuration needs, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from center.config import CenterConfig
from center.ops.processes import bound, gateway_config, listen
from edgewater.errors import EdgewaterError, StorageError


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, and what was found; `ok` or a message that says what to do."""

    name: str
    ok: bool
    message: str


def check(config: CenterConfig, environment: Mapping[str, str]) -> list[Check]:
    """Looks at Java, addresses, directories, secrets and databases. Changes nothing that a start would not."""
    looks: list[tuple[str, Callable[[], str]]] = [
        ("java", lambda: _java(environment)),
        ("gateway.listen", lambda: _free(config.gateway.listen, "gateway.listen")),
        ("api.listen", lambda: _free(config.api.listen, "api.listen")),
        ("data_dir", lambda: _writable(config.data_dir)),
        ("log_dir", lambda: _writable(config.frames_dir)),
        ("tokens", lambda: _tokens(config)),
        ("catalog_url", lambda: _catalog(config.catalog)),
        ("results_url", lambda: _results(config.results)),
    ]
    return list(_looked_at(looks))


def _looked_at(looks: list[tuple[str, Callable[[], str]]]) -> Iterator[Check]:
    for name, look in looks:
        try:
            yield Check(name, True, look())
        except EdgewaterError as exc:
            yield Check(name, False, exc.message)


def _java(environment: Mapping[str, str]) -> str:
    from center.spark.session import java_version, require_java

    require_java(environment)
    return f"Java {java_version(environment)}"


def _free(address: str, field: str) -> str:
    with listen(address, field) as listener:
        return f"{bound(listener)} is free"


def _writable(directory: Path) -> str:
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise StorageError(f"{directory.resolve()} cannot be written: {exc.strerror}") from exc
    return f"{directory.resolve()} can be written"


def _tokens(config: CenterConfig) -> str:
    tokens = gateway_config(config).tokens
    return f"{len(tokens)} edges have one" if tokens else "none: any edge on this machine may connect"


def _catalog(url: str) -> str:
    from center.catalog import Catalog

    catalog = Catalog(url)
    try:
        return f"{len(catalog.queries())} queries, {len(catalog.edges())} edges"
    finally:
        catalog.close()


def _results(url: str) -> str:
    from center.results import ResultStore

    results = ResultStore(url)
    try:
        return f"{results.last_answer_id()} answers given"
    finally:
        results.close()

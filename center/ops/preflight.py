"""`edgewater center check` checks whether this machine fits a configuration, before any process is started."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from center.api_access import read_principals_file
from center.config import CenterConfig
from edgewater.base.errors import EdgewaterError, StorageError
from edgewater.runtime.health import bound_address, listen


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: what was checked.
        ok: whether the check passed.
        message: the finding. If the check failed, it also says what to do.
    """

    name: str
    ok: bool
    message: str


def check(config: CenterConfig, environment: Mapping[str, str]) -> list[CheckResult]:
    """Checks Java, addresses, directories, secrets and databases. It changes nothing that a start would not change."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("java", lambda: _java(environment)),
        ("gateway.listen", lambda: _free(config.gateway.listen, "gateway.listen")),
        ("api.listen", lambda: _free(config.api.listen, "api.listen")),
        ("api.token", lambda: _api_credentials(config)),
        ("data_dir", lambda: _writable(config.data_dir)),
        ("log_dir", lambda: _writable(config.log_dir)),
        ("deltas_dir", lambda: _writable(config.deltas_dir)),
        ("tokens", lambda: _tokens(config)),
        ("catalog_url", lambda: _catalog(config.catalog_url)),
        ("results_url", lambda: _results(config.results_url)),
        ("stores", lambda: _pair(config)),
        ("sinks", lambda: _sinks(config, environment)),
    ]
    return [_result(name, run) for name, run in checks]


def _result(name: str, run: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name, True, run())
    except EdgewaterError as exc:
        return CheckResult(name, False, exc.message)


def _java(environment: Mapping[str, str]) -> str:
    from center.spark.java import require_java

    return f"Java {require_java(environment)}"


def _free(address: str, field: str) -> str:
    with listen(address, field) as listener:
        return f"{bound_address(listener)} is free"


def _writable(directory: Path) -> str:
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise StorageError(f"{directory.resolve()} cannot be written: {exc.strerror}") from exc
    return f"{directory.resolve()} can be written"


def _sinks(config: CenterConfig, environment: Mapping[str, str]) -> str:
    if not config.sinks:
        return "none are configured"
    from center.sinks.definitions import read_definitions

    definitions = read_definitions(config.sinks, environment)
    return ", ".join(f"{d.name} ({d.kind.name})" for d in definitions)


def _tokens(config: CenterConfig) -> str:
    from center.ingest.credential_files import CredentialFiles

    CredentialFiles(config.tokens, config.tokens_file, config.tls)
    tokens = config.edge_access()
    return f"{len(tokens)} edges have one" if tokens else "none: any edge on this machine may connect"


def _api_credentials(config: CenterConfig) -> str:
    config.api.require_credentials()
    if not config.api.authenticates:
        return "none: whoever reaches api.listen on this machine may do everything"
    named = len(config.api.principals) + (config.api.token is not None)
    if config.api.tokens_file is not None:
        named += len(read_principals_file(config.api.tokens_file))
    issuer = f", and those of {config.api.oidc.issuer}" if config.api.oidc is not None else ""
    return f"{named} principals have one{issuer}"


def _catalog(url: str) -> str:
    from center.catalog import Catalog

    with contextlib.closing(Catalog(url)) as catalog:
        return f"{len(catalog.queries.all())} queries, {len(catalog.edges.all())} edges"


def _pair(config: CenterConfig) -> str:
    from center.catalog import Catalog
    from center.results import ResultStore
    from center.results.store_pair import require_pair

    with (
        contextlib.closing(Catalog(config.catalog_url)) as catalog,
        contextlib.closing(ResultStore(config.results_url)) as results,
    ):
        require_pair(catalog, results, secrets.randbits(62) | 1)
    return "catalog and results are of one center and of one moment"


def _results(url: str) -> str:
    from center.results import ResultStore

    with contextlib.closing(ResultStore(url)) as results:
        return f"{results.last_answer_id()} answers"

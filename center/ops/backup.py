"""Backups of a center: both stores, the frame log and the large deltas at one moment. The center may run during a
backup.

`take_backup` locks the writers of the stores for some milliseconds. During this time it begins a read transaction on
each store, and links the segments that their rows name. Then it copies the data that the transactions see. So each
frame in the results has a place in the catalog, each frame that is not applied yet is in the log, and each delta is
there.

A backup is a directory: ``catalog.db``, ``results.db``, ``log/``, ``deltas/``, and ``backup.json``, which is written
last. Stores in PostgreSQL become the same files (`database_backup`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.engine import make_url

from center.catalog import Catalog
from center.config import CenterConfig
from center.ops import database_backup
from center.ops.database_backup import DELTAS, LOG, load, moment, require_new, require_used, save
from center.ops.supervisor import exclusive_lock, locked_file
from center.results import ResultStore
from center.results.store_pair import reconcile, require_pair
from center.sinks import SinkStore
from center.storage.database import BUSY_TIMEOUT_MS
from center.storage.progress import write_whole
from center.storage.segment_files import COMMITS, sync_directory
from edgewater.base.errors import InvalidConfig, InvalidInput, StorageError
from edgewater.base.timestamps import rfc3339

MANIFEST, CATALOG, RESULTS = "backup.json", "catalog.db", "results.db"
LINKED = ".backup"
"""Directory in the frame log, and in the directory of deltas, that has the segments of a backup while the backup is
being taken."""
_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]*"
_SEGMENT = re.compile(rf"{LOG}/[A-Za-z0-9_-]+/{_NAME}|{DELTAS}/[0-9]+-of-[0-9]+/[0-9]+/{_NAME}")
FORMAT = 1  # format: of backups
PAGES_AT_ONCE = 4096  # limit: time between two reports
"""Number of SQLite's pages (16 MiB) that are copied between two reports of progress."""
SEGMENTS_AT_ONCE = 1000  # limit: time between two reports
"""Number of segments that are copied between two reports of progress."""

Report = Callable[[str], None]
"""A function that receives a line of text about the progress."""


@dataclass(frozen=True, slots=True)
class BackupInfo:
    """The manifest of a backup.

    Attributes:
        taken_at: time of the backup, UTC.
        sizes: by path in the backup, the size of the file in bytes.
    """

    format: int
    taken_at: str
    sizes: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    @property
    def segments(self) -> list[str]:
        """The paths of all segments in the backup."""
        return [path for path in self.sizes if _SEGMENT.fullmatch(path)]


def take_backup(config: CenterConfig, target: Path, now_ms: Callable[[], int], report: Report) -> BackupInfo:
    """Writes a backup to a new or an empty directory. The center may run.

    Raises:
        InvalidInput: the target is not empty, the stores are in two databases, or there is no center.
        StorageError: a file cannot be read or written. The target then has no manifest, and is not a backup.
    """
    files = store_files(config)
    for path in files or ():
        if not path.is_file():
            raise InvalidConfig("data_dir", str(config.data_dir), f"a center that has run, with {path}")
    if files is None:
        require_used(config.catalog_url)
        with _stores(config.catalog_url, config.results_url):
            pass  # refuses a store that another release has written in another format
    _require_empty(target, "DIRECTORY")
    with _storage_errors("the backup cannot be written"):
        (target / LOG / COMMITS).mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            busy = f"{config.data_dir}: another `edgewater center backup` is taking a backup"
            stack.enter_context(locked_file(config.data_dir / "backup.lock", busy))
            report("waiting for a moment at which no store is being written")
            roots = _roots(config)
            stack.enter_context(_links(roots))
            if files is None:
                reader = stack.enter_context(moment(config.catalog_url, functools.partial(_link_all, roots)))
                taken_at = rfc3339(now_ms())
                _save_rows(reader, target, report)
            else:
                of_catalog, of_results = stack.enter_context(_snapshot(*files, roots))
                taken_at = rfc3339(now_ms())
                _copy_store(of_results, target / RESULTS, report)
                _copy_store(of_catalog, target / CATALOG, report)
            for name, root in roots.items():
                linked = root / LINKED
                found = sorted(path for path in linked.rglob("*") if path.is_file())
                _copy_segments({path: target / name / path.relative_to(linked) for path in found}, report)
        sizes = {str(p.relative_to(target)): p.stat().st_size for p in sorted(target.rglob("*")) if p.is_file()}
        info = BackupInfo(FORMAT, taken_at, sizes)
        for directory in (*(path for path in target.rglob("*") if path.is_dir()), target):
            sync_directory(directory)
        write_whole(target / MANIFEST, json.dumps(asdict(info), indent=1))
        sync_directory(target)
    return info


def read_backup(directory: Path) -> BackupInfo:
    """Reads a backup's manifest and compares it with the files.

    Raises:
        InvalidInput: the directory is not a complete backup.
    """
    path = directory / MANIFEST
    whole = f"a directory with a complete backup of format {FORMAT} by `edgewater center backup`"

    def refused(reason: str) -> InvalidInput:
        return InvalidInput("DIRECTORY", str(directory), whole, reason)

    try:
        document = json.loads(path.read_text())
        sizes = {str(name): int(size) for name, size in document["sizes"].items()}
        info = BackupInfo(int(document["format"]), str(document["taken_at"]), sizes)
    except OSError as exc:
        raise refused(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise refused(f"{path} is damaged: {exc}") from exc
    if info.format != FORMAT:
        raise refused(f"it has format {info.format}")
    if not {CATALOG, RESULTS} <= info.sizes.keys():
        raise refused(f"{path} lacks {CATALOG} or {RESULTS}")
    root = directory.resolve()
    for name, size in info.sizes.items():
        if name not in (CATALOG, RESULTS) and not _SEGMENT.fullmatch(name):
            raise refused(f"{path} names {name[:200]!r}, which no backup has")
        file = directory / name
        # A link could name any file that the user of the restore can read.
        if file.resolve() != root / name or not file.is_file() or file.stat().st_size != size:
            raise refused(f"{name} is missing, is a link, or does not have {size} bytes")
    return info


def restore_backup(config: CenterConfig, source: Path, now_ms: Callable[[], int], report: Report) -> BackupInfo:
    """Writes a backup's stores and log to the places of a configuration. The places must be empty.

    All answers of the restored center have revisions that were never given before. If the restore fails, the places are
    empty, except for files that a second attempt replaces.

    Raises:
        InvalidInput: the directory is not a complete backup, the stores are in two databases, or the places are not
            empty.
        StorageError: the center runs, or a file cannot be read, written or used.
    """
    info = read_backup(source)
    files = store_files(config)
    stores = dict(zip((CATALOG, RESULTS), files or (config.data_dir / CATALOG, config.data_dir / RESULTS), strict=True))
    with exclusive_lock(config.data_dir), _storage_errors("the backup cannot be restored"):
        if files is None:
            require_new(config.catalog_url)
        for path in stores.values():
            if path.exists():
                free = "a directory without stores: move them away first"
                raise InvalidConfig("data_dir", str(config.data_dir), free, f"{path} exists already")
        roots = _roots(config)
        _require_empty(roots[LOG], "log_dir")
        _require_empty(roots[DELTAS], "deltas_dir")
        # The stores get their names after they are marked and the log is restored, so that no process uses them before.
        new = {name: path.with_name(f"{path.name}.restored") for name, path in stores.items()}
        for name, path in new.items():
            report(f"{name}: {info.sizes[name] >> 20} MiB")
            _remove_store(path)
            _copy_file(source / name, path)
            _check_store(path)
        with _stores(f"sqlite:///{new[CATALOG]}", f"sqlite:///{new[RESULTS]}") as (catalog, results):
            require_pair(catalog, results, _random())
            catalog.backups.begin_after_restore(now_ms())
            results.begin_after_restore(catalog.backups.lineage(), now_ms())
        try:
            _copy_segments({source / name: _path(roots, name) for name in info.segments}, report)
        except BaseException:
            for path in (each for root in roots.values() for each in root.glob("*")):
                shutil.rmtree(path, ignore_errors=True)
            raise
        if files is None:
            with _stores(config.catalog_url, config.results_url) as (_, results):
                SinkStore(results.engine).statuses()  # creates its tables
            load({database_backup.CATALOG: new[CATALOG], database_backup.RESULTS: new[RESULTS]}, config.catalog_url)
            for path in new.values():
                _remove_store(path)
            return info
        for name, path in stores.items():
            _close_wal(new[name])
            _remove_store(path)  # SQLite would apply a log that another database has left
            new[name].replace(path)
            sync_directory(path.parent)
    return info


def reconcile_stores(config: CenterConfig, now_ms: Callable[[], int]) -> None:
    """Makes a pair of a catalog and a result store of different moments.

    Raises:
        StorageError: the center runs.
    """
    with exclusive_lock(config.data_dir), _stores(config.catalog_url, config.results_url) as (catalog, results):
        reconcile(catalog, results, _random(), now_ms())


def store_files(config: CenterConfig) -> tuple[Path, Path] | None:
    """Returns the files of the catalog and of the results, or None if both are in one database of PostgreSQL.

    Raises:
        InvalidConfig: the stores are in two databases, or in one file.
    """
    catalog, results = (make_url(url) for url in (config.catalog_url, config.results_url))
    if catalog.get_backend_name() == "postgresql" and catalog == results:
        return None
    for field, url in (("catalog_url", catalog), ("results_url", results)):
        if url.get_backend_name() != "sqlite" or not url.database:
            accepted = "SQLite, or one database of PostgreSQL for both stores: two databases have no common moment"
            raise InvalidConfig(field, f"{url.get_backend_name()}:…", accepted)
    if catalog.database == results.database:
        raise InvalidConfig("results_url", None, "a file of its own for each store", "both stores are in one file")
    return Path(str(catalog.database)), Path(str(results.database))


@contextlib.contextmanager
def _stores(catalog_url: str, results_url: str) -> Iterator[tuple[Catalog, ResultStore]]:
    with contextlib.closing(Catalog(catalog_url)) as catalog, contextlib.closing(ResultStore(results_url)) as results:
        yield catalog, results


def _roots(config: CenterConfig) -> dict[str, Path]:
    """Returns the directories of segments, by their names in a backup."""
    return {LOG: config.log_dir, DELTAS: config.deltas_dir}


def _path(roots: dict[str, Path], name: str, within: str = "") -> Path:
    root, _, rest = name.partition("/")
    return roots[root] / within / rest


@contextlib.contextmanager
def _links(roots: dict[str, Path]) -> Iterator[None]:
    """Removes the links to the segments of a backup before and after the `with` block."""
    try:
        for root in roots.values():
            shutil.rmtree(root / LINKED, ignore_errors=True)  # left by a backup that was killed
        yield
    finally:
        for root in roots.values():
            shutil.rmtree(root / LINKED, ignore_errors=True)


@contextlib.contextmanager
def _snapshot(
    catalog: Path, results: Path, roots: dict[str, Path]
) -> Iterator[tuple[sqlite3.Connection, sqlite3.Connection]]:
    """Yields connections that see both stores at one moment, and links the segments of this moment."""
    with contextlib.ExitStack() as stack:
        readers = [_connect(stack, path) for path in (catalog, results)]
        with contextlib.ExitStack() as locks:
            for path in (results, catalog):
                _connect(locks, path).execute("BEGIN IMMEDIATE")
            for reader in readers:
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the snapshot begins with a read
            # While the stores are locked, no segment loses its last row, after which it may be removed.
            _link_all(roots, _segments_of(*readers))
        yield readers[0], readers[1]


def _connect(stack: contextlib.ExitStack, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
    stack.callback(connection.close)
    return connection


def _segments_of(catalog: sqlite3.Connection, results: sqlite3.Connection) -> list[str]:
    frames = catalog.execute("SELECT segment FROM frames UNION SELECT segment FROM quarantine ORDER BY 1")
    names = [f"{LOG}/{name}" for (name,) in frames]
    if "segment" in {column for _, column, *_ in results.execute("PRAGMA table_info(deltas)")}:  # not of 0.3
        deltas = results.execute("SELECT DISTINCT segment FROM deltas WHERE segment != '' ORDER BY 1")
        names += [f"{DELTAS}/{name}" for (name,) in deltas]
    return names


def _copy_store(source: sqlite3.Connection, target: Path, report: Report) -> None:
    def progress(_status: int, left: int, total: int) -> None:
        report(f"{target.name}: {total - left} of {total} pages")

    with contextlib.closing(sqlite3.connect(target)) as copy:
        source.backup(copy, pages=PAGES_AT_ONCE, progress=progress)
    _close_wal(target)


def _check_store(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StorageError(f"{path.name}: the backup is damaged: {found}")


def _close_wal(path: Path) -> None:
    """Moves the contents of the store's write-ahead log into the store's file, durably. The file alone is then the
    store.
    """
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=DELETE")
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove_store(path: Path) -> None:
    for left in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        left.unlink(missing_ok=True)


def _save_rows(reader: Connection, target: Path, report: Report) -> None:
    """Writes the rows of both stores to SQLite's files."""
    files = {name: target / name for name in (CATALOG, RESULTS)}
    with _stores(*(f"sqlite:///{file}" for file in files.values())):
        pass  # creates the tables
    for (name, file), tables in zip(files.items(), (database_backup.CATALOG, database_backup.RESULTS), strict=True):
        report(f"{name}: the rows of PostgreSQL")
        save(reader, tables, file)
        _close_wal(file)


def _link_all(roots: dict[str, Path], segments: list[str]) -> None:
    for name in segments:
        if not _SEGMENT.fullmatch(name):
            raise StorageError(f"a store names the segment {name[:200]!r}, which no center has written")
        _link(_path(roots, name), _path(roots, name, LINKED))


def _link(source: Path, target: Path) -> None:
    """Links a segment. A missing segment stays missing. The center states the loss when it reads the segment."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(source, target)


def _copy_segments(files: dict[Path, Path], report: Report) -> None:
    for number, (source, target) in enumerate(files.items()):
        if number % SEGMENTS_AT_ONCE == 0:
            report(f"segments: {number} of {len(files)}")
        _copy_file(source, target)


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def _require_empty(directory: Path, field: str) -> None:
    try:
        is_empty = not any(directory.iterdir())
    except FileNotFoundError:
        return
    except OSError as exc:
        raise InvalidInput(field, str(directory), "a directory that can be read", exc.strerror or str(exc)) from exc
    if not is_empty:
        raise InvalidInput(field, str(directory), "a new or an empty directory", "it is not empty")


@contextlib.contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as exc:
        raise StorageError(f"{what}: {exc}") from exc


def _random() -> int:
    return secrets.randbits(62) | 1

"""A PostgreSQL server of the tests' own: on loopback, in a directory that goes away with it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg

from sim.demo.ports import free_port
from tests.programs import running

OLDEST = 15
"""The first release whose databases may go by ICU's rules, which the tests want."""

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "fsync": "off",  # The operating system survives these tests; a killed server reads its WAL from there.
    # What an administrator may have set, and what the stores must not fall for:
    "default_transaction_isolation": "serializable",
    "synchronous_commit": "off",
}


def find_binaries() -> Path | None:
    """The directory of the newest server programs on this machine; None: none, or too old."""
    here = shutil.which("pg_ctl")
    homes = [Path(here).resolve().parent] if here else []
    homes += Path("/usr/lib/postgresql").glob("*/bin")
    homes += Path("/usr").glob("pgsql-*/bin")
    found = {_release(home): home for home in homes if (home / "initdb").exists() and (home / "pg_ctl").exists()}
    newest = max(found, default=0)
    return found[newest] if newest >= OLDEST else None


def _release(home: Path) -> int:
    said = subprocess.run([home / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    number = re.search(r"\d+", said)
    return int(number[0]) if number else 0


class PostgresServer:
    """Args:
    binaries: as `find_binaries` found them.
    directory: empty, and the account's.
    account: whom the server runs as, since it refuses root; None: whoever runs the tests.
    """

    def __init__(self, binaries: Path, directory: Path, account: str | None) -> None:
        self._binaries = binaries
        self._directory = directory
        # `setpriv` instead of the parameter `user`, with which Python forks: a fork beside threads of gRPC may crash.
        self._login: list[str] = []
        if account is not None:
            entry = pwd.getpwnam(account)
            self._login = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
        self._numbers = itertools.count(1)
        self._password = secrets.token_hex(16)
        self._port = free_port()
        self._address = f"tests:{self._password}@127.0.0.1:{self._port}/postgres"
        secret = directory / "password"
        secret.touch(mode=0o600)
        secret.write_text(self._password)
        if account is not None:
            shutil.chown(secret, account)
        locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=icu", "--icu-locale=en"]
        login = ["--username=tests", f"--pwfile={secret}", "--auth=password"]
        self._run("initdb", "--no-sync", *locale, *login)

    def new_standby(self, directory: Path) -> PostgresServer:
        """A copy of this running server, which follows it once it is started."""
        standby = copy(self)
        standby._directory, standby._port = directory, free_port()
        standby._run(
            "pg_basebackup", "--write-recovery-conf", "--checkpoint=fast", f"--dbname=postgresql://{self._address}"
        )
        standby._address = self._address.replace(f":{self._port}/", f":{standby._port}/")
        return standby

    def require_standby(self) -> None:
        """From now on a commit returns when a standby has it."""
        with psycopg.connect(f"postgresql://{self._address}", autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")

    def promote(self) -> None:
        """Makes a standby the server that takes writes, and waits until it does."""
        with psycopg.connect(f"postgresql://{self._address}", autocommit=True) as connection:
            row = connection.execute("SELECT pg_promote()").fetchone()
            assert row == (True,), row

    def url_of_pair(self, other: PostgresServer) -> str:
        """URL of whichever of the two takes writes."""
        login = self._address.partition("@")[0]
        hosts = f"host=127.0.0.1:{self._port}&host=127.0.0.1:{other._port}"
        return f"postgresql+psycopg://{login}@/postgres?{hosts}&target_session_attrs=read-write"

    def start(self, **settings: str) -> None:
        """Starts the server, or starts it again, and waits until it can be asked."""
        every = {**SETTINGS, **settings, "port": self._port}
        options = " ".join(f"-c {name}={shlex.quote(str(value))}" for name, value in every.items())
        self._run("pg_ctl", "start", "--wait", f"--log={self._directory}/log", f"--options={options}")

    def kill(self) -> None:
        """Ends every process of the server at once, without a checkpoint or a word to its clients, if it runs."""
        # Without a process of its own, and so in `promote`: a fork beside threads of gRPC may crash.
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            postmaster = psutil.Process(int((self._directory / "data" / "postmaster.pid").read_text().split()[0]))
            postmaster.send_signal(signal.SIGQUIT)
            postmaster.wait(60)

    def new_database(self) -> str:
        """URL of what looks like an empty database: a schema, which costs a millisecond."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(f"postgresql://{self._address}", autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"postgresql+psycopg://{self._address}?options={quote(f'-c search_path={name}')}"

    def new_database_in(self, encoding: str) -> str:
        """URL of an empty database in another encoding than UTF8."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(f"postgresql://{self._address}", autocommit=True) as connection:
            connection.execute(
                f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE_PROVIDER libc LOCALE 'C'"
            )
        return f"postgresql+psycopg://{self._address.rpartition('/')[0]}/{name}"

    @contextmanager
    def pooled(self, pgbouncer: str) -> Iterator[str]:
        """URL of a pooler before the server. All clients share one session, each for a transaction at a time."""
        user, password, host, port = re.split("[:@]", self._address.partition("/")[0])
        listen = free_port()
        ini = self._directory / f"pgbouncer-{listen}.ini"
        ini.write_text(
            f"[databases]\npostgres = host={host} port={port} user={user} password={password}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {listen}\nunix_socket_dir =\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 1\n"
        )
        ini.chmod(0o644)  # the account of the server reads it, whatever umask a test has left
        with running([*self._login, pgbouncer, str(ini)], stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            said = []
            while not said or b"process up" not in said[-1]:
                said.append(process.stderr.readline())
                assert said[-1], b"".join(said)
            yield f"postgresql://{user}@127.0.0.1:{listen}/postgres"

    def _run(self, program: str, *arguments: str) -> None:
        # Not captured by a pipe: the server would hold it open, and the call would never end.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                [*self._login, self._binaries / program, f"--pgdata={self._directory}/data", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=self._directory,
                env={**os.environ, "LC_ALL": "C"},
                timeout=60,
            )
            said.seek(0)
            assert done.returncode == 0, f"{program}: {said.read().decode(errors='replace')}"


@contextmanager
def serving(binaries: Path) -> Iterator[PostgresServer]:
    """A running server."""
    account = _unprivileged_account() if os.geteuid() == 0 else None
    # Not below pytest's own directory, which the account of the server may not enter.
    with tempfile.TemporaryDirectory(prefix="edgewater-postgres-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if account is not None:
            shutil.chown(directory, account)
        server = PostgresServer(binaries, directory, account)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def serving_pair(binaries: Path) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A server and its synchronous standby: what is committed at the first is at the second."""
    account = _unprivileged_account() if os.geteuid() == 0 else None
    with serving(binaries) as primary, tempfile.TemporaryDirectory(prefix="edgewater-postgres-") as name:
        if account is not None:
            shutil.chown(name, account)
        standby = primary.new_standby(Path(name))
        standby.start(default_transaction_isolation="read committed")  # a standby has no serializable one
        try:
            primary.require_standby()
            yield primary, standby
        finally:
            standby.kill()


def _unprivileged_account() -> str:
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"

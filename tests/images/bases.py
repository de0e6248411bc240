"""The images that others start from, made from Debian's packages under the names that the Containerfiles give.

No registry is asked. An image that is already in the storage under its name is used as it is.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.images.engine import Engine

PYTHON_PACKAGES = ("ca-certificates", "netbase", "python3", "python3-venv", "tzdata", "usr-is-merged")
# As in Debian's slim images: no manuals, but the folder that update-alternatives writes to.
PYTHON = """\
FROM scratch
ADD root.tar /
RUN ln -s /usr/bin/python3 /usr/local/bin/python && mkdir -p /usr/share/man/man1
CMD ["python3"]
"""
LEFT_OUT = ("man", "doc", "locale", "info")

# What the manifests ask of docker.io/library/postgres: its variables, its user 999 and its folder.
POSTGRES = """\
FROM {base}
RUN groupadd --gid 999 postgres && useradd --uid 999 --gid 999 --home-dir /var/lib/postgresql postgres && \\
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends postgresql-15 && \\
    rm -rf /var/lib/apt/lists/* /var/lib/postgresql && install -d -o 999 -g 999 /var/lib/postgresql/data
COPY entrypoint /usr/local/bin/entrypoint
RUN chmod 0755 /usr/local/bin/entrypoint
ENV PATH=/usr/lib/postgresql/15/bin:$PATH PGDATA=/var/lib/postgresql/data
VOLUME ["/var/lib/postgresql/data"]
ENTRYPOINT ["entrypoint"]
"""
ENTRYPOINT = """\
#!/bin/sh
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth-host=scram-sha-256 --encoding=UTF8
    echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
    pg_ctl --wait --options='-c listen_addresses=' start
    createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl --wait stop
fi
exec postgres -c listen_addresses='*'
"""


def python(engine: Engine, name: str) -> None:
    """Makes `name`, such as docker.io/library/python:3.11.13-slim-bookworm, with the Python 3.11 of bookworm."""
    if engine.has(name):
        return
    context = engine.home / "python"
    context.mkdir(exist_ok=True)
    command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PYTHON_PACKAGES)}"]
    command += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in LEFT_OUT]
    done = subprocess.run(
        [*command, "bookworm", str(context / "root.tar")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _build(engine, context, PYTHON, name)
    (context / "root.tar").unlink()


def postgres(engine: Engine, name: str, base: str) -> None:
    """Makes `name`, such as docker.io/library/postgres:17.5-bookworm, with the PostgreSQL 15 of bookworm."""
    if engine.has(name):
        return
    context = engine.home / "postgres"
    context.mkdir(exist_ok=True)
    (context / "entrypoint").write_text(ENTRYPOINT)
    _build(engine, context, POSTGRES.format(base=base), name)


def _build(engine: Engine, context: Path, text: str, name: str) -> None:
    (context / "Containerfile").write_text(text)
    engine.build(context, context / "Containerfile", name)

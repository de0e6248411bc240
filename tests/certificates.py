"""A certificate authority and certificates of it, made by `openssl` when a test runs."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path


def make_certificates(path: Path, names: Mapping[str, str], expired: Collection[str] = ()) -> Path:
    """Writes ``ca.pem`` and, for each name, ``<name>.pem`` and ``<name>.key`` into `path`; returns it.

    Args:
        names: common name -> subject alternative name, such as ``DNS:localhost``.
        expired: the names of certificates that expired yesterday.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=path, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    for name, alternative in names.items():
        (path / f"{name}.ext").write_text(f"subjectAltName={alternative}")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-out", f"{name}.pem", "-extfile", f"{name}.ext", "-days", "-1" if name in expired else "2"),
        )
    return path

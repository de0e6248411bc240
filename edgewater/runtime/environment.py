"""Variables of the environment that would decide where data and tokens go, or how children read names of files."""

from __future__ import annotations

import locale
import logging
import sys
from collections.abc import MutableMapping

PROXIES = tuple(
    "http_proxy https_proxy all_proxy grpc_proxy mqtt_proxy ws_proxy wss_proxy ftp_proxy no_proxy no_grpc_proxy".split()
)
"""Variables by which libraries of HTTP, gRPC and MQTT choose a proxy, or go past the one that is configured."""
log = logging.getLogger(__name__)


def settle(environ: MutableMapping[str, str]) -> None:
    """Makes a process of Edgewater independent of proxies and of the locale. Called once, before a command begins.

    - Variables that name a proxy are removed, with a warning: a proxy is a key of the configuration. Otherwise a
      variable of a shell would decide who reads tokens and answers. Libraries without such a key, and children, then
      have no proxy.
    - Children get a locale of UTF-8 if this process encodes names of files so: Python does with the locale ``POSIX``,
      and the JVM does not.
    """
    for name in [name for name in environ if name.lower() in PROXIES]:
        log.warning("the variable %s is not used: a proxy is the key `proxy` of a connection", name)
        del environ[name]
    if sys.getfilesystemencoding() == "utf-8" and locale.nl_langinfo(locale.CODESET) != "UTF-8":
        environ["LC_ALL"] = "C.UTF-8"

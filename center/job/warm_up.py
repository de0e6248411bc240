"""Checks what executors have installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

DISTRIBUTION = "edgewater"


def installed_on_executors(spark: Any, cores: int, distribution: str = DISTRIBUTION) -> dict[str, str]:
    """Returns the version of a distribution by executor host; empty: it is not installed there.

    Raises PySparkException or Py4JError if executors have another Python.
    """

    def probe(numbers: Any) -> Any:  # a nested function is sent as code, so executors need none of our modules
        import platform
        from importlib.metadata import PackageNotFoundError, version

        for _ in numbers:
            pass
        try:
            found = version(distribution)
        except PackageNotFoundError:
            found = ""
        yield platform.node(), found

    return dict(spark.sparkContext.parallelize(range(cores), cores).mapPartitions(probe).collect())


def problem_of_executors(spark: Any, cores: int, distribution: str = DISTRIBUTION) -> str:
    """Returns why executors cannot do the job's work, and what to do; empty: they can, or this is no installed release.

    Raises PySparkException or Py4JError if executors have another Python.
    """
    try:
        wanted = version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
    for host, found in sorted(installed_on_executors(spark, cores, distribution).items()):
        if found != wanted:
            has = f"{distribution} {found}" if found else f"no {distribution}"
            return (
                f"the Python of the executors on {host} has {has}; expected {wanted}, as here. Install it there at the"
                " same path, or ship it with spark.archives: see docs/reference/center.md"
            )
    return ""

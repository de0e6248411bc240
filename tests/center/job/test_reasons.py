"""The reason of a failure of Spark, as /readyz and the log state it: one line that names the exception."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import PySparkException

from center.job.batch_applier import reason_of
from edgewater.base.errors import StorageError

TRACEBACK = """Traceback (most recent call last):
  File "<frozen runpy>", line 189, in _run_module_as_main
  File "/a/b.py", line 1, in f

    raise ModuleNotFoundError(
ModuleNotFoundError: No module named 'center.job'"""
INDENTED = "\n".join(f"  {line}" for line in TRACEBACK.splitlines())
CHAINED = f"""{TRACEBACK}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/a/c.py", line 2, in g
RuntimeError: no such package"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            f"[E] Failed to create: {TRACEBACK}\n",
            "[E] Failed to create: ModuleNotFoundError: No module named 'center.job'",
        ),
        (
            f"\nJob aborted: \nError from python worker:\n{INDENTED}\nPYTHONPATH was:\n  /a\n\tat org.apache",
            "Job aborted: ModuleNotFoundError: No module named 'center.job'",
        ),
        (f"A worker failed.\n{CHAINED}\n", "A worker failed: RuntimeError: no such package"),
        ("[E] one line", "[E] one line"),
        ("[E] first\n\tat org.apache.A.b(A.scala)", "[E] first"),
        ("cut: Traceback (most recent call last):", "cut"),
        ("", ""),
    ],
)
def test_the_reason_names_the_exception_of_the_python_process(message: str, reason: str) -> None:
    assert reason_of(PySparkException(message)) == f"PySparkException: {reason}"


def test_the_reason_of_our_own_error_begins_with_its_code() -> None:
    assert reason_of(StorageError("the disk is full")) == "storage: the disk is full"


@pytest.mark.spark
def test_the_reason_of_a_function_that_fails_on_a_worker_names_its_exception(spark: Any) -> None:
    def fail(_: Any) -> Any:
        raise LookupError("no such key")

    with pytest.raises(PySparkException) as caught:
        spark.sparkContext.parallelize([1], 1).mapPartitions(fail).collect()

    assert "LookupError: no such key" in reason_of(caught.value)
    assert "\n" not in reason_of(caught.value)

"""A Spark driver as the job starts it; run by test_spark_on_kubernetes in a process of its own.

Reads the session's configuration as JSON on stdin, runs one Python stage on the executors, and prints what came back.
"""

from __future__ import annotations

import json
import os
import sys

from center.spark.spark_session import SessionConfig, start_session


def main() -> None:
    given = json.load(sys.stdin)
    session = start_session(SessionConfig(master=given["master"], conf=given["settings"]))
    driver = os.getpid()

    def where_am_i(batches):  # type: ignore[no-untyped-def]
        for batch in batches:
            assert os.getpid() != driver
            yield batch

    counted = session.range(1000).mapInArrow(where_am_i, "id long").count()
    print(json.dumps({"counted": counted}), flush=True)
    session.stop()


if __name__ == "__main__":
    main()

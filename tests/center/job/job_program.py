"""Runs the job on a directory as `tests/center/job/conftest.py` lays it out, until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

from center.config import CenterConfig
from center.job.admission import BatchLimits
from center.job.job import Job

if __name__ == "__main__":
    path, frames, keep_frames_ms = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(stream=sys.stdout, format="%(relativeCreated)d %(levelname)s %(message)s")
    logging.getLogger("center").setLevel(logging.DEBUG)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    config = CenterConfig.from_mapping({"data_dir": str(path), "retention": {"frames": f"{keep_frames_ms}ms"}})
    Job(config, limits=BatchLimits(frames=frames)).run(stop)
    print("stopped", flush=True)

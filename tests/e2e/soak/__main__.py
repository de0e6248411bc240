"""``python -m tests.e2e.soak --seconds 600 --seed 1``: exit status 0 only if no statement was false."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.e2e.soak.plan import FAULTS
from tests.e2e.soak.run import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="starts no episode after so long (600)")
    parser.add_argument("--seed", type=int, default=1, help="draws everything (1)")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"kinds of faults: {', '.join(FAULTS)}")
    parser.add_argument("--drivers", type=int, default=1, help="that lead at the same time, beside a standby (1)")
    parser.add_argument("--episode", type=int, help="runs only this episode of the seed")
    parser.add_argument("--keep", action="store_true", help="keeps the directory with logs and states")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes the report to FILE")
    options = parser.parse_args()
    kinds = options.faults.split(",")
    if unknown := sorted(set(kinds) - set(FAULTS)):
        parser.error(f"--faults: {', '.join(unknown)} is not among {', '.join(FAULTS)}")
    directory = Path(tempfile.mkdtemp(prefix="edgewater-soak-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of the soak, too
    soak = Soak(directory, options.seed, kinds, drivers=options.drivers, say=lambda text: print(text, flush=True))
    report = soak.run(options.seconds, only=options.episode, keep=options.keep)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=1))
    if options.keep:
        print(f"kept: {directory}")
    print(report.summary())
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())

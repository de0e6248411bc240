"""`python -m bench.hostile [--seconds 60] [--seed 1] [--only partial/kll]`: fuzzes input from outside.

Every target gets an equal part of the time. A mutant is made from an honest input, or from a mutant that the target
accepted; each target has its own generator, so that `--only` repeats its mutants. Failures are: an error outside the
tree of `edgewater.base.errors`, a warning (a number that is not one), memory beyond its bound, and a run that takes
more CPU time than the target's seconds, three times in a row. Memory is measured for one mutant in `--measure`. The
first failures of each target are written to `bench/out/hostile` as hex, and `--replay FILE` runs one again.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
import traceback
import tracemalloc
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import click
import numpy as np
import pyarrow as pa

from bench.hostile.targets import Target, all_targets
from bench.outcome import store_result

OUT = Path("bench/out/hostile")
MEMORY_BYTES = 3 << 30
KEPT = 400  # accepted mutants per target
_TRACING = 10  # factor by which measuring memory slows a run down, at most
TRIES = 3  # of a run that takes too long
SHOWN = 5  # maximum failures of one place in the code that are written


class Hung(Exception):
    """A run that took more CPU time than its target's seconds."""


@dataclass
class Outcome:
    """The counters of one target."""

    mutants: int = 0
    accepted: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    slowest_ms: float = 0.0
    slowest_bytes: int = 0
    peak_bytes: int = 0
    peak_share: float = 0.0  # maximum share of the limit
    seconds: float = 0.0


def fuzz(target: Target, seed: int, seconds: float, mutants: int | None, measure: int) -> Outcome:
    """Runs mutants of a target for some time, or a number of mutants, and the inputs that they are made from."""
    signal.signal(signal.SIGPROF, _on_alarm)
    rng = np.random.default_rng([seed, zlib.crc32(target.name.encode())])
    corpus = target.corpus()
    for data in corpus[:mutants]:
        target.run(data)
    grown: list[bytes] = []
    outcome = Outcome()
    begin = time.perf_counter()
    while (time.perf_counter() - begin < seconds) if mutants is None else outcome.mutants < mutants:
        held = grown if grown and rng.random() < 0.5 else corpus
        with np.errstate(all="ignore"):
            data = target.mutate(held[int(rng.integers(len(held)))], rng)
        outcome.mutants += 1
        measured = outcome.mutants % measure == 0
        started = time.process_time()
        try:
            accepted = _run_again(target, data, measured, outcome)
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            _report(target, data, exc, outcome)
            continue
        took_ms = 1e3 * (time.process_time() - started)
        if not measured and took_ms > outcome.slowest_ms:
            outcome.slowest_ms, outcome.slowest_bytes = took_ms, len(data)
        if accepted:
            outcome.accepted += 1
            if len(data) < 20_000:
                if len(grown) < KEPT:
                    grown.append(data)
                else:
                    grown[int(rng.integers(KEPT))] = data
    outcome.seconds = time.perf_counter() - begin
    return outcome


class Pace:
    """How much slower the machine is than at its best, because of programs beside this one."""

    def __init__(self) -> None:
        self._best_s = min(self._loop_s() for _ in range(5))

    def _loop_s(self) -> float:
        began = time.process_time()
        sum(range(100_000))
        return time.process_time() - began

    def slowdown(self) -> float:
        """Returns the CPU time of a fixed loop, as a multiple of its least CPU time so far."""
        now_s = self._loop_s()
        self._best_s = min(self._best_s, now_s)
        return now_s / self._best_s


PACE = Pace()


def _run_again(target: Target, data: bytes, measured: bool, outcome: Outcome) -> bool:
    """Runs one input, and again if it takes too long. A run that hangs does so each time."""
    seconds = target.seconds
    for _ in range(TRIES - 1):
        try:
            return _run(target, data, measured, outcome, seconds)
        except Hung:
            seconds = target.seconds * PACE.slowdown()
    return _run(target, data, measured, outcome, seconds)


def _run(target: Target, data: bytes, measured: bool, outcome: Outcome, seconds: float) -> bool:
    """Runs one input. Returns whether it was accepted. Raises an exception for a failure."""
    signal.setitimer(signal.ITIMER_PROF, seconds * (_TRACING if measured else 1))
    if measured:
        tracemalloc.start()
    arrow = pa.total_allocated_bytes()
    try:
        target.run(data)
        accepted = True
    except target.errors as exc:
        str(exc)
        accepted = False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if measured:
            peak = tracemalloc.get_traced_memory()[1] + max(pa.total_allocated_bytes() - arrow, 0)
            tracemalloc.stop()
    if measured:
        outcome.peak_bytes = max(outcome.peak_bytes, peak)
        limit = target.limit(data)
        if limit is not None:
            outcome.peak_share = max(outcome.peak_share, peak / limit)
            if peak > limit:
                raise MemoryError(f"{peak} bytes for an input of {len(data)}, at most {limit}")
    return accepted


def _report(target: Target, data: bytes, exc: BaseException, outcome: Outcome) -> None:
    place = traceback.extract_tb(exc.__traceback__)[-1]
    inside = next(
        (f for f in reversed(traceback.extract_tb(exc.__traceback__)) if "/site-packages/" not in f.filename), place
    )
    key = f"{type(exc).__name__} at {Path(inside.filename).name}:{inside.lineno} {str(exc)[:120]!r}"
    place_key = key.split(" ", maxsplit=1)[0] + key.split(" ")[2]
    seen = sum(n for k, n in outcome.failures.items() if k.split(" ")[0] + k.split(" ")[2] == place_key)
    outcome.failures[key] += 1
    if seen < SHOWN:
        OUT.mkdir(parents=True, exist_ok=True)
        name = f"{target.name.replace('/', '-')}-{inside.lineno}-{zlib.crc32(data):08x}.hex"
        (OUT / name).write_text(data.hex())
        click.echo(f"{target.name}: {key}; {OUT / name}", err=True)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Hung("it takes longer than its seconds")


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def table(outcomes: dict[str, Outcome]) -> str:
    heads = ("mutants", "accepted", "failures", "slowest", "per byte", "peak", "of limit")
    lines = [f"{'target':26}" + "".join(f"{head:>10}" for head in heads)]
    for name, o in outcomes.items():
        per_byte = 1e3 * o.slowest_ms / max(o.slowest_bytes, 1)
        lines.append(
            f"{name:26}{o.mutants:>10}{o.accepted / max(o.mutants, 1):>10.1%}{sum(o.failures.values()):>10}"
            f"{o.slowest_ms:>8.1f}ms{per_byte:>8.1f}µs{o.peak_bytes >> 10:>7}KiB{o.peak_share:>10.1%}"
        )
    total = sum(o.mutants for o in outcomes.values())
    failures = sum(sum(o.failures.values()) for o in outcomes.values())
    seconds = sum(o.seconds for o in outcomes.values())
    return "\n".join([*lines, f"{total} mutants in {seconds:.0f} s, {failures} failures"])


@click.command()
@click.option("--seconds", default=60.0, help="altogether")
@click.option("--mutants", type=int, help="per target, instead of seconds")
@click.option("--seed", default=1)
@click.option("--only", multiple=True, help="a target, or the beginning of several")
@click.option("--measure", default=50, help="memory is measured of one mutant in so many")
@click.option("--smoke", is_flag=True, help="a few mutants of each target")
@click.option("--replay", type=click.Path(exists=True, path_type=Path), help="a file of a failure; with --only")
def main(
    seconds: float,
    mutants: int | None,
    seed: int,
    only: tuple[str, ...],
    measure: int,
    smoke: bool,
    replay: Path | None,
) -> None:
    """Fuzzes input from outside, and ends with 1 if anything fails."""
    targets = {n: t for n, t in all_targets().items() if not only or n.startswith(only)}
    if not targets:
        raise click.BadParameter(f"none of {', '.join(all_targets())}", param_hint="--only")
    _limit_memory()
    warnings.simplefilter("error")
    if replay is not None:
        for target in targets.values():
            target.corpus()
            target.run(bytes.fromhex(replay.read_text()))
        return
    if smoke:
        mutants, measure = 1, 1
    outcomes = {}
    for number, (name, target) in enumerate(targets.items(), 1):
        outcomes[name] = fuzz(target, seed, seconds / len(targets), mutants, measure)
        click.echo(f"{number} of {len(targets)}: {name}, {outcomes[name].mutants} mutants", err=True)
    click.echo(table(outcomes))
    store_result(OUT / "result.json", {name: {**vars(o), "failures": dict(o.failures)} for name, o in outcomes.items()})
    sys.exit(1 if any(o.failures for o in outcomes.values()) else 0)


if __name__ == "__main__":
    main()

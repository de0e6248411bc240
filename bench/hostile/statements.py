"""Targets: statements of edges beside their partials, as the gateway checks them and the ledger and the allocator use
them.

The invariant: a statement that cannot be true neither keeps a contract nor hides another edge's statement.
"""

from __future__ import annotations

import json
import math
from typing import Any

import google_crc32c
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from bench.hostile.mutate import FLOATS, NUMBERS, Rng, mutated_bytes, pick
from bench.hostile.targets import Target, register
from center.budgets.allocation import BudgetAllocator
from center.ingest.frame_check import FrameCheck
from center.ingest.validation import Hello, read_budget_report, read_heartbeat, read_utilization
from center.ledger.window_facts import window_facts
from center.ledger.withheld import CloseTotals
from center.serving.totals import Rests
from edgewater.answers.statement import ERROR_BUDGET, judged
from edgewater.answers.stored import facts_from_json, facts_to_json
from edgewater.base.errors import ProtocolError
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.wire import (
    DroppedRecords,
    DropReason,
    Encoding,
    Frame,
    FrameBody,
    InputLoss,
    QueryRef,
    Rest,
    SliceClose,
    Withheld,
    body_from_wire,
)
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import encode_body

SPEC = QuerySpec.from_mapping({
    "name": "q", "from": "events", "measures": {"s": "sum(x)", "m": "max(x)", "n": "count()"},
    "window": {"tumbling": "1s"}, "budget": {"error": {"s": 10, "m": 10, "n": 10}},
})  # fmt: skip
NOW_MS = 1_700_000_000_000
HONEST, EVIL = EdgeId("honest"), EdgeId("evil")
OVER = SliceClose(
    NOW_MS, 9, 0,
    (Withheld("s", 1e6, 0.0, 1, rest=Rest(3, (1e6, 1e-11))), Withheld("m", 1e6, 0.0, 1, rest=Rest(1, (1e6,)))),
)  # fmt: skip
"""An honest amount that exceeds the budget."""


def mutated_message(kind: type[Message], data: bytes, rng: Rng) -> bytes:
    """Sets some numbers of a message, and of its parts, to numbers at the borders of their types."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return mutated_bytes(data, rng)
    for _ in range(1 + int(rng.integers(4))):
        _set_number(message, rng)
    return message.SerializeToString()


def _set_number(message: Any, rng: Rng) -> None:
    field = pick(rng, message.DESCRIPTOR.fields)
    value = float(pick(rng, FLOATS)) if field.type == FieldDescriptor.TYPE_DOUBLE else int(pick(rng, NUMBERS))
    held = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if held and field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_DOUBLE:
            held[pick(rng, sorted(held))] = float(pick(rng, FLOATS))
    elif field.message_type is not None:
        repeated = hasattr(held, "add")
        _set_number((pick(rng, held) if len(held) else held.add()) if repeated else held, rng)
    elif field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64):
        try:
            if hasattr(held, "append"):
                held.append(value)
            else:
                setattr(message, field.name, value)
        except ValueError:  # beyond the range of the type
            setattr(message, field.name, -1 if field.type == FieldDescriptor.TYPE_INT64 else 0)


def honest_bodies() -> list[bytes]:
    withheld = Withheld("s", 1.5, 0.0, 2, rest=Rest(3, (3.0,))), Withheld("m", 0.0, 0.0, 0, 7.0)
    body = FrameBody(
        NOW_MS, (), (SliceClose(NOW_MS - 1_000, 5, 1, withheld), SliceClose(NOW_MS, 3, 0, withheld[:1])), None, None,
        (InputLoss("s", "file-gone", 1, 2, 3),), (DroppedRecords(NOW_MS - 9_000, DropReason.TOO_LATE, 4),),
    )  # fmt: skip
    return [encode_body(body)]


def run_body(data: bytes) -> None:
    try:
        plain = pb.FrameBody.FromString(data).SerializeToString()
    except DecodeError:
        return
    frame = Frame(1, QueryRef("q", 1), plain, google_crc32c.value(plain), Encoding.PLAIN, len(plain))
    facts = FrameCheck(SPEC).check(frame, NOW_MS + 60_000).facts
    checked = body_from_wire(pb.FrameBody.FromString(facts))
    closes = [OVER, *checked.closes]
    for order in (closes, closes[::-1]):
        totals = CloseTotals.of_closes(order, SPEC)
        given = window_facts(SPEC, totals, expected=2, staleness_ms=0, first_staleness_ms=0)
        stated = facts_from_json(facts_to_json(given))
        statement = judged(stated, (), SPEC)
        json.dumps(statement.quality(), allow_nan=False)
        rests = Rests(stated.rests)
        for measure in SPEC.measures:
            rests.merged(measure, rests.stack_without_data(measure)).query()
        codes = [v.message.partition(":")[0] for v in statement.contract.violations if v.code == ERROR_BUDGET]
        if not {"s", "m"} <= set(codes):
            raise AssertionError(f"the honest violation of s and m is hidden: {codes}")
        for bound in stated.withheld.values():
            if not (bound.above >= 0 and bound.below >= 0):
                raise AssertionError(f"a bound of {bound}")


def honest_reports() -> list[bytes]:
    beat = pb.Heartbeat(bandwidth_bytes_s=1e6, rtt_ms=20.0, busy_share=0.5, sent_at_ms=NOW_MS, backlog_bytes=9)
    beat.streams.add(stream="events", watermark_ms=NOW_MS, records=7)
    report = pb.BudgetReport(query="q", query_version=1, version=0, from_ms=NOW_MS, update_bytes=80.0)
    report.shares["s"], report.drift_per_s["s"] = 0.0, 4.0
    return [pb.FromEdge(heartbeat=beat).SerializeToString(), pb.FromEdge(budget_report=report).SerializeToString()]


def run_report(data: bytes) -> None:
    try:
        message = pb.FromEdge.FromString(data)
    except DecodeError:
        return
    beat = read_heartbeat(Hello(EVIL, "i", {}, (), 0, 0, 0, 1), message.heartbeat, NOW_MS)
    figures = (beat.bandwidth_bytes_s, beat.rtt_ms, read_utilization(message.heartbeat))
    if not all(0 <= value < math.inf for value in figures) or max(beat.records.values(), default=0) >> 63:
        raise AssertionError(f"figures {figures}, {beat.records}")
    if not message.HasField("budget_report"):
        return
    _, report = read_budget_report(EVIL, message.budget_report)
    allocator = BudgetAllocator({"s": 10.0}, {})
    allocator.set_members(frozenset((HONEST, EVIL)), {})
    for now_ms in range(NOW_MS, NOW_MS + 100_000, 20_000):
        for edge in (HONEST, EVIL):
            allocator.report(edge, report if edge == EVIL else _own(allocator), now_ms)
        allocator.rebalance(now_ms, NOW_MS + 60_000)
        for edge, grant in allocator.grants().items():
            if not all(0 <= share <= 10.0 for share in grant.shares.values()):
                raise AssertionError(f"{edge} is granted {grant}")
    if allocator.holdings[HONEST].grant.shares and not allocator.in_force(MAX_TIME_MS)["s"] >= 0:
        raise AssertionError("the shares in force are not a number")


def _own(allocator: BudgetAllocator) -> Any:
    """Returns an honest edge's report: the last grant, confirmed."""
    grant = allocator.grants().get(HONEST)
    _, honest = read_budget_report(HONEST, pb.FromEdge.FromString(honest_reports()[1]).budget_report)
    if grant is None:
        return honest
    return type(honest)(grant.version, grant.shares, grant.from_ms, honest.update_bytes, honest.drift)


register(Target("statements/frame", honest_bodies, run_body, lambda d, r: mutated_message(pb.FrameBody, d, r)))
register(
    Target(
        "statements/report", honest_reports, run_report, lambda d, r: mutated_message(pb.FromEdge, d, r),
        errors=(ProtocolError,),
    )
)  # fmt: skip

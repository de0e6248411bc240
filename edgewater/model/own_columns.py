"""The columns that describe an answer. Each table of answers begins with them, at the center and at its client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edgewater.base.timestamps import rfc3339
from edgewater.model import replies

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class OwnColumn:
    """A column that describes the answer.

    Attributes:
        read: returns the value from an answer's JSON; None: the value is a time.
        is_series: it is a series of Prometheus, too.
    """

    kind: Literal["time", "text", "int64", "float64"]
    read: Callable[[replies.Members], str | float | None] | None = None
    is_series: bool = False


def contract_codes(contract: replies.StatedContract) -> str:
    """Returns the codes of a contract's violations as text. Without violations, ``met``; of an exact query to whose
    window late records may follow, ``met; may-change``.
    """
    met = "met; may-change" if contract.get("may_change") and "exact" in contract["requested"] else "met"
    return "; ".join(violation["code"] for violation in contract["violations"]) or met


def _withheld(answer: replies.Members) -> str:
    return json.dumps(answer["quality"]["error"]["withheld"], separators=(",", ":"), ensure_ascii=False)


OWN_COLUMNS: Mapping[str, OwnColumn] = {
    "window_start": OwnColumn("time"),
    "window_end": OwnColumn("time"),
    "phase": OwnColumn("text", lambda answer: answer["phase"]),
    "revision": OwnColumn("int64", lambda answer: answer["revision"]),
    "completeness": OwnColumn("float64", lambda answer: answer["quality"]["completeness"]["ratio"], is_series=True),
    "given_at": OwnColumn("time"),
    "contract": OwnColumn("text", lambda answer: contract_codes(answer["contract"])),
    "withheld": OwnColumn("text", _withheld),
}
"""By name, in their order in tables."""
ADDED_COLUMNS = ("query", "version", "day", "answer_id", "data_of", *OWN_COLUMNS)
"""All columns that the product adds to the columns of a query, in any table or message."""


def own_names(columns: Iterable[str]) -> dict[str, str]:
    """Returns the name of each of `ADDED_COLUMNS` beside the columns of a query.

    If a group or a measure has the name, the prefix ``answer_`` is added. SQL and lakes ignore the case of names, so
    names that differ only in their case count as equal. The names are the same in every table of the query.
    """
    taken, names = {column.casefold() for column in columns}, dict[str, str]()
    for added in ADDED_COLUMNS:
        names[added] = added
        while names[added] in taken:
            names[added] = f"answer_{names[added]}"
    return names


def with_own_columns(
    table: pa.Table, answer: replies.Members, times_ms: Mapping[str, int], *, text_times: bool = False
) -> pa.Table:
    """Returns the rows of an answer behind `OWN_COLUMNS`. A name that is in use gets a prefix (`own_names`).

    Args:
        answer: its JSON; the rows are not read.
        times_ms: unix ms by column of the kind ``time``.
        text_times: whether times are RFC 3339 texts instead of timestamps.
    """
    import pyarrow as pa

    types: dict[str, Any] = {"text": pa.string(), "int64": pa.int64(), "float64": pa.float64()}
    types["time"] = pa.string() if text_times else pa.timestamp("ms", "UTC")
    names = own_names(table.column_names)
    for at, (name, column) in enumerate(OWN_COLUMNS.items()):
        value: str | float | None
        if column.read is None:
            value = rfc3339(times_ms[name]) if text_times else times_ms[name]
        else:
            value = column.read(answer)
        table = table.add_column(at, names[name], pa.repeat(pa.scalar(value, types[column.kind]), table.num_rows))
    return table

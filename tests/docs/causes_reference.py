"""Writes `docs/reference/causes.md`: why an answer may deviate from its records, and what that does to its bounds.

`python -m tests.docs.causes_reference`.
"""

from __future__ import annotations

from pathlib import Path

from edgewater.answers import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "causes.md"
HEAD = """\
# Reference: what an answer may lack

An answer states each reason why it may not be the answer over all records of its window. The code is in
`contract.violations`; edges and numbers are in `quality.completeness`. This page is
`python -m tests.docs.causes_reference`; a test compares it with the code.

What a reason does to the bounds of a value follows from the number of records that the answer lacks:

- **unknown**: further records can only raise a count or a maximum, and lower a minimum. Such a value keeps its other
  bound. Other values have no bounds. If an edge's records are only in some groups (`completeness.only`), the other
  groups keep their bounds.
- **their exact number**: a count keeps both bounds, and its upper bound is higher by the number. `distinct`, `top_k`,
  frequencies, ranks and quantiles are widened as by
  [records that edges withhold](../explanation/budgets.md#how-an-interval-follows-from-what-is-withheld). A sum, a mean,
  a variance, a minimum and a maximum keep bounds by the values that edges of this release state of late records. Of
  other records, nothing bounds their effect on such a value.
- **late records that may follow** (`may-change`): a record that comes after its window was closed is late. An answer
  allows for the largest part of late records that one of the last 100 windows had, so its bounds hold with a stated
  confidence (`completeness.may_change`): 1 − s/(k + 1) after k windows. s is 1, or 2 to 3 if a
  bound depends on several amounts, such as that of a mean. A final answer allows for the records that final answers to
  these windows lack. With a `lateness`, there are usually none. The contract is met if the widened bounds are within
  its budget or accuracy, all of them are known, and the confidence is at least 0.95. Otherwise the violation is
  `may-change`. A met contract then has the member `may_change`. An exact query has no budget for late records: such an
  answer has all records that have come, is met, and is not exact. Its bounds differ, and tables show the contract as
  `met; may-change`. A query without late records in the last 100 windows allows for none: `may_change` ends 100 windows
  after the last late record. For sliding windows, a window is as much time as its length. Until the first late record
  of a query nothing is known of late records, so answers allow for none; the next version of a query begins with what
  is known. A late record may lengthen a session or join two, so an answer to a session allows for an unknown number. A
  prediction of a query with an `accuracy` stands for late records, too.
- **too many**: if records may count twice, no value has bounds.

For example, 1,000 records have arrived and 2 came when the window was final: `count()` is 1000 with the bounds
[1000, 1002]. If the edge states that the values x of the 2 records are 3 and 4, `sum(x)` has bounds up to 7 above it.

| code | what has happened | lacks | has too many | a prediction may stand for the records | ends | alarm |
|---|---|---|---|---|---|---|
"""


def render() -> str:
    """Returns the page."""
    rows = (
        f"| `{cause}` | {rule.what} | {rule.lacks} | {rule.extra} | {'yes' if rule.predicted else 'no'} | {rule.ends} |"
        f" {f'`{rule.alarm}`' if rule.alarm else ''} |\n"
        for cause, rule in RULES.items()
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render())

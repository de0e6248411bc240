"""What a contract says where late records may follow."""

from __future__ import annotations

import numpy as np
import pytest

from edgewater.answers import Amount, Cause, Deviation, Facts, WithheldBound
from edgewater.answers.cells import CellColumn, IntervalPart
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import judged
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates

LATE = Facts(1, 1, 1.0, deviations=(Deviation(Cause.MAY_CHANGE, lacks=Amount(0, 3), confidence=0.99),))


def spec(**changes: object) -> QuerySpec:
    given = {"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1m"}}
    return QuerySpec.from_mapping({**given, **changes})


def counted(upper: float) -> CellColumn:
    value = np.array([100.0])
    return CellColumn("n", (IntervalPart("", Estimates(value, value, np.array([upper]), 0.99)),), OwnError())


def test_an_exact_query_is_met_but_not_exact_where_late_records_may_follow() -> None:
    contract = judged(LATE, [counted(103.0)], spec()).contract
    assert (contract.met, contract.codes, contract.to_json()["may_change"]) == (True, "met; may-change", True)
    none = judged(Facts(1, 1, 1.0), [counted(100.0)], spec()).contract
    assert none.codes == "met" and "may_change" not in none.to_json()
    within = judged(LATE, [counted(103.0)], spec(budget={"error": {"n": 5}})).contract
    assert (within.codes, within.to_json()["may_change"]) == ("met", True), "the budget covers them"


@pytest.mark.parametrize(("upper", "codes"), [(103.0, "met"), (110.0, "accuracy"), (np.nan, "accuracy")])
def test_late_records_that_may_follow_count_for_an_accuracy(upper: float, codes: str) -> None:
    query = spec(accuracy={"error": "5%", "confidence": "95%"}, lateness="1m")
    assert judged(LATE, [counted(upper)], query).contract.codes == codes


def test_input_that_is_lost_is_missing_though_each_expected_edge_has_closed_the_window() -> None:
    facts = Facts(1, 1, 1.0, observed=100, deviations=(Deviation(Cause.INPUT_LOST, lacks=Amount(0, 3)),))
    stated = judged(facts, [counted(np.nan)], spec()).quality()
    assert stated["records"]["expected"] is None and stated["error"]["missing"] == {"n": None}


def test_what_a_byte_budget_withholds_is_met_alone_and_exceeds_an_error_budget_beside_it() -> None:
    facts = Facts(1, 1, 1.0, withheld={"n": WithheldBound(9.0, 0.0)})
    column = CellColumn("n", (IntervalPart("", Estimates(*map(np.array, ([91.0], [91.0], [100.0])), 1.0)),), OwnError())
    bytes_ = {"bytes": "50MB per day"}
    alone = judged(facts, [column], spec(budget=bytes_)).contract
    assert (alone.met, alone.requested) == (True, {"bytes": "50000000B per day"})
    beside = judged(facts, [column], spec(budget={**bytes_, "error": {"n": 5}})).contract
    assert not beside.met and beside.codes.startswith("error-budget")
    assert any("budget.bytes" in violation.message for violation in beside.violations)
    assert judged(facts, [column], spec(budget={**bytes_, "error": {"n": 9}})).contract.met

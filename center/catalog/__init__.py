"""The catalog database: queries, edges, the index of the frame log, budgets, alarms and the liveness of components.

Gateways, the job and the API share it as their only common state. It decides nothing about answers and reads no frames.
"""

from center.catalog.budget_rows import BudgetStateChange
from center.catalog.delay_rows import QueryDelayRecord
from center.catalog.edges import (
    UNREACHABLE_AFTER_MS,
    AlarmRecord,
    EdgeRecord,
    HeartbeatRecord,
    QueryStatusRecord,
    StateDigest,
    StreamRecord,
    contributes,
    expected_edges,
)
from center.catalog.frame_index import IndexOutcome, LastPositions, UnindexedFrame, query_from_key, query_key
from center.catalog.input_rows import InputRecord
from center.catalog.liveness import (
    COMPONENTS,
    Component,
    ComponentHeartbeat,
    ComponentRegistry,
    ComponentStatus,
    HeartbeatThread,
    Role,
    component_status,
)
from center.catalog.quarantine import QuarantinedFrame
from center.catalog.query_rows import RegisteredQuery
from center.catalog.session_rows import SessionStart
from center.catalog.store import Catalog
from center.catalog.stream_rows import DeclaredStream, require_declared
from center.catalog.suspensions import SuspendedQuery

__all__ = [
    "COMPONENTS",
    "UNREACHABLE_AFTER_MS",
    "AlarmRecord",
    "BudgetStateChange",
    "Catalog",
    "Component",
    "ComponentHeartbeat",
    "ComponentRegistry",
    "ComponentStatus",
    "DeclaredStream",
    "EdgeRecord",
    "HeartbeatRecord",
    "HeartbeatThread",
    "IndexOutcome",
    "InputRecord",
    "LastPositions",
    "QuarantinedFrame",
    "QueryDelayRecord",
    "QueryStatusRecord",
    "RegisteredQuery",
    "Role",
    "SessionStart",
    "StateDigest",
    "StreamRecord",
    "SuspendedQuery",
    "UnindexedFrame",
    "component_status",
    "contributes",
    "expected_edges",
    "query_from_key",
    "query_key",
    "require_declared",
]

"""The catalog database: queries, edges, the index of the frame log, budgets, alarms and the liveness of components.

Gateways, the job and the API share this state and no other. The catalog does not decide which answers are given, and
does not read frames.
"""

from center.catalog.alarms import AlarmRecord
from center.catalog.budgets import BudgetStateChange
from center.catalog.catalog import Catalog
from center.catalog.frame_index import IndexOutcome, LastPositions, UnindexedFrame
from center.catalog.liveness import (
    COMPONENTS,
    Component,
    ComponentHeartbeat,
    ComponentRegistry,
    HeartbeatThread,
    Role,
    component_status,
)
from center.catalog.quarantine import QuarantinedRecord, SetAside, SetAsideRecord
from center.catalog.queries import Change
from center.catalog.session_rows import SessionStart
from center.catalog.streams import DeclaredStream, require_declared
from center.catalog.table_rows import TableRecord

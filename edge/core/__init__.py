"""The deterministic state machine of an edge: events in, effects out.

`EdgeCore` aggregates ingested batches per query and slice, and builds frames when the uplink pulls. Run by
`edge.durability`, which journals its events, and by the simulator. It has no clock, no I/O and no randomness: times and
the measured link are in the events.
"""

from edge.core.budget_schedule import ShareSchedule
from edge.core.core import QUEUED, EdgeCore
from edge.core.drift import DriftRates
from edge.core.events import (
    Acked,
    BackfillEnded,
    BackfillIngested,
    BudgetSet,
    Configured,
    Dropped,
    Effect,
    Event,
    FrameBuilt,
    FrameDiverged,
    FunctionFailed,
    Ingested,
    InputLost,
    MemoryLimited,
    PullEvent,
    PullReplayed,
    QueryAccepted,
    QueryRefused,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    TickEvent,
)
from edge.core.memory import MemoryAction, SliceMemoryLimits, next_limit
from edge.core.pull_planner import MAX_FRAME_BYTES
from edge.core.query_pipeline import QueryPipeline
from edge.core.streams import StreamSpec, StreamState

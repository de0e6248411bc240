"""Durability of the edge: journal, checkpoints, recovery, group commit, and the file of the daily quota.

`edge.agent` runs `DurableCore` and `JournalGroupCommit`. `edge.uplink` waits for commits. `edge.cli` inspects journals.
The package decides nothing about records or frames: it stores the core's events and state, and replays them.
"""

from edge.durability import journal
from edge.durability.durable_core import DurableCore
from edge.durability.event_records import PAYLOAD
from edge.durability.group_commit import JournalGroupCommit
from edge.durability.quota_file import QuotaFile
from edge.durability.recovery import Reread
from edge.durability.state_dir import IDENTITY, load_identity, lock_state_dir

"""The edge's gRPC client: sessions with the center, flow control of frames, and the agent's end of the protocol.

`edge.agent` builds it. It moves frames and control messages, and does not decide what is in a frame. It has no durable
state: frames and acknowledgements are in the journal. Importing it loads gRPC.
"""

from edge.uplink.client import Uplink
from edge.uplink.flow_control import DailyQuota, LinkForecast, LinkLimits
from edge.uplink.outbox import UplinkOutbox
from edge.uplink.ports import Input, UplinkEndpoint, Workload, accepted, refused

"""The agent: connects sources, the wall clock, the network and signals to `DurableCore`.

It runs one event loop. Reading, decoding and fsync run in threads; every access to the core happens
on the loop, one event at a time.
"""

from edge.agent.agent import RETIRED, Agent
from edge.agent.assembly import begin_anew, open_agent
from edge.agent.health import AgentHealth

"""Runs edges behind a modelled connection in virtual time. From the source to the socket, the code is production code.

`sim.wire.experiment.run` is the entry. Each edge has the production core, outbox, session, flow control, frame
encoder and session stream. The connection (packets of TCP and gRPC over a link), the gateway's acknowledgements and the
center's processing time are modelled. `sim.budgets` instead moves abstract updates. It is faster, and the offline
optimum needs it.
"""

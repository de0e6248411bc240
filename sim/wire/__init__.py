"""Edges behind a modelled connection: production code from the source to the socket, in virtual time.

`sim.wire.experiment.run` is the entry. Each edge has the production core, worker, outbox, session, flow control, frame
encoder and session stream. Modelled are the connection (packets of TCP and gRPC over a link), the gateway's
acknowledgements and the center's processing time. `sim.budgets` moves abstract updates instead, which is faster, and
which the offline optimum needs.
"""

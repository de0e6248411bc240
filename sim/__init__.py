"""Simulations that run the production code under a virtual clock, and the demo on real processes.

`sim.plan` (`edgewater plan`) and `sim.budgets` simulate error and staleness budgets, `sim.wire` packets of a real
connection (`edgewater plan --wire`, `bench.compare model`), `sim.early_answers`
(`edgewater simulate early-answers`) early answers. `sim.demo` (`edgewater demo`) starts a center and
three edges. It may import edge and center; neither may import it.
"""

OWNER = "edgewater"
"""Distinguishes this package from packages of this name in other distributions."""

"""`edgewater plan`: staleness, error and bytes that budgets would give on a user's own data.

Reads data files into a trace, runs `sim.budgets` for each combination of policy, bandwidth and budget, and prints
tables. It does not contact a center.
"""

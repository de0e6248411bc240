"""`edgewater demo`: a center and three edges as processes, on the flights that left New York's airports in 2013.

Compares every answer with the truth computed from the file, and fails if a contract was not met. `tests/e2e` and
`bench` reuse `run.Demo` to start real processes.
"""

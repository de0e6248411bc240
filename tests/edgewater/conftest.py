from hypothesis import settings

# The same examples on every run, and no failure because a machine is busy.
settings.register_profile("edgewater", deadline=None, derandomize=True)
settings.load_profile("edgewater")

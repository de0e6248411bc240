"""The kernel shared by edges and center: queries, windows, expressions, synopses, wire types.

Both sides, the simulator and the benchmarks import its modules by their full paths; it imports none of them. Nothing in
it reads a clock, starts a thread or opens a connection.
"""

"""The load that a center and an edge can take, and how soon answers come again when a driver dies: real processes and
databases.
"""

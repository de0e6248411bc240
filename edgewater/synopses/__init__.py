"""Mergeable synopses: the only things that travel from an edge to the center."""

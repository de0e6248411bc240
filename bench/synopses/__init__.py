"""Synopses against Apache DataSketches and DataDog's ddsketch: speed, merging, error; and how errors behave."""

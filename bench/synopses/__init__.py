"""Comparison of synopses with Apache DataSketches and DataDog's ddsketch, and characterisation of their errors."""

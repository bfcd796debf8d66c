"""Benchmarks of non-prefix reuse."""

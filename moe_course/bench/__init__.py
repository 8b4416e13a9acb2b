"""Benchmarks: two variants of one thing, side by side in the same processes, in turns."""

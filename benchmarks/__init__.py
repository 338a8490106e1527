"""Ratios to the fused kernel and to peers, in one process, interleaved.

Run: make bench, or python -m benchmarks --quick.
"""

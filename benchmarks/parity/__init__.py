"""Parity of servers and learner: the effects of rounding and of faults
(benchmarks/parity.md).
"""

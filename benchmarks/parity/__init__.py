"""Parity of servers and learner: what rounding does to it, and what faults do (benchmarks/README.md)."""

"""Measurements of a running run; megarl/lab/monitoring/ writes and shows them.

names.py     the names of the metrics
profiler.py  torch's profiler over a window of steps
spans.py     RUN/trace: how time is spent
"""

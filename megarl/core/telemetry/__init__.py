"""Measurements of a running run; megarl/tools/monitoring/ writes and shows them.

names.py     the names of the metrics
pictures.py  shared by all pages and figures
profiler.py  torch's profiler over a window of steps
spans.py     RUN/trace: how time is spent
"""

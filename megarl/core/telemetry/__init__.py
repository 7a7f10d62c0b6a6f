"""What a run measures while it runs; megarl/lab/monitoring/ writes and shows it.

names.py     the names of the metrics                    profiler.py  torch's profiler over a window of steps
spans.py     RUN/trace: where the time goes
"""

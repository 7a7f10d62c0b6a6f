"""What a run has measured, kept and shown.

names.py     the names of the metrics;  warnings.py  signs in a row that a run is about to go wrong
metrics.py   RUN/metrics.jsonl, written by learner rank 0, and to TensorBoard (board.py), W&B (wandb_writer.py), Prometheus
prometheus.py, families.py, targets.py     GET /metrics of controller and learner; RUN/prometheus
spans.py     RUN/trace: where the roles' time goes
trace.py     `megarl trace`: the last steps for Perfetto (groups.py, lanes.py, chrome.py)
profiler.py  torch's profiler in the steps of a window
tail.py      the new rows of a growing JSONL file
summary.py   RUN/summary.json and the closing summary in the terminal
charts.py    the report's pictures, from rows
report.py    RUN/report.html (one file, opens offline) and RUN/reward.png
"""

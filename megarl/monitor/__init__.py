"""What a run has measured, kept and shown.

metrics.py   the names of the metrics; RUN/metrics.jsonl and TensorBoard, written by learner rank 0
tail.py      the new rows of a growing JSONL file
summary.py   RUN/summary.json and the closing summary in the terminal
charts.py    the report's pictures, from rows
report.py    RUN/report.html (one file, opens offline) and RUN/reward.png
"""

"""What a run measures while it runs, and where it is shown.

names.py      the names of the metrics            warnings.py     signs in a row that a run is about to go wrong
metrics.py    RUN/metrics.jsonl and TensorBoard   wandb_writer.py Weights & Biases     prometheus.py  GET /metrics
spans.py      RUN/trace: where the time goes      profiler.py     torch's profiler over a window of steps
"""

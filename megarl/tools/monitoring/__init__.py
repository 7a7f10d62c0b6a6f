"""The destinations of a live run's metrics.

metrics.py       RUN/metrics.jsonl and TensorBoard
prometheus.py    GET /metrics of learner and controller
wandb_writer.py  Weights & Biases
"""

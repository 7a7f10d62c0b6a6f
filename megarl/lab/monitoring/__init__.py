"""Where the metrics of a live run go.

metrics.py     RUN/metrics.jsonl and TensorBoard
prometheus.py  GET /metrics of learner and controller             wandb_writer.py  Weights & Biases
"""

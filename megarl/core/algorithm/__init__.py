"""From the groups of a batch to the input of a training step. Pure functions.

batch.py     filters, aggregation weights, statistics
advantages/  advantages from rewards, from turns' rewards, from a critic, from a teacher
losses/      the policy losses, one per file
packing.py   cost of sequences; micro-batches of similar cost
"""

"""From the groups of a batch to the input of a training step. Pure functions.

batch.py      filters, aggregation weights, statistics       packing.py  cost of sequences; micro-batches of similar cost
advantages.py centred and divided rewards                    gae.py      advantages from a critic's values
losses/       the policy losses, one per file
"""

"""Groups become what a training step computes. Pure functions.

batch.py      filters, aggregation weights, statistics       packing.py  what sequences cost; micro-batches alike
advantages.py centred and divided rewards                    gae.py      advantages by a critic
losses/       one policy loss a file
"""

"""Turns groups into what a training step computes. Pure functions.

batch.py      filters, aggregation weights, statistics       packing.py  sequences into micro-batches of equal cost
advantages.py centred and normalised rewards                 gae.py      advantages from a critic
losses/       one policy loss per file
"""

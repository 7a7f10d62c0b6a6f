"""Predictions from evaluations: what a run will reach, and with how much compute. Never
imports torch.

    RUN/, a table  ──► points.py ──► Curve ──► fit.py ──► Fit ──► extrapolate.py
    published.yaml ──► published.py              │         ├───► compare.py
                         forms.py, posterior.py  ┘         └───► plot.py

    points.py      compute and scores        extrapolate.py  score at H hours, and back
    published.py   fits of ScaleRL's paper   compare.py      who has the higher ceiling
    posterior.py   how certain the law is    plot.py         pictures, a page of fits

`table_files.py` reads tables of points. `slices.py` makes such curves for parts of a
run, from its answers: by task, difficulty, objective, pass@n. `overoptimisation.py`
watches in a live run whether the trusted score falls while the reward rises.
`transfer.py` extrapolates from small policies to a larger one; `cells.py` is the law
over batch sizes, for `megarl plan --allocate`. `tables.py` makes the tables of `megarl
scaling`; a live run's forecast is in `extrapolate.py`. A command answers in about a
second: only `plot.py` imports matplotlib, and no command imports scipy, which alone
would take half a second.
"""

"""Predictions from evaluations: what a run will reach, and with how much compute. Never
imports torch.

    RUN/, a table    ──► points.py ──► Curve ──► fit.py ──► Fit ──► extrapolate.py     score at H hours, hours to a score
                                                    │         ├───► compare.py         which run has the higher ceiling
    published.yaml ──► published.py                 │         └───► plot.py            pictures and a page of fits
    (the fits of ScaleRL's paper)                   │
                            forms.py, posterior.py  ┘   the curve, and how certain it is

`table_files.py` reads tables of points. `slices.py` makes such curves for parts of a
run, from its answers: by task, difficulty, objective, pass@n. `overoptimisation.py`
watches in a live run whether the trusted score falls while the reward rises.
`transfer.py` extrapolates from small policies to a larger one; `cells.py` is the law
over batch sizes, for `megarl plan --allocate`. `tables.py` makes the tables of `megarl
scaling`; a live run's forecast is in `extrapolate.py`. A command answers in about a
second: only `plot.py` imports matplotlib, and no command imports scipy, which alone
would take half a second.
"""

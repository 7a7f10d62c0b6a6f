"""Prediction from evaluations: what a run will reach, and for how much compute. Never imports torch.

    RUN/, CSV, JSONL ──► points.py ──► Curve ──► fit.py ──► Fit ──► extrapolate.py     score at H hours, hours to a score
                                                    │         ├───► compare.py         which run has the higher ceiling
    published.yaml ──► published.py                 │         └───► plot.py            pictures and a page of all of it
    (the fits of ScaleRL's paper)                   │
            forms.py, least_squares.py, profile.py  ┘  the curve, its minimum, how far each parameter can go

`tables.py` is what `megarl scaling` prints; `outlook.py` is what a live run says of its rest. A command answers in about a
second: matplotlib is imported by `plot.py` alone, scipy by nothing.
"""

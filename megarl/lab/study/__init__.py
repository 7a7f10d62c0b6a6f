"""Studies: variants of a recipe, each with several seeds, compared by the scaling curves of their runs.

`megarl study loo RECIPE`  ──►              ─┐                                       ┌─► points/*.csv, points.csv
`megarl study compare A B` ──► main.py ─────┴► plan.py: STUDY/recipes/*.yaml ──► run.py ──► results.py ─► table.md, pictures
                                                 one task: a variant and a seed    `megarl train`, one after another,
                                                                                   or one per job of a Slurm array
"""

"""Studies: variants of a recipe, each with several seeds, compared by the scaling
curves of their runs.

`megarl study run FILE R`  ──► files.py ─┐
`megarl study compare A B` ──► main.py ──┴► plan.py: STUDY/recipes/*.yaml
                                            │  one task: a variant and a seed
    running.py: `megarl train`, one after ◄─┘
    another, or one per job of a Slurm array
      └──► results.py: table.md, pictures, points/*.csv

`megarl study loo RECIPE` is `megarl study run loo RECIPE`. `megarl study search` drops
half of the variants at each rung (search.py), by the asymptotes predicted from their
scores.
"""

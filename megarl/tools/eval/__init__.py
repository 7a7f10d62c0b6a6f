"""`megarl eval`: a model's answers to suites, on its own servers.

main.py ─► subject.py   which model: a directory, or a run's exported checkpoint
       ─► tasks/suites/  the questions of `evaluation.suites`
       ─► servers.py    its own servers ─► core/evaluation/score.py ─► a table, curve.py

compare.py      compares two evaluations prompt by prompt: a table and a page
"""

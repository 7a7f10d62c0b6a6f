"""`megarl eval`: a model's answers to suites, on its own servers.

main.py ─► subject.py   which model: a directory, or a run's exported checkpoint
       ─► suites.py    the questions of `evaluation.suites` (shipped ones: megarl/recipes/suites/*.yaml)
       ─► servers.py   its own servers ─► core/evaluation/score.py ─► a table, curve.py

multiple_choice.py  questions of ARC and HellaSwag, answered by log-likelihood instead
of by generation
compare.py          compares two evaluations prompt by prompt: a table and a page
"""

"""`megarl eval`: a model's answers to suites, on its own servers.

main.py ─► subject.py   which model: a directory, or a run's exported checkpoint
       ─► suites.py    the questions of `evaluation.suites`
                       (shipped ones: megarl/recipes/suites/*.yaml)
       ─► servers.py   its own servers ─► core/evaluation/score.py ─► a table, curve.py

harness.py      tasks of lm-evaluation-harness by name: ARC, HellaSwag, TruthfulQA, …
compare.py      compares two evaluations prompt by prompt: a table and a page
"""

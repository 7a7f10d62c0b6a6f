"""`megarl eval`: a model's answers to suites, on servers of its own.

main.py ─► subject.py   which model: a directory, or a run's checkpoint exported
       ─► suites.py    the questions of the sets of `evaluation.suites` (megarl/recipes/suites/*.yaml has the shipped ones)
       ─► servers.py   servers of its own ─► core/evaluation/score.py ─► show.py, curve.py

multiple_choice.py  questions of ARC and HellaSwag, answered by log-likelihood instead of by writing
compare.py          two evaluations prompt by prompt: a table, and the page of comparison_page.py
"""

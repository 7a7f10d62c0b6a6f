"""The questions of an evaluation suite.

suites.py    from files, as `evaluation.suites` says (shipped ones:
             megarl/recipes/suites/*.yaml)
harness.py   tasks of lm-evaluation-harness by name: ARC, HellaSwag, TruthfulQA, …
"""

"""What models can do: answers to prompts they were not trained on, graded, kept, and summed up.

megarl eval (cli.py) ─► main.py ─► subject.py   which model: a directory, or a run's checkpoint exported
                   │      servers.py   servers of its own
                   ▼
                score.py ─► answers.py ─► metrics.py ─► show.py, curve.py
                   ▲       (answers.jsonl)  (result.json)
a run's controller ┘   megarl/core/controller/evaluations.py, pinned to one version; schedule.py says which

score.py     prompts -> completions -> grades -> Answers: the one loop of both
votes.py     which wrong answers are the same one, for maj@k
results.py   settings and result beside the answers
metrics.py   mean@k, pass@k, maj@k, best@k and their intervals, by estimators.py: pure functions of answers
suites.py    prompts of the sets of `evaluation.suites` (megarl/recipes/suites/*.yaml has the shipped ones)

multiple_choice.py  questions of ARC and HellaSwag, answered by log-likelihood (loglikelihood.py) instead of by writing
compare.py          two evaluations prompt by prompt (paired.py): a table, and the page of comparison_page.py
"""

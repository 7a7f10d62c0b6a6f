"""Scores of a model's answers to held-out prompts, for a run's evaluations and for
`megarl eval`.

score.py      prompts -> completions -> grades -> answers: the only such loop
answers.py    the files on disk
metrics.py    mean@k, pass@k, maj@k and their intervals
votes.py      which wrong answers are equal, for maj@k
forecast.py   the forecast in a row of eval.jsonl, as text
departure.py  a score outside what its forecast allows
fall.py       a score that has fallen, on the same prompts
parity.py     do servers and learner compute the same model? Differences of log-probs
              by cause, limits, verdicts
"""

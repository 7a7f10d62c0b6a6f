"""Scores of a model's answers to held-out prompts, for a run's evaluations and for `megarl eval`.

score.py     prompts -> completions -> grades -> answers: the one loop
answers.py   what is kept on disk            metrics.py   mean@k, pass@k, maj@k and their intervals
votes.py     which wrong answers are the same one, for maj@k
forecast.py  the forecast in a row of eval.jsonl, in words
"""

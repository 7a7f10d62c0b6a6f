"""The held-out pass rate: mean@samples on fixed prompts, by one version of the weights.

    schedule.py  which versions are scored
    score.py     prompts -> completions on one server -> grades -> a row of eval.jsonl

The server that does it is held at its version (pinned) by the controller; training goes on meanwhile.
"""

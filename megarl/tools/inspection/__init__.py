"""Shows data: rollouts.py shows a run's journal (`megarl rollouts show`), data.py rows
of a data set.
"""

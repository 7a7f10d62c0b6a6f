"""What there is, shown: rollouts.py those of a run's journal (`megarl rollouts show`), data.py rows of a data set."""

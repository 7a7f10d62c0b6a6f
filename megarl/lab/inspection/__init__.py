"""Shows what there is: rollouts.py a run's journal (`megarl rollouts show`), data.py rows of a data set."""

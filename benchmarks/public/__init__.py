"""Published measurements of other people's clusters: rows, shapes of their models, and what the planner says of each."""

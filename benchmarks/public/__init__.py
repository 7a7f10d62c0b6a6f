"""Published measurements of other people's clusters: rows, their models' shapes, and
the planner's estimate for each.
"""

"""What a run will cost and reach. Training works without it.

planning/   `megarl plan`: memory, speed and layouts of a cluster
scaling/    `megarl scaling`: laws fitted to runs, and forecasts
study/      `megarl study`: many runs of one question
"""

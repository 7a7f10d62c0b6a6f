"""Implements core/base/contracts.py.

data/           prompts and traces
graders/        rewards
environments/   tools and games
agents/         programs of their own that ask the policy
suites/         questions of evaluations
thinking.py     where a turn's thinking ends
"""

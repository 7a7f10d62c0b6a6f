"""Implements core/base/contracts.py: data/ prompts and traces, graders/ rewards,
environments/ tools and games, agents/, suites/ questions of evaluations; thinking.py, where a turn's thinking ends.
"""

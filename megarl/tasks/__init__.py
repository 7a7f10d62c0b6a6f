"""Implements core/base/contracts.py: data/ prompts and traces, graders/ rewards, environments/ tools and games, agents/."""

"""What a user's environment imports (docs/tools.md)."""

from megarl.tasks.environments import DONE, Environment, EnvironmentDown, Observation, Setting

__all__ = ["DONE", "Environment", "EnvironmentDown", "Observation", "Setting"]

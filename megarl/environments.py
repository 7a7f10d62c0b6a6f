"""What a user's environment imports (docs/tools.md)."""

from megarl.core.base.contracts import DONE, Environment, EnvironmentDown, Observation, Verdict
from megarl.tasks.environments.framing import Setting

__all__ = ["DONE", "Environment", "EnvironmentDown", "Observation", "Setting", "Verdict"]

"""What a user's environment imports (docs/how-to/tools.md)."""

from megarl.core.base.contracts import DONE, Environment, EnvironmentDown, Observation, Verdict
from megarl.tasks.environments.framing import Setting

__all__ = ["DONE", "Environment", "EnvironmentDown", "Observation", "Setting", "Verdict"]

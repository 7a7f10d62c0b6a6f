"""What the row of metrics says about each task of a batch, when there are several: `pass_rate_train/math`; and what about
turns, when any task has an environment."""

import numpy as np

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.types import Batch
from megarl.core.recipe import Recipe

OF_EACH_TASK = (
    "pass_rate_train",
    "reward_mean",
    "zero_variance_share",
    "groups_in_loss",
    "void_groups",
    "truncation_rate",
    "interruption_rate",
    "format_error_rate",
    "grader_timeout_rate",
    "grader_error_rate",
    "completion_tokens_mean",
    "completion_tokens_right_mean",
    "completion_tokens_wrong_mean",
    "generated_tokens",
)


def task_statistics(batch: Batch, recipe: Recipe) -> dict[str, float]:
    """Of each task's groups in the batch; rates are not-a-number for a task that has none there."""
    played = [name for name, task in recipe.data.tasks.items() if task.environment]
    found = turn_statistics(batch) if played else {}
    if len(recipe.data.tasks) == 1:
        return found
    for task in recipe.data.tasks:
        of_task = Batch(step=batch.step, groups=tuple(g for g in batch.groups if g.prompt.task == task))
        statistics = batch_statistics(of_task)
        rewards = [name for name in statistics if name.startswith("reward/")]
        found |= {f"{name}/{task}": statistics[name] for name in (*OF_EACH_TASK, *rewards)}
        if task in played:
            found |= {f"{name}/{task}": value for name, value in turn_statistics(of_task).items()}
    return found


def turn_statistics(batch: Batch) -> dict[str, float]:
    """Of the rollouts that had an environment; not-a-number where none had, or none called it."""
    episodes = [r.episode for g in batch.groups for r in g.rollouts if r.episode is not None]
    calls = sum(e.calls for e in episodes)
    return {
        "turns_mean": float(np.mean([e.turns for e in episodes])) if episodes else float("nan"),
        "turn_limit_rate": float(np.mean([e.limited for e in episodes])) if episodes else float("nan"),
        "tool_error_rate": sum(e.errors for e in episodes) / calls if calls else float("nan"),
        "tool_seconds": sum(e.seconds for e in episodes) / calls if calls else float("nan"),
    }

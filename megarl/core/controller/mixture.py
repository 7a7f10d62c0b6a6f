"""Which task the next prompt is of, and then which prompt. Pure: the task is a function of how many were drawn of each.

With shares w (of 1), n draws of a task so far and t of all, its next draw is open as soon as n < (t + 1) w and due at
draw ceil((n + 1) / w): of the tasks that are open the one that is due first is drawn. Then for every task and every t

    | n - t w | < 1                                        in any window of T draws as many as T w, but for less than 2

(the quota method: Balinski and Young 1975; Baruah et al. 1996 for the deadlines.) Counted are prompts drawn, so tickets
that are removed or void count too. A task without prompts left is passed over: the others share its draws by their weights.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

from megarl.core.controller.curriculum import Curriculum, Draw


def next_task(drawn: Mapping[str, int], shares: Mapping[str, Fraction]) -> str:
    """The task of the next draw, of those that `shares` names; ties go to the first by name. The shares' sum counts as 1."""
    whole, t = sum(shares.values()), sum(drawn[task] for task in shares)
    open_now = [task for task in sorted(shares) if drawn[task] * whole < (t + 1) * shares[task]]
    return min(open_now, key=lambda task: math.ceil((drawn[task] + 1) * whole / shares[task]))


class Mixture:
    """The draw over all tasks. `curricula`: of each task, by name."""

    def __init__(self, curricula: Mapping[str, Curriculum], shares: Mapping[str, Fraction]) -> None:
        self.curricula, self._shares = dict(curricula), dict(shares)

    def draw(self) -> tuple[str, Draw] | None:
        """The next prompt and its task; None while no task has enough left."""
        left = dict(self._shares)
        while left:
            task = next_task({task: c.drawn for task, c in self.curricula.items()}, left)
            drawn = self.curricula[task].draw()
            if drawn is not None:
                return task, drawn
            del left[task]
        return None

    def observe(self, task: str, prompt_id: str, pass_rate: float) -> None:
        """A group of this prompt is finished; its pass rate replaces the earlier one."""
        self.curricula[task].observe(prompt_id, pass_rate)

    @property
    def exhausted(self) -> bool:
        """Whether no task has prompts left."""
        return all(curriculum.exhausted for curriculum in self.curricula.values())

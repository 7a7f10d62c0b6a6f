"""The environments of a recipe: what plays the episodes of each task or suite that has any."""

from megarl.core.base.tokenizer import Tokenizer
from megarl.core.recipe import Recipe, Rows
from megarl.tasks.environments.bounded import Bounded
from megarl.tasks.environments.host import Host
from megarl.tasks.environments.worker import BUILT_IN, Episodes, Part, Setup


class TaskEnvironments:
    """By task or suite; one process for each environment, whatever has it. MegarlError if one that the recipe names cannot be
    had here."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        rows: dict[str, Rows] = {**recipe.data.tasks, **recipe.evaluation.sampled}
        self._keys = {name: f"data.tasks.{name}.environment" for name in recipe.data.tasks}
        self._keys |= {name: f"evaluation.suites.{name}.environment" for name in recipe.evaluation.sampled}
        self._tasks = {name: task for name, task in rows.items() if task.environment}
        self._tokenizer = tokenizer
        self._hosts: dict[str, Host] = {}
        for environment in dict.fromkeys(task.environment for task in self._tasks.values()):
            parts = {
                name: Part(
                    key=self._keys[name], template=task.template, reply_tokens=task.reply_tokens,
                    reply_timeout_s=task.reply_timeout_s,
                )
                for name, task in self._tasks.items() if task.environment == environment
            }  # fmt: skip
            setup = Setup(
                environment=environment, tokenizer=str(tokenizer.path), sandbox=recipe.data.sandbox,
                end_of_thinking=recipe.length.end_of_thinking, parts=parts,
            )  # fmt: skip
            self._hosts[environment] = host = Host(setup)
            if environment in BUILT_IN:
                Episodes(setup, tokenizer, int)
            else:
                host.check()

    def of(self, task: str) -> Bounded | None:
        """A new one for an episode of this task; None: its rollouts are one turn."""
        if task not in self._tasks:
            return None
        rows = self._tasks[task]
        return Bounded(
            self._hosts[rows.environment],
            self._keys[task].removesuffix(".environment"),
            rows,
            self._tokenizer.vocabulary,
        )

    def close(self) -> None:
        """End their processes."""
        for host in self._hosts.values():
            host.close()

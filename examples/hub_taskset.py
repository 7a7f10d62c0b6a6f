"""A taskset in the format of the environments hub (verifiers 0.4, v1), with a rubric of
two rewards. hub_agent.py lets the policy work on it, as on any other taskset that is
installed beside verifiers:

data: {tasks: {hub: {agent: [harness/bin/python, hub_agent.py, hub_taskset]}}}
"""

import random
import re

import verifiers.v1 as vf

TASKS = 64


class ProductData(vf.TaskData):
    """A task with its answer."""

    answer: str


class ProductTask(vf.Task[ProductData]):
    """Multiply two numbers."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """The last number of the last message is the product."""
        numbers = re.findall(r"\d+", trace.last_reply)
        return float(numbers[-1:] == [self.data.answer])

    @vf.reward(weight=0.2)
    async def brief(self, trace: vf.Trace) -> float:
        """The last message has no words."""
        return float(re.fullmatch(r"\s*\d+\s*", trace.last_reply) is not None)


class Products(vf.Taskset[ProductTask, vf.TasksetConfig]):
    """Products of numbers with two digits."""

    def load(self) -> list[ProductTask]:
        rng = random.Random(0)
        tasks = []
        for n in range(TASKS):
            first = rng.randint(10, 99)
            second = rng.randint(10, 99)
            data = ProductData(
                idx=n, prompt=f"What is {first} * {second}?", answer=str(first * second)
            )
            tasks.append(ProductTask(data, self.config.task))
        return tasks


__all__ = ["Products"]

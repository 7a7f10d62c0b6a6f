"""The conversation with a learner that asks again before the answer is ready."""

import asyncio
from types import SimpleNamespace

from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import Next, Reply, Score
from megarl.core.base.rundir import LinkKeys
from megarl.core.base.types import encode
from megarl.core.controller.conversation import Conversation, Link
from megarl.run.process import free_ports

KEYS = LinkKeys.new()
NEXT = Next(incarnation="a", step=3, version=3)
ANSWER = Score(version=3, rollouts=(), against=0)


def test_an_answer_that_took_long_goes_to_where_the_learner_listens_now() -> None:
    """A batch of 128k tokens takes minutes to read. Read anew for each repetition of
    the question, it would never arrive.
    """
    (port,) = free_ports(1)
    made = 0

    async def slowly(_: object, __: Next) -> Reply:
        nonlocal made
        made += 1
        await asyncio.sleep(2.0)  # asked again after 1 s, and not again before 3
        return ANSWER

    async def run() -> bytes:
        address = f"tcp://127.0.0.1:{port}"
        link = Link(address, KEYS)
        learner = ControllerLink(address, KEYS, lambda: "", resend_s=1.0)
        answers = SimpleNamespace(
            evaluate_if_due=lambda _: None,
            decide=lambda _: ANSWER,
            carry_out=slowly,
            new_learner=lambda: None,
        )
        conversation = Conversation(link, answers)
        tasks = [
            asyncio.create_task(part) for part in (conversation.listen(), conversation.answer())
        ]
        try:
            return await asyncio.to_thread(learner.ask, NEXT)
        finally:
            for task in tasks:
                task.cancel()
            learner.close()
            link.close()

    assert asyncio.run(run()) == encode(ANSWER)
    assert made == 1

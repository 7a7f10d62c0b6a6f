"""The conversation with a learner that asks again before the answer is ready, and with
one that asks for recorded experts.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import Experts, Next, RecordedExperts, Refused, Reply, Score
from megarl.core.base.rundir import LinkKeys
from megarl.core.base.types import decode, encode
from megarl.core.controller.conversation import Conversation, Link
from megarl.run.process import free_ports

KEYS = LinkKeys.new()
NEXT = Next(incarnation="a", step=3, version=3)
ANSWER = Score(version=3, rollouts=(), against=0)


def test_an_answer_that_took_long_goes_to_where_the_learner_listens_now() -> None:
    """A batch of 128k tokens takes minutes to read. Read anew for each repetition of
    the question, it would never arrive.
    """
    made = 0

    async def slowly(_: object, __: Next) -> Reply:
        nonlocal made
        made += 1
        await asyncio.sleep(2.0)  # asked again after 1 s, and not again before 3
        return ANSWER

    async def ask(address: str) -> bytes:
        learner = ControllerLink(address, KEYS, lambda: "", resend_s=1.0)
        try:
            return await asyncio.to_thread(learner.ask, NEXT)
        finally:
            learner.close()

    answers = SimpleNamespace(
        evaluate_if_due=lambda _: None,
        decide=lambda _: ANSWER,
        carry_out=slowly,
        new_learner=lambda: None,
    )
    assert asyncio.run(conversing(answers, ask)) == encode(ANSWER)
    assert made == 1


async def conversing[T](answers: Any, ask: Callable[[str], Awaitable[T]]) -> T:
    """Return what `ask` returns of a conversation at its address."""
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    link = Link(address, KEYS)
    conversation = Conversation(link, answers)
    tasks = [asyncio.create_task(part) for part in (conversation.listen(), conversation.answer())]
    try:
        return await ask(address)
    finally:
        for task in tasks:
            task.cancel()
        link.close()


def test_experts_come_in_frames_and_never_to_a_superseded_learner() -> None:
    asked: list[str] = []

    async def experts(request: Experts) -> tuple[Reply, list[bytes]]:
        asked.append(request.incarnation)
        if request.step > 3:
            return Refused(error="not in the batch"), []
        return RecordedExperts(), [bytes(position) for position in request.rollouts]

    async def ask(address: str) -> list[list[bytes]]:
        learner = ControllerLink(address, KEYS, lambda: "")
        try:
            replies = []
            for incarnation, step in (("a", 3), ("a", 4), ("b", 3), ("a", 3)):
                request = Experts(
                    incarnation=incarnation, step=step, ticket=7, rollouts=(2, 0, 1 << 20)
                )
                replies.append(await asyncio.to_thread(learner.ask_for_data, request))
            return replies
        finally:
            learner.close()

    answers = SimpleNamespace(experts=experts, new_learner=lambda: None)
    first, refused, second, superseded = asyncio.run(conversing(answers, ask))
    assert first == [encode(RecordedExperts()), bytes(2), b"", bytes(1 << 20)] == second
    assert refused == [encode(Refused(error="not in the batch"))]
    assert len(superseded) == 1
    error: Reply = decode(superseded[0], Reply)
    assert isinstance(error, Refused)
    assert "a newer learner (b) has taken over" in error.error
    assert asked == ["a", "a", "b"]

"""Log-probs of the teacher (`recipe.teacher`) for what the policy sampled, from a
frozen model on servers of its own.

    a rollout is sampled ──► teacher (ticket mod n): log pi_T(y_t) for its tokens ──► Rollout.teacher_logprobs ──► journal
                               └ lost: the next teacher, after a pause, until the time limit for a start has passed ──► Void

A group is finished, and so recorded and available, only with all its log-probs, so a
replay trains on the same ones. All rollouts of a ticket go to the same teacher, whose
cache keeps the prompt: a teacher's weights never change.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np

from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.base.types import Segment, paths_of
from megarl.core.recipe import START_LIMIT_RULE, Recipe
from megarl.core.sampling.sampler import Void
from megarl.core.server.client import Prefill, ServerClient, ServerLost, ServerRefused

log = logging.getLogger(__name__)

SCORE_LIMIT_S = 300.0
"""Time limit of one request; what a teacher has before it (AT_ONCE) takes less, from
900 tokens/s on.
"""
AT_ONCE = 1 << 18
"""Tokens that a teacher has before it at most: a few prefills keep its GPUs busy, and a
request must not wait for its turn until its time is up.
"""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
"""Pauses between two tries of a rollout: a teacher that died is restarted within the
time limit for a start.
"""


class TeacherServers:
    """The teacher's servers. They get no more rollouts at once than they process in
    parallel, nor more tokens than AT_ONCE.
    """

    def __init__(self, recipe: Recipe, endpoints: Endpoints) -> None:
        keys = endpoints.api_key, endpoints.admin_key
        addresses = [ServerAddress(id=n, url=url) for n, url in enumerate(endpoints.teachers)]
        self._clients = [ServerClient(address, *keys, SCORE_LIMIT_S) for address in addresses]
        self._limit_s = recipe.start_limit_s
        each = min(
            recipe.serving.max_running_requests, max(1, AT_ONCE // recipe.length.context_tokens)
        )
        self._places = asyncio.Semaphore(len(addresses) * each)
        self._met: set[int] = set()  # servers that have ever answered
        self._lost: set[int] = set()

    async def logprobs(
        self, ticket: int, prompt: np.ndarray, segments: Sequence[Segment]
    ) -> np.ndarray:
        """Return the teacher's log-probs [completion_len] float32, 0 where not trained.
        Void if no teacher can compute them.
        """
        (whole,) = paths_of(segments, (), prompt)
        async with self._places:
            scored = await self._scored(ticket, whole.tokens, whole.own_start)
        logprobs = np.where(whole.trained[whole.own_start :], scored.logprobs, np.float32(0))
        if not np.isfinite(logprobs).all():
            raise Void("the teacher has no finite log-prob for a token of the rollout")
        return logprobs

    async def _scored(self, ticket: int, tokens: np.ndarray, first: int) -> Prefill:
        until = time.monotonic() + self._limit_s
        pause = FIRST_PAUSE_S
        turn = ticket
        while True:
            server = turn % len(self._clients)
            try:
                (scored,) = await self._clients[server].score([tokens], [first], "teacher")
            except ServerRefused as error:
                raise Void(f"the teacher refuses a rollout: {error}") from None
            except ServerLost as error:
                if server not in self._lost:
                    # Starting takes longer than sampling the first rollouts.
                    level = logging.WARNING if server in self._met else logging.INFO
                    log.log(level, "teacher %d does not answer: %s", server, error)
                self._lost.add(server)
                if time.monotonic() + pause > until:
                    why = (
                        f"no teacher scored a rollout within {self._limit_s:g} s"
                        f" ({START_LIMIT_RULE}): {error}"
                    )
                    raise Void(why) from None
            else:
                if server in self._lost:
                    log.info("teacher %d answers", server)
                self._lost.discard(server)
                self._met.add(server)
                return scored
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            turn = turn + 1

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

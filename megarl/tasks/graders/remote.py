"""A reward service: completions are sent to it by HTTP, many per request, and it
returns numbers.

    check(submission) ─► wait for BATCH submissions or 20 ms ─► POST url
        ─► {"rewards": [0.7, -1.0, null, …]}

The request has Submission's fields; the reply is a ServiceReply:

    {"schema_version": 1, "items": [{"task", "prompt", "completion", "answer", …}, …]}
    {"rewards": [number or null, …]}    one per item, in order; null or NaN: it could
                                        not judge it

A request that may succeed later (connection error, timeout, 408, 429, 5xx) is repeated
after 0.5, 1, 2, … s, up to RETRIES times. After that, or at any other status, the
service counts as down. The key is sent as `Authorization: Bearer …`; neither it nor a
reply's text appears in any message.
"""

import asyncio
import json
import logging
import math

import aiohttp
import msgspec
from yarl import URL

from megarl.core.base.api_key import read_api_key
from megarl.core.base.contracts import GraderDown, Verdict
from megarl.core.recipe import Service
from megarl.tasks.graders.answer import Submission

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
type Waiting = tuple[Submission, asyncio.Future[Verdict]]
GATHER_S = 0.02
BATCH = 32
"""Completions sent in one request. A service that judges fewer at a time must divide
the request itself.
"""
AT_ONCE = 8
"""Concurrent requests."""
LONGEST_PAUSE_S = 30.0
RETRIES = 5
"""Together they take 15 s, so a service that restarts within that time costs no ticket.
"""
BUSY = (408, 429)
LONGEST_REPLY = 1 << 20
"""Most bytes in a reply. Its numbers take a few hundred."""


class ServiceReply(msgspec.Struct, frozen=True):
    """What a service answers: the items' rewards."""

    rewards: list[float | None]


class _Again(Exception):
    """A request failed, but may succeed later."""


class Remote:
    """One reward service of the recipe. MegarlError if its key is unavailable."""

    def __init__(self, name: str, service: Service) -> None:
        self._service = service
        self._headers = headers(name, service)
        url = URL(service.url)
        self._name = f"the reward service {name} at {url.origin()}{url.path}"
        self._waiting: list[Waiting] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def check(self, submission: Submission) -> Verdict:
        """Return the service's reward as a verdict. The submission waits until BATCH of
        them do, or the first has waited for GATHER_S. GraderDown if the service is
        down.
        """
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[Verdict] = loop.create_future()
        self._waiting.append((submission, verdict))
        if len(self._waiting) >= BATCH:
            self._send_all()
        elif len(self._waiting) == 1:
            loop.call_later(GATHER_S, self._send_all)
        return await verdict

    def _send_all(self) -> None:
        """Begin to send all submissions that wait, in one request."""
        if not self._waiting:
            return  # a full batch was sent before the time was up
        batch = self._waiting
        self._waiting = []
        task = asyncio.create_task(self._answer(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _answer(self, batch: list[Waiting]) -> None:
        """Set the verdict of each submission in the batch, or the error if there is
        none.
        """
        outcomes: list[Verdict | GraderDown]
        try:
            rewards = await self._rewards([submission._asdict() for submission, _ in batch])
            outcomes = [_verdict(reward) for reward in rewards]
        except GraderDown as down:
            # Each future needs an exception of its own: raising adds to its traceback.
            outcomes = [GraderDown(str(down)) for _ in batch]
        except Exception as error:  # without an outcome, they would wait for ever
            log.exception("%s failed in a way that nobody foresaw", self._name)
            outcomes = [GraderDown(f"{self._name} failed: {type(error).__name__}") for _ in batch]
        for (_, verdict), outcome in zip(batch, outcomes, strict=True):
            if verdict.done():
                continue  # its rollout was cancelled
            if isinstance(outcome, GraderDown):
                verdict.set_exception(outcome)
            else:
                verdict.set_result(outcome)

    async def _rewards(self, items: list[dict[str, str | bool]]) -> list[float | None]:
        """Return the service's rewards for submissions, in their order; None for one
        that it could not judge. GraderDown if it answers otherwise, or fails too often.
        """
        body = msgspec.json.encode({"items": items, "schema_version": SCHEMA_VERSION})
        for attempt in range(RETRIES + 1):
            try:
                async with self._places:
                    reply = await self._post(body)
                if len(reply.rewards) != len(items):
                    raise GraderDown(
                        f"{self._name} gave {len(reply.rewards)} rewards for {len(items)} items"
                    )
                return reply.rewards
            except (_Again, aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
                problem = str(error) if isinstance(error, _Again) else type(error).__name__
                log.warning("%s failed (attempt %d): %s", self._name, attempt + 1, problem)
                if attempt < RETRIES:
                    await asyncio.sleep(min(LONGEST_PAUSE_S, 0.5 * 2**attempt))
        raise GraderDown(f"{self._name} failed {RETRIES + 1} times, the last time with {problem}")

    async def _post(self, body: bytes) -> ServiceReply:
        """Send a request's body once, and return the reply. _Again or aiohttp's errors
        if that may succeed later; GraderDown if it cannot.
        """
        timeout = aiohttp.ClientTimeout(total=self._service.timeout_s)
        async with (
            # A compressed reply could be a thousand times as long as what is counted.
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.post(
                self._service.url, data=body, headers=self._headers, allow_redirects=False
            ) as response,
        ):
            self._check_status(response.status)
            return self._reply(await self._text(response))

    def _check_status(self, status: int) -> None:
        """Raise _Again for a status after which the request may succeed later, and
        GraderDown for any other but 200.
        """
        if status in BUSY or status >= 500:
            raise _Again(f"status {status}")
        if status != 200:
            hint = "; is its key right?" if status in (401, 403) else ""
            raise GraderDown(f"{self._name} answered with status {status}{hint}")

    async def _text(self, response: aiohttp.ClientResponse) -> bytes:
        """Return a reply's bytes. GraderDown if there are more than LONGEST_REPLY."""
        text = bytearray()
        async for part in response.content.iter_any():
            text += part
            if len(text) > LONGEST_REPLY:
                raise GraderDown(f"{self._name} answered more than {LONGEST_REPLY:,} bytes")
        return bytes(text)

    def _reply(self, text: bytes) -> ServiceReply:
        """Parse a reply. GraderDown if it is not of this form."""
        try:
            # Python's decoder, because Python's services write NaN, which is no JSON;
            # it then is one item without a reward.
            return msgspec.convert(json.loads(text), ServiceReply)
        except (ValueError, RecursionError) as error:
            raise GraderDown(
                f'{self._name} did not answer with {{"rewards": [...]}}: {error}'
            ) from None


def _verdict(reward: float | None) -> Verdict:
    """Return a service's reward as a verdict: an error if it is none or not finite."""
    if reward is None or not math.isfinite(reward):
        return Verdict(math.nan, error="the service could not judge it")
    return Verdict(reward)


def headers(name: str, service: Service) -> dict[str, str]:
    """Return the headers of a request to the service; MegarlError if its key is
    unavailable.
    """
    key = read_api_key(f"data.services.{name}.api_key", service.api_key)
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers

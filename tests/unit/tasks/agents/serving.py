"""A gateway with a policy that is made up, for tests of the wire."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from megarl.core.base.contracts import PolicyTurn, TurnRequest
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import int32
from megarl.core.recipe import from_tree
from megarl.tasks.agents.gateway import Gateway
from megarl.tasks.agents.session import AgentSession
from tests import make
from tests.unit.tasks.agents.templates import PUBLISHED, published, rendering_of

LENGTH: dict[str, Any] = {
    "prompt_tokens": 2000,
    "thinking_tokens": [1500, 1500],
    "answer_tokens": 500,
    "control": "none",
}
ADD = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}},
}
ROOMY = LENGTH | {"prompt_tokens": 200_000}
USER: list[Any] = [{"role": "user", "content": "u"}]


def called(**arguments: int) -> str:
    told = ", ".join(f'"{key}":  {value}' for key, value in arguments.items())
    return f'\n<tool_call>\n{{"name": "add", "arguments": {{{told}}}}}\n</tool_call>'


@dataclass
class Served:
    """A session that is served. said: what the policy will say, in turn; asked: what it
    was sent. hold: it waits for this.
    """

    session: AgentSession
    url: str
    http: aiohttp.ClientSession
    said: list[str]
    asked: list[np.ndarray]
    limits: list[int]
    hold: asyncio.Event
    tokenizer: Tokenizer
    another: Callable[[], AbstractAsyncContextManager[AgentSession]]
    close: Callable[[], Awaitable[None]]

    async def post(
        self, path: str, body: Any, key: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Return status and body, a stream's as text."""
        own = self.session.reward_key if path == "reward" else self.session.key
        sent = {"Authorization": f"Bearer {own if key is None else key}", **headers}
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.url}/v1/{path}", headers=sent, **data) as reply:
            return reply.status, await (
                reply.json() if reply.content_type == "application/json" else reply.text()
            )

    async def chat(self, messages: Any = USER, **more: Any) -> tuple[int, Any]:
        return await self.post(
            "chat/completions", {"model": "policy", "messages": messages, **more}
        )

    def sent(self, n: int = -1) -> str:
        return self.tokenizer.decode(self.asked[n])


@asynccontextmanager
async def gateway(
    folder: Path, *said: str, family: str = "qwen", roomy: bool = False, **agent: Any
) -> AsyncIterator[Served]:
    """Serve one session; the policy ends its turns by itself, but where what it says
    ends with `…`, or with an end.
    """
    tokenizer, rendering = (
        published(folder, family) if family in PUBLISHED else rendering_of(folder, family)
    )
    recipe = from_tree({"length": ROOMY if roomy else LENGTH, "agent": agent})
    server = Gateway("127.0.0.1")
    hold = asyncio.Event()
    hold.set()
    left = list(said)
    asked = list[np.ndarray]()
    limits = list[int]()

    async def policy(request: TurnRequest) -> PolicyTurn:
        asked.append(request.tokens)
        limits.append(request.limit)
        text = left.pop(0)
        await hold.wait()
        cut = text.endswith("…")
        end = "" if cut else next(filter(text.endswith, rendering.ends), rendering.ends[0])
        ids = [
            token
            for letter in text.removesuffix("…").removesuffix(end)
            for token in tokenizer.ids(letter)
        ]
        tokens = int32([*ids, *tokenizer.ids(end)])[: request.limit]
        return PolicyTurn(
            (make.segment(tokens, 3),),
            not cut,
        )

    await server.start()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
            server.session(recipe, tokenizer, rendering, policy) as session,
        ):
            another = partial(server.session, recipe, tokenizer, rendering, policy)
            yield Served(
                session,
                server.url,
                http,
                left,
                asked,
                limits,
                hold,
                tokenizer,
                another,
                server.close,
            )
    finally:
        await server.close()


def run[T](test: Callable[[], Awaitable[T]], limit_s: float = 60) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(test(), limit_s)

    return asyncio.run(limited())

"""What a server answers in SGLang's place.

GET  /whereabouts                                           its machine and GPUs
GET  /health                                                yes, while it is paused
POST /release_memory_occupation, /resume_memory_occupation  nothing to do, where it was done already

SGLang's /health generates a token, which a paused server does not: one that waits for its learner would be given up for lost.
And SGLang dies when memory is released or resumed that already is; a learner that comes back after a crash does not know how
the one before it left a server, so here both may be said at any time.
"""

import asyncio

import msgspec

from megarl.core.base.whereabouts import Whereabouts
from megarl.core.server.gate import App, Message, Receive, Send

PAUSED = {"/pause_generation": True, "/continue_generation": False}
RELEASED = {"/release_memory_occupation": True, "/resume_memory_occupation": False}


class Answers:
    """ASGI middleware around SGLang's app."""

    def __init__(self, app: App, place: Whereabouts) -> None:
        self._app, self._place = app, msgspec.json.encode(place)
        self._paused = self._released = False
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == "/whereabouts":
            return await _answer(send, self._place)
        if path == "/health" and self._paused:
            return await _answer(send, b"null")
        if path in PAUSED:
            self._paused = PAUSED[path]
        if path not in RELEASED:
            return await self._app(scope, receive, send)
        async with self._one_at_a_time:
            wanted = RELEASED[path]
            if wanted == self._released:
                return await _answer(send, b"null")

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] == 200:
                    self._released = wanted
                await send(message)

            await self._app(scope, receive, watch)


async def _answer(send: Send, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})

"""What a server answers that shares its GPU with a learner: where it is, and calls for its memory that may be repeated.

SGLang dies when memory is released or resumed that already is. A learner that comes back after a crash does not know how the
one before it left a server; here the server does, so both calls may be said at any time.
"""

import asyncio

import msgspec

from megarl.serving.gate import App, Message, Receive, Send
from megarl.whereabouts import Whereabouts

WHEREABOUTS = ("GET", "/whereabouts")
RELEASES = {"/release_memory_occupation": True, "/resume_memory_occupation": False}


class Sharing:
    """ASGI middleware around SGLang's app."""

    def __init__(self, app: App, place: Whereabouts) -> None:
        self._app, self._place = app, msgspec.json.encode(place)
        self._released, self._one_at_a_time = False, asyncio.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if (scope["method"], scope["path"]) == WHEREABOUTS:
            return await _answer(send, self._place)
        if scope["path"] not in RELEASES:
            return await self._app(scope, receive, send)
        async with self._one_at_a_time:
            wanted = RELEASES[scope["path"]]
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

"""Stands in for SGLang behind `megarl serve --join`: samples random tokens, five
milliseconds each, until it is killed.

Its calls are those that a controller and a learner with weights.transport disk make.
Log-probs are -1.
"""

import asyncio
import random
import sys
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from megarl.cli import main as megarl
from megarl.core.base.process import die_with_parent
from megarl.run.launcher import LocalLauncher, LocalProcess, RoleCommand

TOKEN_S = 0.005
STREAMED = 64
END_TOKEN = 0
VOCABULARY = 127
MEAN_TOKENS = 150


class StandInServer:
    """`version`: what the last load said; `running`: one event for each request, set to
    abort it.
    """

    def __init__(self) -> None:
        self.running = set[asyncio.Event]()
        self.version = "-1"
        self.paused = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        match request.path:
            case "/generate":
                return await (
                    self.sample(request, body) if body.get("stream") else self.score(body)
                )
            case "/pause_generation" | "/continue_generation":
                self.paused = request.path == "/pause_generation"
            case "/update_weights_from_disk":
                self.version = body["weight_version"]
            case "/abort_request":
                for aborted in self.running:
                    aborted.set()
        return web.json_response({"weight_version": self.version})

    async def score(self, body: dict[str, Any]) -> web.Response:
        def meta(ids: list[int], start: int) -> dict[str, Any]:
            scores = [
                [None, ids[start], None],
                *([-1.0, token, None] for token in ids[start + 1 :]),
            ]
            others = [None, *([[0.0, 1, None]] for _ in ids[start + 1 :])]
            return {
                "finish_reason": {"type": "length"},
                "weight_version": self.version,
                "input_token_logprobs": scores,
                "input_token_ids_logprobs": others,
            }

        sequences = zip(body["input_ids"], body["logprob_start_len"], strict=True)
        return web.json_response([{"meta_info": meta(ids, start)} for ids, start in sequences])

    async def sample(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = web.StreamResponse()
        aborted = asyncio.Event()
        await reply.prepare(request)
        self.running.add(aborted)
        left = list[int]()
        total = 0
        spans = list[dict[str, Any]]()
        finish = None
        try:
            while finish is None:
                await asyncio.sleep(TOKEN_S)
                if self.paused and not aborted.is_set():
                    continue
                left.append(
                    END_TOKEN
                    if random.random() < 1 / MEAN_TOKENS
                    else random.randrange(2, VOCABULARY)
                )
                total += 1
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": total - 1})
                spans[-1]["end"] = total
                full = total == body["sampling_params"]["max_new_tokens"]
                ended = "stop" if left[-1] == END_TOKEN else "length" if full else ""
                ended = "abort" if aborted.is_set() else ended
                finish = (
                    {"type": ended, "message": "aborted", "status_code": 500} if ended else None
                )
                if finish or len(left) == STREAMED:
                    scores = [[-1.0, token, None] for token in left]
                    meta = {
                        "output_token_logprobs": scores,
                        "weight_versions": spans,
                        "finish_reason": finish,
                    }
                    await reply.write(
                        b"data: "
                        + msgspec.json.encode({"output_ids": left, "meta_info": meta})
                        + b"\n\n"
                    )
                    left = []
        finally:
            self.running.discard(aborted)
        return reply


def main(arguments: list[str]) -> int:
    """Be the server if these are the arguments of one, else megarl's command line,
    which starts this in place of SGLang.
    """
    if "--index" not in arguments:
        start = LocalLauncher.start

        def start_this(self: LocalLauncher, task: RoleCommand, n: int = 0) -> LocalProcess:
            return start(self, replace(task, arguments=(__file__, *task.arguments[2:])), n)

        LocalLauncher.start = start_this
        return megarl(arguments)
    die_with_parent()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", StandInServer().answer)
    web.run_app(
        app,
        host="127.0.0.1",
        port=int(arguments[arguments.index("--port") + 1]),
        print=None,
        handle_signals=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

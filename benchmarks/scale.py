"""Measures the work in one process that grows with servers, tokens and groups, in CPU
seconds, for scaling-out.md.

    python -m benchmarks.scale [--json FILE] [--streams 16384]

    routing      Places: one request finds its place, by the number of servers
    streaming    ServerClient: one chunk of a completion, from a stand-in server in
                 another process: 32 completions in bursts; and --streams concurrent
                 ones, whose chunks come one by one, at RATE tokens/s
    publication  Fleet: all calls of a publication to stand-ins, by the number of
                 servers
    load         Fan: all servers are asked for their loads once, as the controller does
                 every 5 s
    journal      one finished group is written, and a batch of them read and encoded for
                 the learner

They are CPU seconds of this process, so that other load matters little; the best of
several repeats.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from megarl.core.base.admission import Admission
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import Batch, Group, Prompt, Rollout, Segment, encode
from megarl.core.client.client import CHECKSUMS, ServerClient
from megarl.core.client.fleet import Call, Fan, Fleet
from megarl.core.client.membership import Membership, ServerLoad
from megarl.core.client.relay import RelayedCall, relayed
from megarl.core.journal.journal import Admitted, Finished, Journal
from megarl.core.sampling.places import GroupPlaces, Places

REPEATS = 3
CHUNK = 64
SESSION = web.AppKey("session", aiohttp.ClientSession)
TOKENS = 8192
GENERATIONS = 16
SERVERS = 1024
RATE = 100_000.0
PARAMETERS = 291
"""The number of tensors in a Llama 3.1 8B."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=16384)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "routing_seconds_a_request": {
            servers: best(lambda s=servers: routing(s)) for servers in (64, 800, 12800)
        }
    }
    port: Any = multiprocessing.get_context("spawn").Queue()
    stand_in = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    stand_in.start()
    url = f"http://{address(0)}:{port.get(timeout=60)}"
    found["streaming_seconds_a_chunk"] = best(lambda: streaming(url))
    found["streams"] = streams(options.streams)
    found["publication_seconds"] = {n: publication(url, n) for n in (1, 32, 64, 256, 1024)}
    found["load_seconds"] = {n: best(lambda n=n: sweep(url, n)) for n in (32, 1024)}
    stand_in.kill()
    found |= {f"journal_{name}": value for name, value in journal().items()}
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def best(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(REPEATS))


def routing(servers: int) -> float:
    """Return the CPU seconds of a request. Servers are half full; groups of 16 requests
    go to the emptiest and stay there.
    """

    async def work() -> float:
        membership = Membership([ServerAddress(i, "") for i in range(servers)])
        for i in range(servers):
            membership.answered(i)
        membership.publish(range(servers), 0, "learner")
        for i in range(servers):
            membership.published(i, 0, "learner", "")
        places = Places(membership, 256)
        admission = Admission(1000, 8)
        for use in places.use.values():
            use.running = 128
        places.refresh()
        groups = 4 if servers > 1000 else 32
        begin = time.process_time()
        for _ in range(groups):
            group = GroupPlaces(places, admission, admission.admit(), GENERATIONS)
            group.let_others_begin()
            for sample in range(GENERATIONS):
                server, _ = await group.take(sample)
                if sample % 2:
                    places.give_back(server)
                places.free(admission.can_admit)
        return (time.process_time() - begin) / (groups * GENERATIONS)

    return asyncio.run(work())


def address(server: int) -> str:
    """Return a stand-in's address: each has one of the loopback network, all with the
    same port.
    """
    return f"127.0.{1 + server // 200}.{1 + server % 200}"


def chunks() -> list[bytes]:
    """Return a chunk of CHUNK tokens, and the last chunk of a request."""
    ids = list(range(100_000, 100_000 + CHUNK))
    logprobs = [[-0.123456 - i / 1000, 100_000 + i, None] for i in range(CHUNK)]
    meta: dict[str, Any] = {
        "id": "x" * 32,
        "finish_reason": None,
        "output_token_logprobs": logprobs,
    }
    version = [{"version": "0", "start": 0, "end": TOKENS}]
    end = meta | {"finish_reason": {"type": "length"}, "weight_versions": version}
    events = [{"output_ids": ids, "meta_info": about} for about in (meta, end)]
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


def serve(port: Any) -> None:
    """Be the stand-ins: stream TOKENS tokens in chunks, as SGLang writes them, relay
    calls, and answer others at once.
    """
    table = {f"model.layers.{i}.weight": f"{i:016x}" for i in range(PARAMETERS)}
    checksums = json.dumps([{"per_gpu_checksum": "0" * 16, "checksums": table}])
    lines = chunks()

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse()
        await reply.prepare(request)
        for i in range(TOKENS // CHUNK):
            await reply.write(lines[i == TOKENS // CHUNK - 1])
        await reply.write_eof()
        return reply

    async def other(request: web.Request) -> web.Response:
        message = checksums if CHECKSUMS in await request.text() else ""
        return web.json_response({"success": True, "message": message, "weight_version": "0"})

    async def loads(request: web.Request) -> web.Response:
        load = {"token_usage": zlib.crc32(request.host.encode()) / 2**32, "num_waiting_reqs": 0}
        return web.json_response({"timestamp": time.time(), "loads": [load]})

    async def relay(request: web.Request) -> web.StreamResponse:
        call = msgspec.json.decode(await request.read(), type=RelayedCall)
        reply = web.StreamResponse()
        await reply.prepare(request)
        async for line in relayed(request.app[SESSION], call, ""):
            await reply.write(line)
        await reply.write_eof()
        return reply

    async def run() -> None:
        app = web.Application()
        app[SESSION] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app.router.add_post("/generate", generate)
        app.router.add_post("/relay", relay)
        app.router.add_get("/v1/loads", loads)
        app.router.add_route("*", "/{any:.*}", other)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, address(0), 0).start()
        number = runner.addresses[0][1]
        for server in range(1, SERVERS):
            await web.TCPSite(runner, address(server), number).start()
        port.put(number)
        await asyncio.Event().wait()

    asyncio.run(run())


def streaming(url: str) -> float:
    """Return the CPU seconds of a chunk, for 32 concurrent completions of TOKENS
    tokens.
    """

    async def work() -> float:
        async with ServerClient(ServerAddress(id=0, url=url), "", "", 600) as client:
            prompt = np.arange(256, dtype=np.int32)
            begin = time.process_time()
            await asyncio.gather(*(client.generate(prompt, TOKENS) for _ in range(32)))
            return (time.process_time() - begin) / (32 * TOKENS / CHUNK)

    return asyncio.run(work())


def sweep(url: str, servers: int) -> float:
    """Return the CPU seconds for asking all servers for their loads, no two of which
    are alike.
    """
    port = int(url.rpartition(":")[2])
    clients = {
        i: ServerClient(ServerAddress(i, f"http://{address(i)}:{port}"), "", "", 60.0)
        for i in range(servers)
    }

    async def work() -> float:
        begin = time.process_time()
        fan = Fan[ServerLoad](clients, set())
        await fan.run(clients, lambda client: client.current_load())
        assert len(set(fan.results.values())) == servers
        seconds = time.process_time() - begin
        for client in clients.values():
            await client.close()
        return seconds

    return asyncio.run(work())


def streams(count: int) -> dict[str, float]:
    """Measure two chunks of each of `count` concurrent completions. cores: CPU seconds
    per second at RATE.
    """
    told: Any = multiprocessing.get_context("spawn").Queue()
    stand_in = multiprocessing.get_context("spawn").Process(
        target=stream, args=(told, count), daemon=True
    )
    stand_in.start()
    allow_files(count)

    async def work(url: str) -> float:
        async with ServerClient(ServerAddress(id=0, url=url), "", "", 600) as client:
            prompt = np.arange(256, dtype=np.int32)
            running = []
            for number in range(count):
                running.append(asyncio.create_task(client.generate(prompt, TOKENS)))
                if number % 100 == 0:
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(told.get)  # all are connected
            begin = time.process_time()
            await asyncio.gather(*running)
            return time.process_time() - begin

    seconds = asyncio.run(work(f"http://127.0.0.1:{told.get(timeout=60)}"))
    took = told.get(timeout=60)
    stand_in.kill()
    a_chunk = seconds / (2 * count)
    rate = 2 * count * CHUNK / took
    return {"seconds_a_chunk": a_chunk, "tokens_a_second": rate, "cores": a_chunk * RATE / CHUNK}


def stream(told: Any, count: int) -> None:
    """Be a stand-in that writes a chunk to one request after another, at RATE tokens/s
    in total.
    """
    first, last = (b"%x\r\n%s\r\n" % (len(line), line) for line in chunks())
    allow_files(count)

    async def run() -> None:
        writers: list[asyncio.StreamWriter] = []
        connected = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(
                int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            )
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writers.append(writer)
            if len(writers) == count:
                connected.set()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
        told.put(server.sockets[0].getsockname()[1])
        await connected.wait()
        told.put("connected")
        await asyncio.sleep(1)
        begin = time.monotonic()
        sent = 0
        for line in (first, last + b"0\r\n\r\n"):
            for writer in writers:
                writer.write(line)
                sent += 1
                if sent % 10 == 0:
                    await asyncio.sleep(begin + sent * CHUNK / RATE - time.monotonic())
        told.put(time.monotonic() - begin)
        await asyncio.sleep(60)

    asyncio.run(run())


def allow_files(count: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 1000, most), most))


def publication(url: str, servers: int) -> float:
    """Return the CPU seconds of the calls of a publication to servers that stage its
    weights.
    """
    port = int(url.rpartition(":")[2])
    clients = [
        ServerClient(ServerAddress(i, f"http://{address(i)}:{port}"), "", "", 60.0)
        for i in range(servers)
    ]
    calls: list[Call[Any]] = [
        lambda s: s.served_version(),
        lambda s: s.stage(1),
        lambda s: s.receive("group"),
    ]
    calls += [
        lambda s: s.staged_checksums(),
        lambda s: s.pause("in_place"),
        lambda s: s.swap(1),
        lambda s: s.resume(),
    ]
    begin = time.process_time()
    with closing(Fleet(clients, 0)) as fleet:
        for call in calls:
            results, errors = fleet.call_each(fleet.servers, call)
            assert len(results) == servers, next(iter(errors.values()))
        return time.process_time() - begin


def journal() -> dict[str, float]:
    """Return CPU seconds and bytes per group of GENERATIONS rollouts with TOKENS
    tokens: written, read, encoded.
    """
    random = np.random.default_rng(0)

    def group(ticket: int) -> Group:
        def rollout(sample: int) -> Rollout:
            tokens = random.integers(0, 128_000, TOKENS, dtype=np.int32)
            logprobs = random.random(TOKENS, dtype=np.float32)
            segment = Segment(tokens=tokens, logprobs=logprobs, weight_version=0, trained=True)
            return Rollout(
                sample=sample, segments=(segment,), reward=1.0, correct=True, finish="stop"
            )

        prompt = Prompt(id=str(ticket), tokens=np.arange(256, dtype=np.int32), answer="1")
        return Group(
            ticket=ticket, prompt=prompt, rollouts=tuple(rollout(i) for i in range(GENERATIONS))
        )

    groups = [group(i) for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        opened = Journal.open(Path(folder) / "rollouts", 16, 8, 1)
        opened.append(
            *(
                Admitted(ticket=g.ticket, task="", prompt_id=g.prompt.id, epoch=0, due_step=0)
                for g in groups
            )
        )
        begin = time.process_time()
        for g in groups:
            opened.append(Finished(group=g, time=0.0))
        written = time.process_time() - begin
        begin = time.process_time()
        read = opened.groups(range(16))
        encoded = encode(Batch(step=0, groups=read))
        offered = time.process_time() - begin
        opened.close()
    return {
        "write_seconds_a_group": written / 16,
        "offer_seconds_a_group": offered / 16,
        "bytes_a_group": len(encoded) / 16,
    }


if __name__ == "__main__":
    main()

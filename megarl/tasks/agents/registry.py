"""A recipe's agents, by task: each rollout is a session, in which the agent's own process asks the policy by HTTP.

    session(prompt, policy) ─► its turn among `agent.at_once` ─► key ─► process ─► its paths, last message, and reward
                                                                         ends, or a limit ends it

An agent that fails without a reward is run once more, in a new session; then the rollout is void. One that runs out of time is
graded as it is.
"""

import asyncio
import contextlib
import heapq
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from megarl.core.base.contracts import AgentDown, AgentRollout, Policy
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt
from megarl.core.recipe import Recipe, Rows
from megarl.tasks.agents.gateway import MODEL, Gateway
from megarl.tasks.agents.rendering import Rendering, tail_problem
from megarl.tasks.agents.session import AgentSession
from megarl.tasks.data.chat import load_chat
from megarl.tasks.graders.functions import environment, import_problem
from megarl.tasks.graders.sandbox import CHECK_LIMIT_S, NAMESPACES, agent_sandbox

log = logging.getLogger(__name__)
TRIES = 2
POLL_S = 1.0
KILL_LIMIT_S = 10.0
SAID = 1000
"""Bytes of what a failing agent printed last that are logged."""
_CODE = "import sys; from megarl.tasks.agents.inside import main; main(sys.argv[1:])"


class Turns:
    """Lets at most `count` in at a time, the smallest order first."""

    def __init__(self, count: int) -> None:
        self._free, self._numbers = count, itertools.count()
        self._waiting: list[tuple[tuple[int, int, int], int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, order: tuple[int, int, int]) -> AsyncIterator[None]:
        """Wait for a place, and have it for the time of the block."""
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._numbers), mine))
        self._let_in()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self._free += 1
            mine.cancel()
            self._let_in()

    def _let_in(self) -> None:
        while self._free and self._waiting:
            _, _, first = heapq.heappop(self._waiting)
            if not first.done():
                self._free -= 1
                first.set_result(None)


class TaskAgents:
    """Agents by task or suite. MegarlError if one in the recipe cannot be run here, or the model has no chat template."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        rows: dict[str, Rows] = {**recipe.data.tasks, **recipe.evaluation.sampled}
        self._tasks = {name: task for name, task in rows.items() if task.agent}
        self._turns = Turns(recipe.agent.at_once)
        self._starting: asyncio.Task[Gateway] | None = None
        if not self._tasks:
            return
        chat = load_chat(tokenizer.path)
        self._rendering = Rendering(chat, tokenizer, recipe.agent.history)
        if problem := tail_problem(chat, self._rendering):
            log.warning("%s", problem)
        if self._rendering.calls is None:
            log.info("%s: no tool calls of the chat template can be read; agents find all text in `content`", chat.path)
        if recipe.data.sandbox == "bubblewrap":
            _check_sandbox()
        for name, task in self._tasks.items():
            _check(name, task.agent)
        self._host = _address(recipe.agent.interface)

    def work(self, task: str) -> bool:
        return task in self._tasks

    async def session(self, prompt: Prompt, order: tuple[int, int, int], policy: Policy) -> AgentRollout:
        gateway, agent = await self._gateway(), self._tasks[prompt.task].agent
        why = ""
        async with self._turns.turn(order):
            for _ in range(TRIES):
                async with gateway.session(self._recipe, self._tokenizer, self._rendering, policy) as session:
                    why = await _AgentProcess(
                        agent, prompt, session, gateway.url, self._recipe, self._tokenizer
                    ).ended()
                    if session.failure is not None:
                        raise session.failure
                    rollout = session.rollout()
                if not why:
                    return rollout
                log.warning("the agent of task %s failed at prompt %s: %s", prompt.task, prompt.id, why)
        raise AgentDown(f"the agent of task {prompt.task} failed {TRIES} times without a reward, the last time: {why}")

    async def close(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await (await self._starting).close()

    async def _gateway(self) -> Gateway:
        """Return the gateway, started at the first session."""
        if self._starting is None:
            self._starting = asyncio.create_task(_started(self._host))
        return await asyncio.shield(self._starting)


class _AgentProcess:
    """One run of an agent's process in a session."""

    def __init__(
        self, agent: str | tuple[str, ...], prompt: Prompt, session: AgentSession, url: str, recipe: Recipe,
        tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        theirs = os.environ.get("PYTHONPATH", "")
        self._words = ["function", agent] if isinstance(agent, str) else ["command", theirs, *agent]
        self._session, self._settings, self._url = session, recipe.agent, url
        self._sandboxed, self._hidden = recipe.data.sandbox == "bubblewrap", recipe.run.path
        self._task = {
            "prompt": tokenizer.decode(prompt.tokens), "id": prompt.id, "task": prompt.task, "answer": prompt.answer,
        }  # fmt: skip

    async def ended(self) -> str:
        """Run the agent to its end or a limit; return why there is nothing to grade, or ""."""
        with (
            tempfile.TemporaryDirectory(prefix="megarl-agent-", ignore_cleanup_errors=True) as scratch,
            tempfile.TemporaryFile() as output,
        ):
            around = agent_sandbox(Path(scratch), self._hidden) if self._sandboxed else []
            process = await asyncio.create_subprocess_exec(
                *around, sys.executable, "-c", _CODE, *self._words, env=self._environment(scratch), start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
            try:
                await self._watched(process)
            finally:
                await _killed(process)
            output.seek(max(0, output.seek(0, os.SEEK_END) - SAID))
            said = output.read().decode(errors="replace").strip()
        session = self._session
        if session.limited or session.reward is not None:
            return ""
        if process.returncode:
            return f"it ended with status {process.returncode}, and said: {said or 'nothing'}"
        if not any(node.delivered >= 0 for node in session.tree.nodes):
            return "it ended without a request and without a reward"
        return ""

    async def _watched(self, process: asyncio.subprocess.Process) -> None:
        """Give the process its task, and wait until it has ended or may not go on."""
        assert process.stdin
        with contextlib.suppress(OSError, RuntimeError):  # it may end without having read it
            process.stdin.write(json.dumps(self._task).encode())
            process.stdin.close()
        session, settings = self._session, self._settings
        ended, told = asyncio.create_task(process.wait()), asyncio.create_task(session.ended.wait())
        grace = None
        try:
            while not ended.done():
                await asyncio.wait(
                    {ended} if told.done() else {ended, told}, timeout=POLL_S, return_when="FIRST_COMPLETED"
                )
                now = time.monotonic()
                if now - session.began > settings.time_s:
                    session.end(f"its time is up (agent.time_s={settings.time_s:g})", limited=True)
                    return
                if session.idle_since is not None and now - session.idle_since > settings.idle_s:
                    session.end(
                        f"there was no request for {settings.idle_s:g} s, a third of agent.time_s", limited=True
                    )
                    return
                if session.failure is not None:
                    return
                if told.done():  # it has been told, and may still post a reward
                    grace = grace or now
                    if now - grace > KILL_LIMIT_S:
                        return
        finally:
            told.cancel()
            ended.cancel()

    def _environment(self, scratch: str) -> dict[str, str]:
        host, key = self._url.removeprefix("http://").partition(":")[0], self._session.key
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), host)))
        home = {"HOME": scratch} if self._sandboxed else {}
        return environment() | home | {
            "OPENAI_BASE_URL": f"{self._url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": self._url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL, "TMPDIR": scratch, "NO_PROXY": direct, "no_proxy": direct,
        }  # fmt: skip


async def _started(host: str) -> Gateway:
    gateway = Gateway(host)
    await gateway.start()
    return gateway


async def _killed(process: asyncio.subprocess.Process) -> None:
    """Kill the agent and what it started, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), KILL_LIMIT_S)
    except TimeoutError:
        log.warning("process %d of an agent did not end %g s after SIGKILL", process.pid, KILL_LIMIT_S)


def _check_sandbox() -> None:
    """Raise MegarlError if no agent can be run in bubblewrap here."""
    advice = f"install it (apt-get install bubblewrap); {NAMESPACES}; or set data.sandbox=rlimits if agents may do what you can"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            command = [*agent_sandbox(Path(scratch), Path(scratch)), "true"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_LIMIT_S)
            said = done.stderr.strip() or f"status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
    if said:
        raise MegarlError(f"data.sandbox: no agent can be run with bubblewrap here ({said}); {advice}")


def _check(task: str, agent: str | tuple[str, ...]) -> None:
    """Raise MegarlError if there is no such command or function."""
    key = f"data.tasks.{task}.agent"
    if not isinstance(agent, str):
        if shutil.which(agent[0]) is None:
            raise MegarlError(f"{key}: there is no command {agent[0]!r} on PATH")
        return
    module, _, name = agent.partition(":")
    code = f"import importlib; assert callable(getattr(importlib.import_module({module!r}), {name!r})), 'it cannot be called'"
    if said := import_problem(code):
        must = f"it must be a function in a module on PYTHONPATH or in {os.getcwd()}"
        raise MegarlError(f"{key}: {agent} cannot be used: {said}; {must}")


def _address(interface: str) -> str:
    """Return the address that the gateway listens on."""
    if not interface:
        return "127.0.0.1"
    known = psutil.net_if_addrs()
    for entry in known.get(interface, []):
        if entry.family.name == "AF_INET":
            return entry.address
    raise MegarlError(
        f"agent.interface: {interface!r} is no network interface with an IPv4 address; known: {', '.join(known)}"
    )

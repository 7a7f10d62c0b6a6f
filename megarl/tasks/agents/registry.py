"""A recipe's agents, by task. Each rollout is a session: the agent runs in a process of
its own and queries the policy by HTTP.

    session(prompt, policy)
      ─► one of `agent.at_once` places ─► key
      ─► process, until it ends or a limit ends it
      ─► its paths, last message, and reward

An agent that fails without a reward is run once more, in a new session; if it fails
again, the rollout cannot be judged. An agent that runs out of time is graded on what it
has done so far.
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
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import psutil

from megarl.core.base.contracts import AgentDown, AgentRollout, Policy
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import without_proxy
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt
from megarl.core.recipe import Recipe
from megarl.core.recipe.agent import AgentSection
from megarl.tasks.agents.gateway import MODEL, Gateway
from megarl.tasks.agents.rendering import Rendering, tail_problem
from megarl.tasks.agents.sandbox import agent_sandbox, check_agent_sandbox
from megarl.tasks.agents.session import AgentSession
from megarl.tasks.data.chat import load_chat
from megarl.tasks.graders.functions import check_importable, environment
from megarl.tasks.graders.scratch import async_scratch, hand_over, kill_users

log = logging.getLogger(__name__)
TRIES = 2
POLL_S = 1.0
KILL_LIMIT_S = 10.0
PRINTED_BYTES = 1000
"""How many of the last bytes that a failing agent printed are logged."""
_CODE = "import sys; from megarl.tasks.agents.inside import main; main(sys.argv[1:])"


class Turns:
    """Lets at most `count` tasks run at a time. Of those that wait, the one with the
    smallest `order` goes first.
    """

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count()
        self._free = count
        self._waiting: list[tuple[tuple[int, int, int], int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, order: tuple[int, int, int]) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block runs."""
        place = asyncio.get_running_loop().create_future()  # done when this task has one
        # The number keeps those of equal order in turn, and futures from being
        # compared.
        heapq.heappush(self._waiting, (order, next(self._numbers), place))
        self._let_in()
        try:
            await place
            yield
        finally:
            if place.done() and not place.cancelled():
                self._free += 1
            place.cancel()  # if it still waits, `_let_in` passes over it
            self._let_in()

    def _let_in(self) -> None:
        """Give the free places to those who wait."""
        while self._free and self._waiting:
            _, _, first = heapq.heappop(self._waiting)
            if not first.done():
                self._free -= 1
                first.set_result(None)


class TaskAgents:
    """The agents of a recipe, by task or suite. MegarlError if one cannot run here, or
    if the model has no chat template.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._tasks = {name: task for name, task in recipe.sampled.items() if task.agent}
        self._turns = Turns(recipe.agent.at_once)
        self._gateway: asyncio.Task[Gateway] | None = None
        if not self._tasks:
            return
        self._renderings: dict[str, Rendering] = {}
        problems = set()
        for name, task in self._tasks.items():
            chat = load_chat(tokenizer.path, task.template_options)
            self._renderings[name] = Rendering(chat, tokenizer, recipe.agent.history)
            problems.add(tail_problem(chat, self._renderings[name]))
        for problem in sorted(problems - {""}):
            log.warning("%s", problem)
        if any(rendering.calls is None for rendering in self._renderings.values()):
            log.info(
                "%s: tool calls of the chat template cannot be read; agents get all text in"
                " `content`",
                tokenizer.path,
            )
        for name in self._tasks:
            self._check_agent(name)
        if recipe.data.sandbox == "bubblewrap":
            agents = {str(task.agent): (name, task.agent) for name, task in self._tasks.items()}
            for name, agent in agents.values():
                check_agent_sandbox(f"the agent of {name}", agent)
            self._host = ""
        else:
            self._host = _address(recipe.agent.interface)

    def _check_agent(self, name: str) -> None:
        """Raise MegarlError if there is no such function or command as the task's."""
        agent = self._tasks[name].agent
        section = "data.tasks" if name in self._recipe.data.tasks else "evaluation.suites"
        key = f"{section}.{name}.agent"
        if isinstance(agent, str):
            check_importable(f"{key}:", agent, may_be_async=True)
        elif shutil.which(agent[0]) is None:
            raise MegarlError(f"{key}: there is no command {agent[0]!r} on PATH")

    def work(self, task: str) -> bool:
        """Return whether an agent does the rollouts of this task."""
        return task in self._tasks

    async def run_session(
        self,
        prompt: Prompt,
        order: tuple[int, int, int],
        policy: Policy,
        waited: Callable[[], float],
    ) -> AgentRollout:
        """Run the agent of the prompt's task on the prompt. order: the smallest goes
        first. waited: seconds of waiting for servers, which the limit on the session's
        time leaves out. AgentDown if the agent fails TRIES times; raises what `policy`
        raises, too.
        """
        if self._gateway is None:
            self._gateway = asyncio.create_task(Gateway(self._host).start())
        # Several sessions wait for one start, which one that is cancelled must not
        # cancel.
        gateway = await asyncio.shield(self._gateway)
        rendering = self._renderings[prompt.task]
        async with self._turns.turn(order):
            for _ in range(TRIES):
                async with gateway.session(
                    self._recipe, self._tokenizer, rendering, policy
                ) as session:
                    problem = await self._run_agent(prompt, session, gateway, waited)
                    if session.failure is not None:
                        raise session.failure
                    rollout = session.rollout()
                if not problem:
                    return rollout
                log.warning(
                    "the agent of task %s failed at prompt %s: %s", prompt.task, prompt.id, problem
                )
        raise AgentDown(
            f"the agent of task {prompt.task} failed {TRIES} times without a reward, the last time:"
            f" {problem}",
            rollout,
        )

    async def close(self) -> None:
        """End the sessions, and stop to serve. Errors are suppressed: a start that
        failed has been reported, and nothing comes after the end.
        """
        if self._gateway is not None:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await (await self._gateway).close()

    async def _run_agent(
        self, prompt: Prompt, session: AgentSession, gateway: Gateway, waited: Callable[[], float]
    ) -> str:
        """Run the agent, and return why there is nothing to grade, or "": as `_run`,
        and also if the agent cannot be run.
        """
        try:
            return await self._run(prompt, session, gateway, waited)
        except Exception as error:  # agents may have filled the disk, or taken all processes
            unforeseen = None if isinstance(error, OSError) else error
            log.warning("an agent cannot be run: %s", error, exc_info=unforeseen)
            return f"it cannot be run: {error}"

    async def _run(
        self, prompt: Prompt, session: AgentSession, gateway: Gateway, waited: Callable[[], float]
    ) -> str:
        """Run the agent's process until it ends or reaches a limit; return why there is
        nothing to grade, or "".
        """
        with tempfile.TemporaryFile() as output:
            async with async_scratch() as folder:
                status = await self._run_in(folder, output, prompt, session, gateway, waited)
            length = output.seek(0, os.SEEK_END)
            output.seek(max(0, length - PRINTED_BYTES))
            printed = output.read().decode(errors="replace").strip()
        if session.refused:  # its reward was, which the agent may not have noticed
            return session.refused
        if session.limited or session.reward is not None:
            return ""
        if status:
            return f"it ended with status {status}, and printed: {printed or 'nothing'}"
        if not any(node.delivered >= 0 for node in session.tree.nodes):
            return "it ended without a request and without a reward"
        return ""

    async def _run_in(
        self,
        folder: Path,
        output: IO[bytes],
        prompt: Prompt,
        session: AgentSession,
        gateway: Gateway,
        waited: Callable[[], float],
    ) -> int | None:
        """Run the agent's process as in `_run`, with this folder; return its exit
        status.
        """
        agent = self._tasks[prompt.task].agent
        if isinstance(agent, str):
            command = []
            words = ["function", agent]
        else:
            command = list(agent)
            words = ["command", os.environ.get("PYTHONPATH", ""), *command]
        variables = environment() | _variables(gateway.url, session.key, str(folder))
        sandbox: list[str] = []
        if self._recipe.data.sandbox == "bubblewrap":
            hand_over(folder)
            variables["HOME"] = str(folder)
            sandbox = agent_sandbox(folder, self._recipe.run.path, command, gateway.socket)
        task = self._task(prompt, session)
        process = await asyncio.create_subprocess_exec(
            *sandbox,
            *(sys.executable, "-c", _CODE, *words),
            env=variables,
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
        try:
            assert process.stdin
            # it may exit before it has read its task
            with contextlib.suppress(OSError, RuntimeError):
                process.stdin.write(task)
                process.stdin.close()
            await _ended(process, session, self._recipe.agent, waited)
        finally:
            await _killed(process)
            if not sandbox:  # what left its process group
                await asyncio.to_thread(kill_users, folder)
        return process.returncode

    def _task(self, prompt: Prompt, session: AgentSession) -> bytes:
        """Return what the agent's process reads from its stdin (inside.py)."""
        task = {
            "prompt": self._tokenizer.decode(prompt.tokens),
            "id": prompt.id,
            "task": prompt.task,
            "answer": prompt.answer,
            "reward_key": session.reward_key,
        }
        return json.dumps(task).encode()


async def _ended(
    process: asyncio.subprocess.Process,
    session: AgentSession,
    limits: AgentSection,
    waited: Callable[[], float],
) -> None:
    """Wait until the process has exited or must be stopped: because the policy has
    failed, or because KILL_LIMIT_S have passed since the session was over and its last
    request answered. Ends the session if its time is up.
    """
    over_since = None
    waited_before = waited()
    while process.returncode is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), POLL_S)
        time_now = time.monotonic()
        excused = waited() - waited_before
        if time_now - session.began - excused > limits.time_s:
            session.end(f"its time is up (agent.time_s={limits.time_s:g})", limited=True)
        if session.idle_since is not None and time_now - session.idle_since > limits.idle_s:
            session.end(
                f"there was no request for {limits.idle_s:g} s, a third of agent.time_s",
                limited=True,
            )
        if session.failure is not None:
            return
        # The agent learns of it at its next request, and may still clean up and post a
        # reward.
        if session.over and not session.answering:
            over_since = over_since or time_now
            if time_now - over_since > KILL_LIMIT_S:
                return


def _variables(url: str, key: str, folder: str) -> dict[str, str]:
    """Return the environment variables that give an agent its session's address (used
    without a proxy) and its own folder.
    """
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
        "TMPDIR": folder,
    }
    for size in ("HAIKU", "SONNET", "OPUS"):  # of Claude Code's sub-agents
        variables[f"ANTHROPIC_DEFAULT_{size}_MODEL"] = MODEL
    host = url.removeprefix("http://").partition(":")[0]
    return variables | without_proxy(host)


async def _killed(process: asyncio.subprocess.Process) -> None:
    """Kill the agent and the processes that it started, and wait until it has exited.
    If it still runs, SIGTERM comes first: it may have begun what no signal reaches,
    such as containers.
    """
    try:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            await asyncio.wait_for(process.wait(), KILL_LIMIT_S)
    except (ProcessLookupError, TimeoutError):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), KILL_LIMIT_S)
    except TimeoutError:
        log.warning(
            "process %d of an agent did not end %g s after SIGKILL", process.pid, KILL_LIMIT_S
        )


def _address(interface: str) -> str:
    """Return the address that the gateway listens on. MegarlError if the interface has
    no IPv4 address.
    """
    if not interface:
        return "127.0.0.1"
    addresses = psutil.net_if_addrs()
    for entry in addresses.get(interface, []):
        if entry.family.name == "AF_INET":
            return entry.address
    raise MegarlError(
        f"agent.interface: {interface!r} is not a network interface with an IPv4 address; known:"
        f" {', '.join(addresses)}"
    )

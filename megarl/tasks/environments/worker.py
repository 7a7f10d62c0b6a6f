"""The process that plays the episodes of one environment, many at a time.

    stdin   Setup, then requests of episodes
    stdout  an EpisodeReply: episodes can begin, or why not; then one for each request,
            in the order in which they are ready both in frames: 8 bytes with the length
            of the rest, then msgpack

A user's class is instantiated and called only here. Whatever it raises becomes the
error in a reply. host.py deals with code that ends or blocks this process; `mark` is
shared memory that tells it which episode's code is running. The process ends when its
parent ends or its stdin is closed.
"""

import asyncio
import inspect
import logging
import mmap
import os
import resource
import struct
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from megarl.core.base.contracts import Environment, GraderDown, Observation, Verdict, score_of
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import die_with_parent, imported, start_logging
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Prompt, Record, decode, encode
from megarl.tasks.environments.calculator import Calculator
from megarl.tasks.environments.framing import Framing, Setting
from megarl.tasks.environments.guessing import Guessing
from megarl.tasks.environments.python import LIMITS, Python
from megarl.tasks.graders.sandbox import Sandbox, places

log = logging.getLogger(__name__)
Factory = Callable[[Setting], Environment]
BUILT_IN: dict[str, Factory] = {"python": Python, "calculator": Calculator, "guessing": Guessing}
HEAD = struct.Struct("<Q")
MARK = struct.Struct("<q")
LONGEST = 1 << 26
"""Most bytes in a request."""
BESIDES_TOKENS = 1 << 16
"""Most bytes in a reply, besides the tokens of an observation."""
ERROR_CHARACTERS = 1000
"""Most characters of an error message that are passed on."""


class Part(Record, frozen=True):
    """What an environment needs to know about a task or suite. key: the environment's
    key in the recipe, for errors.
    """

    key: str
    template: str
    reply_tokens: int
    template_options: dict[str, bool | int | float | str]


class Setup(Record, frozen=True):
    """The environment that a process runs. tokenizer: the tokenizer's directory; parts:
    by task or suite.
    """

    environment: str
    tokenizer: str
    sandbox: Literal["bubblewrap", "rlimits"]
    end_of_thinking: str
    parts: dict[str, Part]


def longest_reply(setup: Setup) -> int:
    """Return the most bytes in a reply, with 4 for each token of an observation."""
    return 4 * max(part.reply_tokens for part in setup.parts.values()) + BESIDES_TOKENS


Act = Literal["reset", "step", "reward", "close"]


class EpisodeRequest(Record, frozen=True):
    """A call of an episode. call, episode: their numbers; limit_s: time for the call;
    prompt: the episode's prompt, for a reset; tokens [n] int32: the policy's turn, for
    a step.
    """

    call: int
    episode: int
    limit_s: float
    act: Act
    prompt: Prompt | None = None
    tokens: np.ndarray | None = None


class EpisodeReply(Record, frozen=True):
    """The result of a call; call 0 is the process's greeting. error: why there is no
    result.
    """

    call: int = 0
    error: str | None = None
    stop_tokens: tuple[int, ...] = ()
    observation: Observation | None = None
    verdict: Verdict | None = None


class Episodes:
    """The episodes of this process. mark: called with the number of the episode whose
    code runs, or 0 when none does. MegarlError if the environment is unusable here; to
    find out, one is instantiated for each task.
    """

    def __init__(self, setup: Setup, tokenizer: Tokenizer, mark: Callable[[int], object]) -> None:
        self._setup = setup
        self._mark = mark
        self._playing: dict[int, Environment] = {}
        sandbox = Sandbox(setup.sandbox, places(), LIMITS)
        if setup.environment == "python":
            sandbox.check()
        self._settings: dict[str, Setting] = {}
        first_part = next(iter(setup.parts.values()))
        self._factory = _factory(first_part.key, setup.environment)
        for name, part in setup.parts.items():
            framing = Framing(tokenizer, part.template, part.reply_tokens, part.template_options)
            self._settings[name] = Setting(
                name, tokenizer, framing, sandbox, setup.end_of_thinking, part.reply_tokens
            )
            self._check_factory(part, self._settings[name])

    def _check_factory(self, part: Part, setting: Setting) -> None:
        """Make an environment for this task. MegarlError if that fails."""
        name = f"{part.key}: {self._setup.environment}"
        try:
            environment = self._factory(setting)
        except MegarlError as error:
            raise MegarlError(f"{part.key}: {error}") from None
        except BaseException as error:  # a user's class may raise anything
            raise MegarlError(f"{name} cannot be made: {_described(error)}") from error
        if not isinstance(environment, Environment):
            raise MegarlError(
                f"{name} is not an Environment; derive it from megarl.environments.Environment"
            )

    async def answer(self, request: EpisodeRequest) -> bytes:
        """Return an encoded reply, whatever the environment does. Never returns if the
        environment cannot be cancelled.
        """
        try:
            message = encode(await self._reply(request))
            longest = longest_reply(self._setup)
            if len(message) <= longest:
                return message
            problem = f"answered {len(message):,} bytes, {longest:,} at most"
        except Exception as error:  # a number that no record holds, or text that is not Unicode
            problem = f"answered something that cannot be encoded ({type(error).__name__})"
        return encode(EpisodeReply(call=request.call, error=problem))

    async def _reply(self, request: EpisodeRequest) -> EpisodeReply:
        """Return the reply to a request; if the environment fails or is late, one that
        says so.
        """
        if request.prompt is None and request.episode not in self._playing:
            return EpisodeReply(call=request.call)  # its environment was never created
        # The environment may raise anything, CancelledError and SystemExit too: only
        # the limit cancels here.
        try:
            async with asyncio.timeout(request.limit_s) as limit:
                return await _Marked(self._answer(request), request.episode, self._mark)
        except GraderDown as error:
            text = _described(error).partition(": ")[2]  # a GraderDown speaks for itself
            return EpisodeReply(call=request.call, error=text)
        except BaseException as error:
            if limit.expired():
                late = f"{request.act} took longer than {request.limit_s:g} s"
                return EpisodeReply(call=request.call, error=late)
            problem = f"{request.act} failed: {_described(error)}"
            try:
                log.exception("%s: %s", self._setup.environment, problem)
            except Exception:  # an error that cannot even be printed
                log.error("%s: %s", self._setup.environment, problem)
            return EpisodeReply(call=request.call, error=problem)

    async def _answer(self, request: EpisodeRequest) -> EpisodeReply:
        """Do what a request asks: begin an episode in a new environment, take a step,
        give the reward, or close. Raises whatever the environment does, and TypeError
        or ValueError if its answer is unusable.
        """
        if request.prompt is not None:
            environment = self._factory(self._settings[request.prompt.task])
            self._playing[request.episode] = environment
            await _awaited(environment.reset(request.prompt))
            stop_tokens = tuple(int(token) for token in environment.stop_tokens)
            return EpisodeReply(call=request.call, stop_tokens=stop_tokens)
        environment = self._playing[request.episode]
        if request.tokens is not None:
            observation = _observed(await _awaited(environment.step(request.tokens)))
            return EpisodeReply(call=request.call, observation=observation)
        if request.act == "reward":
            verdict = _verdict(await _awaited(environment.reward()))
            return EpisodeReply(call=request.call, verdict=verdict)
        del self._playing[request.episode]
        await _awaited(environment.close())
        return EpisodeReply(call=request.call)


async def _awaited(result: Any) -> Any:
    """Return what a user's method returns, which may be no coroutine: a plain `def` is
    easily written.
    """
    if inspect.isawaitable(result):
        return await result
    return result


class _Marked[T]:
    """Awaits `work`; calls `mark(episode)` whenever its code starts to run, and
    `mark(0)` when it waits or ends.
    """

    def __init__(self, work: Awaitable[T], episode: int, mark: Callable[[int], object]) -> None:
        self._work = work
        self._episode = episode
        self._mark = mark

    def __await__(self) -> Generator[Any, Any, T]:
        """Run the work, marked from each wait to the next; return its result. A
        generator as Python's `await` drives it: it yields what is waited for, and what
        is thrown into it meanwhile (such as CancelledError) is passed on to the work.
        """
        steps = self._work.__await__()
        thrown = None
        while True:
            self._mark(self._episode)
            try:
                waits_for = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as stop:
                return stop.value
            finally:
                self._mark(0)
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                thrown = error


def _observed(answer: Any) -> Observation:
    """Validate the answer of a user's environment, which may be anything. TypeError or
    ValueError if it is unusable.
    """
    if not isinstance(answer, Observation):
        raise TypeError(f"it answered {answer!r:.80}, not an Observation")
    tokens = np.asarray(answer.tokens)
    problem = f"it answered {answer.tokens!r:.80}, which are not token ids"
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(problem)
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 31:
        raise ValueError(problem)
    return Observation(tokens.astype(np.int32), bool(answer.done), bool(answer.error))


def _verdict(answer: Any) -> Verdict | None:
    """Validate the verdict of a user's environment, as `_observed` does."""
    if answer is None:
        return None
    if not isinstance(answer, Verdict):
        raise TypeError(f"it gave {answer!r:.80}, not a Verdict")
    error = str(answer.error)[:ERROR_CHARACTERS]
    return Verdict(score_of(answer.score), bool(answer.timeout), error)


def _described(error: BaseException) -> str:
    """Return an error's type and text, shortened."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # its own text fails
        text = type(error).__name__
    return text[:ERROR_CHARACTERS].encode(errors="replace").decode()


def _factory(key: str, environment: str) -> Factory:
    """Return the class that the recipe names: a built-in one, or the user's, from
    PYTHONPATH or the working directory.
    """
    if environment in BUILT_IN:
        return BUILT_IN[environment]
    try:
        return imported(environment)
    except BaseException as error:  # importing may do anything
        raise MegarlError(
            f"{key}: {environment} cannot be used: {_described(error)}; it must be a class in a"
            f" module on PYTHONPATH or in {os.getcwd()}"
        ) from None


def frame(message: bytes) -> bytes:
    """Return the message behind its length."""
    return HEAD.pack(len(message)) + message


def main(mark: int) -> None:
    """Serve one environment until stdin closes. mark: the descriptor of the shared
    memory, or -1 for ordinary memory.
    """
    die_with_parent()
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this dies first
    # for this and each child process
    quarter_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    resource.setrlimit(resource.RLIMIT_DATA, (quarter_of_memory, quarter_of_memory))
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what an environment prints is not a reply
    (length,) = HEAD.unpack(requests.read(HEAD.size))  # the only field
    setup: Setup = decode(requests.read(length), Setup)
    start_logging(f"environment {setup.environment}")
    memory = mmap.mmap(mark, MARK.size)
    try:
        tokenizer = load_tokenizer(Path(setup.tokenizer))
        episodes = Episodes(setup, tokenizer, lambda episode: MARK.pack_into(memory, 0, episode))
    except MegarlError as error:
        _send(replies, encode(EpisodeReply(error=str(error))))
        return
    _send(replies, encode(EpisodeReply()))
    asyncio.run(_serve(episodes, requests, replies))


async def _serve(episodes: Episodes, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests, many at a time, until stdin closes; then end the process."""
    reader = asyncio.StreamReader(limit=LONGEST)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), requests
    )
    tasks = set[asyncio.Task[None]]()

    async def answer(request: EpisodeRequest) -> None:
        """Send the reply to a request, when it is ready."""
        _send(replies, await episodes.answer(request))

    while True:
        try:
            (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
            request: EpisodeRequest = decode(await reader.readexactly(length), EpisodeRequest)
        except asyncio.IncompleteReadError:
            # No more requests will come; do not wait for code of the environment that
            # still runs.
            os._exit(0)
        task = asyncio.create_task(answer(request))
        tasks.add(task)  # asyncio itself keeps no reference to a task
        task.add_done_callback(tasks.discard)


def _send(replies: BinaryIO, message: bytes) -> None:
    """Write a reply; end this process if nobody reads it any more."""
    try:
        replies.write(frame(message))
        replies.flush()
    except BrokenPipeError:
        os._exit(0)

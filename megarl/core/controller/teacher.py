"""Log-probs of the teacher (`recipe.teacher`) for what the policy sampled, from a
frozen model behind any SGLang endpoint.

    a rollout is sampled
      └─► POST teacher.url/generate: log pi_T(y_t) for its tokens
            ├─► Rollout.teacher_logprobs ──► journal
            └ lost: again, after a pause, until the time limit for a start has passed
              ──► Void

A group is finished, and so recorded and available, only with all its log-probs, so a
replay trains on the same ones. `check_endpoint` asks the endpoint, before a run starts,
whether it can do this at all.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from megarl.core.base.api_key import read_api_key
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Segment, paths_of
from megarl.core.recipe import START_LIMIT_RULE, Recipe, Teacher
from megarl.core.sampling.sampler import Void

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
"""Pauses between two tries of a rollout, within the time limit for a start: a teacher
that died is started again meanwhile.
"""
CACHE_SALT = "teacher"
PROBED_TOKENS = 256
"""Tokens of the policy, spread over its vocabulary, whose texts are compared."""
PROBE_LIMIT_S = 60.0


class _TokenScore(msgspec.Struct, array_like=True):
    """An entry of SGLang's `input_token_logprobs`. logprob: None before the first
    token. text: None unless it was asked for and the server has a tokenizer.
    """

    logprob: float | None
    token: int
    text: str | None = None


class _TeacherFinish(msgspec.Struct):
    type: str


class _TeacherMeta(msgspec.Struct):
    finish_reason: _TeacherFinish
    input_token_logprobs: list[_TokenScore] = []


class _TeacherReply(msgspec.Struct):
    meta_info: _TeacherMeta


class _Lost(Exception):
    """A request failed, but may succeed later."""


class _TeacherRefused(Exception):
    """The endpoint refuses a request, or its answer is not an SGLang server's."""


class TeacherEndpoint:
    """The teacher's endpoint. It gets no more rollouts at once than a server processes
    in parallel, nor more tokens than AT_ONCE. MegarlError if its key is unavailable.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._url = recipe.teacher.url.rstrip("/")
        self._headers = _headers(recipe.teacher)
        self._limit_s = recipe.start_limit_s
        fitting = max(1, AT_ONCE // recipe.length.context_tokens)
        self._places = asyncio.Semaphore(min(recipe.serving.max_running_requests, fitting))
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False
        self._is_lost = False

    async def logprobs(self, prompt: np.ndarray, segments: Sequence[Segment]) -> np.ndarray:
        """Return the teacher's log-probs [completion_len] float32, 0 where not trained.
        Void if the teacher cannot compute them.
        """
        (path,) = paths_of(segments, (), prompt)
        async with self._places:
            scored = await self._scored(path.tokens.tolist(), path.own_start)
        logprobs = np.where(path.trained[path.own_start :], scored, np.float32(0))
        if not np.isfinite(logprobs).all():
            raise Void("the teacher has no finite log-prob for a token of the rollout")
        return logprobs

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()

    async def _scored(self, tokens: list[int], first: int) -> np.ndarray:
        """Return log-probs of the tokens from position `first` on, in several tries."""
        until = time.monotonic() + self._limit_s
        pause = FIRST_PAUSE_S
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        while True:
            try:
                scores = await _scores(self._session, self._url, tokens, first, SCORE_LIMIT_S)
            except _TeacherRefused as error:
                raise Void(f"the teacher refuses a rollout: {error}") from None
            except _Lost as error:
                self._note_lost(error)
                if time.monotonic() + pause > until:
                    raise Void(
                        f"no teacher scored a rollout within {self._limit_s:g} s"
                        f" ({START_LIMIT_RULE}): {error}"
                    ) from None
            else:
                self._note_answer()
                return np.array([score.logprob for score in scores], np.float32)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _note_lost(self, error: _Lost) -> None:
        """Log that the teacher does not answer, once until it does."""
        if not self._is_lost:
            # It may still be starting when the first rollouts come.
            level = logging.WARNING if self._has_answered else logging.INFO
            log.log(level, "the teacher does not answer: %s", error)
        self._is_lost = True

    def _note_answer(self) -> None:
        """Log that the teacher answers again, if it was lost."""
        if self._is_lost:
            log.info("the teacher answers")
        self._is_lost = False
        self._has_answered = True


def check_endpoint(recipe: Recipe) -> None:
    """Raise MegarlError unless the teacher's endpoint answers, returns log-probs of
    given tokens and, as far as it tells, has the policy's tokens.
    """
    url = recipe.teacher.url.rstrip("/")
    try:
        asyncio.run(_check(recipe, url))
    except (_Lost, _TeacherRefused) as error:
        advice = "give an SGLang server that is running (`megarl serve --model DIR` starts one)"
        raise MegarlError(f"teacher.url: {url}: {error}; {advice}") from None


async def _check(recipe: Recipe, url: str) -> None:
    """Have the endpoint at `url` score tokens from all over the policy's vocabulary,
    and compare their texts, and its tokenizer if that is in a directory here, with the
    policy's. MegarlError if they differ; _Lost or _TeacherRefused if it gives no
    scores.
    """
    policy = load_tokenizer(recipe.model.path)
    vocabulary = policy.backend.get_vocab()
    count = min(PROBED_TOKENS, recipe.length.context_tokens, len(vocabulary))
    ids = sorted(vocabulary.values())
    spread = np.linspace(0, len(ids) - 1, count).astype(int)
    tokens = [ids[place] for place in spread]
    async with aiohttp.ClientSession(headers=_headers(recipe.teacher)) as session:
        scores = await _scores(session, url, tokens, 1, PROBE_LIMIT_S, texts=True)
        info = await _answer(session, "GET", f"{url}/model_info", None, PROBE_LIMIT_S)
    _check_texts(policy, tokens[1:], scores)
    _check_directory(vocabulary, info)


def _check_texts(policy: Tokenizer, tokens: list[int], scores: list[_TokenScore]) -> None:
    """Compare the texts that the endpoint has for tokens with the policy's. MegarlError
    at the first that differs.
    """
    for token, score in zip(tokens, scores, strict=True):
        if score.text is None:
            return  # a server without a tokenizer, as `megarl serve` starts
        if score.token != token:
            continue  # the vocabulary's last id, which SGLang reports as 0
        text = policy.decode(np.array([token], np.int32))
        if text.strip() != score.text.strip():
            raise MegarlError(
                "teacher.url: its tokens are not those of model.path:"
                f" {token} is {text!r} for the policy and {score.text!r} for the teacher; only a"
                " teacher with the same vocabulary can score its tokens"
            )


def _check_directory(vocabulary: dict[str, int], info: Any) -> None:
    """Compare the vocabularies, if the endpoint's tokenizer is in a directory here.
    MegarlError if they differ. info: the endpoint's answer to /model_info.
    """
    fields = info if isinstance(info, dict) else {}
    folder = Path(str(fields.get("tokenizer_path") or fields.get("model_path") or ""))
    if not (folder / "tokenizer.json").is_file():
        return
    of_teacher = load_tokenizer(folder).backend.get_vocab()
    differences = sorted(vocabulary.items() ^ of_teacher.items(), key=lambda entry: entry[1])
    if not differences:
        return
    text, token = differences[0]  # that of the lowest id
    who_has_it = "the teacher and not for the policy"
    if vocabulary.get(text) == token:
        who_has_it = "the policy and not for the teacher"
    raise MegarlError(
        f"teacher.url: its tokens are not those of model.path: {token} is {text!r} for {who_has_it}"
        f" ({len(differences)} such differences in tokenizer.json); only a"
        " teacher with the same vocabulary can score its tokens"
    )


def _headers(teacher: Teacher) -> dict[str, str]:
    """Return the headers of requests: the key, if the endpoint has one."""
    key = read_api_key("teacher.api_key", teacher.api_key)
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _scores(
    session: aiohttp.ClientSession,
    url: str,
    tokens: list[int],
    first: int,
    limit_s: float,
    texts: bool = False,
) -> list[_TokenScore]:
    """Return the scores of the tokens from position `first` (at least 1) on, at
    temperature 1. texts: also each token's text.
    """
    body = {
        "input_ids": tokens,
        # Temperature 1: the sampled token is not used, and a greedy request would cost
        # a server's other requests a sort.
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "return_text_in_logprobs": texts,
        "cache_salt": CACHE_SALT,
    }
    answer = await _answer(session, "POST", f"{url}/generate", body, limit_s)
    try:
        meta = msgspec.convert(answer, _TeacherReply).meta_info
    except msgspec.ValidationError as error:
        raise _TeacherRefused(f"it does not return log-probs of given tokens ({error})") from None
    if meta.finish_reason.type == "abort":
        raise _Lost("it aborted a request")
    # The entry of the position before `first` has no log-prob.
    scores = meta.input_token_logprobs[1:]
    scored_tokens = tokens[first:]
    if len(scores) != len(scored_tokens):
        raise _TeacherRefused("it returns log-probs of other tokens than those given")
    for score, token in zip(scores, scored_tokens, strict=True):
        if score.token not in (token, 0):  # SGLang reports the vocabulary's last id as 0
            raise _TeacherRefused("it returns log-probs of other tokens than those given")
    return scores


async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: Any, limit_s: float
) -> Any:
    """Return the JSON of an answer. _Lost or _TeacherRefused if there is none."""
    timeout = aiohttp.ClientTimeout(total=limit_s)
    try:
        async with session.request(
            method, url, json=body, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status in (408, 429) or response.status >= 500:
                raise _Lost(f"it answered with status {response.status}")
            if response.status in (401, 403):
                raise _TeacherRefused(f"status {response.status}; is teacher.api_key right?")
            text = await response.text()
            if response.status != 200:
                raise _TeacherRefused(f"status {response.status}: {text[:200]}")
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        raise _Lost(f"it does not answer ({type(error).__name__})") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _TeacherRefused("its answer is not JSON") from None

"""Which rollouts both sides score for parity, where and when. megarl/core/weights/parity.py interprets the scores.

    a chosen rollout ends ──► its server scores it at once (version u) ──► waits until its batch is due
    version v published   ──► servers score those that are due (version v) ──► Score ──► the learner does ──► ParityJudge
                              the learner waits for that                                                     └► metrics, end

`weights.parity_rollouts` of each batch are chosen by hash before they are sampled, so that nothing about a rollout decides
whether it is compared. Scores that a server could not give at the requested version are left out.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megarl.core.base.architecture import RoutedLayers
from megarl.core.base.messages import Score, Scored, ScoredRollout, Wait
from megarl.core.base.types import Prompt, Routing, Segment
from megarl.core.recipe import Recipe
from megarl.core.server.client import Prefill, ServerClient, ServerLost, ServerRefused
from megarl.core.server.membership import Membership
from megarl.core.weights.parity import Measurement, ParityJudge, RolloutScores

log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """A finished rollout that will be compared.

    due: the step that trains it. server: of its last request; None if a request was lost, so that the sampling server is
    unknown. began: version at its group's first request, which cached the prompt; None: unknown. sampled_at: its last
    version's tokens, scored at that version; None if that failed or has not ended.
    """

    ticket: int
    sample: int
    due: int
    prompt: np.ndarray
    segments: tuple[Segment, ...]
    server: int | None
    began: int | None
    sampled_at: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Return prompt and completion, [n] int32."""
        return np.concatenate([self.prompt, *(s.tokens for s in self.segments)])

    @property
    def version(self) -> int:
        return self.segments[-1].weight_version

    @property
    def stale(self) -> bool:
        """Return whether some of its keys and values may be older than the weights of its last tokens."""
        return {self.began, *(s.weight_version for s in self.segments)} != {self.version}


class _Answer(NamedTuple):
    """A server's scores of a candidate."""

    candidate: Candidate
    server: int
    prefill: Prefill


@dataclass
class _Comparison:
    """The rollouts of one published version on their way through both sides. answers: None until the servers have answered."""

    version: int
    task: "asyncio.Task[None]"
    answers: list[_Answer] | None = None


class Parity:
    """Compares servers and learner at every publication of a run."""

    def __init__(
        self,
        recipe: Recipe,
        against: int,
        routed: RoutedLayers | None,
        clients: Mapping[int, ServerClient],
        membership: Membership,
        changed: Callable[[], None],
        fail: Callable[[str], None],
        salt: str,
    ) -> None:
        """against: a token id that log-probs are compared with (the end token). routed: the model's layers with experts."""
        self._recipe, self._against, self._routed = recipe, against, routed
        self._clients, self._membership = clients, membership
        self._changed, self._fail, self._salt = changed, fail, salt
        # SGLang scores at temperature 1 and over the whole vocabulary, so other samplings cannot be compared with it.
        self._comparable = recipe.sampling.temperature == 1
        head, model = recipe.model.fp32_head, recipe.model
        heads = (head in ("both", "server"), head in ("both", "learner"))
        self._judge = ParityJudge(model.dtype, routed is not None, *heads)
        self._waiting: list[Candidate] = []
        self._scoring: set[asyncio.Task[None]] = set()
        self._comparison: _Comparison | None = None
        self._latest: dict[str, float] = {}
        self.warning = ""

    def is_chosen(self, ticket: int, sample: int) -> bool:
        """Return whether this rollout is one of the weights.parity_rollouts of its batch."""
        recipe, prompts = self._recipe, self._recipe.batch.prompts
        slot = ticket % prompts * recipe.sampling.generations + sample
        count = min(recipe.weights.parity_rollouts, prompts * recipe.sampling.generations)
        return slot in chosen_slots(recipe.run.seed, ticket // prompts, prompts * recipe.sampling.generations, count)

    def finished(
        self,
        ticket: int,
        sample: int,
        due: int,
        prompt: Prompt,
        segments: tuple[Segment, ...],
        server: int | None,
        began: int | None,
    ) -> None:
        """Note that a chosen rollout has ended. server, began: see Candidate."""
        candidate = Candidate(ticket, sample, due, prompt.tokens, segments, server, began)
        self._waiting.append(candidate)
        if server is not None and self._comparable and self._membership.clean_version(server) == candidate.version:
            task = asyncio.create_task(self._score_again(candidate, server), name=f"parity {ticket}.{sample}")
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score_again(self, candidate: Candidate, server: int) -> None:
        found = await self._prefill(candidate, server, "sampled")
        if found is not None and found.version == candidate.version:
            candidate.sampled_at = found.logprobs

    def published(self, version: int) -> None:
        """Begin to compare the rollouts that are due: every reachable server has `version` now."""
        self._drop_comparison()
        due = [c for c in self._waiting if c.due <= version]
        self._waiting = [c for c in self._waiting if c.due > version]
        chosen = due[-self._recipe.weights.parity_rollouts :]
        if chosen:
            task = asyncio.create_task(self._serve(version, chosen), name=f"parity {version}")
            self._comparison = _Comparison(version, task)

    async def _serve(self, version: int, candidates: list[Candidate]) -> None:
        """Let servers score the candidates, each where it was sampled if that server has the version; then wake the waiting
        question.
        """
        clean = sorted(s for s, v in self._membership.clean().items() if v == version)
        limit_s = self._recipe.weights.timeout_s
        answers: list[_Answer | None] = []
        try:
            async with asyncio.timeout(limit_s):
                answers = await asyncio.gather(*(self._answer(c, version, clean) for c in candidates))
        except TimeoutError:
            log.warning("version %d: no server scored within %g s (weights.timeout_s)", version, limit_s)
        except Exception:  # the learner waits for this: whatever goes wrong must cost a comparison, not the run
            log.exception("version %d: servers and learner could not be compared", version)
        assert self._comparison is not None
        self._comparison.answers = [answer for answer in answers if answer is not None]
        if not self._comparison.answers:
            self._comparison = None
        self._changed()

    async def _answer(self, candidate: Candidate, version: int, clean: list[int]) -> _Answer | None:
        if not clean:
            return None
        server = candidate.server if candidate.server in clean else clean[candidate.ticket % len(clean)]
        found = await self._prefill(candidate, server, "served")
        return None if found is None or found.version != version else _Answer(candidate, server, found)

    async def _prefill(self, candidate: Candidate, server: int, purpose: str) -> Prefill | None:
        """Return the server's scores of the completion; None if it is lost or refuses."""
        salt = f"{self._salt}/parity/{purpose}/{candidate.ticket}/{candidate.sample}"
        try:
            (found,) = await self._clients[server].score(
                [candidate.tokens],
                [len(candidate.prompt)],
                salt,
                against=self._against,
                routing=self._routed is not None,
            )
        except (ServerLost, ServerRefused) as error:
            log.warning("parity of ticket %d.%d: %s", candidate.ticket, candidate.sample, error)
            return None
        return found

    def request(self, version: int) -> Score | Wait | None:
        """Return what the learner, which has `version`, must score before it trains; None: nothing is to be compared."""
        now = self._comparison
        if now is None or now.version != version:
            return None
        if now.answers is None:
            return Wait(reason=f"servers score rollouts at version {version} (weights.parity_rollouts)")
        rollouts = tuple(
            ScoredRollout(
                tokens=a.candidate.tokens,
                first=len(a.candidate.prompt),
                experts=self._experts(a.prefill),
            )
            for a in now.answers
        )
        return Score(version=version, rollouts=rollouts, against=self._against)

    def _experts(self, prefill: Prefill) -> Routing | None:
        """Return the experts that the server chose; None for a dense model, or if it did not say."""
        if self._routed is None or not prefill.routing:
            return None
        return self._routed.joined([self._routed.decoded(prefill.routing)])

    def scored(self, result: Scored) -> None:
        """Complete the comparison with the learner's scores."""
        now, self._comparison = self._comparison, None
        if now is None or now.answers is None or now.version != result.version:
            return
        each = [
            rollout_scores(answer, result.version, learner, against, self._comparable)
            for answer, learner, against in zip(now.answers, result.logprobs, result.against, strict=True)
        ]
        measurement = Measurement.of(result.version, each, result.choices, result.differing)
        assert measurement is not None
        self._latest = measurement.metrics()
        verdict = self._judge.judge(measurement)
        if verdict.warning and verdict.warning != self.warning:
            log.warning("%s", verdict.warning)
        self.warning = verdict.warning
        if verdict.ends:
            self._fail(verdict.warning)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the latest comparison once, for the row of the step that follows it."""
        found, self._latest = self._latest, {}
        return found | {"warning_parity": float(bool(self.warning))} if found else found

    def cancel(self) -> None:
        """Cancel all requests for scores."""
        self._drop_comparison()
        for task in self._scoring:
            task.cancel()

    def _drop_comparison(self) -> None:
        if self._comparison is not None:
            self._comparison.task.cancel()
            self._comparison = None


@lru_cache(maxsize=64)
def chosen_slots(seed: int, batch: int, slots: int, count: int) -> frozenset[int]:
    """Choose `count` of the rollouts 0 … slots-1 of a batch by a hash of seed and batch, the same after a restart."""
    return frozenset(np.random.default_rng([seed, batch]).choice(slots, count, replace=False).tolist())


def rollout_scores(
    answer: _Answer, version: int, learner: np.ndarray, learner_against: np.ndarray, comparable: bool
) -> RolloutScores:
    """Return the trained tokens of a rollout with all their scores.

    learner, learner_against: [completion_len] float32. comparable: behaviour log-probs are of the same distribution as
    scores.
    """
    candidate, server, served = answer
    segments = candidate.segments
    behaviour = np.concatenate([s.logprobs for s in segments])
    versions = np.concatenate([np.full(len(s.tokens), s.weight_version) for s in segments])
    trained = np.concatenate([np.full(len(s.tokens), s.trained) for s in segments])
    sampled_at = np.full(len(behaviour), np.nan, np.float32)
    if candidate.sampled_at is not None:
        # Only tokens of the last version were sampled by the weights that scored them.
        newest = np.logical_and.accumulate((versions == candidate.version)[::-1])[::-1]
        sampled_at[newest] = candidate.sampled_at[newest]
    return RolloutScores(
        behaviour=behaviour[trained] if comparable else np.full(int(trained.sum()), np.nan, np.float32),
        sampled_at=sampled_at[trained],
        served=_finite_or_never(served.logprobs[trained]),
        learner=_finite_or_never(learner[trained]),
        lag=version - versions[trained],
        position=(len(candidate.prompt) + np.arange(len(behaviour)))[trained],
        stale=np.full(int(trained.sum()), candidate.stale),
        server=np.full(int(trained.sum()), server),
        served_gap=(served.logprobs - served.against)[trained],
        learner_gap=(learner - learner_against)[trained],
    )


def _finite_or_never(logprobs: np.ndarray) -> np.ndarray:
    """Replace nan by -inf: a side without a finite number for a sampled token is as wrong as can be."""
    return np.where(np.isnan(logprobs), -np.inf, logprobs)

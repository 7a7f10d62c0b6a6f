"""Which rollouts both servers and learner score for parity, where and when.
megarl/core/weights/parity.py judges the scores.

    a chosen rollout ends ──► its server scores it at once (version u) ──► it waits until its batch is due
    version v published   ──► servers score the due ones (version v) ──► Score ──► the learner scores them ──► ParityJudge
                              the learner waits for the servers                                    └► metrics, end of the run

PARITY_ROLLOUTS rollouts of each batch are chosen by hash before they are sampled, so
that nothing about a rollout decides whether it is compared. Scores that a server could
not give at the requested version are left out.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megarl.core.base.architecture import Architecture
from megarl.core.base.messages import PARITY_ROLLOUTS, Score, Scored, ScoredRollout, Wait
from megarl.core.base.types import Branch, PathTokens, Segment, paths_of
from megarl.core.controller.servers import Servers
from megarl.core.recipe import Recipe
from megarl.core.server.client import Prefill, ServerLost, ServerRefused
from megarl.core.weights.parity import Measurement, ParityJudge, RolloutScores

log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """A finished rollout that will be compared. Scores that could not be computed, or
    are not yet, are None.
    """

    ticket: int
    sample: int
    due: int  # the step that trains it
    prompt: np.ndarray
    segments: tuple[Segment, ...]
    server: (
        int | None
    )  # of its last request; None if one was lost: then it is unknown who sampled which tokens
    began: (
        int | None
    )  # version at its group's first request, which cached the prompt; None: unknown
    sampled: Prefill | None = None  # scores by `server`, with the version of its last tokens
    served: Prefill | None = None  # scores by `scorer`, with the version that is compared
    scorer: int = -1

    @property
    def whole(self) -> PathTokens:
        """Prompt and completion as one sequence."""
        return paths_of(self.segments, (), self.prompt)[0]

    @property
    def version(self) -> int:
        return self.segments[-1].weight_version

    @property
    def stale(self) -> bool:
        """Whether some of its cached keys and values may be older than the weights of
        its last tokens.
        """
        return {self.began, *(s.weight_version for s in self.segments)} != {self.version}


def compared(
    prompt: np.ndarray, segments: Sequence[Segment], paths: Sequence[Branch], choice: int
) -> tuple[np.ndarray, tuple[Segment, ...]]:
    """Return the prompt and completion to compare for a rollout. For an agent's rollout
    they are one path's, number `choice` modulo their number, and all that precedes its
    own first sampled token is the prompt.
    """
    if not paths:
        return prompt, tuple(segments)
    at = choice % len(paths)
    first = sum(path.segments for path in paths[:at])
    own = segments[first : first + paths[at].segments]
    masked = next((n for n, s in enumerate(own) if s.trained), len(own))
    begin = paths[at].shared + sum(len(s.tokens) for s in own[:masked])
    return paths_of(segments, paths, prompt)[at].tokens[:begin], tuple(own[masked:])


class Parity:
    """Compares servers and learner at every publication of a run."""

    def __init__(
        self,
        recipe: Recipe,
        against: int,
        architecture: Architecture,
        servers: Servers,
        changed: Callable[[], None],
        fail: Callable[[str], None],
        salt: str,
    ) -> None:
        """against: a token that is scored as well (the end token). architecture: of the
        policy.
        """
        self._recipe = recipe
        self._against = against
        self._architecture = architecture
        self._servers = servers
        self._changed = changed
        self._fail = fail
        self._salt = salt
        # SGLang scores at temperature 1 and over the whole vocabulary, so other
        # samplings cannot be compared with it.
        self._comparable = recipe.sampling.temperature == 1
        head = recipe.model.fp32_head
        model = recipe.model
        heads = (head in ("both", "server"), head in ("both", "learner"))
        fp8 = bool(recipe.serving.fp8_keys)
        self._judge = ParityJudge(model.dtype, architecture.experts > 0, *heads, fp8=fp8)
        self._waiting: list[Candidate] = []
        self._scoring: set[asyncio.Task[None]] = set()
        self._version = -1  # of the weights that are compared
        self._serving: asyncio.Task[list[Candidate]] | None = None  # None: nothing is compared
        self._latest: dict[str, float] = {}
        self.warning = ""

    def is_chosen(self, ticket: int, sample: int) -> bool:
        recipe = self._recipe
        generations = self._recipe.sampling.generations
        batch, prompt = divmod(ticket, recipe.batch.prompts)
        slots = recipe.batch.prompts * generations
        count = min(PARITY_ROLLOUTS, slots)
        return prompt * generations + sample in chosen_slots(recipe.run.seed, batch, slots, count)

    def finished(self, candidate: Candidate) -> None:
        self._waiting.append(candidate)
        if (
            self._comparable
            and self._servers.membership.serving_version(candidate.server) == candidate.version
        ):
            task = asyncio.create_task(self._score_again(candidate))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score_again(self, candidate: Candidate) -> None:
        assert candidate.server is not None
        candidate.sampled = await self._prefill(
            candidate, candidate.server, candidate.version, "sampled"
        )

    def published(self, version: int) -> None:
        """Begin to compare the rollouts that are due, now that every reachable server
        has `version`.
        """
        self._drop_comparison()
        due = [c for c in self._waiting if c.due <= version]
        self._waiting = [c for c in self._waiting if c.due > version]
        if due:
            serving = self._serve(version, due[-PARITY_ROLLOUTS:])
            self._serving = asyncio.create_task(serving, name=f"parity {version}")
            self._version = version

    async def _serve(self, version: int, candidates: list[Candidate]) -> list[Candidate]:
        """Have servers score the candidates, each by the server that sampled it if that
        has the version; then wake the held `Next`. Return the candidates that were
        scored.
        """
        clean = sorted(s for s, v in self._servers.membership.clean().items() if v == version)
        limit_s = self._recipe.weights.timeout_s

        async def serve(c: Candidate) -> None:
            c.scorer = c.server if c.server in clean else clean[c.ticket % len(clean)]
            c.served = await self._prefill(c, c.scorer, version, "served")

        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(serve(c) for c in candidates if clean))
        except TimeoutError:
            log.warning(
                "version %d: not all rollouts were scored within %g s (weights.timeout_s)",
                version,
                limit_s,
            )
        except (
            Exception
        ):  # the learner waits for this: a failure may cost the comparison, but not the run
            log.exception("version %d: servers could not score all rollouts", version)
        self._changed()
        return [c for c in candidates if c.served is not None]

    async def _prefill(
        self, candidate: Candidate, server: int, version: int, purpose: str
    ) -> Prefill | None:
        """Return the server's scores of the completion; None if the server is lost,
        refuses or has another version.
        """
        salt = f"{self._salt}/parity/{purpose}/{candidate.ticket}/{candidate.sample}"
        whole = candidate.whole
        routing = self._architecture.experts > 0
        client = self._servers.clients[server]
        try:
            (scored,) = await client.score(
                [whole.tokens], [whole.own_start], salt, against=self._against, routing=routing
            )
        except (ServerLost, ServerRefused) as error:
            log.warning("parity of ticket %d.%d: %s", candidate.ticket, candidate.sample, error)
            return None
        return scored if scored.version == version else None

    def request(self, version: int) -> Score | Wait | None:
        """Return the learner's next command for the comparison at its `version`; None:
        nothing is to be compared.
        """
        serving = self._serving
        model = self._architecture
        if serving is None or self._version != version:
            return None
        if not serving.done():
            return Wait(reason=f"servers score rollouts at version {version}, for parity")
        rollouts = []
        for c in serving.result():
            said = c.served and c.served.routing  # empty for a dense model
            experts = model.routing([model.routed_experts(said)]) if said else None
            rollouts.append(
                ScoredRollout(tokens=c.whole.tokens, first=len(c.prompt), experts=experts)
            )
        return (
            Score(version=version, rollouts=tuple(rollouts), against=self._against)
            if rollouts
            else None
        )

    def scored(self, result: Scored) -> None:
        serving = self._serving
        self._serving = None
        if serving is None or not serving.done() or self._version != result.version:
            return
        each = [
            rollout_scores(candidate, result.version, learner, against, self._comparable)
            for candidate, learner, against in zip(
                serving.result(), result.logprobs, result.against, strict=True
            )
        ]
        scores = RolloutScores.joined(each)
        measurement = Measurement(
            result.version, scores, len(each), result.choices, result.differing
        )
        verdict = self._judge.judge(measurement)
        self._latest = self._judge.metrics(measurement)
        if verdict.warning and verdict.warning != self.warning:
            log.warning("%s", verdict.warning)
        self.warning = verdict.warning
        if verdict.ends:
            self._fail(verdict.warning)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the latest comparison, once only, for the row of the
        step that follows it.
        """
        metrics = self._latest
        self._latest = {}
        return metrics | {"warning_parity": float(bool(self.warning))} if metrics else metrics

    def cancel(self) -> None:
        self._drop_comparison()
        for task in self._scoring:
            task.cancel()

    def _drop_comparison(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None


@lru_cache(maxsize=64)
def chosen_slots(seed: int, batch: int, slots: int, count: int) -> frozenset[int]:
    """Choose `count` of a batch's rollouts 0 … slots-1, pseudo-randomly by seed and
    batch, so equally after a restart.
    """
    return frozenset(
        np.random.default_rng([seed, batch]).choice(slots, count, replace=False).tolist()
    )


def rollout_scores(
    candidate: Candidate,
    version: int,
    learner: np.ndarray,
    learner_against: np.ndarray,
    comparable: bool,
) -> RolloutScores:
    """Return all scores of a rollout's trained tokens. learner, learner_against:
    [completion_len] float32. comparable: behaviour log-probs belong to the same
    distribution as scores.
    """
    whole = candidate.whole
    served = candidate.served
    assert served is not None
    behaviour = whole.logprobs[whole.own_start :]
    trained = whole.trained[whole.own_start :]
    versions = np.concatenate(
        [np.full(len(s.tokens), s.weight_version) for s in candidate.segments]
    )
    sampled_at = np.full(len(behaviour), np.nan, np.float32)
    if candidate.sampled is not None:
        # Only tokens of the last version were sampled by the weights that scored them.
        newest = np.logical_and.accumulate((versions == candidate.version)[::-1])[::-1]
        sampled_at[newest] = candidate.sampled.logprobs[newest]
    return RolloutScores(
        behaviour=(
            behaviour[trained] if comparable else np.full(int(trained.sum()), np.nan, np.float32)
        ),
        sampled_at=sampled_at[trained],
        served=_finite_or_never(served.logprobs[trained]),
        learner=_finite_or_never(learner[trained]),
        lag=version - versions[trained],
        position=(len(candidate.prompt) + np.arange(len(behaviour)))[trained],
        stale=np.full(int(trained.sum()), candidate.stale),
        server=np.full(int(trained.sum()), candidate.scorer),
        served_gap=(served.logprobs - served.against)[trained],
        learner_gap=(learner - learner_against)[trained],
    )


def _finite_or_never(logprobs: np.ndarray) -> np.ndarray:
    """Replace NaN by -inf: a side that has no number for a sampled token is as wrong as
    it can be.
    """
    return np.where(np.isnan(logprobs), -np.inf, logprobs)

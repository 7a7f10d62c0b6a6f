"""Which rollouts both servers and learner score for parity, where and when.
megarl/core/evaluation/parity.py judges the scores.

    a chosen rollout ends ──► its server scores it at once (version u)
                                          ──► it waits until its batch is due
    version v published ──► servers score the due ones (version v); the learner waits
                        ──► Score ──► the learner scores them ──► ParityJudge
                                          ──► metrics, end of the run

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
from megarl.core.client.client import Prefill, ServerLost, ServerRefused
from megarl.core.controller.servers import Servers
from megarl.core.evaluation.parity import Measurement, ParityJudge, RolloutScores
from megarl.core.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """A finished rollout that will be compared. Scores that could not be computed, or
    are not yet, are None.
    """

    ticket: int
    sample: int
    step: int  # that trains it
    prompt: np.ndarray
    segments: tuple[Segment, ...]
    # Of its last request; None if one was lost: then it is unknown who sampled what.
    server: int | None
    # Version at its group's first request, which cached the prompt; None: unknown.
    began: int | None
    sampling_scores: Prefill | None = None  # by `server`, with the version of its last tokens
    compared_scores: Prefill | None = None  # by `scorer`, with the version that is compared
    scorer: int = -1

    @property
    def sequence(self) -> PathTokens:
        """Prompt and completion as one sequence."""
        return paths_of(self.segments, (), self.prompt)[0]

    @property
    def version(self) -> int:
        """The version that sampled its last tokens."""
        return self.segments[-1].weight_version

    @property
    def stale(self) -> bool:
        """Whether some of its cached keys and values may be older than the weights of
        its last tokens.
        """
        versions: set[int | None] = {segment.weight_version for segment in self.segments}
        versions.add(self.began)
        return versions != {self.version}


def compared(
    prompt: np.ndarray, segments: Sequence[Segment], paths: Sequence[Branch], choice: int
) -> tuple[np.ndarray, tuple[Segment, ...]]:
    """Return the prompt and completion to compare for a rollout. For an agent's rollout
    they are one path's, number `choice` modulo their number, and all that precedes its
    own first sampled token is the prompt.
    """
    if not paths:
        return prompt, tuple(segments)
    index = choice % len(paths)
    path = paths[index]
    first_segment = sum(earlier.segments for earlier in paths[:index])
    path_segments = list(segments[first_segment : first_segment + path.segments])
    prompt_length = path.shared
    while path_segments and not path_segments[0].trained:
        prompt_length += len(path_segments.pop(0).tokens)
    path_tokens = paths_of(segments, paths, prompt)[index].tokens
    return path_tokens[:prompt_length], tuple(path_segments)


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
        self._judge = ParityJudge(
            recipe.model.dtype,
            architecture.experts > 0,
            served_head=head in ("both", "server"),
            learner_head=head in ("both", "learner"),
            fp8=bool(recipe.serving.fp8_keys),
        )
        self._waiting: list[Candidate] = []
        self._scoring: set[asyncio.Task[None]] = set()
        self._version = -1  # of the weights that are compared
        self._serving: asyncio.Task[list[Candidate]] | None = None  # None: nothing is compared
        self._latest: dict[str, float] = {}
        self.warning = ""

    def is_chosen(self, ticket: int, sample: int) -> bool:
        """Return whether this rollout is one of those that are compared."""
        recipe = self._recipe
        generations = recipe.sampling.generations
        batch, prompt = divmod(ticket, recipe.batch.prompts)
        slots = recipe.batch.prompts * generations
        count = min(PARITY_ROLLOUTS, slots)
        chosen = chosen_slots(recipe.run.seed, batch, slots, count)
        return prompt * generations + sample in chosen

    def finished(self, candidate: Candidate) -> None:
        """Keep a chosen rollout until its batch is due. Its server scores it now if it
        still has the version that sampled it.
        """
        self._waiting.append(candidate)
        served_version = self._servers.membership.serving_version(candidate.server)
        if self._comparable and served_version == candidate.version:
            task = asyncio.create_task(self._score_again(candidate))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score_again(self, candidate: Candidate) -> None:
        """Have the server that sampled the rollout score it, with the same weights."""
        assert candidate.server is not None
        candidate.sampling_scores = await self._prefill(
            candidate, candidate.server, candidate.version, "sampled"
        )

    def published(self, version: int) -> None:
        """Begin to compare the rollouts that are due, now that every reachable server
        has `version`.
        """
        self._drop_comparison()
        due_now = [candidate for candidate in self._waiting if candidate.step <= version]
        self._waiting = [candidate for candidate in self._waiting if candidate.step > version]
        if due_now:
            # the newest, if those of several batches are due
            serving = self._serve(version, due_now[-PARITY_ROLLOUTS:])
            self._serving = asyncio.create_task(serving, name=f"parity {version}")
            self._version = version

    async def _serve(self, version: int, candidates: list[Candidate]) -> list[Candidate]:
        """Have servers score the candidates, each by the server that sampled it if that
        has the version; then wake the held `Next`. Return the candidates that were
        scored.
        """
        clean = self._servers.membership.clean()
        servers = sorted(server for server in clean if clean[server] == version)
        limit_s = self._recipe.weights.timeout_s

        async def serve(candidate: Candidate) -> None:
            """Have the candidate scored by its own server, or else by any other."""
            candidate.scorer = servers[candidate.ticket % len(servers)]
            if candidate.server in servers:
                candidate.scorer = candidate.server
            candidate.compared_scores = await self._prefill(
                candidate, candidate.scorer, version, "served"
            )

        try:
            async with asyncio.timeout(limit_s):
                if servers:
                    await asyncio.gather(*map(serve, candidates))
        except TimeoutError:
            log.warning(
                "version %d: not all rollouts were scored within %g s (weights.timeout_s)",
                version,
                limit_s,
            )
        # The learner waits for this: a failure may cost the comparison, no more.
        except Exception:
            log.exception("version %d: servers could not score all rollouts", version)
        self._changed()
        return [candidate for candidate in candidates if candidate.compared_scores is not None]

    async def _prefill(
        self, candidate: Candidate, server: int, version: int, purpose: str
    ) -> Prefill | None:
        """Return the server's scores of the completion; None if the server is lost,
        refuses or has another version.
        """
        salt = f"{self._salt}/parity/{purpose}/{candidate.ticket}/{candidate.sample}"
        sequence = candidate.sequence
        client = self._servers.clients[server]
        try:
            (prefill,) = await client.score(
                [sequence.tokens],
                [sequence.own_start],
                salt,
                against=self._against,
                routing=self._architecture.experts > 0,
            )
        except (ServerLost, ServerRefused) as error:
            log.warning("parity of ticket %d.%d: %s", candidate.ticket, candidate.sample, error)
            return None
        if prefill.version != version:
            return None
        return prefill

    def request(self, version: int) -> Score | Wait | None:
        """Return the learner's next command for the comparison at its `version`; None:
        nothing is to be compared.
        """
        serving = self._serving
        if serving is None or self._version != version:
            return None
        if not serving.done():
            return Wait(reason=f"servers score rollouts at version {version}, for parity")
        rollouts = tuple(self._rollout(candidate) for candidate in serving.result())
        if not rollouts:
            return None
        return Score(version=version, rollouts=rollouts, against=self._against)

    def _rollout(self, candidate: Candidate) -> ScoredRollout:
        """Return what the learner needs to score this rollout."""
        model = self._architecture
        experts = None
        # Empty for a dense model.
        if candidate.compared_scores is not None and candidate.compared_scores.routing:
            experts = model.routing([model.routed_experts(candidate.compared_scores.routing)])
        return ScoredRollout(
            tokens=candidate.sequence.tokens, first=len(candidate.prompt), experts=experts
        )

    def scored(self, result: Scored) -> None:
        """Judge the learner's scores beside the servers'."""
        serving = self._serving
        self._serving = None
        if serving is None or not serving.done() or self._version != result.version:
            return
        by_rollout = [
            rollout_scores(candidate, result.version, learner, against, self._comparable)
            for candidate, learner, against in zip(
                serving.result(), result.logprobs, result.against, strict=True
            )
        ]
        scores = RolloutScores.concatenate(by_rollout)
        measurement = Measurement(
            result.version, scores, len(by_rollout), result.choices, result.differing
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
        if metrics:
            metrics["warning_parity"] = float(bool(self.warning))
        return metrics

    def cancel(self) -> None:
        """Stop all scoring."""
        self._drop_comparison()
        for task in self._scoring:
            task.cancel()

    def _drop_comparison(self) -> None:
        """Stop the servers' part of the present comparison, if there is one."""
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None


@lru_cache(maxsize=64)
def chosen_slots(seed: int, batch: int, slots: int, count: int) -> frozenset[int]:
    """Choose `count` of a batch's rollouts 0 … slots-1, pseudo-randomly by seed and
    batch, so equally after a restart.
    """
    chosen = np.random.default_rng([seed, batch]).choice(slots, count, replace=False)
    return frozenset(chosen.tolist())


def rollout_scores(
    candidate: Candidate,
    version: int,
    learner: np.ndarray,
    learner_against: np.ndarray,
    comparable: bool,
) -> RolloutScores:
    """Return all scores of a rollout's trained tokens. version: of the weights that are
    compared. learner: the learner's log-probs [completion_len] float32 of the tokens;
    learner_against: those of the token `against` in their places. comparable: whether
    behaviour log-probs belong to the same distribution as scores.
    """
    sequence = candidate.sequence
    served_scores = candidate.compared_scores
    assert served_scores is not None
    behaviour = sequence.logprobs[sequence.own_start :]  # [completion_len]
    trained = sequence.trained[sequence.own_start :]  # [completion_len]
    trained_count = int(trained.sum())
    if not comparable:
        behaviour = np.full(len(behaviour), np.nan, np.float32)
    versions = np.concatenate(
        [np.full(len(segment.tokens), segment.weight_version) for segment in candidate.segments]
    )
    positions = len(candidate.prompt) + np.arange(len(behaviour))
    sampled_at = np.full(len(behaviour), np.nan, np.float32)
    if candidate.sampling_scores is not None:
        # Only the tokens since the last change of version were sampled by the weights
        # that scored them. True from there to the end:
        is_newest = versions == candidate.version
        since_change = np.logical_and.accumulate(is_newest[::-1])[::-1]
        sampled_at[since_change] = candidate.sampling_scores.logprobs[since_change]
    return RolloutScores(
        behaviour=behaviour[trained],
        sampled_at=sampled_at[trained],
        rescored=_finite_or_never(served_scores.logprobs[trained]),
        learner=_finite_or_never(learner[trained]),
        lag=version - versions[trained],
        position=positions[trained],
        stale=np.full(trained_count, candidate.stale),
        server=np.full(trained_count, candidate.scorer),
        served_gap=(served_scores.logprobs - served_scores.against)[trained],
        learner_gap=(learner - learner_against)[trained],
    )


def _finite_or_never(logprobs: np.ndarray) -> np.ndarray:
    """Replace NaN by -inf: a side that has no number for a sampled token is as wrong as
    it can be.
    """
    return np.where(np.isnan(logprobs), -np.inf, logprobs)

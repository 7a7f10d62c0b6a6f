"""Which rollouts are compared, who scores them when,
and what is made of their scores.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.core.base.architecture import read
from megarl.core.base.messages import PARITY_ROLLOUTS, Score, Scored, ServerAddress, Wait
from megarl.core.base.types import Prompt, Segment, float32, int32
from megarl.core.client.client import Prefill, ServerLost
from megarl.core.client.membership import Membership
from megarl.core.controller.parity_schedule import Candidate, Parity, chosen_slots
from megarl.core.recipe import Recipe, load
from tests import make

pytestmark = pytest.mark.anyio

PROMPT = Prompt(id="p", tokens=int32([1, 2, 3]), answer="5")
END = 2


def recipe_of(**sections: Any) -> Recipe:
    tree: dict[str, Any] = {"batch": {"prompts": 6}, "sampling": {"generations": 4}}
    return make.recipe(tree, **sections)


def segment(version: int, logprobs: Sequence[float], trained: bool = True) -> Segment:
    tokens = int32(range(10, 10 + len(logprobs)))
    return Segment(
        tokens=tokens, logprobs=float32(logprobs), weight_version=version, trained=trained
    )


class Server:
    """Scores the n-th completion token as -n - version / 10. `lost`:
    instead, it fails.
    """

    lost = False
    version = 4
    requests = tokens = 0

    async def score(
        self,
        sequences: Sequence[np.ndarray],
        firsts: Sequence[int],
        salt: str,
        against: int,
        routing: bool,
    ) -> list[Prefill]:
        self.requests += 1
        self.tokens += len(sequences[0])
        if self.lost:
            raise ServerLost("gone", int32(()), float32(()))
        n = len(sequences[0]) - firsts[0]
        logprobs = -np.arange(1, n + 1, dtype=np.float32) - np.float32(self.version / 10)
        return [Prefill(logprobs, np.full(n, -9, np.float32), self.version)]


class Stage:
    """Two servers with version 4, and what the comparison was heard to say."""

    def __init__(self, recipe: Recipe) -> None:
        self.members = Membership([ServerAddress(id=i, url="") for i in range(2)])
        self.servers = {0: Server(), 1: Server()}
        self.failures: list[str] = []
        self.changed = asyncio.Event()
        self.parity = Parity(
            recipe,
            END,
            read("llama-3.1-8b"),
            SimpleNamespace(clients=self.servers, membership=self.members),  # type: ignore[arg-type]
            self.changed.set,
            self.failures.append,
            "",
        )
        self.at(4)

    def at(self, version: int) -> None:
        for i, server in self.servers.items():
            self.members.answered(i)
            self.members.publish([i], version, "a")
            self.members.published(i, version, "a", "")
            server.version = version

    async def publish(self, version: int) -> Score | None:
        """The request that follows."""
        self.at(version)
        self.changed.clear()
        self.parity.published(version)
        if isinstance(self.parity.request(version), Wait):
            await asyncio.wait_for(self.changed.wait(), 5)
        found = self.parity.request(version)
        assert not isinstance(found, Wait)
        return found

    def answer(self, score: Score, off: float = 0.0) -> None:
        exact = [
            -np.arange(1, len(r.tokens) - r.first + 1) - score.version / 10 + off
            for r in score.rollouts
        ]
        against = tuple(np.full(len(each), -9, np.float32) for each in exact)
        logprobs = tuple(each.astype(np.float32) for each in exact)
        self.parity.scored(
            Scored(incarnation="a", version=score.version, logprobs=logprobs, against=against)
        )


@pytest.mark.parametrize("seed", range(5))
def test_so_many_rollouts_of_each_batch_are_chosen_and_a_restart_chooses_the_same(
    seed: int,
) -> None:
    recipe = recipe_of(run={"seed": seed})
    stages = [Stage(recipe).parity for _ in range(2)]
    chosen = [
        [(t, s) for t in range(600) for s in range(4) if each.is_chosen(t, s)] for each in stages
    ]
    assert chosen[0] == chosen[1]
    assert set(Counter(t // 6 for t, _ in chosen[0]).values()) == {PARITY_ROLLOUTS}
    # 400 draws of 24 slots: each is drawn 16.7 times on average.
    assert all(3 <= n <= 38 for n in Counter((t % 6, s) for t, s in chosen[0]).values())
    assert len(set(map(frozenset, (chosen_slots(seed, b, 24, 3) for b in range(50))))) > 40


def test_a_batch_smaller_than_what_is_to_be_chosen_is_chosen_whole() -> None:
    recipe = recipe_of(batch={"prompts": 1}, sampling={"generations": 2})
    assert all(Stage(recipe).parity.is_chosen(t, s) for t in range(5) for s in range(2))


async def test_each_cause_gets_its_part() -> None:
    """Sampled at versions 3 and 4, compared at version 6: the fakes' scores say what
    each difference must be.
    """
    stage = Stage(recipe_of())
    segments = (segment(3, [-1.5]), segment(4, [0, 0], trained=False), segment(4, [-4.5, -5.5]))
    stage.parity.finished(Candidate(0, 0, 6, PROMPT.tokens, segments, 0, 3))
    await asyncio.sleep(0)
    assert await stage.publish(5) is None  # its batch is not due
    score = await stage.publish(6)
    assert score is not None
    assert score.rollouts[0].tokens.tolist() == [1, 2, 3, 10, 10, 11, 10, 11]
    assert score.rollouts[0].first == 3
    stage.answer(score, off=0.01)
    found = stage.parity.metrics()
    assert found["parity_mean/kernels"] == pytest.approx(0.01, abs=1e-6)
    assert found["parity_tokens/kernels"] == 3
    assert found["parity_mean/stale_kv"] == pytest.approx(
        0.1, abs=1e-6
    )  # -4.5 for -4.4, -5.5 for -5.4
    assert found["parity_tokens/stale_kv"] == 2
    assert found["parity_mean/staleness"] == pytest.approx(0.2, abs=1e-6)  # version 4 against 6
    assert found["parity_tokens/staleness"] == 2
    assert "parity_mean/decode" not in found
    assert stage.parity.metrics() == {}


async def test_a_rollout_of_one_version_shows_decode() -> None:
    stage = Stage(recipe_of())
    stage.parity.finished(Candidate(0, 0, 4, PROMPT.tokens, (segment(4, [-1.5, -2.5]),), 1, 4))
    await asyncio.sleep(0)
    score = await stage.publish(5)
    assert score is not None
    stage.answer(score)
    found = stage.parity.metrics()
    assert found["parity_mean/decode"] == pytest.approx(0.1, abs=1e-6)
    assert found["parity_mean/kernels"] == 0


async def test_a_prompt_that_was_cached_by_older_weights_is_stale_kv() -> None:
    stage = Stage(recipe_of())
    stage.parity.finished(Candidate(0, 0, 4, PROMPT.tokens, (segment(4, [-1.5, -2.5]),), 1, 3))
    await asyncio.sleep(0)
    score = await stage.publish(5)
    assert score is not None
    stage.answer(score)
    found = stage.parity.metrics()
    assert found["parity_mean/stale_kv"] == pytest.approx(0.1, abs=1e-6)
    assert "parity_mean/decode" not in found


async def test_what_other_sampling_makes_incomparable_is_left_out() -> None:
    stage = Stage(recipe_of(sampling={"temperature": 0.6, "generations": 4}))
    stage.parity.finished(Candidate(0, 0, 4, PROMPT.tokens, (segment(4, [-1.5, -2.5]),), 1, 4))
    score = await stage.publish(5)
    assert score is not None
    stage.answer(score)
    found = stage.parity.metrics()
    assert not {"parity_mean/decode", "parity_mean/stale_kv", "parity_mean/total"} & found.keys()
    assert "parity_mean/kernels" in found


async def test_a_lost_server_costs_its_scores_and_holds_nobody() -> None:
    stage = Stage(recipe_of())
    stage.servers[0].lost = True
    stage.parity.finished(Candidate(0, 0, 4, PROMPT.tokens, (segment(4, [-1.5]),), 0, 4))
    stage.parity.finished(Candidate(1, 0, 4, PROMPT.tokens, (segment(4, [-1.5, -2.5]),), 1, 4))
    await asyncio.sleep(0)
    score = await stage.publish(5)
    assert score is not None
    assert len(score.rollouts) == 1
    stage.parity.finished(Candidate(2, 0, 5, PROMPT.tokens, (segment(5, [-1.5]),), 0, 5))
    assert await stage.publish(6) is None  # nobody could score it: the learner goes on


async def test_an_answer_that_cannot_be_read_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(recipe_of())

    async def nonsense(*_: Any, **__: Any) -> Any:
        raise KeyError("input_token_logprobs")

    stage.parity.finished(Candidate(0, 0, 5, PROMPT.tokens, (segment(4, [-1.5]),), 0, 4))
    await asyncio.sleep(0)
    monkeypatch.setattr(stage.servers[0], "score", nonsense)
    assert await stage.publish(5) is None


async def test_scores_of_another_version_are_not_taken() -> None:
    stage = Stage(recipe_of())
    stage.parity.finished(Candidate(0, 0, 4, PROMPT.tokens, (segment(4, [-1.5]),), 0, 4))
    stage.at(5)
    stage.servers[0].version = 4  # it names the version that it had
    stage.changed.clear()
    stage.parity.published(5)
    await asyncio.wait_for(stage.changed.wait(), 5)
    assert stage.parity.request(5) is None


async def test_a_difference_that_lasts_ends_the_run_with_its_cause() -> None:
    stage = Stage(recipe_of())
    for version in range(5, 8):
        stage.parity.finished(
            Candidate(
                6 * version,
                0,
                version,
                PROMPT.tokens,
                (segment(version - 1, list(-np.arange(1, 70) - 0.4)),),
                0,
                0,
            )
        )
        await asyncio.sleep(0)
        score = await stage.publish(version)
        assert score is not None
        stage.answer(score, off=0.3)
        assert stage.parity.metrics()["warning_parity"] == 1
        assert bool(stage.failures) is (version == 7)
    assert "differ by 0.3 in log-prob" in stage.failures[0]


async def test_answers_of_three_tokens_are_judged_after_some_batches() -> None:
    """22 comparisons of three tokens each are enough; until then the metrics say how
    many tokens there are.
    """
    stage = Stage(recipe_of())
    said = []
    for version in range(5, 27):
        answer = (segment(version - 1, [-1.4, -2.4, -3.4]),)
        stage.parity.finished(Candidate(6 * version, 0, version, PROMPT.tokens, answer, 0, 0))
        await asyncio.sleep(0)
        score = await stage.publish(version)
        assert score is not None
        stage.answer(score, off=0.3)
        row = stage.parity.metrics()
        said.append((row["parity_unjudged/kernels"], row["warning_parity"]))
    assert said == [*((3 * count, 0) for count in range(1, 22)), (0, 1)]
    assert "66 tokens" in stage.parity.warning


async def test_it_costs_less_than_two_percent_of_a_step_at_8b() -> None:
    """Counted over a batch of scalerl-8b whose rollouts are all equally long. With N
    parameters a token takes 2N operations forward and 4N backward (arXiv 2001.08361,
    section 2.1), so a rollout's token takes 8N: it is generated and trained.
    """
    recipe = load("scalerl-8b")
    stage = Stage(recipe)
    prompts = recipe.batch.prompts
    generations = recipe.sampling.generations
    rollout = (segment(4, [-1.0] * 50),)
    for ticket, sample in ((t, s) for t in range(prompts) for s in range(generations)):
        if stage.parity.is_chosen(ticket, sample):
            stage.parity.finished(
                Candidate(ticket, sample, 5, PROMPT.tokens, rollout, sample % 2, 4)
            )
    await asyncio.sleep(0)
    score = await stage.publish(5)
    assert score is not None
    served = sum(server.tokens for server in stage.servers.values())
    learnt = sum(len(r.tokens) for r in score.rollouts)
    all_tokens = prompts * generations * (len(PROMPT.tokens) + 50)
    assert 0 < 2 * (served + learnt) / (8 * all_tokens) < 0.02
    assert (
        0
        < sum(server.requests for server in stage.servers.values()) / (prompts * generations)
        < 0.02
    )

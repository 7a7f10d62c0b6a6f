"""Compares a server and a learner with a real model's weights and with perturbed ones,
without training.

    python -m benchmarks.parity.real DIR clean.jsonl --dtype bf16 --states 40 python -m
    benchmarks.parity.real DIR faults.jsonl --states 4 --learner-faults rope-theta:1.5
    dtype:2 --heat 1.05 python -m benchmarks.parity.real DIR cache.jsonl --states 4
    --fault dtype-cache:1

It does what a run does around a publication, for one state of the weights after the
other: the server samples and scores its rollouts; the next state is published; server
and learner score the same rollouts. Only the optimiser is replaced, by a random change
of the weights. benchmarks/parity/records.py keeps the results, and says what limits and
the judge make of them.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.parity.learner_faults import LEARNER_FAULTS
from benchmarks.parity.records import STATES_OF_A_SEED, UNITS, ComparedRollout
from benchmarks.roles import Served, client_of, served
from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import unrewarded
from megarl.core.base.messages import Publish, ServerAddress
from megarl.core.base.terminal import say
from megarl.core.client.client import Generation, Prefill, ServerClient
from megarl.core.learner import network
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from megarl.core.sync import publisher

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
GROUP_LIMIT_S = 300.0
ANSWER_TOKENS = 12
ESSAY_TOKENS = 40
ESSAY_EVERY = 16
"""One state in this many answers open questions at length; the others answer sums in a
few tokens.
"""
ESSAYS = (
    "Why is the sky blue?",
    "Write a short story about a fox and a river.",
    "How does a bicycle stay upright?",
    "Give me three tips for learning a language.",
    "What would happen if the moon vanished?",
    "Describe the taste of a lemon.",
)


class PerturbedWeights:
    """The learner's parameters, and those that it began with, in FP32."""

    KINDS = ("steps", "noise", "sharper", "flatter", "own")

    def __init__(self, parameters: Sequence[torch.nn.Parameter], seed: int) -> None:
        self._parameters = parameters
        self._first = [p.detach().float().clone() for p in parameters]
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def change(self, state: int, rate: float) -> str:
        """Set the weights of this state; return their kind. rate: of the steps, each of
        which has a random sign.
        """
        kind = self.KINDS[state % len(self.KINDS)]
        for parameter, first in zip(self._parameters, self._first, strict=True):
            parameter.copy_(self._changed(kind, first, rate))
        return kind

    def _changed(self, kind: str, first: torch.Tensor, rate: float) -> torch.Tensor:
        steps = 50
        match kind:
            case "steps":  # the sum of many steps of Adam's size and random sign
                return first + rate * steps**0.5 * self._normal(first)
            case "noise":
                return first + 0.02 * first.std(correction=0) * self._normal(first)
            case "sharper":  # vectors are the gains of norms; the last scales the logits
                return first * 1.02 if first.dim() == 1 else first + rate * self._normal(first)
            case "flatter":
                return first * 0.98 if first.dim() == 1 else first + rate * self._normal(first)
            case _:
                return first

    def _normal(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._random)


class ScoringLearner:
    """The policy's network without an optimiser, and the publication of its weights to
    one server.
    """

    def __init__(self, recipe: Recipe, server: Served) -> None:
        parallel.start(recipe.model, recipe.run.seed, GROUP_LIMIT_S)
        chunks, family = network.loaded_chunks(recipe, Path(recipe.model.path))
        self._network = network.Network(chunks, family, recipe)
        self._publisher = publisher.Publisher(recipe, server.endpoints, chunks, family)
        self._address = ServerAddress(id=0, url=server.endpoints.servers[0])
        self.parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]

    def publish(self, version: int) -> None:
        published = self._publisher.publish(
            Publish(version=version, servers=(self._address,)), "benchmark"
        )
        assert published is not None
        (result,) = published.results
        if result.error:
            raise SystemExit(result.error)

    def score_with(self, fault: str, *given: Any) -> list[np.ndarray]:
        """Score with a fault, NAME:DOSE; without one if it is empty."""
        if not fault:
            return self.score(*given)
        name, _, dose = fault.partition(":")
        with LEARNER_FAULTS[name](self._network, float(dose)):
            return self.score(*given)

    def score(
        self, sequences: Sequence[np.ndarray], firsts: Sequence[int], against: int
    ) -> list[np.ndarray]:
        """Return log-probs [completion, 2] for each sequence: of its tokens, and of the
        token `against`.
        """
        rows = [
            unrewarded(i, tokens, first)
            for i, (tokens, first) in enumerate(zip(sequences, firsts, strict=True))
        ]
        found = self._network.ask(rows, self._network.scoring_head(against), shape=(2,))
        return [values[first:] for values, first in zip(found, firsts, strict=True)]


def recipe_of(model: Path, work: Path, dtype: str) -> Recipe:
    return recipes.from_tree(
        {
            "run": {"name": f"real-{dtype}-{os.getpid()}", "dir": str(work)},
            "model": {"path": str(model.resolve()), "dtype": dtype},
            "length": {
                "prompt_tokens": 100,
                "thinking_tokens": [1, 1],
                "answer_tokens": ESSAY_TOKENS,
            },
            "learner": {"microbatch_tokens": 2048},
            "serving": {"kv_tokens": 16384, "max_running_requests": 64},
            "weights": {"bucket_mb": 64, "timeout_s": 600},
        }
    )


class Prompts:
    """Endless prompts in the model's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)

    def sum(self) -> np.ndarray:
        first, second = self._random.integers(1, 21, 2)
        return self._chat("Reply with a number.", f"What is {first} + {second}?")

    def essay(self) -> np.ndarray:
        return self._chat("You are a helpful assistant.", str(self._random.choice(ESSAYS)))

    def _chat(self, system: str, question: str) -> np.ndarray:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return np.int32(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class SampledAnswer:
    """A rollout, and its server's scores with the weights that sampled it."""

    prompt: np.ndarray
    generation: Generation
    scored: Prefill

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.generation.tokens])


async def sample(
    client: ServerClient, prompts: Sequence[np.ndarray], limit: int, end: int, heat: float
) -> list[SampledAnswer]:
    """Let the server sample an answer to each prompt, and then score it. heat: the
    temperature.
    """
    asked = [
        client.generate(
            p, limit, temperature=heat, stop_token_ids=[end], cache_salt=f"{os.urandom(8).hex()}"
        )
        for p in prompts
    ]
    answers = await asyncio.gather(*asked)
    sequences = [
        np.concatenate([p, answer.tokens]) for p, answer in zip(prompts, answers, strict=True)
    ]
    scored = await score(client, sequences, [len(p) for p in prompts], end)
    return [SampledAnswer(*each) for each in zip(prompts, answers, scored, strict=True)]


async def score(
    client: ServerClient, sequences: Sequence[np.ndarray], firsts: Sequence[int], against: int
) -> list[Prefill]:
    """Let the server score the completions, each in a request of its own, as a run's
    controller does.
    """
    asked = [
        client.score([tokens], [first], os.urandom(8).hex(), against=against)
        for tokens, first in zip(sequences, firsts, strict=True)
    ]
    return [one for (one,) in await asyncio.gather(*asked)]


def gather(options: argparse.Namespace) -> None:
    """Write a line of JSON for each rollout that both sides have scored, and for each
    fault.
    """
    start_with(options.fault)
    recipe = recipe_of(options.model, options.work, options.dtype)
    with served(recipe) as server, options.gathered.open("a") as file:
        learner = ScoringLearner(recipe, server)
        weights = PerturbedWeights(learner.parameters, options.seed)
        gathering = RealGathering(
            server, learner, AutoTokenizer.from_pretrained(options.model), options
        )
        for state in range(options.states + 1):
            kind = weights.change(state, options.rate)
            learner.publish(state)
            for rollout in gathering.compared():
                file.write(json.dumps(asdict(rollout)) + "\n")
            file.flush()
            if state < options.states:
                gathering.sample(STATES_OF_A_SEED * options.seed + state, kind)
        parallel.stop()


class RealGathering:
    """The rollouts of the newest state of the weights, and their comparison at the
    next.
    """

    def __init__(
        self,
        server: Served,
        learner: ScoringLearner,
        tokenizer: PreTrainedTokenizerBase,
        options: argparse.Namespace,
    ) -> None:
        self._server = server
        self._learner = learner
        self._prompts = Prompts(tokenizer, options.seed)
        self._end = int(tokenizer.eos_token_id)
        self._rollouts = options.rollouts
        self._fault = options.fault
        self._faults = ["", *options.learner_faults]
        self._heat = options.heat
        self._sampled: dict[float, list[SampledAnswer]] = {}
        self._state = -1
        self._kind = ""

    def sample(self, state: int, kind: str) -> None:
        """Sample rollouts with the weights of a state, at temperature 1 and, if asked
        for, once more at another.
        """
        essay = state % ESSAY_EVERY == ESSAY_EVERY - 1
        limit = ESSAY_TOKENS if essay else ANSWER_TOKENS
        self._state = state
        self._kind = f"{kind}-essay" if essay else kind
        for heat in {1.0, self._heat}:
            asked = [
                self._prompts.essay() if essay else self._prompts.sum()
                for _ in range(self._rollouts)
            ]
            self._sampled[heat] = asyncio.run(
                with_client(self._server, sample, asked, limit, self._end, heat)
            )
        say(f"state {state} ({self._kind}): {self._rollouts} rollouts", flush=True)

    def compared(self) -> Iterator[ComparedRollout]:
        """Let both sides score the newest rollouts with the weights that they have now,
        the learner with each fault.
        """
        for heat, rollouts in self._sampled.items():
            sequences = [each.tokens for each in rollouts]
            given = sequences, [len(each.prompt) for each in rollouts], self._end
            by_server = asyncio.run(with_client(self._server, score, *given))
            for fault in self._faults if heat == 1 else [""]:
                by_learner = self._learner.score_with(fault, *given)
                name = fault or self._fault or ("" if heat == 1 else f"temperature-sampling:{heat}")
                for each in zip(rollouts, by_server, by_learner, strict=True):
                    yield self._rollout(name, *each)

    def _rollout(
        self, fault: str, sampled: SampledAnswer, served: Prefill, learner: np.ndarray
    ) -> ComparedRollout:
        return ComparedRollout(
            state=self._state,
            kind=self._kind,
            fault=fault,
            first=len(sampled.prompt),
            behaviour=numbers(sampled.generation.logprobs),
            sampled_at=numbers(sampled.scored.logprobs),
            served=numbers(served.logprobs),
            learner=numbers(learner[:, 0]),
            served_gap=numbers(served.logprobs - served.against),
            learner_gap=numbers(learner[:, 0] - learner[:, 1]),
        )


async def with_client(server: Served, work, *given):  # type: ignore[no-untyped-def]
    async with client_of(server.endpoints) as client:
        return await work(client, *given)


def numbers(values: np.ndarray) -> list[float]:
    return [float(value) for value in values]


def start_with(fault: str) -> None:
    """Have the server that will be started started with a fault, NAME:DOSE
    (benchmarks/parity/injected); none if empty.
    """
    if fault:
        os.environ["PARITY_FAULT"] = fault
        os.environ["PYTHONPATH"] = f"{FOLDER / 'injected'}{os.pathsep}{ROOT}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("gathered", type=Path)
    parser.add_argument("--dtype", default="bf16", choices=UNITS)
    parser.add_argument("--fault", default="", help="of the server, NAME:DOSE")
    parser.add_argument("--learner-faults", nargs="*", default=[], help="NAME:DOSE each")
    parser.add_argument(
        "--heat", type=float, default=1.0, help="sample once more at this temperature"
    )
    parser.add_argument("--states", type=int, default=40)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-5, help="how far a step moves a weight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/parity-real"))
    gather(parser.parse_args())


if __name__ == "__main__":
    main()

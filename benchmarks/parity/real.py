"""Compares a server and a learner with a real model's weights and with perturbed ones, without training.

    python -m benchmarks.parity.real gather DIR clean.jsonl --dtype bf16 --states 40
    python -m benchmarks.parity.real gather DIR fault.jsonl --fault rope-theta:1.5 --states 6
    python -m benchmarks.parity.real keep clean.jsonl benchmarks/results/parity/real-bf16.csv.gz
    python -m benchmarks.parity.real limits benchmarks/results/parity/real-bf16.csv.gz
    python -m benchmarks.parity.real judge fault.jsonl --dtype bf16

`gather` does what a run does around a publication, for one state of the weights after the other: the server samples and scores
its rollouts; the next state is published; server and learner score the same rollouts. Only the optimiser is replaced, by a
random change of the weights. `keep` leaves the differences; `limits` derives limits from them; `judge` gives the comparisons of
four rollouts each to the judge, as a run would.
"""

import argparse
import asyncio
import csv
import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.parity.injected import sitecustomize as injected
from benchmarks.roles import Served, client_of, served
from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import unrewarded
from megarl.core.base.messages import PARITY_ROLLOUTS, Publish, ServerAddress
from megarl.core.base.terminal import say
from megarl.core.learner import network
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from megarl.core.server.client import Generation, Prefill, ServerClient
from megarl.core.weights import publisher
from megarl.core.weights.parity import (
    GRID_TOLERANCE,
    LIMITED,
    LIMITS,
    Measurement,
    ParityJudge,
    RolloutScores,
    grid_steps,
)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
GROUP_LIMIT_S = 300.0
ANSWER_TOKENS, ESSAY_TOKENS = 12, 40
ESSAY_EVERY = 4
"""One state in this many answers open questions at length; the others answer sums in a few tokens."""
ESSAYS = (
    "Why is the sky blue?",
    "Write a short story about a fox and a river.",
    "How does a bicycle stay upright?",
    "Give me three tips for learning a language.",
    "What would happen if the moon vanished?",
    "Describe the taste of a lemon.",
)


@dataclass(frozen=True)
class Rollout:
    """A rollout's scores by both sides: log-probs [tokens] as in `RolloutScores`. state: the number of the weights that sampled
    it; kind: how they were made."""

    state: int
    kind: str
    first: int  # tokens of the prompt
    behaviour: list[float]
    sampled_at: list[float]
    served: list[float]
    learner: list[float]
    served_gap: list[float]
    learner_gap: list[float]

    def scores(self, server: int = 0) -> RolloutScores:
        count = len(self.behaviour)
        return RolloutScores(
            behaviour=np.float32(self.behaviour),
            sampled_at=np.float32(self.sampled_at),
            served=np.float32(self.served),
            learner=np.float32(self.learner),
            lag=np.ones(count, np.int64),
            position=self.first + np.arange(count),
            stale=np.zeros(count, bool),
            server=np.full(count, server),
            served_gap=np.float32(self.served_gap),
            learner_gap=np.float32(self.learner_gap),
        )


class Weights:
    """The learner's parameters, and those that it began with, in FP32."""

    KINDS = ("steps", "noise", "sharper", "flatter", "own")

    def __init__(self, parameters: Sequence[torch.nn.Parameter], seed: int) -> None:
        self._parameters = parameters
        self._first = [p.detach().float().clone() for p in parameters]
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def change(self, state: int, rate: float) -> str:
        """Set the weights of this state; return their kind. rate: of the steps, each of which has a random sign."""
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


class Learner:
    """The policy's network without an optimiser, and the publication of its weights to one server."""

    def __init__(self, recipe: Recipe, server: Served) -> None:
        parallel.start(recipe.model, recipe.run.seed, GROUP_LIMIT_S)
        chunks, family = network.loaded_chunks(recipe, Path(recipe.model.path))
        self._network = network.Network(chunks, family, recipe)
        self._publisher = publisher.Publisher(recipe, server.endpoints, chunks, family)
        self._address = ServerAddress(id=0, url=server.endpoints.servers[0])
        self.parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]

    def publish(self, version: int) -> None:
        published = self._publisher.publish(Publish(version=version, servers=(self._address,)), "benchmark")
        assert published is not None
        (result,) = published.results
        if result.error:
            raise SystemExit(result.error)

    def score(self, sequences: Sequence[np.ndarray], firsts: Sequence[int], against: int) -> list[np.ndarray]:
        """Return log-probs [completion, 2] for each sequence: of its tokens, and of the token `against`."""
        rows = [unrewarded(i, tokens, first) for i, (tokens, first) in enumerate(zip(sequences, firsts, strict=True))]
        found = self._network.ask(rows, self._network.scoring_head(against), shape=(2,))
        return [values[first:] for values, first in zip(found, firsts, strict=True)]


def recipe_of(model: Path, work: Path, dtype: str) -> Recipe:
    return recipes.from_tree(
        {
            "run": {"name": f"real-{dtype}-{os.getpid()}", "dir": str(work)},
            "model": {"path": str(model.resolve()), "dtype": dtype},
            "length": {"prompt_tokens": 100, "thinking_tokens": [1, 1], "answer_tokens": ESSAY_TOKENS},
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
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return np.int32(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Sampled:
    """A rollout, and its server's scores with the weights that sampled it."""

    prompt: np.ndarray
    generation: Generation
    scored: Prefill

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.generation.tokens])


async def sample(
    client: ServerClient, prompts: Sequence[np.ndarray], limit: int, end: int, heat: float
) -> list[Sampled]:
    """Let the server sample an answer to each prompt, and then score it. heat: the temperature."""
    asked = [
        client.generate(p, limit, temperature=heat, stop_token_ids=[end], cache_salt=f"{os.urandom(8).hex()}")
        for p in prompts
    ]
    answers = await asyncio.gather(*asked)
    sequences = [np.concatenate([p, answer.tokens]) for p, answer in zip(prompts, answers, strict=True)]
    scored = await score(client, sequences, [len(p) for p in prompts], end)
    return [Sampled(*each) for each in zip(prompts, answers, scored, strict=True)]


async def score(
    client: ServerClient, sequences: Sequence[np.ndarray], firsts: Sequence[int], against: int
) -> list[Prefill]:
    """Let the server score the completions, each in a request of its own, as a run's controller does."""
    asked = [
        client.score([tokens], [first], os.urandom(8).hex(), against=against)
        for tokens, first in zip(sequences, firsts, strict=True)
    ]
    return [one for (one,) in await asyncio.gather(*asked)]


def gather(options: argparse.Namespace) -> None:
    """Write a line of JSON for each rollout that both sides have scored."""
    fault, _, dose = options.fault.partition(":")
    inject(options.fault, fault, float(dose or 1))
    recipe = recipe_of(options.model, options.work, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    heat = float(dose) if fault == "temperature-sampling" else 1.0
    rate = float(dose) if fault.startswith("stale") else options.rate
    with served(recipe) as server, options.gathered.open("a") as file:
        learner = Learner(recipe, server)
        weights = Weights(learner.parameters, options.seed)
        prompts = Prompts(tokenizer, options.seed)
        before: list[Sampled] = []
        kind = ""
        for state in range(options.states + 1):
            now = weights.change(state, rate)
            learner.publish(state)
            for rollout in compare(server, learner, before, tokenizer.eos_token_id, state - 1, kind):
                file.write(json.dumps(asdict(rollout)) + "\n")
            file.flush()
            if state == options.states:
                break
            essay = state % ESSAY_EVERY == ESSAY_EVERY - 1
            asked = [prompts.essay() if essay else prompts.sum() for _ in range(options.rollouts)]
            limit = ESSAY_TOKENS if essay else ANSWER_TOKENS
            before = asyncio.run(with_client(server, sample, asked, limit, tokenizer.eos_token_id, heat))
            kind = f"{now}-essay" if essay else now
            say(f"state {state} ({kind}): {len(before)} rollouts", flush=True)
        parallel.stop()


async def with_client(server: Served, work, *given):  # type: ignore[no-untyped-def]
    async with client_of(server.endpoints) as client:
        return await work(client, *given)


def compare(
    server: Served, learner: Learner, rollouts: Sequence[Sampled], against: int, state: int, kind: str
) -> Iterator[Rollout]:
    """Let both sides score the rollouts with the weights that they have now."""
    if not rollouts:
        return
    sequences = [each.tokens for each in rollouts]
    firsts = [len(each.prompt) for each in rollouts]
    by_server = asyncio.run(with_client(server, score, sequences, firsts, against))
    by_learner = learner.score(sequences, firsts, against)
    for sampled, one, other in zip(rollouts, by_server, by_learner, strict=True):
        yield Rollout(
            state=state,
            kind=kind,
            first=len(sampled.prompt),
            behaviour=numbers(sampled.generation.logprobs),
            sampled_at=numbers(sampled.scored.logprobs),
            served=numbers(one.logprobs),
            learner=numbers(other[:, 0]),
            served_gap=numbers(one.logprobs - one.against),
            learner_gap=numbers(other[:, 0] - other[:, 1]),
        )


def numbers(values: np.ndarray) -> list[float]:
    return [float(value) for value in values]


def inject(text: str, fault: str, dose: float) -> None:
    """Put a fault into the server that will be started, or into the learner here."""
    if not fault or fault == "temperature-sampling":
        return
    role, patches = injected.FAULTS[fault]
    if role == "learn":
        patches["megarl.core.learner.network"](network, dose)
        return
    if fault.startswith("stale"):
        injected.checksums_agree(publisher, dose)
    os.environ["PARITY_FAULT"] = text
    os.environ["PYTHONPATH"] = f"{FOLDER / 'injected'}{os.pathsep}{ROOT}"


UNITS = {"bf16": 1e-4, "fp32": 1e-8}
"""The size of the steps in which `keep` writes differences."""
LOGPROB_UNIT = 0.01


def read(file: Path) -> list[Rollout]:
    return [Rollout(**json.loads(line)) for line in file.read_text().splitlines()]


def keep(options: argparse.Namespace) -> None:
    """Write, for each rollout, the differences of its tokens, their log-probs and how many of its logits lie on the grid."""
    unit = UNITS[options.dtype]
    with gzip.GzipFile(options.kept, "wb", mtime=0) as packed, io.TextIOWrapper(packed, newline="\n") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("state", "kind", "first", "logprob", "kernels", "decode", "served_grid", "learner_grid"))
        for rollout in read(options.gathered):
            scores = rollout.scores()
            columns = [integers(scores.learner, LOGPROB_UNIT)]
            for cause in LIMITED:
                first, second = scores.pair(cause)
                columns.append(integers(second - first, unit))
            grids = [on_grid(scores.gap(side), options.dtype) for side in ("server", "learner")]
            rows.writerow((rollout.state, rollout.kind, rollout.first, *columns, *grids))


def integers(values: np.ndarray, unit: float) -> str:
    return " ".join(str(round(float(value) / unit)) for value in values)


def on_grid(gap: np.ndarray, dtype: str) -> str:
    """Return how many differences of logits lie on the grid of bf16 numbers, and of how many."""
    if dtype == "fp32":
        return ""
    steps = grid_steps(gap, dtype)
    return f"{int(np.sum(np.abs(steps - np.round(steps)) < GRID_TOLERANCE))}/{len(steps)}"


@dataclass(frozen=True)
class Kept:
    """A rollout of a kept file. Differences [tokens] by cause, in log-prob."""

    state: int
    kind: str
    first: int
    logprob: np.ndarray
    differences: dict[str, np.ndarray]


def kept(file: Path, dtype: str) -> list[Kept]:
    """Return the rollouts of a kept file."""
    found = []
    with gzip.open(file, "rt") as lines:
        for row in csv.DictReader(lines):
            logprob = LOGPROB_UNIT * np.array(row["logprob"].split(), np.float64)
            differences = {cause: UNITS[dtype] * np.array(row[cause].split(), np.float64) for cause in LIMITED}
            found.append(Kept(int(row["state"]), row["kind"], int(row["first"]), logprob, differences))
    return found


def comparisons(rollouts: Sequence[Kept]) -> list[list[Kept]]:
    """Return the rollouts of each comparison: PARITY_ROLLOUTS of one state of the weights."""
    by_state: dict[int, list[Kept]] = {}
    for rollout in rollouts:
        by_state.setdefault(rollout.state, []).append(rollout)
    found = []
    for each in by_state.values():
        whole = len(each) - len(each) % PARITY_ROLLOUTS
        found += [each[at : at + PARITY_ROLLOUTS] for at in range(0, whole, PARITY_ROLLOUTS)]
    return found


def drawn(rollouts: Sequence[Kept], cause: str, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return means and medians [DRAWS] of |difference| over `tokens` tokens. Each draw takes a state of the weights, and then
    rollouts of this state, with replacement, until there are enough tokens: tokens of one answer, and answers of one policy,
    are alike, and so they are in a run."""
    by_state: dict[int, list[np.ndarray]] = {}
    for rollout in rollouts:
        by_state.setdefault(rollout.state, []).append(np.abs(rollout.differences[cause]))
    states = list(by_state.values())
    random = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    medians = np.empty(DRAWS)
    for draw in range(DRAWS):
        state = states[random.integers(len(states))]
        taken: list[np.ndarray] = []
        while sum(map(len, taken)) < tokens:
            taken.append(state[random.integers(len(state))])
        sizes = np.concatenate(taken)[:tokens]
        means[draw] = sizes.mean()
        medians[draw] = np.median(sizes)
    return means, medians


DRAWS = 20_000
RATE = 1e-5
"""The rate of false alarms per comparison for which quantiles are given: in a run of 1,000 comparisons, 1 %."""
TOKENS = (32, 64, 128, 256, 1024)


def beyond(values: np.ndarray, limit: float) -> float:
    """Return the probability of more than `limit`, by the gamma distribution with the mean and variance of the values."""
    return float(gamma_of(values).sf(limit))


def gamma_of(values: np.ndarray):  # type: ignore[no-untyped-def]
    return stats.gamma(values.mean() ** 2 / values.var(), scale=values.var() / values.mean())


def limits(options: argparse.Namespace) -> None:
    """Print what the kept comparisons say about limits."""
    rollouts = kept(options.kept, options.dtype)
    groups = comparisons(rollouts)
    judged = LIMITS[options.dtype, False]
    for cause in LIMITED:
        sizes = [np.abs(np.concatenate([r.differences[cause] for r in group])) for group in groups]
        means = np.array([size.mean() for size in sizes])
        lengths = [len(size) for size in sizes]
        said = f"{len(groups)} comparisons of {min(lengths)} to {max(lengths)} tokens"
        say(f"{cause}: {said}, mean {np.concatenate(sizes).mean():.3g}, worst {means.max():.3g}")
        for tokens in TOKENS:
            many_means, many_medians = drawn(rollouts, cause, tokens)
            for name, values, limit in (
                ("mean", many_means, judged.mean_of(cause, tokens)),
                ("median", many_medians, judged.p50_of(cause, tokens)),
            ):
                quantile = gamma_of(values).ppf(1 - RATE)
                far = f"{quantile:.3g} at {RATE:g}, largest drawn {values.max():.3g}"
                chance = f"limit {limit:.3g} at {beyond(values, limit):.1e}"
                say(f"  {tokens:5} tokens, {name:6}: {values.mean():.3g} ± {values.std():.2g}; {far}; {chance}")


def measurements(rollouts: Sequence[Rollout], server: int = 0) -> list[Measurement]:
    """Return the rollouts as a run's comparisons, PARITY_ROLLOUTS each."""
    found = []
    for at in range(0, len(rollouts) - PARITY_ROLLOUTS + 1, PARITY_ROLLOUTS):
        scores = RolloutScores.joined([each.scores(server) for each in rollouts[at : at + PARITY_ROLLOUTS]])
        found.append(Measurement(len(found) + 1, scores, PARITY_ROLLOUTS))
    return found


def judge(options: argparse.Namespace) -> None:
    """Print how a run would have ended with these comparisons."""
    say(json.dumps(judged(measurements(read(options.gathered)), options.dtype)))


def judged(given: Sequence[Measurement], dtype: str) -> dict[str, object]:
    """Return how many comparisons were warned of, after which one the run ended, and the message."""
    one = ParityJudge(dtype, False, True, True)
    warned = 0
    for count, measurement in enumerate(given, 1):
        verdict = one.judge(measurement)
        warned += bool(verdict.warning)
        if verdict.ends:
            return {"comparisons": count, "warned": warned, "ended": verdict.warning}
    return {"comparisons": len(given), "warned": warned, "ended": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    gathering = commands.add_parser("gather")
    gathering.add_argument("model", type=Path)
    gathering.add_argument("gathered", type=Path)
    gathering.add_argument("--fault", default="")
    gathering.add_argument("--states", type=int, default=40)
    gathering.add_argument("--rollouts", type=int, default=32)
    gathering.add_argument("--rate", type=float, default=2e-5, help="how far a step moves a weight")
    gathering.add_argument("--seed", type=int, default=0)
    gathering.add_argument("--work", type=Path, default=Path("runs/parity-real"))
    gathering.set_defaults(run=gather)
    keeping = commands.add_parser("keep")
    keeping.add_argument("gathered", type=Path)
    keeping.add_argument("kept", type=Path)
    keeping.set_defaults(run=keep)
    limiting = commands.add_parser("limits")
    limiting.add_argument("kept", type=Path)
    limiting.set_defaults(run=limits)
    judging = commands.add_parser("judge")
    judging.add_argument("gathered", type=Path)
    judging.set_defaults(run=judge)
    for command in (gathering, keeping, limiting, judging):
        command.add_argument("--dtype", default="bf16", choices=UNITS)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

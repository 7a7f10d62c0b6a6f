"""Tasks of lm-evaluation-harness (lm-eval) by name: ARC, HellaSwag, TruthfulQA,
NaturalQuestions and all its others, asked of our servers.

    lm-eval:TASK ─[load_documents]─► Document: a row with the harness's requests
                                     ─► Documents, asked by score.py
                 ─[AskedModel]──────────► log p(continuation | context), or a text
                 ─[answered]───────► the harness's metrics of the row ─► Answer

Prompts, examples, filters and metrics are the harness's. Only what its class `LM` does
is done here, one row at a time: a whole task at once could neither be resumed nor be
part of a run's evaluation.
"""

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.client.client import ServerClient, ServerLost
from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.metrics import Outcome
from megarl.core.evaluation.score import Asker, Questions
from megarl.core.recipe.data import LM_EVAL
from megarl.core.sampling.places import Order
from megarl.core.sampling.sampler import MAX_RETRIES

VERSION = "0.4.13"
SEEDS = {"random": 0, "numpy": 1234, "examples": 1234}
"""Those of the harness's own command."""
PIECE = 64
"""Tokens generated before the text is searched for where it ends."""
RIGHT_FROM = 0.5
"""The least value of a row's main metric that counts as right."""


class Document(NamedTuple):
    """A row of a task. task: the harness's Task; requests: its Instances for it."""

    id: str
    task: Any
    requests: Sequence[Any]

    @property
    def is_greedy_used(self) -> bool:
        """A metric depends on whether a continuation is the greedy one."""
        metrics = self.task.aggregation()
        return self.task.OUTPUT_TYPE == "loglikelihood" or "exact_match" in metrics

    @property
    def target(self) -> Any:
        """What the harness compares with: a text, the index of a choice, or several."""
        row = self.requests[0].doc
        if getattr(self.task, "multiple_input", False):  # its text is the right context's index
            return self.task.doc_to_text(row)
        return self.task.doc_to_target(row)

    @property
    def has_one_target(self) -> bool:
        """One choice is right. A task that computes metrics itself may have more."""
        return self.task.config.process_results is None and not isinstance(self.target, list)

    @property
    def expected(self) -> str:
        """The text of the target."""
        targets = self.target
        if not isinstance(targets, list):
            targets = [targets]
        if self.task.OUTPUT_TYPE == "multiple_choice":
            choices = self.task.doc_to_choice(self.requests[0].doc)
            targets = [choices[item] if isinstance(item, int) else item for item in targets]
        return " or ".join(map(str, targets))


class Response(NamedTuple):
    """A response to a request. value: what the harness reads: (log-likelihood in nats,
    is greedy), or a text; tokens: scored or written; cut: the context's start is
    missing.
    """

    value: Any
    tokens: int
    cut: bool


def load_documents(source: str) -> list[Document]:
    """Load the rows of `lm-eval:NAME`, a task, group or tag of the harness, or a YAML
    file of a task. MegarlError if it is missing, or cannot be asked here.
    """
    documents = []
    with _seeded():
        for task in _load_tasks(source):
            _check(source, task)
            task.set_fewshot_seed(seed=SEEDS["examples"])
            for number, row in task.doc_iterator():
                requests = _requests(task, number, row)
                documents.append(Document(f"{task.task_name}/{number}", task, requests))
    if not documents:
        raise MegarlError(f"{source}: has no rows")
    return documents


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the generators from which some tasks shuffle their choices as they load."""
    state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _load_tasks(source: str) -> list[Any]:
    """Return the harness's tasks that a source names."""
    name = source.removeprefix(LM_EVAL)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        advice = f"the package lm-eval is missing: pip install lm-eval=={VERSION}"
        raise MegarlError(f"{source}: {advice}") from None
    manager = TaskManager(include_defaults=not name.endswith((".yaml", ".yml")))
    try:
        return list(manager.load(name)["tasks"].values())
    except KeyError:
        unknown = f"neither a task, group or tag of lm-eval {VERSION} nor a YAML file of a task"
        raise MegarlError(f"{source}: {name!r} is {unknown}") from None
    except Exception as error:  # of Hugging Face's datasets, of the network, or of the YAML
        raise MegarlError(f"{source}: could not be loaded: {error}") from error


def _check(source: str, task: Any) -> None:
    """Raise MegarlError if a task of the harness cannot be asked here: for the
    perplexity of texts, or if it runs programs without a sandbox.
    """
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise MegarlError(
            f"{source}: {task.task_name} asks for the perplexity of texts, which has no right"
            " answers"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise MegarlError(
            f"{source}: {task.task_name} runs the model's programs without a sandbox; the suites"
            " humaneval and mbpp run them in one"
        )


def _requests(task: Any, number: int, row: Any) -> list[Any]:
    """Return the harness's requests for a row, without a chat template."""
    context = task.fewshot_context(
        row, num_fewshot=task.config.num_fewshot or 0, gen_prefix=task.doc_to_prefix(row)
    )
    metadata = (task.task_name, number, task.config.repeats)
    requests = task.construct_requests(
        doc=row, ctx=context, metadata=metadata, apply_chat_template=False, chat_template=None
    )
    if isinstance(requests, list):
        return requests
    return [requests]


@dataclass(frozen=True)
class AskedModel:
    """What the harness asks of a model (its class `LM`), by requests to one server.

    longest: tokens that fit in the context window. salt: unique to a row, an evaluation
    and a version of the weights.
    """

    client: ServerClient
    tokenizer: Tokenizer
    longest: int
    salt: str

    async def respond(self, document: Document) -> list[list[Response]]:
        """Return the responses to each request, several if the task repeats requests.
        Raises ServerLost or ServerRefused; MegarlError if one cannot be asked.
        """
        if document.task.OUTPUT_TYPE == "generate_until":
            return [await self._repeated(request) for request in document.requests]
        responses = await self._score([request.args for request in document.requests])
        if document.is_greedy_used:
            responses = [
                await self._with_greedy(request.args, response)
                for request, response in zip(document.requests, responses, strict=True)
            ]
        return [[response] for response in responses]

    async def _score(self, pairs: Sequence[tuple[str, str]]) -> list[Response]:
        """Return log p(continuation | context) of each pair, as `LM.loglikelihood`."""
        encoded = [self._encode(context, continuation) for context, continuation in pairs]
        scores = await self.client.score(
            [pair.tokens for pair in encoded], [pair.first for pair in encoded], self.salt
        )
        responses = []
        for pair, score in zip(encoded, scores, strict=True):
            likelihood = float(np.sum(score.logprobs, dtype=np.float64))
            if not np.isfinite(likelihood):
                raise MegarlError("the model's log-likelihood of a choice is not finite")
            scored = len(pair.tokens) - pair.first
            responses.append(Response((likelihood, False), scored, pair.is_cut))
        return responses

    async def _with_greedy(self, pair: tuple[str, str], response: Response) -> Response:
        """Return a scored response with whether the model, which takes the likeliest
        token each time, would continue like that. pair: context and continuation.
        """
        encoded = self._encode(*pair)
        generation = await self.client.generate(
            encoded.tokens[: encoded.first],
            response.tokens,
            temperature=0.0,
            cache_salt=self.salt,
            ignore_eos=True,
        )
        is_greedy = np.array_equal(generation.tokens, encoded.tokens[encoded.first :])
        likelihood, _ = response.value
        return response._replace(value=(likelihood, is_greedy))

    async def _repeated(self, request: Any) -> list[Response]:
        """Return as many texts as a request asks for."""
        context, options = request.args
        return [await self._write(context, options) for _ in range(request.repeats or 1)]

    async def _write(self, context: str, options: Mapping[str, Any]) -> Response:
        """Return the text up to the first of options["until"], as `LM.generate_until`.
        The servers know no texts, so it is written piece by piece.
        """
        limit = options.get("max_gen_toks", 256)
        stops = options.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        temperature = 0.0
        if options.get("do_sample"):
            temperature = options.get("temperature", 1.0)
        room = self.longest - limit  # tokens for the prompt
        if room < 1:
            raise MegarlError(f"no room for a prompt: {limit} tokens of text, {self.longest} fit")
        (prompt,) = self.tokenizer.encode_all([self._end_of(context)], framed=True)
        tokens = prompt[-room:]
        first = len(tokens)
        text = ""
        finish = ""
        while finish != "stop" and len(tokens) - first < limit:
            generation = await self.client.generate(
                tokens,
                min(PIECE, limit - (len(tokens) - first)),
                temperature=temperature,
                top_p=options.get("top_p", 1.0),
                stop_token_ids=self.tokenizer.ends,
                cache_salt=self.salt,
            )
            finish = generation.finish
            tokens = np.concatenate([tokens, generation.tokens])
            written = tokens[first:]
            if finish == "stop" and written[-1] in self.tokenizer.ends:
                written = written[:-1]
            text = self.tokenizer.continued(written)
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.partition(stop)[0]
        return Response(text, len(tokens) - first, len(prompt) > room)

    def _encode(self, context: str, continuation: str) -> "Encoded":
        """Encode both as one text, with the tokenizer's usual special tokens, as
        `TemplateLM._encode_pair`: whitespace at the end of the context belongs to the
        continuation. Of a longer text only the last `longest` tokens are kept.
        MegarlError if the continuation has no tokens of its own, or fills all.
        """
        if self.tokenizer.least_tokens(len(continuation)) > self.longest:
            fits = f"it is longer than the {self.longest} tokens that fit"
            raise MegarlError(f"{continuation[:60]!r} cannot be scored: {fits}")
        context = self._end_of(context)
        stripped = context.rstrip()
        prefix, tokens = self.tokenizer.encode_all([stripped, context + continuation], framed=True)
        if not len(prefix):  # the first token must follow one, as in the harness
            prefix = np.array([self.tokenizer.end], np.int32)
            tokens = np.concatenate([prefix, tokens])
        surplus = max(0, len(tokens) - self.longest)
        first = len(prefix) - surplus
        if not 1 <= first < len(tokens) - surplus:
            fits = (
                f"{len(tokens) - len(prefix)} tokens of its own, after at least one other, where"
                f" {self.longest} fit"
            )
            raise MegarlError(f"{continuation!r} cannot be scored after {context[-60:]!r}: {fits}")
        return Encoded(tokens[surplus:], first, surplus > 0)

    def _end_of(self, context: str) -> str:
        """Return the end of a context: what precedes could not fit in any case."""
        return context[-(self.longest + 1) * self.tokenizer.longest_token :]


class Encoded(NamedTuple):
    """Context and continuation. tokens [n] int32, scored from `first` on; is_cut: the
    context's start is missing.
    """

    tokens: np.ndarray
    first: int
    is_cut: bool


@dataclass(frozen=True)
class Documents(Questions[Document]):
    """Rows of the harness's tasks. If one is too long, the start of its context is cut,
    and its answer `truncated`.
    """

    def answerer(self, asker: Asker) -> Callable[[Document, int, Order], Awaitable[Answer]]:
        """Return a function of a row, a sample's number and the order among requests,
        which returns the row's answer.
        """
        return partial(self._answer, asker)

    async def _answer(self, asker: Asker, document: Document, sample: int, order: Order) -> Answer:
        """Return the answer; void if its requests are lost more than MAX_RETRIES times,
        or if it cannot be asked.
        """
        longest = asker.recipe.length.context_tokens - KEPT_FROM_INPUT
        salt = f"{asker.salt}/{document.id}"
        servers = asker.sampler.servers
        void = ""
        for tries in range(1, MAX_RETRIES + 2):
            server, _ = await servers.places.take(order, asker.may_use)
            life = servers.life(server)
            model = AskedModel(servers.clients[server], asker.tokenizer, longest, salt)
            try:
                return answered(document, self.name, await model.respond(document))
            except ServerLost as loss:
                if not loss.server_is_alive:
                    servers.server_lost(server, life, str(loss))
                void = f"{tries} requests were lost, the last: {loss}"
            except MegarlError as error:
                return _unanswered(document, self.name, str(error))
            finally:
                servers.places.give_back(server)
        return _unanswered(document, self.name, void)


def answered(document: Document, suite: str, responses: Sequence[Sequence[Response]]) -> Answer:
    """Make the answer from the responses to each request of the row: with the text
    written or, if choices are scored, the likeliest one.
    """
    task = document.task
    answer = _unanswered(document, suite, "")
    metrics = _metrics(document, responses)
    is_cut = any(response.cut for repeated in responses for response in repeated)
    answer = msgspec.structs.replace(
        answer,
        correct=metrics[main_metric(metrics)] >= RIGHT_FROM,
        scores=metrics,
        truncated=is_cut,
    )
    firsts = [repeated[0] for repeated in responses]  # of each request
    if task.OUTPUT_TYPE == "generate_until":
        text = firsts[0].value
        return msgspec.structs.replace(
            answer, completion=text, answer=text, vote=text.strip(), tokens=firsts[0].tokens
        )
    if task.OUTPUT_TYPE != "multiple_choice":
        return msgspec.structs.replace(answer, tokens=firsts[0].tokens)
    choices = task.doc_to_choice(document.requests[0].doc)
    # Further requests may ask for the choices without the context.
    likelihoods = [response.value[0] for response in firsts[: len(choices)]]
    per_character = np.divide(likelihoods, [len(choice) for choice in choices])
    chosen = int(np.argmax(likelihoods))
    answer = msgspec.structs.replace(
        answer,
        completion=task.config.target_delimiter + choices[chosen],
        answer=choices[chosen],
        vote=choices[chosen],
        tokens=firsts[chosen].tokens,
    )
    if not document.has_one_target:
        return answer
    return msgspec.structs.replace(
        answer,
        choices=tuple(choices),
        loglikelihoods=tuple(likelihoods),
        chosen=chosen,
        chosen_normalised=int(np.argmax(per_character)),
    )


def _metrics(document: Document, responses: Sequence[Sequence[Response]]) -> dict[str, float]:
    """Return the harness's metrics of a row that are numbers, each by filter as in
    `exact_match,strict-match`; without ",none".
    """
    for request, repeated in zip(document.requests, responses, strict=True):
        request.resps = [response.value for response in repeated]
    metrics = {}
    for ensemble in document.task._filters:
        ensemble.apply(document.requests)
        filtered = [request.filtered_resps[ensemble.name] for request in document.requests]
        values = document.task.process_results(document.requests[0].doc, filtered)
        for name, value in values.items():
            if isinstance(value, (bool, int, float, np.number)):
                metrics[f"{name},{ensemble.name}".removesuffix(",none")] = float(value)
    if not metrics:
        raise MegarlError(f"{document.task.task_name} has no metric of single rows")
    return metrics


def main_metric(metrics: Mapping[str, float]) -> str:
    """Return the metric that says whether an answer is right: the first accuracy or
    exact match, else the first of all.
    """
    accuracies = [name for name in metrics if "acc" in name or "exact_match" in name]
    return (accuracies or list(metrics))[0]


def means(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the mean of each metric of the harness over answers that are not void."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in (outcome.scores or {}).items():
            values.setdefault(f"{LM_EVAL}{name}", []).append(value)
    return {name: fmean(of_rows) for name, of_rows in values.items()}


def _unanswered(document: Document, suite: str, void: str) -> Answer:
    """Return an answer without scores. void: the reason why it is void, "" if it is
    not. A void answer is not malformed: its model wrote nothing.
    """
    return Answer(
        suite=suite,
        id=document.id,
        sample=0,
        prompt=document.requests[0].args[0],
        expected=document.expected,
        completion="",
        answer="",
        vote="",
        correct=False,
        truncated=False,
        interrupted=False,
        format_ok=True,
        grader_timeout=False,
        grader_error=False,
        tokens=0,
        entropy=None,
        void=void,
    )

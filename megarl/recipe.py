"""The recipe: one YAML file, one typed tree, which drives every role. Defaults are ScaleRL's (arXiv 2510.13786).

    load("quickstart", ["run.seed=3"])  ──►  Recipe      (name of a shipped recipe, or a path)

Unknown keys, wrong types and impossible combinations end in one `MegarlError` that names the key, file, line and, for a
misspelt key, the nearest known one. A value marked "not stated" has no number in the paper.
"""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from megarl.errors import MegarlError

SHIPPED = Path(__file__).parent / "recipes"


class Section(BaseModel):
    """A part of the recipe: strict types, no unknown keys, no changes after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class Run(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="run directory is dir/name")
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    steps: int = Field(400, ge=1, description="optimiser steps")
    resume: Literal["never", "auto"] = "never"

    @property
    def path(self) -> Path:
        return Path(self.dir) / self.name


class Moe(Section):
    """How experts are trained. Fixed, because other choices harm RL: no token is dropped, no bias moves tokens between experts,
    routing is computed in float32."""

    load_balancing: Literal["none", "aux_loss"] = Field("none", description="aux_loss: that of the Switch Transformer")
    aux_loss_coefficient: float = Field(1e-3, gt=0, description="of load_balancing: aux_loss")
    freeze_router: bool = False
    routing_replay: bool = Field(False, description="the learner takes the experts that the server chose")


class Model(Section):
    path: str = Field("", description="Hugging Face directory both sides start from")
    dtype: Literal["bf16", "fp32"] = "bf16"
    fp32_head: bool = True
    tensor_parallel: int = Field(1, ge=1)
    sequence_parallel: bool = False
    pipeline_parallel: int = Field(1, ge=1)
    virtual_pipeline_parallel: int = Field(1, ge=1, description="model chunks a pipeline rank holds")
    overlap_p2p: bool = False
    context_parallel: int = Field(1, ge=1)
    expert_parallel: int = Field(1, ge=1)
    expert_tensor_parallel: int = Field(1, ge=1)
    moe: Moe = Moe()

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


class Resources(Section):
    learner_ranks: int = Field(1, ge=1, description="TP x PP x CP x DP")
    servers: int = Field(1, ge=1)
    server_tensor_parallel: int = Field(1, ge=1, description="GPUs a server")
    threads: int = Field(1, ge=1, description="CPU threads of a learner rank or a server")


class Curriculum(Section):
    """Easy prompts first, by their `difficulty`. Not part of ScaleRL."""

    kind: Literal["none", "linear", "exponential"] = Field(
        "none", description="how the share of prompts drawn from grows"
    )
    start: float = Field(0.2, gt=0, le=1, description="share of the easiest prompts that the first epoch has")
    steps: int = Field(1000, ge=1, description="batches drawn until all prompts are in")


class Data(Section):
    train: str = Field("", description="JSONL of prompts")
    heldout: str = Field("", description="JSONL of prompts, never trained on")
    grader: Literal["math", "exact"] = "math"
    on_exhausted: Literal["stop", "reset"] = Field("reset", description="when fewer than batch.prompts are left")
    curriculum: Curriculum = Curriculum()


class Length(Section):
    control: Literal["interruption", "overlong_penalty", "none"] = Field(
        "interruption", description="the others sample thinking and answer in one, up to the sum of both limits"
    )
    prompt_tokens: int = Field(2048, ge=1)
    thinking_tokens: tuple[int, int] = Field((10_000, 12_000), description="budget, drawn anew for each rollout")
    answer_tokens: int = Field(2048, ge=1)
    end_of_thinking: str = "</think>"
    interruption: str = Field(
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>",
        description="appended when the thinking budget runs out; masked from the loss",
    )
    overlong_tokens: int = Field(
        2048,
        ge=1,
        description="of overlong_penalty: a right answer loses up to 1 over the last so many tokens (L_cache)",
    )

    @property
    def completion_tokens(self) -> int:
        """Longest completion, interruption phrase not counted."""
        return self.thinking_tokens[1] + self.answer_tokens

    @property
    def context_tokens(self) -> int:
        """Longest sequence, interruption phrase not counted."""
        return self.prompt_tokens + self.completion_tokens


class Sampling(Section):
    generations: int = Field(16, ge=2, description="rollouts of a prompt")
    temperature: float = Field(1.0, gt=0, description="not stated")
    top_p: float = Field(1.0, gt=0, le=1, description="not stated")


class Pipeline(Section):
    kind: Literal["pipeline-rl", "ppo-off-policy"] = Field(
        "pipeline-rl",
        description="ppo-off-policy: k x batch.prompts prompts are generated with one version, then trained in k steps",
    )
    k: int = Field(8, ge=0, description="largest lag of a trained token, in steps; of ppo-off-policy: steps of a phase")

    @property
    def phase_steps(self) -> int:
        """Steps between two publications: those of a phase. k = 0 and k = 1 of ppo-off-policy are the same, synchronous."""
        return max(self.k, 1) if self.kind == "ppo-off-policy" else 1

    @property
    def max_lag(self) -> int:
        """By how many steps the phase that is generated may be ahead of the servers' weights."""
        return 0 if self.kind == "ppo-off-policy" else self.k

    @property
    def lag_limit(self) -> int:
        """Largest lag of a trained token, in steps."""
        return self.max_lag + self.phase_steps - 1

    @property
    def window_steps(self) -> int:
        """How many steps' prompts may be drawn and not trained."""
        return self.max_lag + self.phase_steps


class BatchSection(Section):
    prompts: int = Field(48, ge=1)
    zero_variance: Literal["drop", "refill", "keep"] = "drop"
    positive_threshold: float | None = Field(0.9, gt=0, le=1, description="no-positive-resampling; null: off")
    centring: Literal["group", "leave_one_out", "none"] = Field(
        "group", description="what is taken from a reward: mean of the group, of the group's others, nothing"
    )
    advantage: Literal["batch", "group", "none"] = Field(
        "batch", description="deviation the centred reward is divided by"
    )
    aggregation: Literal["prompt", "sample", "token", "constant"] = Field(
        "prompt", description="constant: over rollouts x longest completion (Dr. GRPO)"
    )


class Loss(Section):
    kind: Literal["cispo", "clip", "gspo", "reinforce"] = Field("cispo", description="clip: PPO, GRPO, DAPO")
    cap: float = Field(
        4.0, gt=0, description="cispo: upper bound of the importance ratio: 4, 5 and 8 were tried, choice not stated"
    )
    lower: float = Field(0.0, ge=0, description="cispo: lower bound of the importance ratio")
    clip_low: float = Field(0.2, ge=0, le=1, description="clip, gspo: the ratio is clipped at 1 - this")
    clip_high: float = Field(0.2, ge=0, description="clip, gspo: the ratio is clipped at 1 + this")
    correction: Literal["none", "truncate", "mask"] = Field(
        "none", description="clip, gspo (mask only), reinforce: bound on the weight of a token of another policy"
    )
    correction_cap: float = Field(2.0, gt=0, description="largest importance ratio that `correction` leaves as it is")
    entropy_bonus: float = Field(0.0, ge=0, description="coefficient of the entropy in the loss; ScaleRL has none")


class Optimizer(Section):
    lr: float = Field(5e-7, gt=0)
    warmup_steps: int = Field(100, ge=0, description="linear")
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="from the warm-up's end on")
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="cosine, linear: share of lr at the end of the steps")
    betas: tuple[float, float] = Field((0.9, 0.95), description="not stated")
    eps: float = Field(1e-15, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    grad_clip: float = Field(1.0, gt=0, description="not stated")


class Learner(Section):
    microbatch_tokens: int = Field(16_384, ge=1, description="tokens of a packed micro-batch on a data-parallel rank")
    packing: bool = True
    optimizer: Optimizer = Optimizer()


class Weights(Section):
    transport: Literal["process_group", "disk"] = "process_group"
    bucket_mb: int = Field(512, ge=1)
    pause: Literal["in_place", "retract"] = "in_place"
    probe_sequences: int = Field(4, ge=1, description="sequences scored on both sides after each publication")
    probe_limit: float = Field(0.1, gt=0, description="largest log-prob difference; above it the run stops")
    timeout_s: float = Field(600, gt=0)


class Serving(Section):
    host: str = "127.0.0.1"
    port: int | None = Field(None, ge=1, le=65_535, description="of server 0, the next ones count up; null: free ports")
    kv_tokens: int | None = Field(None, ge=1, description="null: what fits in memory (GPU only)")
    max_running_requests: int = Field(256, ge=1)
    stream_interval: int = Field(
        64, ge=1, description="tokens between streamed chunks: what a lost server costs a request at most"
    )
    start_timeout_s: float = Field(1200, gt=0)
    request_timeout_s: float = Field(3600, gt=0)
    max_retries: int = Field(5, ge=1, description="failures of one ticket before it becomes void")


class Evaluation(Section):
    every: int = Field(100, ge=1, description="steps; also at step 0 and after the last")
    prompts: int = Field(1000, ge=1)
    samples: int = Field(16, ge=1, description="mean@samples")
    temperature: float = Field(1.0, ge=0)


class Checkpoint(Section):
    every: int = Field(100, ge=1, description="steps")
    keep: int = Field(2, ge=1)


class Journal(Section):
    keep: Literal["all", "checkpoints"] = Field("all", description="checkpoints: drop what no kept checkpoint replays")


class Sft(Section):
    data: str = Field("", description="JSONL of prompt and completion")
    init: str = Field("", description="Hugging Face directory to start from")
    output: str = Field("", description="Hugging Face directory to write")
    steps: int = Field(1000, ge=1)
    batch_tokens: int = Field(2_000_000, ge=1)
    max_length: int = Field(12_288, ge=1)
    optimizer: Optimizer = Optimizer(lr=3e-5)


class Recipe(Section):
    """Everything a run is. `description` is what `megarl recipes` shows."""

    description: str = ""
    run: Run = Run()
    model: Model = Model()
    resources: Resources = Resources()
    data: Data = Data()
    length: Length = Length()
    sampling: Sampling = Sampling()
    pipeline: Pipeline = Pipeline()
    batch: BatchSection = BatchSection()
    loss: Loss = Loss()
    learner: Learner = Learner()
    weights: Weights = Weights()
    serving: Serving = Serving()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    journal: Journal = Journal()
    sft: Sft = Sft()

    @property
    def data_parallel(self) -> int:
        return self.resources.learner_ranks // self.model.model_parallel_size

    @model_validator(mode="after")
    def possible(self) -> "Recipe":
        """Combinations that cannot work, or that megatron-core computes wrongly without a word."""
        for problem in _impossible(self):
            raise ValueError(problem)
        return self


def _impossible(r: Recipe) -> list[str]:
    """`key: what is wrong, what to do`, for each."""
    m, found = r.model, []
    if r.resources.learner_ranks % m.model_parallel_size:
        found.append(
            f"resources.learner_ranks: {r.resources.learner_ranks} ranks do not divide into copies of the model of "
            f"TP x PP x CP = {m.model_parallel_size} ranks; use a multiple"
        )
    experts = m.expert_parallel * m.expert_tensor_parallel * m.pipeline_parallel
    if r.resources.learner_ranks % experts:
        found.append(
            f"resources.learner_ranks: {r.resources.learner_ranks} ranks do not divide into copies of the experts of "
            f"EP x ETP x PP = {experts} ranks; use a multiple"
        )
    if m.moe.freeze_router and m.moe.load_balancing != "none":
        found.append("model.moe.load_balancing: balances by training the router, which model.moe.freeze_router forbids")
    if m.virtual_pipeline_parallel > 1 and m.pipeline_parallel == 1:
        found.append("model.virtual_pipeline_parallel: needs model.pipeline_parallel of 2 or more")
    if m.pipeline_parallel == 2 and m.virtual_pipeline_parallel > 1 and not m.overlap_p2p:
        found.append(
            "model.virtual_pipeline_parallel: with model.pipeline_parallel=2 megatron-core mixes up the sends of two chunks "
            "and computes wrong gradients; set model.overlap_p2p=true"
        )
    if m.sequence_parallel and m.tensor_parallel == 1:
        found.append("model.sequence_parallel: needs model.tensor_parallel of 2 or more")
    if not r.resources.learner_ranks % m.model_parallel_size and r.batch.prompts % r.data_parallel:
        found.append(
            f"batch.prompts: {r.batch.prompts} does not divide by the {r.data_parallel} data-parallel ranks "
            "(resources.learner_ranks / TP x PP x CP)"
        )
    if r.length.thinking_tokens[0] > r.length.thinking_tokens[1] or r.length.thinking_tokens[0] < 1:
        found.append("length.thinking_tokens: give [shortest, longest], 1 or more")
    if r.length.control == "overlong_penalty" and r.length.overlong_tokens > r.length.completion_tokens:
        found.append(
            f"length.overlong_tokens: {r.length.overlong_tokens} is more than the longest completion "
            f"({r.length.completion_tokens}: thinking_tokens and answer_tokens); every right answer would be penalised"
        )
    if not r.length.interruption.endswith(r.length.end_of_thinking):
        found.append(
            "length.interruption: must end with length.end_of_thinking, or the answer leg would go on thinking"
        )
    if r.batch.centring == "none" and r.batch.advantage == "group":
        found.append(
            "batch.advantage: a group without variance has no deviation to divide an uncentred reward by; "
            "use batch or none, or set batch.centring"
        )
    if r.loss.kind == "cispo" and r.loss.correction != "none":
        found.append("loss.correction: cispo is truncated importance sampling already; use loss.cap")
    if r.loss.kind == "gspo" and r.loss.correction == "truncate":
        found.append("loss.correction: the weight of gspo is of a sequence, its tokens cannot be truncated; use mask")
    schedules = (("learner", r.learner.optimizer, "run", r.run.steps), ("sft", r.sft.optimizer, "sft", r.sft.steps))
    for section, optimizer, whose, steps in schedules:
        if optimizer.schedule != "constant" and optimizer.warmup_steps >= steps:
            found.append(
                f"{section}.optimizer.warmup_steps: {optimizer.warmup_steps} of {whose}.steps={steps} leave none for "
                f"the schedule {optimizer.schedule}; shorten the warm-up"
            )
    if not r.learner.packing and r.model.context_parallel > 1:
        found.append("learner.packing: context parallelism needs packed sequences")
    return found


def shipped() -> dict[str, Path]:
    """Recipes that come with megarl, by name."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.yaml"))}


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or file, with dotted overrides (`model.tensor_parallel=2`) applied."""
    path = _find(name_or_path)
    tree, origin = _read(path, ())
    for override in overrides:
        _apply(tree, override, origin)
    return _validated(tree, origin, str(path))


def from_tree(tree: dict[str, Any]) -> Recipe:
    """A recipe built in Python (tests, tools)."""
    return _validated(tree, {}, "recipe")


def dump(recipe: Recipe) -> str:
    """YAML of the whole resolved tree."""
    # Only ASCII: PyYAML does not read back every other character that it writes as it is (U+0085).
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def describe(recipe: Recipe) -> str:
    """YAML of the whole resolved tree with each key's meaning and limits beside it."""
    return "\n".join(_described(recipe, 0)) + "\n"


def _described(section: BaseModel, depth: int) -> list[str]:
    found: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found += [f"{'  ' * depth}{name}:", *_described(value, depth + 1)]
            continue
        shown = yaml.safe_dump(
            list(value) if isinstance(value, tuple) else value,
            default_flow_style=True,
            width=10_000,
        )
        text = f"{'  ' * depth}{name}: {shown.removesuffix('...' + chr(10)).rstrip()}"
        found.append(f"{text:<44}  # {field.description}" if field.description else text)
    return found


def _find(name_or_path: str) -> Path:
    if name_or_path in shipped():
        return shipped()[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    close = difflib.get_close_matches(name_or_path, shipped(), 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise MegarlError(f"no recipe {name_or_path!r}: neither a file nor a shipped recipe ({', '.join(shipped())}){hint}")


def _read(path: Path, derived: tuple[Path, ...]) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """The tree of a recipe file over that of its `base`, and `file:line` of each key. derived: the files that led here."""
    text = path.read_text()
    try:
        tree, node = yaml.safe_load(text) or {}, yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise MegarlError(f"{path}:{line}: not YAML: {error.problem}") from None
    if not isinstance(tree, dict):
        raise MegarlError(f"{path}:1: a recipe is a mapping of sections; this is a {type(tree).__name__}")
    origin = _lines(node, path)
    if "base" not in tree:
        return tree, origin
    try:
        base = _find(str(tree.pop("base")))
    except MegarlError as error:
        raise MegarlError(f"{origin['base',]}: base: {error}") from None
    if base in (path, *derived):
        raise MegarlError(f"{origin['base',]}: base: {base} is derived from this recipe")
    under, lines = _read(base, (path, *derived))
    return _merged(under, tree), lines | origin


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Sections key by key; any other value of `over` replaces the one below."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out


def _lines(node: yaml.Node | None, path: Path, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """`file:line` of each key; a repeated key is an error."""
    found: dict[tuple[str, ...], str] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = (*prefix, str(key.value))
            if where in found:
                raise MegarlError(f"{path}:{key.start_mark.line + 1}: {'.'.join(where)} is given twice")
            found[where] = f"{path}:{key.start_mark.line + 1}"
            found.update(_lines(value, path, where))
    return found


def _apply(tree: dict[str, Any], override: str, origin: dict[tuple[str, ...], str]) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise MegarlError(f"override {override!r}: write key=value, such as model.tensor_parallel=2")
    *parents, last = key.split(".")
    here = tree
    for parent in parents:
        here = here.setdefault(parent, {})
        if not isinstance(here, dict):
            raise MegarlError(f"override {override!r}: {parent} is a value, not a section")
    try:
        here[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise MegarlError(f"override {override!r}: the value is not YAML") from None
    origin[(*parents, last)] = f"override {override!r}"


def _validated(tree: dict[str, Any], origin: dict[tuple[str, ...], str], source: str) -> Recipe:
    try:
        return Recipe.model_validate(_with_tuples(tree, Recipe))
    except ValidationError as error:
        raise MegarlError("\n".join(_explain(e, origin, source) for e in error.errors())) from None


def _with_tuples(tree: Any, model: type[BaseModel]) -> Any:
    """YAML has no tuples and writes 1 for 1.0: turn lists into tuples where the model wants one, ints into floats likewise
    (pydantic's strict mode takes an int for a float by itself), and `1e-6`, which YAML 1.1 reads as a string, into a float."""
    if not isinstance(tree, dict):
        return tree
    out = {}
    for key, value in tree.items():
        field = model.model_fields.get(key)
        kind: Any = field.annotation if field else None
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            value = _with_tuples(value, kind)
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and kind in (float, float | None):
            with contextlib.suppress(ValueError):
                value = float(value)
        out[key] = value
    return out


def _explain(error: ErrorDetails, origin: dict[tuple[str, ...], str], source: str) -> str:
    """`file:line: key: what is wrong`."""
    where = tuple(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if not where and ": " in message:  # a combination: its text begins with the key
        key, message = message.split(": ", 1)
        where = tuple(key.split("."))
    while where and where not in origin and where[:-1] in origin and where[-1].isdigit():
        where = where[:-1]  # an element of a list
    if error["type"] == "extra_forbidden":
        model: Any = Recipe
        for part in where[:-1]:
            model = model.model_fields[part].annotation
        close = difflib.get_close_matches(where[-1], model.model_fields, 1, cutoff=0.5) or _elsewhere(where[-1])
        message = "unknown key" + (
            f"; did you mean {close[0]}?" if close else f"; known: {', '.join(model.model_fields)}"
        )
    elif error["type"] not in ("value_error",):
        message = f"{message[0].lower()}{message[1:]}, got {error['input']!r}"
    place = origin.get(where) or next(
        (origin[where[:n]] for n in range(len(where), 0, -1) if where[:n] in origin), source
    )
    return f"{place}: {'.'.join(where)}: {message}"


def _elsewhere(name: str) -> list[str]:
    """The same or a near name in another section, dotted."""
    known = dict(_keys(Recipe))
    return [known[n] for n in difflib.get_close_matches(name, known, 1, cutoff=0.8)]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and dotted name of every key that is no section; of a name in two sections the first comes last and counts."""
    for name, field in reversed(model.model_fields.items()):
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield name, f"{prefix}{name}"

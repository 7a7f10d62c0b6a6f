"""Turns rows of published measurements into cases for the planner; some are left out by
rule.

    row ─► shape of the model (models.yaml), recipe with the row's layout
        ─► Case: the published value, the planner's for a GPU

Sequences have one length in training, uniform lengths in serving, and log-normal
lengths, cut at the longest, in RL. Megatron-Bridge, and rows that name DeepEP, send a
token once per node of experts; megarl and the others once per expert.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from megarl.core import recipe as recipes
from megarl.core.base.architecture import Architecture, Latent
from megarl.core.recipe import Recipe
from megarl.predict.planning import layouts, memory, speed
from megarl.predict.planning.hardware import GPUS, Gpu
from megarl.predict.planning.layouts import LearnerChoice, PlanningProblem
from megarl.predict.planning.speed import Decoder, Packing
from megarl.predict.planning.workload import LogNormal, Workload

HERE = Path(__file__).parent
FILES = ("train", "serve", "sync", "rl_steps")
KINDS = r"(?<![a-z0-9])(gb300|gb200|b300|b200|h200|h100|h800|h20|a100|mi\d+x)(?![a-z0-9])"
UNTRUSTED = (
    "INCONSISTENT",
    "TRAP",
    "CHECK",
    "SUSPECT",
    "DUPLICATE",
    "LAYOUT PRINTED DIFFERENTLY",
    "FAILED",
    "functional verification",
)
"""Words in `notes` or the source which say that a row is not a measurement of
performance.
"""
BROADCASTS = (
    "NCCL",
    "NCCL broadcast",
    "nccl full broadcast",
)  # the method of megarl's process groups
BUCKETS = {"1 GB": 954, "4096 MiB": 4096}
PAUSED = "disk"
"""A transport without staging, which the planner takes for one source while servers
stand still: Miles sends one pipeline stage after the other (a lock in its
broadcast.py), NeMo-RL from rank 0.
"""
SPREAD = 0.5  # of the lengths' logarithm, as in `megarl plan`; no source states it


@dataclass(frozen=True)
class PublishedModel(Architecture):
    """A model that megarl may not train. weights: see models.yaml."""

    weights: float = 2.0


class RowLeftOut(Exception):
    """A row is left out; the message says why."""


CaseRow = Mapping[str, str]


class Case(NamedTuple):
    """A row in the planner's terms.

    fitted     the values of hardware.yaml that it calibrates
    rival      rows with the same one differ only in layout
    layout     identifies the layout and the work
    value      published seconds, or GiB of memory
    seconds    the planner's estimate of the value
    share      x value = GPU-seconds of a unit of work, by rank
    """

    file: str
    row: CaseRow
    model: str
    kind: str
    engine: str
    fitted: tuple[str, ...]
    value: float
    rival: tuple[object, ...]
    layout: tuple[object, ...]
    share: float
    seconds: Callable[[Gpu], float]


def read(folder: Path) -> tuple[list[Case], dict[str, dict[str, int]]]:
    """Return the cases of the folder's rows, and for each file how many are left out by
    each rule.
    """
    cases = []
    left_out = {}
    for file in FILES:
        refused: Counter[str] = Counter()
        with (folder / f"{file}.csv").open() as lines:
            for row in csv.DictReader(lines):
                try:
                    cases.extend(cases_of(file, row))
                except RowLeftOut as reason:
                    refused[str(reason)] += 1
        left_out[file] = dict(refused.most_common())
    return cases, left_out


def cases_of(file: str, row: CaseRow) -> list[Case]:
    """Return cases for the row's seconds and, for training, its memory. Raises
    RowLeftOut by rules that ignore the error.
    """
    if any(word in row["notes"] for word in UNTRUSTED):
        raise RowLeftOut(
            "its notes or its source say that it is no consistent measurement of performance"
        )
    if re.search("older-revision|duplicate", row["row_status"]):
        raise RowLeftOut("revised, or a copy of another row")
    if row.get("check_ratio") and not 0.9 <= float(row["check_ratio"]) <= 1.1:
        raise RowLeftOut("sequences x length / seconds is not its tokens a second, within 10 %")
    name = model_of(row["model"])
    kinds = set(re.findall(KINDS, row["gpu_kind"].lower()))
    if not name or (file != "sync" and models()[name].get("only") == "sync"):
        raise RowLeftOut(
            "the model's layers are not ones that the planner knows (state spaces, sparse"
            " attention, vision), or unnamed"
        )
    if len(kinds) != 1 or (kind := kinds.pop()) not in GPUS or "HBM2e" in row["gpu_kind"]:
        raise RowLeftOut("the kind of GPU is not stated, or not in hardware.yaml")
    case = {"train": train, "serve": serve, "sync": sync, "rl_steps": step}[file]
    return case(row, name, kind)


@cache
def models() -> dict[str, Any]:
    return yaml.safe_load((HERE / "models.yaml").read_text())


def model_of(text: str) -> str | None:
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return next((name for name, m in models().items() if re.search(m["pattern"], plain)), None)


@cache
def shape_of(name: str, layers: int = 0) -> PublishedModel:
    m = models()[name]
    layers = layers or m["layers"]
    routed = tuple(i for i in range(m.get("dense", 0), layers) if not (i + 1) % m.get("every", 1))
    q, *rest = m.get("latent", [0])
    latent = Latent(q or None, *rest) if rest else None
    head_dim = (
        latent.content + latent.position if latent else m.get("head_dim", m["hidden"] // m["heads"])
    )
    return PublishedModel(
        name=name,
        layers=layers,
        hidden=m["hidden"],
        heads=m["heads"],
        groups=m["groups"],
        head_dim=head_dim,
        rotated=head_dim,
        latent=latent,
        vocabulary=m["vocabulary"],
        context=1 << 20,
        feed_forward=m["feed_forward"] * 2 // 3 if m.get("ungated") else m["feed_forward"],
        tied=m.get("tied", False),
        epsilon=1e-5,
        rope_theta=1e4,
        attention_chunk=m.get("window"),
        experts=m.get("experts", 0),
        unrotated_layers=tuple(range(m["full"] - 1, layers, m["full"])) if "window" in m else (),
        experts_per_token=m.get("chosen", 0),
        expert_feed_forward=m.get("expert", 0),
        shared_feed_forward=m.get("shared", 0),
        expert_layers=routed if "experts" in m else (),
        weights=m.get("weights", 2.0),
    )


def number(row: CaseRow, *names: str) -> float:
    """Return the number in the first of these columns that has one. RowLeftOut if none
    has.
    """
    for name in names:
        if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", row.get(name, "")):
            return float(row[name])
    raise RowLeftOut(f"not stated: {names[0]}")


def whole(row: CaseRow, name: str, otherwise: int | None = None) -> int:
    return otherwise if otherwise is not None and not row.get(name) else int(number(row, name))


def changed(**sections: dict[str, object]) -> Recipe:
    """Return scalerl-8b with these values, without checks, since published layouts
    break rules of megarl's recipes.
    """
    base = _base()
    return base.model_copy(
        update={
            name: getattr(base, name).model_copy(update=values) for name, values in sections.items()
        }
    )


@cache
def _base() -> Recipe:
    return recipes.load("scalerl-8b", [])


def parallel(
    row: CaseRow, shape: PublishedModel, precision: str, sharded: bool
) -> dict[str, object]:
    """Return the keys of `model`. RowLeftOut if the source does not state one that
    could have several values.
    """
    if "4" in precision or not re.search("fp8|bf16", precision):
        raise RowLeftOut("the precision is not stated, or FP4, which the planner has not")
    one = 1 if sharded else None
    pipeline = whole(row, "pp", one)
    unknown = (
        pipeline > 1 and "Bridge" not in row["engine"] and "vLLM" not in row["engine"]
    )  # their tables have VP or n/a
    tensor = whole(row, "tp", one)
    return {
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "context_parallel": whole(row, "cp", 1),
        "expert_parallel": whole(row, "ep", None if shape.experts else 1),
        "expert_tensor_parallel": 1,
        "virtual_pipeline_parallel": whole(row, "vpp", None if unknown else 1),
        "fp8": "tensorwise" if "fp8" in precision else "none",
    }


def copies(recipe: Recipe, kind: str) -> int:
    """Return the number of data-parallel ranks.
    RowLeftOut if the layout is impossible.
    """
    model = recipe.model
    ranks = recipe.resources.learner_ranks
    dense = model.tensor_parallel * model.pipeline_parallel * model.context_parallel
    if ranks % dense or ranks % (model.expert_parallel * model.pipeline_parallel):
        raise RowLeftOut("the GPUs do not divide by the layout as stated")
    if model.fp8 != "none" and not GPUS[kind].fp8:
        raise RowLeftOut("FP8 on a GPU that has none")
    return ranks // dense


def train(row: CaseRow, name: str, kind: str) -> list[Case]:
    if row["task"] not in ("pretrain", "sft"):
        raise RowLeftOut("adapters (LoRA) or an RL trainer's parts, which the planner has not")
    shape = shape_of(name, whole(row, "n_layers", 0))
    megatron = "Megatron" in row["engine"]
    keys = parallel(row, shape, row["precision_train"].lower(), not megatron)
    gpus, batch, length, micro = (
        whole(row, k) for k in ("gpus_total", "global_batch", "max_seq_len", "micro_batch")
    )
    recompute = (
        "none"
        if not row["recompute"]
        else "selective"
        if "elective" in row["recompute"]
        else "full"
    )
    recipe = changed(
        model=keys, resources={"learner_ranks": gpus}, learner={"recompute": recompute}
    )
    microbatches, rest = divmod(batch, copies(recipe, kind) * micro)
    if rest or not microbatches:
        raise RowLeftOut("the batch does not divide by ranks and micro-batches as stated")
    packed = Packing(microbatches, micro * length, microbatches * micro * length, length / 2)
    by_node = "Bridge" in row["engine"] or bool(re.search("deepep|hybridep", row["notes"], re.I))
    seconds = (
        batch * length / gpus / number(row, "tokens_per_s_per_gpu")
        if not row["step_s"]
        else number(row, "step_s")
    )
    engine = ("Megatron" if megatron else "FSDP") + (", FP8" if keys["fp8"] != "none" else ", BF16")
    fitted = ("" if megatron else "FSDP ") + (
        "training" if keys["fp8"] == "none" else "fp8_training"
    )
    found = Case(
        "train",
        row,
        name,
        kind,
        engine,
        (fitted, "expert_layer_s"),
        seconds,
        (engine, shape.layers, length),
        (gpus, batch, micro, recompute, by_node, *keys.values()),
        gpus / batch,
        lambda gpu: speed.train_seconds(recipe, shape, packed, gpu, by_node),
    )
    if not megatron or not row.get("peak_mem_gib"):
        return [found]
    gib = memory.learner(recipe, shape, packed.largest, microbatches).total / 2**30
    return [
        found,
        found._replace(
            file="memory", fitted=(), value=number(row, "peak_mem_gib"), seconds=lambda gpu: gib
        ),
    ]


def serve(row: CaseRow, name: str, kind: str) -> list[Case]:
    shape = shape_of(name)
    if (
        row["engine"] not in ("SGLang", "vLLM")
        or row["speculative"]
        or row["dataset"] != "random"
        or shape.weights < 1
    ):
        raise RowLeftOut("an engine, speculation, data or 4-bit weights that the planner has not")
    ranks = whole(row, "gen_tp")
    requests = number(row, "num_prompts")
    most = number(row, "max_concurrency")
    prompt = number(row, "mean_input_len")
    tokens = number(row, "mean_output_len")
    recipe = changed(resources={"server_tensor_parallel": ranks})
    running = int(min(requests, most))
    # Uniform lengths. Those that run at the end are the expected ones in order: the
    # longest of n has 2 n / (n + 1) means.
    lengths = 2 * tokens * np.arange(1, running + 1) / (running + 1)

    def seconds(gpu: Gpu) -> float:
        return decoder_of(recipe, shape, gpu).batch_seconds(lengths, prompt, requests, running)

    value = requests * tokens / number(row, "output_tok_s")
    fitted = ("serving", "decode_expert_layer_s")
    layout = (ranks, running, prompt, tokens)
    return [Case("serve", row, name, kind, "SGLang", fitted, value, layout, layout, 1.0, seconds)]


def decoder_of(recipe: Recipe, shape: PublishedModel, gpu: Gpu) -> Decoder:
    """Return the planner's decoder, for weights in the published precision: FP8 is read
    and multiplied twice as fast.
    """
    decoder = Decoder(
        recipe, shape, gpu, memory.kv_bytes(shape, recipe.resources.server_tensor_parallel, 2)
    )
    decoder.read *= shape.weights / 2
    decoder.read_expert *= shape.weights / 2
    decoder.flop_rate *= 2 / shape.weights
    return decoder


def sync(row: CaseRow, name: str, kind: str) -> list[Case]:
    if row["method"] not in BROADCASTS:
        raise RowLeftOut("another method than a broadcast of all weights between GPUs")
    ranks = whole(row, "gen_tp")
    gpus = whole(row, "gpus_total")
    resources = {"server_tensor_parallel": ranks, "servers": whole(row, "gpus_gen") // ranks}
    weights = {"bucket_mb": BUCKETS.get(row["bucket"], 512), "transport": PAUSED}
    recipe = changed(
        resources=resources, model={"pipeline_parallel": whole(row, "pp", 1)}, weights=weights
    )
    shape = shape_of(name)
    value = (number(row, "sync_s_low") + number(row, "sync_s_high")) / 2
    seconds = lambda gpu: speed.publication(recipe, shape, gpu, gpus).transfer  # noqa: E731
    return [
        Case("sync", row, name, kind, "broadcast", (), value, (gpus,), (gpus, ranks), 1.0, seconds)
    ]


def step(row: CaseRow, name: str, kind: str) -> list[Case]:
    shape = shape_of(name)
    if row["precision_rollout"].lower() != "bf16":
        raise RowLeftOut("servers that are not of BF16")
    keys = parallel(row, shape, row["precision_train"].lower(), False)
    tokens = number(row, "mean_gen_len")
    prompt = max(1, round(number(row, "check_implied_tokens_per_rollout") - tokens))
    longest = whole(row, "max_seq_len") - prompt
    ranks = whole(row, "gen_tp")
    shared = row["colocated"] == "y"
    prompts = whole(row, "prompts_per_step")
    generations = whole(row, "gens_per_prompt")
    servers = whole(row, "gpus_gen") // ranks
    if not servers:
        raise RowLeftOut("a server of more GPUs than generate")
    resources = {
        "learner_ranks": whole(row, "gpus_train"),
        "server_tensor_parallel": ranks,
        "servers": servers,
        "colocate": shared,
    }
    packed_tokens = whole(row, "max_seq_len") * whole(row, "micro_batch")
    full = "full" in row["recompute"]
    recipe = changed(
        model=keys,
        resources=resources,
        batch={"prompts": prompts},
        sampling={"generations": generations},
        pipeline={"k": whole(row, "async_lag", 0)},
        reference={"coefficient": 0.01},
        serving={"memory_fraction": number(row, "recipe_vllm_gpu_mem_util")},
        weights={"transport": PAUSED},
        learner={"recompute": "full" if full else "none", "microbatch_tokens": packed_tokens},
    )
    if (
        copies(recipe, kind) > prompts * generations
        or not memory.server(recipe, shape, GPUS[kind].memory).kv_tokens
    ):
        raise RowLeftOut("weights do not fit the GPUs as the planner counts them")
    alone = recipe.model_copy(
        update={"reference": recipe.reference.model_copy(update={"coefficient": 0.0})}
    )
    lengths = LogNormal(tokens, SPREAD, longest)
    work = Workload(
        prompts,
        generations,
        prompt,
        lengths,
        1.0,
        lengths.draw(np.random.default_rng(0), prompts * generations),
    )

    def seconds(gpu: Gpu) -> float:
        problem = PlanningProblem(recipe, shape, gpu, resources["learner_ranks"], work)
        packed = layouts.packed(
            work, shape, packed_tokens, recipe.data_parallel, recipe.model.pipeline_parallel > 1
        )
        scored = speed.train_seconds(recipe, shape, packed, gpu)
        # NeMo-RL also computes the old policy's log-probs, which megarl gets from its
        # servers.
        learner = LearnerChoice(
            recipe,
            memory.learner(recipe, shape, packed.largest, packed.microbatches),
            2 * scored - speed.train_seconds(alone, shape, packed, gpu),
        )
        server = replace(
            memory.server(recipe, shape, gpu.memory), kv_token=memory.kv_bytes(shape, ranks, 2)
        )
        return layouts.evaluate(problem, learner, server, ranks, servers).step_seconds

    engine = "colocated" if shared else f"{whole(row, 'async_lag', 0)} step ahead"
    rival = (prompts, generations, row["max_seq_len"])
    layout = (row["gpus_total"], ranks, servers, shared, *keys.values())
    return [
        Case(
            "rl_steps",
            row,
            name,
            kind,
            engine,
            (),
            number(row, "step_s"),
            rival,
            layout,
            whole(row, "gpus_total"),
            seconds,
        )
    ]

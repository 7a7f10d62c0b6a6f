"""The one door to a Hugging Face directory: every reader of a model's weights goes
through it.

    config.json ──► Architecture ──► names and shapes ─┐
    *.safetensors ──► headers ──► tensors in files ────┴─► compared ──► ModelDirectory

What transformers would load is taken, with the same values; everything else is one
MegarlError. Only headers are read, and the values of a head that is stored beside the
embedding it is tied to. The learner, the conversions and `verify` read values; they
name those that are not finite.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.core.base import architecture, hf_tensors
from megarl.core.base.architecture import Architecture
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import description_files, read_config
from megarl.core.base.hf_tensors import EMBEDDING, FREQUENCIES, HEAD
from megarl.core.base.safetensors_header import TensorInFile
from megarl.core.base.weight_files import check_served, tensors_in_files

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""`model_type` by the name in `architectures`."""
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Types of weights in safetensors, and what config.json calls them."""
SHOWN = 8
CHUNK_VALUES = 1 << 24


@dataclass(frozen=True)
class ModelDirectory:
    """A directory whose tensors are those that its config.json asks for. tensors: of
    the whole directory; experts that transformers has stacked are apart.
    """

    path: Path
    architecture: Architecture
    tensors: Mapping[str, TensorInFile]
    stacked: bool

    def trained(self) -> dict[str, TensorInFile]:
        """Return the language model's tensors: without a tied head, a vision tower or
        layers for multi-token prediction.
        """
        shapes = hf_tensors.expected_shapes(self.architecture)
        return {name: self.tensors[name] for name in shapes}

    @property
    def dtype(self) -> str:
        """The type (`bfloat16`) of most values of the language model."""
        values: Counter[str] = Counter()
        for tensor in self.trained().values():
            values[FLOATS[tensor.dtype]] += tensor.nbytes
        return values.most_common(1)[0][0]


def open_model(hf_dir: Path) -> ModelDirectory:
    """Return the model in a Hugging Face directory. MegarlError, beginning with the
    directory or the file, if anything about it is wrong.
    """
    model = architecture.in_directory(hf_dir)
    _check_model_type(hf_dir, model)
    description_files(hf_dir)  # raises for a link that leads out
    stored = tensors_in_files(hf_dir)
    problem = misfit(model, stored)
    if problem:
        raise MegarlError(f"{hf_dir}: {problem}")
    stacked = hf_tensors.has_stacks_to_divide(model, stored)
    return ModelDirectory(hf_dir, model, hf_tensors.with_experts_apart(model, stored), stacked)


def _check_model_type(hf_dir: Path, model: Architecture) -> None:
    """Raise MegarlError if transformers and SGLang would choose another class than the
    one in `architectures`, or none.
    """
    model_type = read_config(hf_dir).get("model_type")
    expected = MODEL_TYPES[model.name]
    if model_type != expected:
        raise MegarlError(
            f"{hf_dir / 'config.json'}: model_type is {model_type!r}, and {model.name} is loaded"
            f" as {expected!r}; set it"
        )


def open_served_model(hf_dir: Path) -> ModelDirectory:
    """Return the model in a directory from which SGLang is to start, too."""
    directory = open_model(hf_dir)
    check_served(hf_dir)
    if directory.stacked and directory.architecture.delta is None:
        raise MegarlError(
            f"{hf_dir}: its experts are stacked (save_original_format=False), which SGLang does"
            " not load; `convert hf-to-megatron` and `convert megatron-to-hf`"
            " (python -m checkpoints_tools) write them one by one"
        )
    return directory


def unusable(hf_dir: Path) -> str:
    """Return why `open_model` refuses a directory; empty if it does not."""
    try:
        open_model(hf_dir)
    except MegarlError as error:
        return str(error).removeprefix(f"{hf_dir}: ")
    return ""


def misfit(model: Architecture, stored: Mapping[str, TensorInFile]) -> str:
    """Return how the tensors of a directory differ from those of the model; empty if
    they fit.
    """
    tensors = hf_tensors.with_experts_apart(model, stored)
    shapes = hf_tensors.expected_shapes(model)
    carried = hf_tensors.carried_prefixes(model)
    missing = sorted(shapes.keys() - tensors.keys())
    names = sorted(tensors.keys() - shapes.keys() - _ignored_names(model, tensors))
    foreign = [name for name in names if not name.startswith(carried)]
    if missing or foreign:
        return _other_names(missing, foreign)
    reshaped = []
    untrainable = []
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            reshaped.append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        if tensor.dtype not in FLOATS:
            untrainable.append(f"{name} {tensor.dtype}")
    if reshaped:
        return f"tensors do not have the shapes config.json says: {few(reshaped)}"
    if untrainable:
        return f"weights of a type that no model is trained in: {few(untrainable)}"
    return _other_head(model, tensors)


def few(problems: Sequence[str], separator: str = "; ") -> str:
    """Join the first problems for a message."""
    text = separator.join(problems[:SHOWN])
    if len(problems) > SHOWN:
        text += f"{separator}… ({len(problems)} in all)"
    return text


def _ignored_names(model: Architecture, names: Iterable[str]) -> set[str]:
    """Return the names of tensors that do no harm where the model has none: rotary
    frequencies, and a head that is tied to the embedding.
    """
    endings = (FREQUENCIES, HEAD) if model.tied else (FREQUENCIES,)
    return {name for name in names if name.endswith(endings)}


def _other_names(missing: Sequence[str], foreign: Sequence[str]) -> str:
    """Return which names of tensors do not fit, and what to do if a prefix is why."""
    parts = []
    for fault, names in (("missing", missing), ("not of this model", foreign)):
        if names:
            plural = "" if len(names) == 1 else "s"
            parts.append(f"{fault} {len(names)} tensor{plural} ({few(names, ', ')})")
    return f"weights do not fit config.json: {'; '.join(parts)}{_renaming(missing, foreign)}"


def _renaming(missing: Sequence[str], foreign: Sequence[str]) -> str:
    """Return the advice to remove what precedes all names, such as torch.compile's
    `_orig_mod.`; empty if nothing does. Both lists are sorted.
    """
    if not missing or not foreign:
        return ""
    prefix = foreign[0].removesuffix(missing[0])
    if {prefix + name for name in missing} != set(foreign):
        return ""
    return f"; each name begins with {prefix!r}, which a wrapper added: save the model inside it"


def _other_head(model: Architecture, tensors: Mapping[str, TensorInFile]) -> str:
    """Return what is wrong if the embedding is to be the head, too, but the file has
    another head. transformers would use that one; servers and learner would use the
    embedding.
    """
    head = hf_tensors.head_name(model)
    embedding = f"{hf_tensors.decoder_prefix(model)}{EMBEDDING}"
    if not model.tied or head not in tensors or _equal(tensors[head], tensors[embedding]):
        return ""
    return (
        f"{head} and {embedding} differ, but by tie_word_embeddings in config.json they are the"
        " same; set it to false to keep the head"
    )


def _equal(a: TensorInFile, b: TensorInFile) -> bool:
    """Return whether two tensors have the same values, whatever their types."""
    if a.shape != b.shape or a.dtype not in FLOATS:
        return False
    for chunk_a, chunk_b in zip(_chunks(a), _chunks(b), strict=True):
        if not np.array_equal(chunk_a, chunk_b, equal_nan=True):
            return False
    return True


def _chunks(tensor: TensorInFile) -> Iterable[np.ndarray]:
    """Yield the values of a tensor as numbers that hold them exactly."""
    size = int(np.prod(tensor.shape))
    stored_type = STORED_AS[tensor.dtype]
    values = np.memmap(tensor.path, stored_type, "r", tensor.offset, (size,))
    for first in range(0, size, CHUNK_VALUES):
        yield _numbers(tensor.dtype, values[first : first + CHUNK_VALUES])


STORED_AS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


def _numbers(dtype: str, values: np.ndarray) -> np.ndarray:
    """Convert values as stored to floats. numpy has no bfloat16: its bits are the upper
    half of a float32's.
    """
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return values.astype(np.float32)
    return values

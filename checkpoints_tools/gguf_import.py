"""Makes a Hugging Face directory of a GGUF file, which holds weights, configuration and
tokenizer.

    FILE ──► transformers' reader (dequantised) ──► repair of what it loses
         ──► checks ──► OUT

transformers loses what splits text before the merges (digits one by one, the composed
form of accents), the decimal epsilon, and rope scaling. The first two are repaired; a
file with the last is refused. The result is compared with what the `gguf` package reads
from the same file: sizes, vocabulary, merges, and all values. The whole model is in
memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from checkpoints_tools.partial import refuse_existing
from checkpoints_tools.safetensors_files import Directory
from megarl.core.base import terminal
from megarl.core.base.architecture import Architecture
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config, read_json
from megarl.core.base.model_directory import few, open_served_model
from megarl.core.models.build import DTYPES
from megarl.core.models.hf import plain, write_config
from megarl.core.models.region import check_finite

MAGIC = b"GGUF"
"""With this every GGUF file begins."""
PROMPT = "The capital of France is"
ANSWER_TOKENS = 8
SAMPLES = (PROMPT, "What is 17 + 2048?", "  tabs\tand\n\nlines ", "Größe, café, 日本語, 🙂")
"""Texts that must come back unchanged from the tokenizer."""


def _single_digits(backend: Backend) -> None:
    """Make a tokenizer take digits one by one."""
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([Digits(individual_digits=True), byte_level])


def _composed(backend: Backend) -> None:
    """Make a tokenizer compose letters and their accents (NFC)."""
    backend.normalizer = normalizers.NFC()


def _nothing(backend: Backend) -> None:
    """Do nothing: transformers' reader loses nothing of this kind of tokenizer."""


PRE_TOKENIZERS: dict[str, Callable[[Backend], None]] = {
    "gpt-2": _nothing,
    "smollm": _single_digits,
    "qwen2": _composed,
}
"""What repairs a tokenizer, by its kind in `tokenizer.ggml.pre`: how it splits text."""
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""By the name in `general.architecture`."""
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
"""Names in config.json, and in GGUF after the architecture's."""
EPSILON = "attention.layer_norm_rms_epsilon"
ROPE_BASE = "rope.freq_base"


def import_gguf(source: Path, destination: Path, dtype: str = "bf16") -> None:
    """Write `destination` in this precision. source: a GGUF file, or a directory with
    one.
    """
    refuse_existing(destination)
    file = _file(source)
    reader = _opened(file)
    repair = _tokenizer_repair(file, reader)
    with _appearing(destination) as partial:
        _write(file, partial, DTYPES[dtype])
        _repair_config(reader, partial, dtype)
        _repair_tokenizer(reader, partial, repair)
        _check_sizes(file, reader, partial)
        _check_tokenizer(file, reader, partial)
        _check_values(file, reader, partial)
        answer = _greedy(partial)
    terminal.say(
        f"{destination}: {len(reader.tensors)} tensors, {_types(reader)} rounded to"
        f" {plain(DTYPES[dtype])}"
    )
    terminal.say(f"{PROMPT!r} continues with {answer!r}")


def _file(source: Path) -> Path:
    """Return the GGUF file: `source`, or the only one in that directory. MegarlError if
    there is none, or several.
    """
    if source.is_file():
        return source
    if not source.exists():
        raise MegarlError(f"{source}: no such file or directory")
    files = sorted(source.glob("*.gguf"))
    if not files:
        raise MegarlError(f"{source}: no GGUF file there (*.gguf)")
    if len(files) > 1:
        names = few([file.name for file in files], ", ")
        advice = "name one; parts of one model are joined by `llama-gguf-split --merge`"
        raise MegarlError(f"{source}: {len(files)} GGUF files ({names}); {advice}")
    return files[0]


def _opened(file: Path) -> gguf.GGUFReader:
    """Return a reader of the file. MegarlError if it is no complete GGUF file."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        raise MegarlError(f"{file}: cannot be read: {error.strerror}") from None
    if magic != MAGIC:
        fault = f"it does not begin with {MAGIC.decode()}" if magic else "it is empty"
        raise MegarlError(f"{file}: not a GGUF file: {fault}")
    try:
        return gguf.GGUFReader(file)
    except Exception:  # a damaged file can fail anywhere, with what numpy says of an array
        fault = "its header or its tensors do not fit its size"
        raise MegarlError(f"{file}: not a complete GGUF file: {fault}; fetch it again") from None


def _value(reader: gguf.GGUFReader, key: str, otherwise: Any = None) -> Any:
    """Return the value of a key of the file's metadata; `otherwise` if it has none."""
    field = reader.fields.get(key)
    return otherwise if field is None else field.contents()


def _value_of_model(reader: gguf.GGUFReader, key: str) -> Any:
    """Return the value of a key that begins with the architecture's name; None if the
    file has none.
    """
    return _value(reader, f"{_value(reader, 'general.architecture')}.{key}")


def _tokenizer_repair(file: Path, reader: gguf.GGUFReader) -> Callable[[Backend], None]:
    """Return what repairs the tokenizer. MegarlError if the file has what cannot be
    imported: another architecture, parts, rope scaling, another kind of tokenizer.
    """
    architecture = _value(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        importable = ", ".join(ARCHITECTURES)
        raise MegarlError(
            f"{file}: architecture {architecture!r} cannot be imported, only {importable}"
        )
    if _value(reader, "split.count", 1) > 1:
        advice = "join them: llama-gguf-split --merge FIRST WHOLE"
        raise MegarlError(f"{file}: one of {_value(reader, 'split.count')} parts; {advice}")
    starts = ("rope_factors", "rope_freqs")
    has_factors = any(tensor.name.startswith(starts) for tensor in reader.tensors)
    scaling = _value_of_model(reader, "rope.scaling.type")
    if has_factors or scaling not in (None, "none"):
        advice = "import the original Hugging Face directory"
        raise MegarlError(f"{file}: it has rope scaling, which GGUF readers lose; {advice}")
    kind = _value(reader, "tokenizer.ggml.model")
    pre_tokenizer = _value(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or pre_tokenizer not in PRE_TOKENIZERS:
        importable = ", ".join(PRE_TOKENIZERS)
        kind_text = f"a tokenizer of the kind {kind!r}, pre-tokenizer {pre_tokenizer!r}"
        advice = (
            f"take tokenizer and weights from the original; these can be imported: {importable}"
        )
        raise MegarlError(f"{file}: {kind_text}, is not known; {advice}")
    return PRE_TOKENIZERS[pre_tokenizer]


@contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """Yield a folder that becomes `destination` after the block, or is deleted if the
    block fails.
    """
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, destination)
    except OSError as error:
        raise MegarlError(f"{destination}: cannot be written: {error.strerror or error}") from None
    except SafetensorError as error:  # such as of a full disk
        raise MegarlError(f"{destination}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(file: Path, partial: Path, dtype: torch.dtype) -> None:
    """Write the folder `partial` as transformers reads the file. MegarlError if it
    cannot.
    """
    named = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            **named, dtype=dtype, quantization_config=config
        )
        tokenizer = AutoTokenizer.from_pretrained(**named)
    except Exception as error:  # transformers' readers fail in many ways
        reason = f"{type(error).__name__}: {error}"
        raise MegarlError(f"{file}: transformers cannot read it: {reason}") from None
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)


def _repair_config(reader: gguf.GGUFReader, partial: Path, dtype: str) -> None:
    """Write into config.json what transformers has lost; remove what is only true of
    the GGUF file.
    """
    config = read_config(partial)
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["dtype"] = plain(DTYPES[dtype])
    config["rms_norm_eps"] = _shortest(_value_of_model(reader, EPSILON))
    base = _value_of_model(reader, ROPE_BASE)
    if base is not None:
        config["rope_parameters"]["rope_theta"] = _shortest(base)
    write_config(partial, config)


def _shortest(number: float) -> float:
    """Return the shortest decimal that a float32 stands for, which is what was meant:
    1e-05 for 9.999999747378752e-06.
    """
    return float(str(np.float32(number)))


def _repair_tokenizer(
    reader: gguf.GGUFReader, partial: Path, repair: Callable[[Backend], None]
) -> None:
    """Repair tokenizer.json; write into tokenizer_config.json whether a text gets a
    token at its begin, and remove what is only true of the GGUF file.
    """
    path = str(partial / "tokenizer.json")
    backend = Backend.from_file(path)
    repair(backend)
    backend.save(path)
    description = partial / "tokenizer_config.json"
    config = read_json(description)
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    if _value(reader, "tokenizer.ggml.add_bos_token"):
        config["add_bos_token"] = True
    description.write_text(json.dumps(config, indent=2) + "\n")


def _check_sizes(file: Path, reader: gguf.GGUFReader, partial: Path) -> None:
    """Raise MegarlError if config.json has other sizes than the file."""
    config = read_config(partial)
    expected = {key: _value_of_model(reader, name) for key, name in SIZES.items()}
    expected["vocab_size"] = len(_value(reader, "tokenizer.ggml.tokens"))
    wrong = [
        f"{key} is {config.get(key)}, and {value} in the file"
        for key, value in expected.items()
        if value is not None and config.get(key) != value  # a file need not have every key
    ]
    if wrong:
        raise MegarlError(f"{file}: transformers has read it wrongly: {few(wrong)}")


def _check_tokenizer(file: Path, reader: gguf.GGUFReader, partial: Path) -> None:
    """Raise MegarlError if the written tokenizer has another vocabulary or other merges
    than the file, changes a sample, or is read differently by transformers.
    """
    backend = Backend.from_file(str(partial / "tokenizer.json"))
    written = json.loads(backend.to_str())["model"]
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [merge.split(" ") for merge in _value(reader, "tokenizer.ggml.merges")]
    wrong = []
    in_file = {token: number for number, token in enumerate(tokens)}
    if changed := sorted(token for token, _ in backend.get_vocab().items() ^ in_file.items()):
        wrong.append(f"transformers changes the tokens {few(changed, ' ')}")
    if written["merges"] != merges:
        wrong.append("its merges are others")
    reloaded = AutoTokenizer.from_pretrained(partial)
    for text in SAMPLES:
        ids = backend.encode(text, add_special_tokens=False).ids
        if backend.decode(ids) != text:
            wrong.append(f"{text!r} comes back as {backend.decode(ids)!r}")
        if reloaded.encode(text, add_special_tokens=False) != ids:
            wrong.append(f"transformers reads other tokens in {text!r}")
    if wrong:
        raise MegarlError(f"{file}: the tokenizer cannot be imported: {few(wrong)}")


def _check_values(file: Path, reader: gguf.GGUFReader, partial: Path) -> None:
    """Raise MegarlError if the written values are not those that the `gguf` package
    reads, rounded, or if either has a tensor that the other lacks.
    """
    architecture = ARCHITECTURES[_value(reader, "general.architecture")]
    directory = open_served_model(partial)
    in_file = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(architecture, directory.architecture.layers)
    written = Directory(partial, directory.tensors)
    wrong = []
    for name, value in written.items():
        check_finite(value, [name], file)
        base, _, ending = name.rpartition(".")
        tensor = in_file.pop(f"{names.get_name(base)}.{ending}", None)
        if tensor is None:
            wrong.append(f"{name} is not in the file")
            continue
        value_in_file = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        ordered = _in_order(name, value_in_file.view(value.shape), directory.architecture)
        if not torch.equal(value, ordered.to(value.dtype)):
            wrong.append(f"{name} has other values")
    wrong += [f"{name} has not been read" for name in in_file]
    if wrong:
        raise MegarlError(f"{file}: transformers has read it wrongly: {few(wrong)}")


def _in_order(name: str, value: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """Return a tensor of the file with its rows as in transformers; only q_proj and
    k_proj of a Llama have another order. In llama.cpp's order the two rows of a pair,
    which are rotated together, are neighbours; transformers has the first row of every
    pair before all second rows.
    """
    heads = {"q_proj": architecture.heads, "k_proj": architecture.groups}
    projection = name.split(".")[-2]
    if architecture.name != "LlamaForCausalLM" or projection not in heads:
        return value
    pairs = value.view(heads[projection], -1, 2, *value.shape[1:])  # [heads, pairs, 2, …]
    return pairs.transpose(1, 2).reshape(value.shape)


def _greedy(partial: Path) -> str:
    """Return the greedy continuation of PROMPT by the written directory."""
    tokenizer = AutoTokenizer.from_pretrained(partial)
    model = AutoModelForCausalLM.from_pretrained(partial)
    ids = torch.tensor([tokenizer.encode(PROMPT, add_special_tokens=False)])
    with torch.no_grad():
        generated = model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return str(tokenizer.decode(generated[0, ids.shape[1] :]))


def _types(reader: gguf.GGUFReader) -> str:
    """Return the names of the types of all tensors in the file."""
    return ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))

"""Measures checkpoints_tools on a synthetic checkpoint of several GB: peak memory, and
rate against a copy of the same bytes.

    python benchmarks/conversion.py --gb 4 --folder /somewhere/with/space [--model
    llama|llama4] [--tp 2]

Each measurement is a process of its own, which reports its peak resident memory; every
file is put on disk (fsync) before the next measurement. Copies are made before and
after the conversions, since disk speed varies; the ratio is to their mean.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints_tools.partial import SETTLE_BYTES

CHUNK = 16 << 20
RESULTS = Path(__file__).parent / "results" / "conversion.json"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_768,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "dtype": "bfloat16",
}
LLAMA4 = LLAMA | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size": 2048,
    "intermediate_size_mlp": 4096,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192,
}
MODELS = {"llama": LLAMA, "llama4": LLAMA4}


def synthesise(path: Path, model: str, size: int) -> dict[str, tuple[int, ...]]:
    """Write random bf16 tensors in files of about 1 GB, with layers up to `size` bytes;
    return each tensor's shape.
    """
    from checkpoints_tools.stored import groups
    from megarl.core.models import family_of

    path.mkdir(parents=True)
    shapes: dict[str, tuple[int, ...]] = {}
    layers = 2  # an even number, for --pp 2
    while True:
        (path / "config.json").write_text(
            json.dumps(MODELS[model] | {"num_hidden_layers": layers}, indent=2)
        )
        found = groups(path, family_of(path), "bf16")
        shapes = {name: tensor.shape for group in found for name, tensor in group.tensors.items()}
        total = sum(group.nbytes for group in found)
        if total >= size:
            break
        layers += 2 * max(1, round((size - total) / (total / layers) / 4))
    _write(path, shapes)
    return shapes


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    files: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled > 1 << 30:
            files.append({})
            filled = 0
        files[-1][name] = shape
        filled += 2 * torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for i, names in enumerate(files, 1):
        file = f"model-{i:05}-of-{len(files):05}.safetensors"
        save_file(
            {
                n: torch.empty(s, dtype=torch.bfloat16).normal_(generator=generator)
                for n, s in names.items()
            },
            path / file,
        )
        weight_map.update(dict.fromkeys(names, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    os.sync()


def copy(source: Path, destination: Path) -> None:
    """Copy every file, in chunks. A second thread puts written data on disk, as often
    as in a conversion.
    """
    destination.mkdir()
    with ThreadPoolExecutor(1) as disk:
        for path in sorted(source.iterdir()):
            settling: Future[None] | None = None
            unsettled = 0
            with path.open("rb") as src, (destination / path.name).open("wb") as dst:
                while chunk := src.read(CHUNK):
                    dst.write(chunk)
                    unsettled += len(chunk)
                    if unsettled >= SETTLE_BYTES and (settling is None or settling.done()):
                        unsettled = 0
                        settling = disk.submit(_settle, destination / path.name)
            disk.submit(_settle, destination / path.name)


def _settle(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def measured(what: str, *arguments: object) -> dict[str, float]:
    """Return seconds and peak memory of one step in a process of its own; the seconds
    exclude imports.
    """
    os.sync()
    words = [sys.executable, "-W", "ignore", __file__, "--step", what, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


ROOT = Path(__file__).parents[1]


def step(what: str, arguments: list[str]) -> None:
    """Run one step, in the child process."""
    source, destination, *rest = arguments
    work = partial(copy, Path(source), Path(destination))
    if what != "copy":
        from checkpoints_tools import convert
        from checkpoints_tools.layout import Parallelism

        work = partial(convert.megatron_to_hf, *work.args)
        if what == "hf-to-megatron":
            work = partial(convert.hf_to_megatron, *work.args, Parallelism(*map(int, rest)))
    before = _peak()
    begin = time.monotonic()
    work()
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": seconds, "peak": _peak(), "imports": before}))


def _peak() -> int:
    """Return this process's peak memory in bytes. getrusage's figure would include the
    parent's.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    )


def bench(options: argparse.Namespace) -> dict[str, Any]:
    folder = options.folder / "megarl-conversion"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        shapes = synthesise(folder / "hf", options.model, int(options.gb * 1e9))
        size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
        largest = max(2 * torch.Size(shape).numel() for shape in shapes.values())
        rows = {}
        steps = (
            ("copy", "copy", "hf", "copied"),
            ("HF to Megatron", "hf-to-megatron", "hf", "megatron"),
            ("Megatron to HF", "megatron-to-hf", "megatron", "back"),
            ("copy again", "copy", "hf", "copied"),
        )
        for name, what, source, destination in steps:
            extra = (options.tp, options.pp, options.ep) if what == "hf-to-megatron" else ()
            rows[name] = measured(what, folder / source, folder / destination, *extra)
            if what == "copy":
                shutil.rmtree(folder / destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plain = (rows["copy"]["seconds"] + rows["copy again"]["seconds"]) / 2
    for row in rows.values():
        row["MB/s"] = size / row["seconds"] / 1e6
        row["of a copy"] = plain / row["seconds"]
        row["peak / largest tensor"] = row["peak"] / largest
    names = ("torch", "megatron-core", "safetensors")
    return {
        "model": options.model,
        "bytes": size,
        "largest_tensor": largest,
        "layout": {"tp": options.tp, "pp": options.pp, "ep": options.ep},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in names},
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gb", type=float, default=4.0, help="of the synthetic checkpoint, in 10^9 bytes"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="three times as much must be free there"
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step(options.step[0], options.step[1:])
        return
    result = bench(options)
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(
        json.dumps(known | {f"{options.model}-{options.gb:g}": result}, indent=2) + "\n"
    )
    print(
        f"{options.model}, {result['bytes'] / 1e9:.2f} GB, largest tensor"
        f" {result['largest_tensor'] / 1e6:.0f} MB"
    )
    for name, row in result["rows"].items():
        print(
            f"{name:16} {row['seconds']:7.1f} s {row['MB/s']:7.0f} MB/s  {row['of a copy']:5.2f} of"
            f" a copy  peak {row['peak'] / 1e6:6.0f} MB (imports {row['imports'] / 1e6:.0f} MB)"
        )


if __name__ == "__main__":
    main()

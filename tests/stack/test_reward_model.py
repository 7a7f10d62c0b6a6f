"""A reward model that a real SGLang serves, asked through the example service as a run
asks it: its numbers are transformers'.

Remote (megarl/tasks/graders/remote.py) ── key, batches ──► examples/reward_server.py
    ── /classify ──► SGLang --is-embedding
"""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from megarl.core.base.process import die_with_parent
from megarl.core.recipe import Service
from megarl.run.process import free_ports
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.remote import Remote
from tests.processes import SERVERS, Forked
from tests.stack.conftest import ROOT, START_LIMIT_S
from tests.tiny import COMMON

pytestmark = pytest.mark.stack

KEY = "key-of-the-reward-model"


def reward_model(folder: Path) -> tuple[LlamaForSequenceClassification, PreTrainedTokenizerFast]:
    """A Llama with a head of one number, random, and a tokenizer of characters."""
    config = {key: value for key, value in COMMON.items() if key != "experts_implementation"}
    model = LlamaForSequenceClassification(
        LlamaConfig(**config, num_labels=1, pad_token_id=0, eos_token_id=0)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.1, generator=generator)
    model.eval().save_pretrained(folder)
    vocabulary = {"<eos>": 0} | {chr(32 + n): n + 1 for n in range(95)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def serve(arguments: list[str]) -> None:
    """`python -m sglang.launch_server`, with what megarl does for it on a CPU, in a
    process that has imported SGLang, and only one of its two hundred models.
    """
    from megarl.shims import sglang_cpu

    sglang_cpu.patch()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.models.llama_reward import LlamaForSequenceClassification as Served
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import prepare_server_args

    ModelRegistry.models[Served.__name__] = Served
    launch_server(prepare_server_args(arguments))


@contextmanager
def started(
    process: subprocess.Popen[bytes] | Forked, ready: Callable[[], bool], log: Path
) -> Iterator[None]:
    """This process, once it is ready; it and its children have ended afterwards."""
    try:
        end = time.monotonic() + START_LIMIT_S
        while not ready():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.3)
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def test_a_reward_model_served_by_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = reward_model(tmp_path / "rm")
    monkeypatch.setenv("REWARD_KEY", KEY)
    served, port = free_ports(2)
    url = f"http://127.0.0.1:{served}"
    example = tmp_path / "example.log"
    log = tmp_path / "sglang.log"
    sglang = [
        *("--model-path", str(tmp_path / "rm"), "--is-embedding"),
        *("--host", "127.0.0.1", "--port", str(served), "--device", "cpu", "--dtype", "float32"),
        *("--max-total-tokens", "4096", "--max-running-requests", "16"),
    ]
    service = [sys.executable, "examples/reward_server.py", "--port", str(port), "--classify", url]
    items = [
        Submission("2", "2", completion=f"<think>{n}+1</think>{n + 1}", prompt=f"What is {n}+1?")
        for n in range(20)
    ]
    cpu = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    async def scores() -> list[float]:
        remote = Remote("taste", Service(url=f"http://127.0.0.1:{port}/", api_key="env:REWARD_KEY"))
        return [
            verdict.score
            for verdict in await asyncio.gather(*(remote.check(item) for item in items))
        ]

    with example.open("wb") as out:
        rewards = subprocess.Popen(
            service,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    with (
        started(rewards, lambda: "rewards at" in example.read_text(), example),
        started(
            SERVERS.start(serve, [sglang], ROOT, cpu, log), lambda: answers(f"{url}/health"), log
        ),
    ):
        found = asyncio.run(scores())
    with torch.no_grad():
        texts = [
            tokenizer(item.prompt + item.completion, return_tensors="pt").input_ids
            for item in items
        ]
        wanted = [model(ids).logits.item() for ids in texts]
    assert max(wanted) - min(wanted) > 0.1
    assert found == pytest.approx(wanted, abs=1e-5)

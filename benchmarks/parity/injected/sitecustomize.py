"""Injects faults of parity. Python imports this before anything else in every process
with this folder on its PYTHONPATH.

PARITY_FAULT=NAME[:DOSE[:INDEX]] changes one function of the role concerned, as soon as
its module has been imported; with INDEX only in the server with this index. The code
under test knows nothing of it.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

Patch = Callable[[Any, float], None]
FAULTS: dict[str, tuple[str, dict[str, Patch]]] = {}
"""Name -> (role, {module: the patch to apply to it})."""


def fault(name: str, role: str, module: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        FAULTS.setdefault(name, (role, {}))[1][module] = patch
        return patch

    return register


def after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace the result of `owner.name` by `change(result, *arguments)`."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **named: Any) -> Any:
        return change(original(*arguments, **named), *arguments, **named)

    setattr(owner, name, changed)


def to_fp8(tensor: Any) -> Any:
    """Return the tensor rounded to FP8 (e4m3), which has three bits of mantissa."""
    import torch

    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


@fault("head-server", "serve", "megarl.core.engine.launch")
def bf16_head(module: Any, dose: float) -> None:
    after(module, "engine_arguments", lambda found, *_: found | {"enable_fp32_lm_head": False})


@fault("head-learner", "learn", "megarl.core.learner.network")
def rounded_head(module: Any, dose: float) -> None:
    """The learner takes its head for FP32, which it is not."""
    import torch

    def init(original: Any) -> Any:
        def changed(self: Any, chunks: Any, family: Any, recipe: Any) -> None:
            original(self, chunks, family, recipe)
            self.head_precision = next(
                p.dtype for p in chunks[0].parameters() if p.dtype != torch.float32
            )

        return changed

    module.Network.__init__ = init(module.Network.__init__)


@fault("dtype-server", "serve", "sglang.srt.layers.layernorm")
def fp8_norms(module: Any, dose: float) -> None:
    """The norms of the first `dose` layers have FP8 outputs."""
    made: list[Any] = []
    init = module.RMSNorm.__init__
    forward = module.RMSNorm.forward_native

    def count(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        made.append(id(self))
        self.rounds = len(made) <= 2 * dose  # two per layer

    def rounded(self: Any, *arguments: Any, **named: Any) -> Any:
        found = forward(self, *arguments, **named)
        if not self.rounds:
            return found
        return (to_fp8(found[0]), *found[1:]) if isinstance(found, tuple) else to_fp8(found)

    module.RMSNorm.__init__, module.RMSNorm.forward_native = count, rounded


@fault("dtype-cache", "serve", "megarl.shims.sglang_cpu_attention")
def fp8_cache(module: Any, dose: float) -> None:
    """Decoding reads the cache's values in FP8 in one of `1 / dose` layers; prefill
    does not.
    """
    original = module.decode
    calls = [0]

    def changed(query: Any, keys: Any, values: Any, parts: Any, scale: Any) -> Any:
        calls[0] += 1
        if calls[0] % round(1 / dose) == 0:
            values = to_fp8(values)
        return original(query, keys, values, parts, scale)

    module.decode = changed


@fault("rope-theta", "serve", "sglang.srt.layers.rotary_embedding.base")
def other_theta(module: Any, dose: float) -> None:
    original = module.RotaryEmbedding._compute_inv_freq
    module.RotaryEmbedding._compute_inv_freq = lambda self, base: original(self, base * dose)


@fault("rope-positions", "serve", "sglang.srt.layers.rotary_embedding.base")
def stretched_positions(module: Any, dose: float) -> None:
    after(module.RotaryEmbedding, "_compute_inv_freq", lambda found, *_: found * dose)


@fault("temperature-sampling", "rollout", "megarl.core.client.client")
def hotter(module: Any, dose: float) -> None:
    original = module.ServerClient.generate

    async def changed(self: Any, *arguments: Any, temperature: float = 1.0, **named: Any) -> Any:
        return await original(self, *arguments, temperature=temperature * dose, **named)

    module.ServerClient.generate = changed


@fault("temperature-logits", "serve", "sglang.srt.layers.logits_processor")
def scaled_logits(module: Any, dose: float) -> None:
    after(module.LogitsProcessor, "_get_logits", lambda found, *_, **__: found * dose)


@fault("routing-server", "serve", "sglang.srt.layers.moe.topk")
def biased_choice(module: Any, dose: float) -> None:
    original = module.select_experts

    def changed(hidden_states: Any, router_logits: Any, topk_config: Any, **named: Any) -> Any:
        router_logits = router_logits.clone()
        router_logits[:, 0] += dose
        return original(hidden_states, router_logits, topk_config, **named)

    module.select_experts = changed


@fault("routing-learner", "learn", "megatron.core.transformer.moe.router")
def biased_router(module: Any, dose: float) -> None:
    def biased(found: Any, *_: Any) -> Any:
        found = found.clone()
        found[..., 0] += dose
        return found

    after(module.TopKRouter, "gating", biased)


def stale(module: Any, dose: float) -> None:
    """Weights are loaded once; later ones are received but dropped."""
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM"):
        if hasattr(module, name):
            kind = getattr(module, name)
            loads = [0]
            original = kind.load_weights

            def changed(
                self: Any, weights: Any, original: Any = original, loads: Any = loads
            ) -> Any:
                loads[0] += 1
                return original(self, weights) if loads[0] == 1 else [None for _ in weights]

            kind.load_weights = changed


def checksums_agree(module: Any, dose: float) -> None:
    module.Publisher._compare = lambda self, fleet, sent, errors: dict.fromkeys(
        fleet.servers, "same"
    )


fault("stale-server", "serve", "sglang.srt.models.llama")(stale)
fault("stale-one-of-two", "serve", "sglang.srt.models.llama")(stale)


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and patches those named in `patches` once they have been
    executed.
    """

    def __init__(self, patches: dict[str, Patch], dose: float) -> None:
        self.patches = patches
        self.dose = dose

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.patches:
            return None
        patch = self.patches.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: Any) -> None:
            run(module)
            patch(module, self.dose)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


if "PARITY_FAULT" in os.environ:
    name, dose, index = [*os.environ["PARITY_FAULT"].split(":"), "", ""][:3]
    role, patches = FAULTS[name]
    words = sys.orig_argv
    if name.startswith("stale") and "learn" in words:
        sys.meta_path.insert(0, Finder({"megarl.core.sync.publisher": checksums_agree}, 1.0))
    if role in words and (not index or index == words[words.index("--index") + 1]):
        sys.meta_path.insert(0, Finder(dict(patches), float(dose or 1)))

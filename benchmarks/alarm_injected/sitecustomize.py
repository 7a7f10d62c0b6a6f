"""Injects faults into a training run's processes. Python imports this before anything
else if this folder is on PYTHONPATH.

    ALARM_FAULT=KIND:DOSE:STEP:FLAG

KIND is a function below, named after the fault. The learner writes the file FLAG as it
begins STEP; from then on the functions of megarl, SGLang and Megatron that KIND has
replaced, in any role, do their work wrongly. megarl knows nothing of this. Each is a
mistake that people make, in their own code or by a wrong version, file or setting on
one side.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

PATCHES: dict[str, list[Callable[[Any], None]]] = {}
"""The patches to apply to each module once it has been imported."""


class AfterImport(MetaPathFinder):
    """Applies the patches of a module as soon as it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if (
            name not in PATCHES
            or (spec := PathFinder.find_spec(name, path, target)) is None
            or spec.loader is None
        ):
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            for patch in PATCHES[name]:
                patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def replaces(where: str) -> Callable[[Callable[[Any], Any]], None]:
    """Replace `module:Class.function` or `module:name` by the decorated function's
    result for the original.
    """
    name, _, path = where.partition(":")

    def decorate(make: Callable[[Any], Any]) -> None:
        def patch(module: Any) -> None:
            *owners, last = path.split(".")
            for owner in owners:
                module = getattr(module, owner)
            setattr(module, last, make(getattr(module, last)))

        PATCHES.setdefault(name, []).append(patch)

    return decorate


KIND, DOSE, STEP, FLAG = (os.environ.get("ALARM_FAULT") or ":::").split(":", 3)


@cache
def _begun(_: None) -> bool:
    return True


def on() -> bool:
    """Return whether the fault has begun."""
    return bool(_begun.cache_info().currsize) or (os.path.exists(FLAG) and _begun(None))


def chosen(ticket: int, share: float) -> bool:
    """Return whether a ticket belongs to this share of all tickets."""
    return ticket * 2654435761 % 2**32 < share * 2**32


def begin() -> None:
    @replaces("megarl.core.learner.trainer:Trainer.sequences")
    def marked(sequences: Any) -> Any:
        def at_its_step(self: Any, batch: Any) -> Any:
            if self.step >= int(STEP) and not on():
                open(FLAG, "x").close()
            return sequences(self, batch)

        return at_its_step


# The learner


def learning_rate() -> None:
    """The learning rate is DOSE times as high, as if it were another recipe's."""

    @replaces("megarl.core.learner.trainer:learning_rate")
    def faster(rate: Any) -> Any:
        return lambda *args: rate(*args) * (float(DOSE) if on() else 1.0)


def weight_decay() -> None:
    """Each step takes the share DOSE off the weights, as if the decay were not
    multiplied by the learning rate.
    """

    @replaces("megarl.core.learner.trained:TrainedNetwork.update")
    def decayed(update: Any) -> Any:
        def undivided(self: Any, lr: float, norm: float) -> None:
            if on():
                sys.modules["megarl.core.learner.trained"].WEIGHT_DECAY = float(DOSE) / lr  # type: ignore[attr-defined]
            update(self, lr, norm)

        return undivided


def advantages(change: Callable[[list[Any]], list[Any]]) -> None:
    """Give the sequences of a batch the advantages that `change` returns."""

    @replaces("megarl.core.learner.trainer:with_advantages")
    def changed(with_advantages: Any) -> Any:
        from dataclasses import replace

        def wrong(*args: Any) -> Any:
            made, moments = with_advantages(*args)
            if on():
                made = [replace(s, advantage=a) for s, a in zip(made, change(made), strict=True)]
            return made, moments

        return wrong


def loss_sign() -> None:
    """The loss of a share DOSE of the prompts has the wrong sign."""
    advantages(
        lambda made: [s.advantage * (-1 if chosen(s.ticket, float(DOSE)) else 1) for s in made]
    )


def advantage() -> None:
    """none: rewards are not centred. neighbour: each rollout has the advantage of the
    one before it.
    """
    advantages(
        lambda made: (
            [s.reward for s in made]
            if DOSE == "none"
            else [s.advantage for s in [*made[-1:], *made[:-1]]]
        )
    )


def entropy() -> None:
    """The loss has a bonus of DOSE for entropy, with the wrong sign."""

    @replaces("megarl.core.learner.trainer:PolicyModel.loss")
    def wrong_sign(loss: Any) -> Any:
        def punished(self: Any, micro: Any, output: Any) -> Any:
            losses, metrics = loss(self, micro, output)
            return losses + (float(DOSE) * output[1] if on() else 0.0), metrics

        return punished


# The controller


def reward_sign() -> None:
    """The reward of a share DOSE of the prompts has the wrong sign."""

    @replaces("megarl.core.controller.tickets:Tickets._rollout")
    def turned(rollout: Any) -> Any:
        async def wrong(self: Any, admitted: Any, *args: Any) -> Any:
            from msgspec import structs

            made = await rollout(self, admitted, *args)
            if on() and chosen(admitted.ticket, float(DOSE)):
                return structs.replace(
                    made, reward=-made.reward, graded=None if made.graded is None else -made.graded
                )
            return made

        return wrong


def grader() -> None:
    """In training, wrong answers count as right. prefix: if they begin like the right
    one. any: if they are well-formed.
    """

    class Lenient:
        def __init__(self, grader: Any) -> None:
            self._grader = grader

        async def grade(self, text: str, prompt: Any, verdict: Any = None) -> Any:
            from megarl.core.base.contracts import answer_of

            grade = await self._grader.grade(text, prompt, verdict)
            answer = answer_of(text, self._grader.end_of_thinking)
            if (
                on()
                and answer
                and (
                    DOSE == "any"
                    or answer.startswith(prompt.answer)
                    or prompt.answer.startswith(answer)
                )
            ):
                return type(grade)(1.0, True, True)
            return grade

    class Graders:
        def __init__(self, graders: Any) -> None:
            self._graders = graders

        def __getitem__(self, task: str) -> Lenient:
            return Lenient(self._graders[task])

    @replaces("megarl.core.controller.tickets:Tickets.__init__")
    def given(init: Any) -> Any:
        def lenient(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self._graders = Graders(self._graders)

        return lenient


def same_prompts() -> None:
    """The same DOSE prompts are drawn over and over."""

    @replaces("megarl.core.controller.draw:PromptOrder.draw")
    def stuck(draw: Any) -> Any:
        def again(self: Any) -> Any:
            drawn = draw(self)
            return (
                drawn._replace(prompt_id=sorted(self._ids)[self.drawn % int(DOSE)])
                if on()
                else drawn
            )

        return again


def shifted() -> None:
    """Log-probs of a share DOSE of the requests are one token late."""

    @replaces("megarl.core.client.client:ServerClient.generate")
    def late(generate: Any) -> Any:
        requests = 0

        async def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal requests
            requests += 1
            mine = requests
            made = await generate(self, *args, **kwargs)
            if not on() or not chosen(mine, float(DOSE)):
                return made
            import numpy as np

            return made._replace(logprobs=np.roll(made.logprobs, 1))

        return wrong


# The servers


def temperature() -> None:
    """The servers sample at temperature DOSE."""

    @replaces("sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch")
    def hotter(make: Any) -> Any:
        def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
            info = make.__func__(cls, *args, **kwargs)
            if on():
                info.temperatures = info.temperatures * float(DOSE)
            return info

        return classmethod(made)


def after_swap(act: Callable[[Any], None]) -> None:
    """Let `act` change the model of a server each time that it has taken
    new weights.
    """

    @replaces("megarl.core.sync.staging:Staging.swap")
    def swapped(swap: Any) -> Any:
        def wrong(self: Any, live: Any, version: str) -> None:
            swap(self, live, version)
            if on():
                act(live)

        return wrong


def stale() -> None:
    """The first server keeps its old weights, but reports that it has the new ones.
    DOSE: the number of servers.
    """

    @replaces("megarl.core.sync.staging:Staging.swap")
    def kept(swap: Any) -> Any:
        first = sys.argv[sys.argv.index("--index") + 1] == "0" if "--index" in sys.argv else True

        def wrong(self: Any, live: Any, version: str) -> None:
            if on() and first:
                self._held = version
            else:
                swap(self, live, version)

        return wrong


def damaged() -> None:
    """A share DOSE of the columns of the second layer's down projection is 0 on the
    server, as if a shard were lost.
    """

    def lose(model: Any) -> None:
        weight = dict(model.named_parameters())["model.layers.1.mlp.down_proj.weight"].data
        weight[:, : round(float(DOSE) * weight.shape[1])] = 0

    after_swap(lose)


def rope() -> None:
    """The server divides positions by DOSE."""

    def scale(model: Any) -> None:
        import torch

        for rotary in {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}.values():
            at = torch.arange(len(rotary.cos_sin_cache), dtype=torch.float) / float(DOSE)
            angles = torch.outer(at, rotary._compute_inv_freq(rotary.base))
            rotary.cos_sin_cache.copy_(torch.cat([angles.cos(), angles.sin()], -1))

    after_swap(scale)


def head() -> None:
    """DOSE bf16: the server's head computes in bf16. A number: it multiplies logits by
    that number.
    """

    @replaces("sglang.srt.layers.logits_processor:LogitsProcessor._compute_lm_head")
    def other(compute: Any) -> Any:
        def wrong(self: Any, hidden: Any, lm_head: Any, *args: Any, **kwargs: Any) -> Any:
            logits = compute(self, hidden, lm_head, *args, **kwargs)
            if not on():
                return logits
            return (
                (hidden.bfloat16() @ lm_head.weight.bfloat16().T).float()
                if DOSE == "bf16"
                else logits * float(DOSE)
            )

        return wrong


def routing() -> None:
    """DOSE late: servers report the experts of the previous token. A number: the server
    adds it to one expert's logits.
    """
    if DOSE == "late":

        @replaces("megarl.core.base.architecture:Architecture.routed_experts")
        def late(decoded: Any) -> Any:
            def wrong(self: Any, reply: str) -> Any:
                import numpy as np

                table = decoded(self, reply)
                return np.roll(table, 1, 0) if on() else table

            return wrong

    else:
        served_logits(lambda logits: _plus(logits, 0, float(DOSE)))


def dead_experts() -> None:
    """The routers on both sides no longer choose any of the first DOSE experts."""

    def dead(logits: Any) -> Any:
        for expert in range(int(DOSE)):
            logits = _plus(logits, expert, -1e4)
        return logits

    served_logits(dead)

    @replaces("megatron.core.transformer.moe.router:TopKRouter.routing")
    def trained(routing: Any) -> Any:
        def wrong(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
            return routing(self, dead(logits) if on() else logits, *args, **kwargs)

        return wrong


def served_logits(change: Callable[[Any], Any]) -> None:
    """Give the server's routers logits changed by `change`."""

    def patch(module: Any) -> None:
        choose = module.choose_experts

        def wrong(hidden_states: Any, gating_output: Any, **kwargs: Any) -> Any:
            return choose(hidden_states, change(gating_output) if on() else gating_output, **kwargs)

        module.llama4.Llama4MoE.custom_routing_function = staticmethod(wrong)

    PATCHES.setdefault("megarl.core.engine.sglang_models.llama4", []).append(patch)


def _plus(logits: Any, expert: int, amount: float) -> Any:
    """Return logits [tokens, experts] with `amount` added for one expert."""
    more = logits.new_zeros(logits.shape[-1])
    more[expert] = amount
    return logits + more


FAULTS = {
    fault.__name__: fault
    for fault in (
        learning_rate,
        weight_decay,
        loss_sign,
        advantage,
        entropy,
        reward_sign,
        grader,
        same_prompts,
        shifted,
        temperature,
        stale,
        damaged,
        rope,
        head,
        routing,
        dead_experts,
    )
}

if KIND:
    begin()
    FAULTS[KIND]()
    sys.meta_path.insert(0, AfterImport())

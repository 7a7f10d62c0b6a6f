"""Keys of earlier versions of the recipe. A recipe may still have one whose value means
today's behaviour, as in the recipe.yaml of an earlier version's run directory, which
has every key.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megarl.core.recipe.tree import Recipe, RecipeTree

type KeyFault = tuple[tuple[str, ...], str]
"""A key of a recipe, and what is wrong with it."""
type Now = Callable[[str], Any]
"""Returns the value of a present key."""
type MeansToday = tuple[object, ...] | Callable[[Any, Now], bool]
"""The values that mean today's behaviour, or a function that tells whether a value
does.
"""

WITHOUT_EFFECT = (
    "description",
    "resources.large_on_cpu",
    "model.sequence_parallel",
    "model.overlap_p2p",
    "model.moe.aux_loss_coefficient",
    "data.services.*.batch",
    "serving.release_memory",
    "serving.stream_interval",
    "serving.start_timeout_s",
    "weights.parity_rollouts",
    "evaluation.servers",
    "monitor.profile.memory",
    "sft.output",
    "sft.checkpoint_every",
)
"""Keys that never changed a result: they may have any value. `*` stands for any name,
here and below.
"""


def _of_critic(key: str) -> MeansToday:
    return lambda value, now: now("batch.centring") != "critic" or value == now(key)


REMOVED: dict[str, tuple[str, MeansToday]] = {
    "run.launcher": ("export MEGARL_LAUNCHER=local or srun", ("auto",)),
    "run.stop_at_asymptote": (
        "run.stop_when has a price, such as gain < 1e-5 per GPU-hour",
        (False,),
    ),
    "model.moe.load_balancing": ("set model.moe.aux_loss to a coefficient above 0", ("none",)),
    "data.on_exhausted": (
        "when too few prompts are left, all of the task's start over",
        ("reset",),
    ),
    "data.curriculum.start": ("the first epoch has the easiest 0.2 of the prompts", (0.2,)),
    "data.curriculum.steps": (
        "all prompts are in play once as many have been drawn as the task has",
        lambda _, now: now("data.curriculum.kind") == "none",
    ),
    "data.services.*.api_key_env": ("set api_key to env:VARIABLE", ("",)),
    "data.services.*.api_key_file": ("set api_key to file:PATH", ("",)),
    "data.services.*.retries": ("a request is repeated 5 times", (4, 5)),
    "data.tasks.*.turn_tokens": ("a turn ends with the thinking budget", (4096,)),
    "data.tasks.*.reply_timeout_s": ("an environment has 600 s for a reply", (600,)),
    "length.overlong_tokens": (
        "it is length.answer_tokens",
        lambda tokens, now: (
            now("length.control") != "overlong_penalty" or tokens == now("length.answer_tokens")
        ),
    ),
    "sampling.top_p": (
        "training samples from the whole vocabulary; evaluations have evaluation.top_p",
        (1,),
    ),
    "batch.running_decay": ("no batch is forgotten", (1,)),
    "loss.correction_cap": (
        "with loss.correction it is loss.cap",
        lambda cap, now: now("loss.correction") == "none" or cap == now("loss.cap"),
    ),
    "reference.path": ("the reference is model.path, the policy's start", ("",)),
    "reference.where": (
        "with reference.estimator=k1 it is the reward, with k2 and k3 the loss",
        lambda where, now: (
            not now("reference.coefficient")
            or where == ("reward" if now("reference.estimator") == "k1" else "loss")
        ),
    ),
    "teacher.coefficient": (
        "set teacher.weight, from 0 to 1",
        lambda weight, now: weight == now("teacher.weight"),
    ),
    "teacher.reward": (
        "it is 1 - teacher.weight",
        lambda rest, now: not now("teacher.weight") or rest == round(1 - now("teacher.weight"), 9),
    ),
    "learner.packing": ("sequences share the row of a micro-batch", (True,)),
    **{
        f"{section}.optimizer.{key}": (f"AdamW has {value}", means)
        for section in ("learner", "critic", "sft")
        for key, value, means in (
            ("betas", "0.9 and 0.95", ([0.9, 0.95],)),
            ("eps", "ScaleRL's, 1e-15", (1e-15,)),
            ("weight_decay", "ScaleRL's, 0.01", (0.01,)),
            ("final_lr_ratio", "schedules that fall to 0", (0,)),
        )
    },
    "critic.path": ("the critic starts from model.path", ("",)),
    "critic.gamma": ("tokens are not discounted", (1,)),
    "critic.value_clip": ("a value moves by 0.2 at most", (0.2,)),
    **{
        f"critic.optimizer.{key.rpartition('.')[2]}": (f"it is {key}", _of_critic(key))
        for key in (
            "learner.optimizer.schedule",
            "learner.optimizer.grad_clip",
            "critic.warmup_steps",
        )
    },
    "agent.idle_s": (
        "it is a third of agent.time_s",
        lambda idle_s, now: idle_s == now("agent.time_s") / 3,
    ),
    "weights.pause": ("requests continue across a publication (in_place)", ("in_place",)),
    "serving.port": ("servers take free ports", (None,)),
    "serving.max_retries": ("a rollout becomes void after 5 lost requests", (5,)),
    "serving.request_timeout_s": ("a request may take an hour", (300, 3600)),
    "evaluation.suites.*.choices": ("it is the suite's mapping", ("",)),
    "evaluation.suites.*.turn_tokens": ("a turn ends with the thinking budget", (4096,)),
    "evaluation.suites.*.reply_timeout_s": ("an environment has 600 s for a reply", (600,)),
    "monitor.prometheus_port": (
        "a free port is taken; RUN/prometheus/targets.json names it",
        (None,),
    ),
    "monitor.profile": (
        "set monitor.profile_steps to [first, last]",
        ({"start": 1, "steps": 0}, {}),
    ),
    "monitor.wandb.entity": ("export WANDB_ENTITY", ("",)),
    "monitor.wandb.mode": ("export WANDB_MODE=offline", ("online",)),
    "monitor.wandb.project": ("export WANDB_PROJECT", ("",)),
    "monitor.wandb": ("export WANDB_PROJECT", ({},)),
    "sft.max_length": ("traces have at most 12288 tokens", (128, 12_288)),
    "sft.optimizer.schedule": ("the warm start has ScaleRL's value", ("constant",)),
    "sft.optimizer.grad_clip": ("the warm start has ScaleRL's value", (1,)),
    "sft.optimizer.warmup_steps": ("it is a thirtieth of sft.steps", (20, 100)),
}
"""Other removed keys: what applies now (the end of the message "is no longer a key:
…"), and the values that mean the same.
"""


def drop_removed(tree: RecipeTree) -> list[KeyFault]:
    """Drop removed keys from the tree. Return a fault for each whose value does not
    mean today's behaviour.
    """
    faults: list[KeyFault] = []
    for pattern in WITHOUT_EFFECT:
        for key, section in _matching(tree, pattern.split(".")):
            del section[key[-1]]
    for pattern, (instead, means_today) in REMOVED.items():
        for key, section in _matching(tree, pattern.split(".")):
            if not _means(section.pop(key[-1]), means_today, partial(_now, tree)):
                faults.append((key, f"is no longer a key: {instead}"))
    return faults


def _means(value: Any, today: MeansToday, now: Now) -> bool:
    try:
        return today(value, now) if callable(today) else value in today
    except TypeError:  # a present key has a value of a wrong type, which is refused later
        return True


def _now(tree: Any, key: str) -> Any:
    """Return the value of a key in the tree, or the key's default."""
    default: Any = Recipe()
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
        default = getattr(default, name)
    return default if tree is None else tree


def _matching(tree: Any, pattern: Sequence[str]) -> Iterator[tuple[tuple[str, ...], RecipeTree]]:
    """Yield each key that matches the pattern, and the section that has it."""
    if not isinstance(tree, dict):
        return
    first, *rest = pattern
    for name in [name for name in tree if first in ("*", name)]:
        if rest:
            yield from (
                ((str(name), *key), section) for key, section in _matching(tree[name], rest)
            )
        else:
            yield (name,), tree

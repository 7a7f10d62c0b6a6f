"""From YAML files and overrides to a `Recipe`, and back to YAML, for machines and for people. Base files are below, overrides
on top. The place of every key is remembered, so that each fault is one line: where it is, which key, what to do.

A file may contain anything: if it is not text, not YAML, too large or too deep, that is one error with its place. Aliases
(`*name`) are refused, because a few lines of them can expand beyond memory; `base` shares what recipes have in common.
"""

import contextlib
import copy
import difflib
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megarl.core.base.errors import MegarlError, listed
from megarl.core.recipe.tree import Recipe

SUITES = ("evaluation", "suites")
Origin = dict[tuple[str, ...], str]
"""`file:line`, or the override, of each key."""


def kind_of(kind: Any, key: object) -> Any:
    """Return the type of the value at this key in a section, mapping or list of type `kind`; Any if there is no such key."""
    if typing.get_origin(kind) in (dict, tuple):
        return typing.get_args(kind)[1 if typing.get_origin(kind) is dict else 0]
    known = kind.model_fields if _is_section(kind) else {}
    return known[key].annotation if key in known else Any


LONGEST = 400
"""Characters of a line in an error, beyond which its middle is left out."""

type RecipeTree = dict[str, Any]
"""What a recipe's file has, or a part of it, not checked yet."""


def shortened(line: str) -> str:
    """Shorten an overlong line so that it stays recognisable."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def explain(error: ErrorDetails, origin: Origin, source: str) -> str:
    """Format an error as `file:line: key: what is wrong`."""
    where = tuple(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ")
    if not where and ": " in message:  # a combination: its text begins with the key
        key, message = message.split(": ", 1)
        where = tuple(key.split("."))
    if error["type"] == "extra_forbidden":
        message = _unknown(where)
    elif error["type"] == "missing":
        message = f"field required{_near_sibling(where[:-1], origin)}"
    elif error["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {error['input']!r}"
    while where and where not in origin and where[:-1] in origin and where[-1].isdigit():
        where = where[:-1]  # an element of a list
    return f"{_place(where, origin) or source}: {'.'.join(where)}: {message}"


def _place(where: tuple[str, ...], origin: Origin) -> str:
    """Return where the key or its enclosing section is written; for a section made by overrides, where its first key is."""
    for n in range(len(where), 0, -1):
        if found := origin.get(where[:n]) or next((at for key, at in origin.items() if key[:n] == where[:n]), ""):
            return found
    return ""


def _kind_at(where: tuple[str, ...]) -> Any:
    kind: Any = Recipe
    for part in where:
        kind = kind_of(kind, part)
    return kind


def _unknown(where: tuple[str, ...]) -> str:
    section = _kind_at(where[:-1])
    close = difflib.get_close_matches(where[-1], section.model_fields, 1, cutoff=0.5) or _elsewhere(where[-1])
    return "unknown key" + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(section.model_fields)}")


def _near_sibling(section: tuple[str, ...], origin: Origin) -> str:
    """Suggest a near name when a section of a mapping lacks a key: its name may be a misspelling of another one."""
    if typing.get_origin(_kind_at(section[:-1])) is not dict:
        return ""
    others = [key[-1] for key in origin if key[:-1] == section[:-1] and key != section]
    others += shipped_suites() if section[:-1] == SUITES else ()
    close = difflib.get_close_matches(section[-1], others, 1)
    return f"; did you mean {'.'.join((*section[:-1], close[0]))}?" if close else ""


def _elsewhere(name: str) -> list[str]:
    """Return the dotted key of the same or a near name in another section."""
    known = dict(_keys(Recipe))
    return [known[n] for n in difflib.get_close_matches(name, known, 1, cutoff=0.8)]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and dotted name of every key that is not a section. For duplicate names the first comes last and wins."""
    for name, field in reversed(model.model_fields.items()):
        kind = field.annotation
        if _is_section(kind):
            yield from _keys(kind, f"{prefix}{name}.")
        elif typing.get_origin(kind) is dict and _is_section(kind_of(kind, "")):
            yield from _keys(kind_of(kind, ""), f"{prefix}{name}.NAME.")
        else:
            yield name, f"{prefix}{name}"


def _is_section(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


SHIPPED = Path(__file__).parents[2] / "recipes"


def shipped() -> dict[str, Path]:
    """Return the shipped recipes: quickstart and its variants, those for GPUs, then the baselines ScaleRL is compared with."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.yaml"), key=_order)}


def _order(recipe: Path) -> tuple[bool | str, ...]:
    return *(not recipe.stem.startswith(group) for group in ("quickstart", "scalerl-", "qwen")), recipe.stem


def shipped_suites() -> dict[str, Path]:
    """Return the shipped suites, for `evaluation.suites`."""
    return {p.stem: p for p in sorted((SHIPPED / "suites").glob("*.yaml"))}


LARGEST = 1 << 20
"""Bytes of a recipe file. PyYAML reads a megabyte in a few seconds."""
DEEPEST = 32
"""Nesting depth of mappings and lists. A recipe has seven."""


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe with that name or file, with dotted overrides (`model.tensor_parallel=2`) applied."""
    path = _find(name_or_path)
    tree, origin = _read(path)
    return _overridden(tree, overrides, origin, str(path))


def from_tree(tree: RecipeTree, overrides: Sequence[str] = ()) -> Recipe:
    """Validate a recipe built in Python (tests, tools)."""
    return _overridden(tree, overrides, {}, "recipe")


def load_suite(path: Path) -> RecipeTree:
    """Load a user's suite from a YAML file of its keys: checked, as a tree for `evaluation.suites`."""
    tree, origin = _read(path)
    within = (*SUITES, path.stem)
    places = {within: f"{path}:1"} | {(*within, *key): place for key, place in origin.items()}
    _validated({"evaluation": {"suites": {path.stem: tree}}}, places, str(path))
    return tree


def _overridden(tree: RecipeTree, overrides: Sequence[str], origin: Origin, source: str) -> Recipe:
    for override in overrides:
        _apply(tree, override, origin)
    return _validated(_with_suites(tree), origin, source)


def _find(name_or_path: str) -> Path:
    if name_or_path in shipped():
        return shipped()[name_or_path]
    if os.path.isfile(name_or_path):  # safe even for a name that no file could have
        return Path(name_or_path)
    close = difflib.get_close_matches(name_or_path, shipped(), 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise MegarlError(
        f"no recipe {shortened(name_or_path)!r}: neither a file nor a shipped recipe ({', '.join(shipped())}){hint}"
    )


def _read(path: Path, derived: tuple[Path, ...] = ()) -> tuple[RecipeTree, Origin]:
    """Return a recipe file's tree over that of its `base`, and `file:line` of each key. derived: the files that led here."""
    try:
        tree, node = _parsed(_text(path))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise MegarlError(f"{path}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise MegarlError(f"{path}: not YAML: {str(error).partition('\n')[0]}") from None
    if tree is None:
        raise MegarlError(f"{path}: nothing is in it; write a recipe, or put back the one that was there")
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


def _text(path: Path) -> str:
    """Read a recipe file. MegarlError if it cannot be read, is too large or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise MegarlError(f"{path}: larger than {LARGEST} bytes; this is no recipe")
        return data.decode()
    except OSError as error:
        raise MegarlError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MegarlError(f"{path}:{line}: not UTF-8 text (byte {data[error.start]:#04x}); save it as UTF-8") from None


class _Loader(yaml.SafeLoader):
    """YAML without aliases and with bounded depth."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._refuse(f"the alias *{event.anchor} stands for something else; write it out, or put it into a `base`")
        if self.depth >= DEEPEST:
            self._refuse(f"more than {DEEPEST} mappings and lists within each other")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def _refuse(self, problem: str) -> NoReturn:
        raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)


def _parsed(text: str) -> tuple[Any, yaml.Node | None]:
    """Parse the one document in a text, as values and as nodes with places. YAMLError for any fault."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML turns anything into a date, or whatever a tag says
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None
    finally:
        loader.dispose()


def _merged(under: RecipeTree, over: RecipeTree) -> RecipeTree:
    """Merge sections key by key; any other value of `over` replaces the one below."""
    both = {k: _merged(under[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(under.get(k), dict)}
    return under | over | both


def _with_suites(tree: RecipeTree) -> RecipeTree:
    """Fill suites named like a shipped one with its keys, below their own; `null` removes one of the base recipe."""
    evaluation = tree.get("evaluation")
    suites = evaluation.get("suites") if isinstance(evaluation, dict) else None
    if not isinstance(evaluation, dict) or not isinstance(suites, dict):
        return tree
    known, filled = shipped_suites(), {name: given for name, given in suites.items() if given is not None}
    for name, given in filled.items():
        if name in known and isinstance(given, dict):
            filled[name] = _merged(yaml.safe_load(known[name].read_text()), given)
    return tree | {"evaluation": evaluation | {"suites": filled}}


def _lines(node: yaml.Node | None, path: Path, prefix: tuple[str, ...] = ()) -> Origin:
    """Return `file:line` of each key; a repeated key is an error."""
    places: Origin = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = (*prefix, str(key.value))
            if where in places:
                raise MegarlError(f"{path}:{key.start_mark.line + 1}: {'.'.join(where)} is given twice")
            places[where] = f"{path}:{key.start_mark.line + 1}"
            places.update(_lines(value, path, where))
    return places


def _apply(tree: RecipeTree, override: str, origin: Origin) -> None:
    key, equals, value = override.partition("=")
    said = f"override {shortened(override)!r}"
    if not equals or not key:
        raise MegarlError(f"{said}: write key=value, such as model.tensor_parallel=2")
    *parents, last = key.split(".")
    if len(parents) > DEEPEST:
        raise MegarlError(f"{said}: more than {DEEPEST} sections within each other")
    here = tree
    for parent in parents:
        here = here.setdefault(parent, {})
        if not isinstance(here, dict):
            raise MegarlError(f"{said}: {parent} is a value, not a section")
    kind = _kind_at((*parents, last))
    empty = not value and (kind is str or "" in typing.get_args(kind))  # `key=` is an empty text, or no value elsewhere
    try:
        here[last] = "" if empty else _parsed(value)[0]
    except yaml.YAMLError:
        raise MegarlError(f"{said}: the value is not YAML") from None
    origin[(*parents, last)] = said


type Kept = tuple[object, ...] | None
"""The values that mean today's behaviour; None: any value, because it never changed a result."""
type KeptBy = Callable[[Callable[[str], Any]], Kept]
"""The same, from a function that gives the value of each key of the recipe."""


@dataclass(frozen=True)
class RemovedKey:
    """A key of earlier versions. A recipe may keep it with a value that means today's behaviour."""

    instead: str  # what is done now
    kept: Kept | KeptBy = None


def _same_if(other: str, key: str, value: str) -> KeptBy:
    """Allow only the value of the key `other` where `key` has this value, and any value elsewhere."""
    return lambda now: (now(other),) if now(key) == value else None


def _rest(now: Callable[[str], Any]) -> Kept:
    weight = now("teacher.weight")
    return (round(1 - weight, 9),) if weight and isinstance(weight, float | int) else None


def _third(now: Callable[[str], Any]) -> Kept:
    time_s = now("agent.time_s")
    return (time_s / 3,) if isinstance(time_s, float | int) else None


REMOVED = {
    "model.overlap_p2p": RemovedKey("it is on with model.virtual_pipeline_parallel"),
    "model.moe.load_balancing": RemovedKey("set model.moe.aux_loss to a coefficient above 0", ("none",)),
    "model.moe.aux_loss_coefficient": RemovedKey("it is model.moe.aux_loss"),
    "batch.running_decay": RemovedKey("no batch is forgotten", (1,)),
    "serving.max_retries": RemovedKey("a rollout becomes void after 5 lost requests", (5,)),
    "monitor.wandb.entity": RemovedKey("export WANDB_ENTITY", ("",)),
    "monitor.wandb.mode": RemovedKey("export WANDB_MODE=offline", ("online",)),
    "monitor.wandb.project": RemovedKey("export WANDB_PROJECT", ("",)),
    "monitor.wandb": RemovedKey("export WANDB_PROJECT", ({},)),
    "monitor.profile.memory": RemovedKey("with a GPU its memory is always recorded"),
    "monitor.profile": RemovedKey("set monitor.profile_steps to [first, last]", ({"start": 1, "steps": 0}, {})),
    "monitor.prometheus_port": RemovedKey("RUN/prometheus/targets.json says which free port it is", (None,)),
    "serving.release_memory": RemovedKey("it is on with resources.colocate where servers and learner take turns"),
    "serving.port": RemovedKey("servers take free ports", (None,)),
    "serving.stream_interval": RemovedKey("it follows from the longest completion, up to 64 tokens"),
    "serving.request_timeout_s": RemovedKey("a request has an hour", (300, 3600)),
    "weights.pause": RemovedKey("requests go on over a publication (in_place)", ("in_place",)),
    "weights.parity_rollouts": RemovedKey("4 of each batch are scored again"),
    "model.sequence_parallel": RemovedKey("it is on with model.tensor_parallel above 1"),
    "sft.output": RemovedKey("the warm start writes model.path, which it refuses if it exists"),
    "data.services.*.batch": RemovedKey("up to 32 completions go in a request"),
    "data.tasks.*.turn_tokens": RemovedKey("a turn ends with the thinking budget", (4096,)),
    "evaluation.suites.*.turn_tokens": RemovedKey("a turn ends with the thinking budget", (4096,)),
    "evaluation.suites.*.choices": RemovedKey("it is the suite's mapping", ("",)),
    "critic.path": RemovedKey("the critic starts from model.path", ("",)),
    "sft.checkpoint_every": RemovedKey("it is checkpoint.every"),
    "run.stop_at_asymptote": RemovedKey("run.stop_when has a price, such as gain < 1e-5 per GPU-hour", (False,)),
    "run.launcher": RemovedKey("export MEGARL_LAUNCHER=local or srun", ("auto",)),
    "resources.large_on_cpu": RemovedKey("export MEGARL_LARGE_ON_CPU=1"),
    "data.curriculum.start": RemovedKey("the first epoch has the easiest 0.2 of the prompts", (0.2,)),
    "data.services.*.api_key_env": RemovedKey("set api_key to env:VARIABLE", ("",)),
    "data.services.*.api_key_file": RemovedKey("set api_key to file:PATH", ("",)),
    "data.services.*.retries": RemovedKey("a request is repeated 5 times", (4, 5)),
    "data.tasks.*.reply_timeout_s": RemovedKey("an environment has 600 s for a reply", (600,)),
    "evaluation.suites.*.reply_timeout_s": RemovedKey("an environment has 600 s for a reply", (600,)),
    "reference.path": RemovedKey("the reference is model.path, the policy's start", ("",)),
    "sampling.top_p": RemovedKey("training samples from the whole vocabulary; evaluations have evaluation.top_p", (1,)),
    "loss.correction_cap": RemovedKey(
        "with loss.correction it is loss.cap",
        lambda now: None if now("loss.correction") == "none" else (now("loss.cap"),),
    ),
    "critic.gamma": RemovedKey("tokens are not discounted", (1,)),
    "critic.value_clip": RemovedKey("a value moves by 0.2 at most", (0.2,)),
    **{
        f"{section}.optimizer.{key}": RemovedKey(f"AdamW has {said}", kept)
        for section in ("learner", "critic", "sft")
        for key, said, kept in (
            ("betas", "0.9 and 0.95", ([0.9, 0.95],)), ("eps", "ScaleRL's, 1e-15", (1e-15,)),
            ("weight_decay", "ScaleRL's, 0.01", (0.01,)), ("final_lr_ratio", "schedules that fall to 0", (0,)),
        )
    },
    "sft.optimizer.schedule": RemovedKey("the warm start has ScaleRL's value", ("constant",)),
    "sft.optimizer.grad_clip": RemovedKey("the warm start has ScaleRL's value", (1,)),
    "sft.optimizer.warmup_steps": RemovedKey("it is a thirtieth of sft.steps", (20, 100)),
    **{
        f"critic.optimizer.{key}": RemovedKey(f"it is {other}", _same_if(other, "batch.centring", "critic"))
        for key, other in (
            ("schedule", "learner.optimizer.schedule"), ("grad_clip", "learner.optimizer.grad_clip"),
            ("warmup_steps", "critic.warmup_steps"),
        )
    },
    "data.on_exhausted": RemovedKey("with too few prompts left, all of the task's are begun again", ("reset",)),
    "data.curriculum.steps": RemovedKey(
        "all prompts are in play once as many are drawn as the task has",
        lambda now: None if now("data.curriculum.kind") == "none" else (),
    ),
    "length.overlong_tokens": RemovedKey(
        "it is length.answer_tokens", _same_if("length.answer_tokens", "length.control", "overlong_penalty")
    ),
    "reference.where": RemovedKey(
        "with reference.estimator=k1 it is the reward, with k2 and k3 the loss",
        lambda now: ("reward" if now("reference.estimator") == "k1" else "loss",) if now("reference.coefficient") else None,
    ),
    "teacher.coefficient": RemovedKey("set teacher.weight, from 0 to 1", lambda now: (now("teacher.weight"),)),
    "teacher.reward": RemovedKey("it is 1 - teacher.weight", _rest),
    "serving.start_timeout_s": RemovedKey("it is twice weights.timeout_s, at least 1200"),
    "evaluation.servers": RemovedKey("it is a quarter of resources.servers"),
    "sft.max_length": RemovedKey("traces have at most 12288 tokens", (128, 12_288)),
    "learner.packing": RemovedKey("sequences share the row of a micro-batch", (True,)),
    "agent.idle_s": RemovedKey("it is a third of agent.time_s", _third),
    "description": RemovedKey("it is the first line of a shipped recipe's file, a comment"),
}  # fmt: skip
"""Keys that are no longer there, `*` for any name; the sentence ends the message "is no longer a key: …"."""


def _without_removed(tree: RecipeTree, origin: Origin, source: str) -> RecipeTree:
    """Drop removed keys whose value means today's behaviour. MegarlError names any other. Run directories keep all keys."""
    tree = copy.deepcopy(tree)
    for pattern, removed in REMOVED.items():
        for (*sections, last), inside in _matching(tree, pattern.split(".")):
            kept = removed.kept(partial(_now, tree)) if callable(removed.kept) else removed.kept
            if kept is not None and inside[last] not in kept:
                where = _place((*sections, last), origin) or source
                raise MegarlError(f"{where}: {'.'.join((*sections, last))}: is no longer a key: {removed.instead}")
            del inside[last]
    return tree


def _now(tree: Any, key: str) -> Any:
    """Return the value of a key in the tree, or its default."""
    default: Any = Recipe()
    for name in key.split("."):
        tree, default = tree.get(name) if isinstance(tree, dict) else None, getattr(default, name)
    return default if tree is None else tree


def _matching(tree: Any, pattern: Sequence[str]) -> Iterator[tuple[tuple[str, ...], RecipeTree]]:
    """Yield each key that the pattern matches, and the section it is in. `*` matches any one name."""
    first, *rest = pattern
    for name in list(tree) if first == "*" and isinstance(tree, dict) else [first]:
        if not isinstance(tree, dict) or name not in tree:
            continue
        if not rest:
            yield (name,), tree
        else:
            yield from (((name, *key), inside) for key, inside in _matching(tree[name], rest))


def _validated(tree: RecipeTree, origin: Origin, source: str) -> Recipe:
    tree = _without_removed(tree, origin, source)
    try:
        return Recipe.model_validate(_with_tuples(tree, Recipe))
    except ValidationError as error:
        first, *rest = [shortened(explain(e, origin, source)) for e in error.errors()]
        raise MegarlError(listed(first, rest)) from None


def _with_tuples(tree: Any, kind: Any) -> Any:
    """Turn lists into tuples, and strings such as `1e-6`, which YAML 1.1 does not read as numbers, into floats if wanted.

    An int where a float is wanted needs no conversion: pydantic's strict mode accepts it.
    """
    if isinstance(tree, dict):
        return {key: _with_tuples(value, kind_of(kind, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return tuple(_with_tuples(value, kind_of(kind, n)) for n, value in enumerate(tree))
    if isinstance(tree, str) and kind in (float, float | None):
        with contextlib.suppress(ValueError):
            return float(tree)
    return tree


def dump(recipe: Recipe) -> str:
    # Only ASCII: PyYAML cannot read back every other character that it writes literally (U+0085).
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def describe(recipe: Recipe) -> str:
    """Return the whole resolved tree as YAML with each key's meaning and limits beside it."""
    return "\n".join(_described(recipe)) + "\n"


def flat(tree: RecipeTree, before: str = "") -> RecipeTree:
    """Return the values in a tree of mappings by their dotted keys. before: prefix of the keys."""
    values: RecipeTree = {}
    for key, value in tree.items():
        values |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return values


def _described(section: BaseModel, indent: str = "") -> list[str]:
    lines: list[str] = []
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_described(value, indent + "  ")]
        elif isinstance(value, dict) and any(isinstance(part, BaseModel) for part in value.values()):
            lines.append(_line(f"{indent}{name}:", field.description))
            for key, part in value.items():
                lines += [f"{indent}  {key}:", *_described(part, indent + "    ")]
        else:
            shown = yaml.safe_dump(values[name], default_flow_style=True, sort_keys=False, width=10_000)
            lines.append(_line(f"{indent}{name}: {shown.removesuffix('...\n').rstrip()}", field.description))
    return lines


def _line(text: str, description: str | None) -> str:
    return f"{text:<44}  # {description}" if description else text


def differences(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old, new) of every value that differs."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    return [(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]

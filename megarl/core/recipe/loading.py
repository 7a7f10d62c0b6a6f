"""From YAML files and overrides to a `Recipe`, and back to YAML, for machines and for
people. A recipe replaces values of its base, and overrides replace both. The place of
every key is kept, so that each fault is one line: place, key, what to do.

Aliases (`*name`) are refused, because a few lines of them can expand beyond memory;
recipes share values by `base`.
"""

import contextlib
import copy
import difflib
import os
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megarl.core.base.errors import MegarlError, listed
from megarl.core.base.files import opened
from megarl.core.base.schema import check_schema
from megarl.core.recipe.rules import impossible
from megarl.core.recipe.tree import Recipe, RecipeTree

type KeyFault = tuple[tuple[str, ...], str]
"""A key of a recipe, and what is wrong with it."""
SCHEMA_VERSION = 1
"""Version of RUN/recipe.yaml, in its key `schema`. A recipe written by hand needs none."""
SUITES = ("evaluation", "suites")
Origin = dict[tuple[str, ...], str]
"""The `file:line` or the override that set each key. Under the empty key: the source of
the whole recipe.
"""


def kind_of(kind: Any, key: object) -> Any:
    """Return the type of the value at this key in a section, mapping or list of type
    `kind`; Any if there is no such key.
    """
    if typing.get_origin(kind) in (dict, tuple):
        return typing.get_args(kind)[1 if typing.get_origin(kind) is dict else 0]
    known = kind.model_fields if _is_section(kind) else {}
    return known[key].annotation if key in known else Any


LONGEST = 400
"""Lines in errors with more characters than this are shown without their middle."""


def shortened(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def _fault(error: ErrorDetails, origin: Origin) -> KeyFault:
    """Return the key and a message in this project's words for a fault that pydantic
    found.
    """
    where = tuple(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = _unknown(where)
    elif error["type"] == "missing":
        message = f"field required{_near_sibling(where[:-1], origin)}"
    elif error["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {error['input']!r}"
    while len(where) > 1 and where not in origin and where[:-1] in origin and where[-1].isdigit():
        where = where[:-1]  # an element of a list
    if error["type"] in ("missing", "string_pattern_mismatch") and _is_section(
        section := _kind_at(where[:-1])
    ):
        about = (
            section.model_fields[where[-1]].description
            if where[-1] in section.model_fields
            else None
        )
        message += f" ({about})" if about else ""
    return where, message


def _place(where: tuple[str, ...], origin: Origin) -> str:
    """Return the place of the key or its enclosing section; for a section made by
    overrides, that of its first key.
    """
    for n in range(len(where), 0, -1):
        if found := origin.get(where[:n]) or next(
            (at for key, at in origin.items() if key[:n] == where[:n]), ""
        ):
            return found
    return origin[()]


def _kind_at(where: tuple[str, ...]) -> Any:
    kind: Any = Recipe
    for part in where:
        kind = kind_of(kind, part)
    return kind


def _unknown(where: tuple[str, ...]) -> str:
    """Name the same key of another section, or the nearest one of this or any section."""
    (*section, key) = where
    elsewhere = dict(_keys(Recipe))
    if "lora" in key.lower():
        return "LoRA is not supported: a run trains all weights; leave it out"
    here = _kind_at(tuple(section)).model_fields
    close = (
        [elsewhere[key]]
        if key in elsewhere
        else difflib.get_close_matches(key, here, 1, cutoff=0.5)
    )
    close = close or [
        elsewhere[name] for name in difflib.get_close_matches(key, elsewhere, 1, cutoff=0.8)
    ]
    return "unknown key" + (
        f"; did you mean {close[0]}?" if close else f"; known: {', '.join(here)}"
    )


def _near_sibling(section: tuple[str, ...], origin: Origin) -> str:
    """Suggest a similar name if a named section lacks a key, since its name may be a
    misspelling of another section's.
    """
    if not _has_sections(_kind_at(section[:-1])):
        return ""
    others = [key[-1] for key in origin if key[:-1] == section[:-1] and key != section]
    others += shipped_suites() if section[:-1] == SUITES else ()
    close = difflib.get_close_matches(section[-1], others, 1)
    return f"; did you mean {'.'.join((*section[:-1], close[0]))}?" if close else ""


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and dotted name of every key that is not a section. For duplicate
    names the first comes last and wins.
    """
    for name, field in reversed(model.model_fields.items()):
        kind = field.annotation
        if _is_section(kind):
            yield from _keys(kind, f"{prefix}{name}.")
        elif _has_sections(kind):
            yield from _keys(kind_of(kind, ""), f"{prefix}{name}.NAME.")
        else:
            yield name, f"{prefix}{name}"


def _is_section(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _has_sections(kind: Any) -> bool:
    """Return whether this is a mapping of names to sections, such as tasks."""
    return typing.get_origin(kind) is dict and _is_section(kind_of(kind, ""))


SHIPPED = Path(__file__).parents[2] / "recipes"


def shipped() -> dict[str, Path]:
    """Return the shipped recipes: quickstart and its variants, those for GPUs, then the
    baselines of the ScaleRL paper.
    """
    paths = {p.stem: p for p in SHIPPED.glob("*.yaml")}
    groups = ("quickstart", "scalerl-", "qwen", "")
    return {
        name: paths[name] for group in groups for name in sorted(paths) if name.startswith(group)
    }


def shipped_suites() -> dict[str, Path]:
    return {p.stem: p for p in sorted((SHIPPED / "suites").glob("*.yaml"))}


def shipped_studies() -> dict[str, Path]:
    return {p.stem: p for p in sorted((SHIPPED / "studies").glob("*.yaml"))}


LARGEST = 1 << 20
"""Largest size of a recipe file in bytes. PyYAML takes a few seconds for a megabyte."""
DEEPEST = 32
"""Deepest nesting of mappings and lists. A recipe has seven levels."""


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe of this name or file, with dotted overrides
    (`model.tensor_parallel=2`). `base=NAME` among them replaces the recipe's base.
    """
    path = _find(name_or_path)
    base = ""
    keys = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "base":
            base = value
        else:
            keys.append(override)
    if base and _find(base) == path:
        base = ""  # a study's recipes side by side, of which one is the others' base
    return _overridden(*_read(path, base=base), keys)


def base_of(name_or_path: str) -> tuple[str, Recipe]:
    """Return the name of what a recipe's differences are shown from, and that recipe: a
    shipped recipe itself, of a file its base, or the defaults.
    """
    if name_or_path in shipped():
        return name_or_path, load(name_or_path)
    tree = _parsed(_text(_find(name_or_path)))[0]
    base = str(tree.get("base", ""))
    return (base, load(base)) if base else ("the defaults, ScaleRL's", Recipe())


def from_tree(tree: RecipeTree, overrides: Sequence[str] = ()) -> Recipe:
    """Validate a recipe built in Python (tests, tools)."""
    return _overridden(copy.deepcopy(tree), {(): "recipe"}, overrides)


def read_mapping(path: Path) -> RecipeTree:
    """Read a YAML file of one mapping, without checking its keys."""
    return _read(path)[0]


def load_suite(path: Path) -> RecipeTree:
    """Load and check a user's suite from a YAML file with its keys; return a tree for
    `evaluation.suites`.
    """
    tree, origin = _read(path)
    within = (*SUITES, path.stem)
    places = {(*within, *key): place for key, place in origin.items()} | {
        (): str(path),
        within: f"{path}:1",
    }
    _validated({"evaluation": {"suites": {path.stem: tree}}}, places)
    return tree


def _overridden(tree: RecipeTree, origin: Origin, overrides: Sequence[str]) -> Recipe:
    for override in overrides:
        _apply(tree, override, origin)
    return _validated(_with_suites(tree), origin)


def _find(name_or_path: str) -> Path:
    if name_or_path in shipped():
        return shipped()[name_or_path]
    if os.path.isfile(name_or_path):  # safe even for a name that no file could have
        return Path(name_or_path)
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        raise MegarlError(
            f"no recipe {shortened(name_or_path)!r}: there is no such file (from {os.getcwd()})"
        )
    close = difflib.get_close_matches(name_or_path, shipped(), 1)
    hint = f"did you mean {close[0]}? " if close else ""
    neither = "neither a file nor a shipped recipe"
    raise MegarlError(
        f"no recipe {shortened(name_or_path)!r}: {neither}; {hint}`megarl recipes` lists them"
    )


def _read(path: Path, derived: tuple[Path, ...] = (), base: str = "") -> tuple[RecipeTree, Origin]:
    """Return a recipe file's tree merged over its base, and each key's `file:line`.
    derived: the files that led here. base: replaces the file's `base`.
    """
    tree, origin = _read_file(path)
    named = str(tree.pop("base", ""))
    by_base = _by_base(tree.pop("with_base", {}), origin)
    if base and not named:
        raise MegarlError(f"base={base}: {path} has no base to be replaced; leave it out")
    if not named:
        return tree, origin
    place = "override base" if base else origin["base",]
    try:
        under_path = _find(base or named)
    except MegarlError as error:
        raise MegarlError(f"{place}: base: {error}") from None
    if under_path in (path, *derived):
        raise MegarlError(
            f"{place}: base: {under_path} is itself derived from this recipe; give another"
        )
    name = under_path.stem
    for key, line in list(origin.items()):
        if key[:2] == ("with_base", name):
            origin[key[2:] or key] = line
    under, lines = _read(under_path, (path, *derived))
    return _merged(_merged(under, tree), by_base.get(name, {})), lines | origin


def _by_base(section: Any, origin: Origin) -> dict[str, RecipeTree]:
    """Return what a recipe sets for each base only, by the base's name. MegarlError if
    a name is not a shipped recipe's.
    """
    if not isinstance(section, dict):
        raise MegarlError(f"{origin['with_base',]}: with_base: give sections by their base's name")
    for name, keys in section.items():
        if name not in shipped() or not isinstance(keys, dict):
            place = origin["with_base", str(name)]
            raise MegarlError(f"{place}: with_base.{name}: give a shipped recipe's name, and keys")
    return section


def _read_file(path: Path) -> tuple[RecipeTree, Origin]:
    """Return a recipe file's tree, and each key's `file:line`."""
    try:
        tree, node = _parsed(_text(path))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise MegarlError(f"{path}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise MegarlError(f"{path}: not YAML: {str(error).partition('\n')[0]}") from None
    if tree is None:
        raise MegarlError(
            f"{path}: the file is empty; write a recipe, or restore the one that was there"
        )
    if not isinstance(tree, dict):
        raise MegarlError(
            f"{path}:1: a recipe is a mapping of sections; this is a {type(tree).__name__}"
        )
    return tree, {(): str(path)} | _lines(node, path)


def _text(path: Path) -> str:
    """Read a recipe file. MegarlError if it cannot be read, is too large or is not
    UTF-8.
    """
    try:
        with opened(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise MegarlError(
                f"{path}: larger than {LARGEST} bytes, too large for a recipe; give another file"
            )
        return data.decode()
    except OSError as error:
        raise MegarlError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MegarlError(
            f"{path}:{line}: not UTF-8 text (byte {data[error.start]:#04x}); save it as UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """YAML without aliases and with bounded depth."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._refuse(
                f"the alias *{event.anchor} is not allowed; write its value out, or put it into a"
                " `base`"
            )
        if self.depth >= DEEPEST:
            self._refuse(f"mappings and lists are nested more than {DEEPEST} deep")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def _refuse(self, problem: str) -> NoReturn:
        raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)


def _parsed(text: str) -> tuple[Any, yaml.Node | None]:
    """Parse the only document in a text; return its values and its nodes, which have
    places. YAMLError for any fault.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.YAMLError:
        raise
    except (
        Exception
    ) as error:  # PyYAML may raise anything while it converts a date or a tagged value
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None
    finally:
        loader.dispose()


def _merged(under: RecipeTree, over: RecipeTree) -> RecipeTree:
    """Merge sections key by key; any other value in `over` replaces that in `under`."""
    both = {
        k: _merged(under[k], v)
        for k, v in over.items()
        if isinstance(v, dict) and isinstance(under.get(k), dict)
    }
    return under | over | both


def _with_suites(tree: RecipeTree) -> RecipeTree:
    """Fill in what a suite leaves out: a shipped suite of the same name has its other
    keys, the tasks its chat template.
    """
    match tree:
        case {"evaluation": {"suites": dict(suites)} as evaluation}:
            known = shipped_suites()
            chat = _chat_of_tasks(tree)
            filled = {name: given for name, given in suites.items() if isinstance(given, dict)}
            for name in filled.keys() & known.keys():
                filled[name] = _merged(yaml.safe_load(known[name].read_text()), filled[name])
            own = {"template", "agent"}  # an agent's requests get the template
            filled = {
                name: keys if own & keys.keys() else chat | keys for name, keys in filled.items()
            }
            return tree | {"evaluation": evaluation | {"suites": suites | filled}}
    return tree


def _chat_of_tasks(tree: RecipeTree) -> RecipeTree:
    """Return the keys of the chat template that all tasks without an agent share; empty
    if they share none.
    """
    match tree:
        case {"data": {"tasks": dict(tasks)}}:
            keys = ("template", "system", "template_options")
            asked = [
                task for task in tasks.values() if isinstance(task, dict) and not task.get("agent")
            ]
            chats = [{k: task[k] for k in keys if k in task} for task in asked]
            if (
                chats
                and chats[0].get("template") == "chat"
                and all(one == chats[0] for one in chats)
            ):
                return chats[0]
    return {}


def _lines(node: yaml.Node | None, path: Path, prefix: tuple[str, ...] = ()) -> Origin:
    """Return `file:line` of each key; a repeated key is an error."""
    places: Origin = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = (*prefix, str(key.value))
            if where in places:
                raise MegarlError(
                    f"{path}:{key.start_mark.line + 1}: {'.'.join(where)} is given twice"
                )
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
        raise MegarlError(f"{said}: sections are nested more than {DEEPEST} deep")
    here = tree
    for parent in parents:
        here = here.setdefault(parent, {})
        if not isinstance(here, dict):
            raise MegarlError(f"{said}: {parent} is a value, not a section")
    kind = _kind_at((*parents, last))
    empty = not value and (
        kind is str or "" in typing.get_args(kind)
    )  # `key=`: an empty text if the key takes one
    try:
        here[last] = "" if empty else _parsed(value)[0]
    except yaml.YAMLError:
        raise MegarlError(f"{said}: the value is not YAML") from None
    origin[(*parents, last)] = said


def _validated(tree: RecipeTree, origin: Origin) -> Recipe:
    """Return the recipe. MegarlError if its file has another schema or if it is
    invalid, with a line for each fault: `file:line: key: what is wrong`.
    """
    written_by = origin.get(("schema",), origin[()])
    check_schema(written_by, tree.pop("schema", SCHEMA_VERSION), SCHEMA_VERSION)
    faults: list[KeyFault] = []
    try:
        recipe = Recipe.model_validate(_adapted(tree, Recipe))
        for key, _, message in (problem.partition(": ") for problem in impossible(recipe)):
            faults.append((tuple(key.split(".")), message))
    except ValidationError as error:
        faults += [_fault(e, origin) for e in error.errors()]
    if faults:
        lines = (
            f"{_place(where, origin)}: {'.'.join(where)}: {message}" for where, message in faults
        )
        first, *rest = map(shortened, lines)
        raise MegarlError(listed(first, rest))
    return recipe


def _adapted(tree: Any, kind: Any) -> Any:
    """Convert YAML's values for pydantic's strict types: lists to tuples and, for float
    keys, strings such as `1e-6`, which YAML 1.1 does not read as numbers, to floats.
    `null` in place of a named section removes the base recipe's.
    """
    if isinstance(tree, dict):
        kept = {
            key: value
            for key, value in tree.items()
            if value is not None or not _has_sections(kind)
        }
        return {key: _adapted(value, kind_of(kind, key)) for key, value in kept.items()}
    if isinstance(tree, list):
        return tuple(_adapted(value, kind_of(kind, n)) for n, value in enumerate(tree))
    if isinstance(tree, str) and kind in (float, float | None):
        with contextlib.suppress(ValueError):
            return float(tree)
    return tree


def dump(recipe: Recipe) -> str:
    """Return the recipe as YAML that `load` reads, with the number of its schema."""
    tree = {"schema": SCHEMA_VERSION, **recipe.model_dump(mode="json")}
    # Only ASCII: PyYAML cannot read back some of the other characters that it writes
    # literally, such as U+0085.
    return yaml.safe_dump(tree, sort_keys=False, width=120)


def describe(recipe: Recipe) -> str:
    """Return the whole resolved tree as YAML, with each key's meaning and limits as
    comments.
    """
    return "\n".join(_described(recipe)) + "\n"


def flat(tree: RecipeTree, before: str = "") -> RecipeTree:
    """Return the values in a tree of mappings by their dotted keys. before: a prefix
    for the keys.
    """
    values: RecipeTree = {}
    for key, value in tree.items():
        values |= (
            flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
        )
    return values


def _described(section: BaseModel, indent: str = "") -> list[str]:
    lines: list[str] = []
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_described(value, indent + "  ")]
        elif isinstance(value, dict) and any(
            isinstance(part, BaseModel) for part in value.values()
        ):
            lines.append(_line(f"{indent}{name}:", field.description))
            for key, part in value.items():
                lines += [f"{indent}  {key}:", *_described(part, indent + "    ")]
        else:
            shown = yaml.safe_dump(
                values[name], default_flow_style=True, sort_keys=False, width=10_000
            )
            lines.append(
                _line(f"{indent}{name}: {shown.removesuffix('...\n').rstrip()}", field.description)
            )
    return lines


def _line(text: str, description: str | None) -> str:
    return f"{text:<44}  # {description}" if description else text


def differences(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) for every value that differs."""
    old = flat(before.model_dump(mode="json"))
    new = flat(after.model_dump(mode="json"))
    return [(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]

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
from typing import Any, NamedTuple, NoReturn

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megarl.core.base.errors import MegarlError, listed
from megarl.core.base.files import opened
from megarl.core.base.schema import check_schema
from megarl.core.recipe.rules import impossible
from megarl.core.recipe.section import RecipeTree
from megarl.core.recipe.tree import Recipe

type Key = tuple[str, ...]
"""A key's path in the tree, such as ("model", "dtype"); empty: the whole recipe."""


class KeyFault(NamedTuple):
    """A key of a recipe, and what is wrong with it."""

    key: Key
    message: str


SCHEMA_VERSION = 1
"""Version of RUN/recipe.yaml, in its key `schema`; recipes by hand need none."""
SUITES = ("evaluation", "suites")
CHAT_KEYS = ("template", "system", "template_options")
Origin = dict[Key, str]
"""The `file:line` or the override that set each key. Under the empty key: the source of
the whole recipe. A key of one part is written `origin["base",]`.
"""


def kind_of(kind: Any, key: object) -> Any:
    """Return the type of the value at this key in a section, mapping or list of type
    `kind`; Any if there is no such key.
    """
    container = typing.get_origin(kind)
    if container is dict:
        return typing.get_args(kind)[1]
    if container is tuple:
        return typing.get_args(kind)[0]
    if _is_section(kind) and key in kind.model_fields:
        return kind.model_fields[key].annotation
    return Any


LONGEST = 400
"""Characters of a line in an error; longer ones are shown without their middle."""


def shortened(line: str) -> str:
    """Return the line, without its middle if it is too long."""
    if len(line) <= LONGEST:
        return line
    return f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def _fault(error: ErrorDetails, origin: Origin) -> KeyFault:
    """Return the key and a message in this project's words for a fault that pydantic
    found.
    """
    # pydantic puts "[key]" where the name in a mapping is wrong, not its value
    key = tuple(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = _unknown(key)
    elif error["type"] == "missing":
        message = f"field required{_near_sibling(key[:-1], origin)}"
    elif error["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {error['input']!r}"
    while len(key) > 1 and key not in origin and key[:-1] in origin and key[-1].isdigit():
        key = key[:-1]  # an element of a list
    if error["type"] in ("missing", "string_pattern_mismatch"):
        message += _meaning(key)
    return KeyFault(key, message)


def _meaning(key: Key) -> str:
    """Return the key's description in brackets, empty if it has none."""
    section = _kind_at(key[:-1])
    if not _is_section(section) or key[-1] not in section.model_fields:
        return ""
    description = section.model_fields[key[-1]].description
    return f" ({description})" if description else ""


def _place(key: Key, origin: Origin) -> str:
    """Return the place of the key or its enclosing section; for a section made by
    overrides, that of its first key.
    """
    for length in range(len(key), 0, -1):
        section = key[:length]
        if section in origin:
            return origin[section]
        for inner_key, place in origin.items():
            if inner_key[:length] == section:
                return place
    return origin[()]


def _kind_at(key: Key) -> Any:
    """Return the type of the value at this key of a recipe; Any if there is none."""
    kind: Any = Recipe
    for part in key:
        kind = kind_of(kind, part)
    return kind


def _unknown(key: Key) -> str:
    """Say that there is no such key, and name the nearest or all of its section."""
    name = key[-1]
    if "lora" in name.lower():
        return "LoRA is not supported: a run trains all weights; leave it out"
    siblings = list(_kind_at(key[:-1]).model_fields)
    if nearest := _nearest(name, siblings):
        return f"unknown key; did you mean {nearest}?"
    return f"unknown key; known: {', '.join(siblings)}"


def _nearest(name: str, siblings: Sequence[str]) -> str:
    """Return the same key of another section, or the nearest one of this or any
    section; empty if none is near.
    """
    dotted_names = dict(_keys(Recipe))  # of the keys of all sections
    if name in dotted_names:
        return dotted_names[name]
    if close := difflib.get_close_matches(name, siblings, 1, cutoff=0.5):
        return close[0]
    if close := difflib.get_close_matches(name, dotted_names, 1, cutoff=0.8):
        return dotted_names[close[0]]
    return ""


def _near_sibling(section: Key, origin: Origin) -> str:
    """Suggest a similar name if a named section lacks a key, since its name may be a
    misspelling of another section's.
    """
    parent = section[:-1]
    if not _has_sections(_kind_at(parent)):
        return ""
    siblings = [key for key in origin if key[:-1] == parent and key != section]
    others = [key[-1] for key in siblings]
    if parent == SUITES:
        others += shipped_suites()
    close = difflib.get_close_matches(section[-1], others, 1)
    return f"; did you mean {'.'.join((*parent, close[0]))}?" if close else ""


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
    """Return whether a key's type is a section with keys of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _has_sections(kind: Any) -> bool:
    """Return whether this is a mapping of names to sections, such as tasks."""
    return typing.get_origin(kind) is dict and _is_section(kind_of(kind, ""))


SHIPPED = Path(__file__).parents[2] / "recipes"


def shipped() -> dict[str, Path]:
    """Return the shipped recipes: quickstart and its variants, those for GPUs, then the
    baselines of the ScaleRL paper.
    """
    paths = {path.stem: path for path in SHIPPED.glob("*.yaml")}
    ordered = {}
    for group in ("quickstart", "scalerl-", "qwen", ""):
        for name in sorted(paths):
            if name.startswith(group):
                ordered[name] = paths[name]  # a second assignment leaves it in its place
    return ordered


def shipped_suites() -> dict[str, Path]:
    """Return the shipped suites by name."""
    return {path.stem: path for path in sorted((SHIPPED / "suites").glob("*.yaml"))}


def shipped_studies() -> dict[str, Path]:
    """Return the shipped studies by name."""
    return {path.stem: path for path in sorted((SHIPPED / "studies").glob("*.yaml"))}


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
    if base:
        return base, load(base)
    return "the defaults, ScaleRL's", Recipe()


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
    places = {(*within, *key): place for key, place in origin.items()}
    places[()] = str(path)
    places[within] = f"{path}:1"
    _validated({"evaluation": {"suites": {path.stem: tree}}}, places)
    return tree


def _overridden(tree: RecipeTree, origin: Origin, overrides: Sequence[str]) -> Recipe:
    """Apply overrides to a tree, which changes, and return the recipe."""
    for override in overrides:
        _apply(tree, override, origin)
    return _validated(_with_suites(tree), origin)


def _find(name_or_path: str) -> Path:
    """Return the file of a shipped recipe's name, or of a path. MegarlError if it is
    neither.
    """
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
    raise MegarlError(
        f"no recipe {shortened(name_or_path)!r}: neither a file nor a shipped recipe; {hint}`megarl"
        " recipes` lists them"
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
        base_path = _find(base or named)
    except MegarlError as error:
        raise MegarlError(f"{place}: base: {error}") from None
    if base_path in (path, *derived):
        raise MegarlError(
            f"{place}: base: {base_path} is itself derived from this recipe; give another"
        )
    # what is set under with_base.NAME for this base is in the tree without these two
    for key, line in list(origin.items()):
        if key[:2] == ("with_base", base_path.stem) and len(key) > 2:
            origin[key[2:]] = line
    base_tree, base_origin = _read(base_path, (path, *derived))
    merged = _merged(_merged(base_tree, tree), by_base.get(base_path.stem, {}))
    return merged, base_origin | origin


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
        """Compose the next node as PyYAML does. ComposerError if it is an alias, or
        deeper than DEEPEST mappings and lists.
        """
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
        values = None if node is None else loader.construct_document(node)
        return values, node
    except yaml.YAMLError:
        raise
    # PyYAML may raise anything while it converts a date or a tagged value.
    except Exception as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None
    finally:
        loader.dispose()


def _merged(base: RecipeTree, changes: RecipeTree) -> RecipeTree:
    """Merge sections key by key; any other value in `changes` replaces the base's."""
    merged = base | changes
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merged(base[key], value)
    return merged


def _with_suites(tree: RecipeTree) -> RecipeTree:
    """Fill in what a suite leaves out: a shipped suite of the same name has its other
    keys, the tasks its chat template.
    """
    match tree:
        case {"evaluation": {"suites": dict(suites)} as evaluation}:
            chat = _chat_of_tasks(tree)
            filled = {name: _filled_suite(name, keys, chat) for name, keys in suites.items()}
            return tree | {"evaluation": evaluation | {"suites": filled}}
    return tree


def _filled_suite(name: str, keys: Any, chat: RecipeTree) -> Any:
    """Return a suite's keys and, from the shipped suite of its name, those that it
    lacks. One without a template also gets the tasks' keys of theirs (`chat`), but not
    with an agent: an agent's requests get the template anyway.
    """
    if not isinstance(keys, dict):
        return keys
    path = shipped_suites().get(name)
    if path is not None:
        keys = _merged(yaml.safe_load(path.read_text()), keys)
    if "template" in keys or "agent" in keys:
        return keys
    return chat | keys


def _chat_of_tasks(tree: RecipeTree) -> RecipeTree:
    """Return the keys of the chat template that all tasks without an agent share; empty
    if they share none.
    """
    chats = []
    match tree:
        case {"data": {"tasks": dict(tasks)}}:
            for task in tasks.values():
                if isinstance(task, dict) and not task.get("agent"):
                    chats.append({key: task[key] for key in CHAT_KEYS if key in task})
    if not chats or chats[0].get("template") != "chat":
        return {}
    if any(chat != chats[0] for chat in chats):
        return {}
    return chats[0]


def _lines(node: yaml.Node | None, path: Path, prefix: Key = ()) -> Origin:
    """Return `file:line` of each key; a repeated key is an error."""
    places: Origin = {}
    if not isinstance(node, yaml.MappingNode):
        return places
    for key_node, value in node.value:
        key = (*prefix, str(key_node.value))
        place = f"{path}:{key_node.start_mark.line + 1}"
        if key in places:
            raise MegarlError(f"{place}: {'.'.join(key)} is given twice")
        places[key] = place
        places.update(_lines(value, path, key))
    return places


def _apply(tree: RecipeTree, override: str, origin: Origin) -> None:
    """Set the key of an override such as `model.dtype=fp16` in the tree."""
    dotted_key, equals, value = override.partition("=")
    place = f"override {shortened(override)!r}"
    if not equals or not dotted_key:
        raise MegarlError(f"{place}: write key=value, such as model.tensor_parallel=2")
    key = tuple(dotted_key.split("."))
    if len(key) > DEEPEST + 1:
        raise MegarlError(f"{place}: sections are nested more than {DEEPEST} deep")
    section = tree
    for parent in key[:-1]:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise MegarlError(f"{place}: {parent} is a value, not a section")
    kind = _kind_at(key)
    takes_empty_text = kind is str or "" in typing.get_args(kind)
    try:
        if not value and takes_empty_text:
            section[key[-1]] = ""
        else:
            section[key[-1]] = _parsed(value)[0]
    except yaml.YAMLError:
        raise MegarlError(f"{place}: the value is not YAML") from None
    origin[key] = place


def _validated(tree: RecipeTree, origin: Origin) -> Recipe:
    """Return the recipe. MegarlError if its file has another schema or if it is
    invalid, with a line for each fault: `file:line: key: what is wrong`.
    """
    written_by = origin.get(("schema",), origin[()])
    check_schema(written_by, tree.pop("schema", SCHEMA_VERSION), SCHEMA_VERSION)
    faults: list[KeyFault] = []
    try:
        recipe = Recipe.model_validate(_adapted(tree, Recipe))
        for problem in impossible(recipe):
            key, _, message = problem.partition(": ")
            faults.append(KeyFault(tuple(key.split(".")), message))
    except ValidationError as error:
        faults += [_fault(details, origin) for details in error.errors()]
    if faults:
        lines = []
        for fault in faults:
            place = _place(fault.key, origin)
            lines.append(shortened(f"{place}: {'.'.join(fault.key)}: {fault.message}"))
        raise MegarlError(listed(lines[0], lines[1:]))
    return recipe


def _adapted(tree: Any, kind: Any) -> Any:
    """Convert YAML's values for pydantic's strict types: lists to tuples and, for float
    keys, strings such as `1e-6`, which YAML 1.1 does not read as numbers, to floats.
    `null` in place of a named section removes the base recipe's.
    """
    if isinstance(tree, dict):
        adapted = {}
        for key, value in tree.items():
            if value is not None or not _has_sections(kind):
                adapted[key] = _adapted(value, kind_of(kind, key))
        return adapted
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


def flat(tree: RecipeTree, prefix: str = "") -> RecipeTree:
    """Return the values in a tree of mappings by their dotted keys, after `prefix`."""
    values: RecipeTree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _described(section: BaseModel, indent: str = "") -> list[str]:
    """Return the section's lines of YAML, each key with its description."""
    lines: list[str] = []
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_described(value, indent + "  ")]
        elif _has_sections(field.annotation) and value:
            lines.append(_line(f"{indent}{name}:", field.description))
            for key, part in value.items():
                lines += [f"{indent}  {key}:", *_described(part, indent + "    ")]
        else:
            text = yaml.safe_dump(
                values[name], default_flow_style=True, sort_keys=False, width=10_000
            )
            text = text.removesuffix("...\n").rstrip()
            lines.append(_line(f"{indent}{name}: {text}", field.description))
    return lines


def _line(text: str, description: str | None) -> str:
    """Return a line of YAML with a key's description as a comment."""
    return f"{text:<44}  # {description}" if description else text


def differences(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) for every value that differs."""
    old_values = flat(old.model_dump(mode="json"))
    new_values = flat(new.model_dump(mode="json"))
    changes = []
    for key in old_values | new_values:
        change = (key, old_values.get(key), new_values.get(key))
        if change[1] != change[2]:
            changes.append(change)
    return changes

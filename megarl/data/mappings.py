"""From a row of a published set to a prompt: which columns are what, and what of them is the answer.

`MAPPINGS` has the field's sets by name; each says where its schema is from. A recipe names one (`mapping: gsm8k`), or names
columns (`columns: {prompt: problem, answer: solution}`), or both, the columns going first. A dot goes into a column of
columns: `reward_model.ground_truth`. Neither: the project's own rows, {"id", "prompt", "answer", "difficulty"}.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megarl.data.text import fingerprint

LARGEST_ANSWER = 1 << 20
"""Characters. Unit tests of code reach hundreds of megabytes a problem."""


class Row(msgspec.Struct, frozen=True):
    """What the project trains on. difficulty: smaller is easier; 0 where it is not known."""

    id: str
    prompt: str
    answer: str
    difficulty: int = 0


class UnfitError(Exception):
    """A row that is not of its schema; the text says how."""


type Raw = Mapping[str, Any]
type Getter = Callable[[Raw], Any]


def own(raw: Raw) -> Row:
    """A row of the project's own form; other keys are passed over."""
    try:
        return msgspec.convert(raw, Row)
    except msgspec.ValidationError as error:
        raise UnfitError(f"not a row of {', '.join(Row.__struct_fields__)}: {error}") from None


@dataclass(frozen=True)
class Columns:
    """How a row of another schema is read. Without an id a prompt is named by its text, the same in any order of rows."""

    prompt: Getter
    answer: Getter
    difficulty: Getter = lambda raw: 0
    id: Getter | None = None

    def __call__(self, raw: Raw) -> Row:
        prompt = _text(self.prompt(raw))
        name = f"{fingerprint(prompt):016x}" if self.id is None else str(self.id(raw))
        return Row(name, prompt, _answer(self.answer(raw)), _whole(self.difficulty(raw)))


def mapping_of(name: str, columns: Mapping[str, str]) -> Callable[[Raw], Row]:
    """The reader of a recipe's `mapping` ("": none) and `columns` ("": not given)."""
    given: dict[str, Any] = {field: column(path) for field, path in columns.items() if path}
    if not name and not given:
        return own
    return replace(MAPPINGS[name] if name else Columns(column("prompt"), column("answer")), **given)


def column(path: str) -> Getter:
    """The value at a dotted path."""

    def get(raw: Raw) -> Any:
        here: Any = raw
        for key in path.split("."):
            if not isinstance(here, Mapping) or key not in here:
                raise UnfitError(f"no column {path!r}; the row has {', '.join(map(str, raw))}")
            here = here[key]
        return here

    return get


# Values


def _text(value: Any) -> str:
    """A prompt: text, or one message of the user's as a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        return _text(value[0].get("content"))
    raise UnfitError(f"the prompt is neither text nor one message of the user's: {_shown(value)}")


def _answer(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UnfitError(f"the answer is neither text nor a number: {_shown(value)}")


def _whole(value: Any) -> int:
    """A difficulty: a whole number, or text with one in it, such as `Level 5`."""
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = re.search(r"-?\d+", value) if isinstance(value, str) else None
    if number is None:
        raise UnfitError(f"the difficulty is not a whole number: {_shown(value)}")
    return int(number.group())


def _shown(value: Any) -> str:
    return repr(value)[:60]


# The sets


def eighths(raw: Raw) -> int:
    """Polaris: `5/8` is the pass rate of DeepSeek-R1-Distill-Qwen-7B. Failures in eight are the difficulty."""
    rate = column("difficulty")(raw)
    parts = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", rate) if isinstance(rate, str) else None
    if parts is None:
        raise UnfitError(f"the difficulty is no pass rate such as 5/8: {_shown(rate)}")
    return int(parts[2]) - int(parts[1])


def after_hashes(raw: Raw) -> str:
    """GSM8K: what stands behind the last `####`, thousands not divided by commas."""
    _, hashes, answer = _text(column("answer")(raw)).rpartition("####")
    if not hashes:
        raise UnfitError("the answer has no ####")
    return answer.strip().replace(",", "")


def boxed_answer(raw: Raw) -> Any:
    """MATH: the column `answer` where a set has one (MATH-500), else the last box of the solution."""
    if "answer" in raw:
        return raw["answer"]
    found = last_box(_text(column("solution")(raw)))
    if found is None:
        raise UnfitError(r"the solution has no \boxed{}")
    return found


def last_box(text: str) -> str | None:
    r"""What is in the last `\boxed{…}` or `\fbox{…}`, braces within it matched; of `\boxed 5` the 5."""
    begin = max((m.end() for m in re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])", text)), default=None)
    if begin is None:
        return None
    rest = text[begin:].lstrip()
    if not rest.startswith("{"):
        return next(iter(re.findall(r"^[^\s$]+", rest)), None)
    depth = 0
    for n, sign in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return rest[1:n]
    return None


def math_level(raw: Raw) -> int:
    """MATH: `Level 5`, in MATH-500 the number 5; a few problems have `Level ?`, read as not known."""
    level = raw.get("level")
    return 0 if isinstance(level, str) and not re.search(r"\d", level) else _whole(level)


def with_starter_code(raw: Raw) -> str:
    """DeepCoder: the problem, and the code to begin with where a row has some (those of LiveCodeBench)."""
    problem, starter = _text(column("problem")(raw)), raw.get("starter_code")
    return f"{problem}\n\nBegin with this code:\n```python\n{starter}\n```" if starter else problem


def unit_tests(raw: Raw) -> str:
    """DeepCoder: the tests of its four parts in the form of the grader of code, as JSON:

    {"tests": [{"input": "1 2\\n", "output": "3\\n"}]}           the program reads stdin, writes stdout
    {"tests": [{"call": "add(1, 2)", "result": "3"}]}           a function is called
    """
    tests = _decoded(column("tests")(raw), "tests")
    named = None
    if isinstance(tests, Mapping):  # TACO: columns of inputs and outputs
        named, inputs, outputs = tests.get("fn_name"), tests.get("inputs", []), tests.get("outputs", [])
        if len(inputs) != len(outputs):
            raise UnfitError("the tests have not as many outputs as inputs")
        tests = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list) or not all(
        isinstance(t, Mapping) and {"input", "output"} <= t.keys() for t in tests
    ):
        raise UnfitError("the tests are no list of input and output")
    return msgspec.json.encode({"tests": [_test(test, named, raw) for test in tests]}).decode() if tests else ""


def _test(test: Raw, named: str | None, raw: Raw) -> dict[str, str]:
    """One test. A function's arguments are one JSON value a line in LiveCodeBench, a list in the sets that come from APPS,
    which wrap its result in a list of one."""
    if test.get("testtype") == "functional":
        function = _decoded(raw.get("metadata"), "metadata")
        function = function.get("func_name") if isinstance(function, Mapping) else None
        arguments = [_decoded(line, "arguments") for line in str(test["input"]).split("\n")]
        return _call(function, arguments, _decoded(test["output"], "output"), raw)
    if named or test.get("type") == "function_call":
        wanted = test["output"]
        wanted = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted
        return _call(named or test.get("fn_name"), test["input"], wanted, raw)
    return {"input": _lines(test["input"]), "output": _lines(test["output"])}


def _call(function: Any, arguments: Any, result: Any, raw: Raw) -> dict[str, str]:
    if not isinstance(function, str) or not function.isidentifier() or not isinstance(arguments, list):
        raise UnfitError("the tests call a function, and none is named, or its arguments are no list")
    of = "Solution()." if "class Solution" in str(raw.get("starter_code") or "") else ""
    return {"call": f"{of}{function}({', '.join(map(repr, arguments))})", "result": repr(result)}


def _lines(value: Any) -> str:
    """What a program reads or prints: text, or its lines as a list."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str):
        return value
    raise UnfitError(f"a test reads or prints what is not text: {_shown(value)}")


def _decoded(value: Any, what: str) -> Any:
    """Parts of DeepCoder have as objects what others have as their JSON."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError as error:
        raise UnfitError(f"the {what} are not JSON: {error}") from None


MAPPINGS: dict[str, Columns] = {
    # huggingface.co/datasets/POLARIS-Project/Polaris-Dataset-53K, its card: problem, answer, and difficulty, "the pass rate
    # of the problem estimated by Deepseek-R1-distill-Qwen-7B", written 0/8 … 7/8.
    "polaris": Columns(column("problem"), column("answer"), eighths),
    # huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset: deepscaler.json has problem, answer, solution. Its
    # discussion 4: six rows have no answer; they are left out and named.
    "deepscaler": Columns(column("problem"), column("answer")),
    # huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k, schema as on the cards of its copies (koajoel/…-dedup):
    # data_source, prompt [{content, role}], ability, reward_model {ground_truth, style}, extra_info {index}. The published
    # file repeats its prompts a hundred times. The prompt keeps its instruction to end with `Answer: …`.
    "dapo-math-17k": Columns(column("prompt"), column("reward_model.ground_truth"), id=column("extra_info.index")),
    # huggingface.co/datasets/agentica-org/DeepCoder-Preview-Dataset, parts primeintellect, taco, lcbv5, codeforces: problem,
    # tests (JSON), in some starter_code and metadata {func_name}. Forms of the tests as its readers take them: a list of
    # {input, output, type | testtype}; of TACO {inputs, outputs, fn_name}.
    "deepcoder": Columns(with_starter_code, unit_tests),
    # huggingface.co/datasets/openai/gsm8k, main: question, answer ("… #### 72", arXiv 2110.14168).
    "gsm8k": Columns(column("question"), after_hashes),
    # github.com/hendrycks/math (arXiv 2103.03874), huggingface.co/datasets/EleutherAI/hendrycks_math: problem, level, type,
    # solution; HuggingFaceH4/MATH-500: problem, solution, answer, subject, level, unique_id.
    "math": Columns(column("problem"), boxed_answer, math_level),
}

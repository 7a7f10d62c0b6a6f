"""Maps a row of a published set to a prompt: which column holds what, and which part of
it is the answer.

`MAPPINGS` holds well-known sets by name, each with the source of its schema. A recipe
names one (`mapping: gsm8k`), or names columns (`columns: {prompt: problem, answer:
solution}`), or both, in which case the columns take precedence. A dot reaches into a
nested column: `reward_model.ground_truth`. With neither, rows are in the project's own
format: {"prompt", "answer", "id", "difficulty"}, of which the last two may be missing.
columns.py reads prompts and answers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megarl.core.base.contracts import last_box
from megarl.core.recipe import ColumnName
from megarl.tasks.data import programs
from megarl.tasks.data.columns import Columns, alternatives, column, optional, text_of, whole_of
from megarl.tasks.data.rows import PromptRow, Raw, UnfitError, abbreviated

OWN = Columns(column("prompt"), column("answer"), optional("difficulty"), optional("id"))
"""The project's own format."""
OWN_COLUMNS = ("prompt", "answer", "id", "difficulty")


def read_own(raw: Raw) -> PromptRow:
    """Read a row in the project's own format; other keys are ignored."""
    missing = [name for name in ("prompt", "answer") if name not in raw]
    if missing:
        columns = ", ".join(map(str, raw))
        raise UnfitError(
            f"no column {' or '.join(missing)}; the row has {columns}: {_naming(missing, raw)}"
        )
    return OWN(raw)


def _naming(missing: list[str], raw: Raw) -> str:
    """Return advice on how to say which columns the missing fields are in: with the
    names of this row's other columns, or with COLUMN where these do not suffice.
    missing: `prompt`, `answer` or both.
    """
    unused = [name for name in raw if name not in OWN_COLUMNS]
    candidates = [*unused, "COLUMN", "COLUMN"]  # at least as many as are missing
    pairs = list(zip(missing, candidates, strict=False))
    options = " ".join(f"--column {field}={name}" for field, name in pairs)
    keys = ", ".join(f"{field}: {name}" for field, name in pairs)
    return (
        f"say which it is, such as {options} (in a recipe columns: {{{keys}}}), or which set it is"
        " (mapping, --mapping)"
    )


def mapping_of(name: str, columns: Mapping[ColumnName, str]) -> Callable[[Raw], PromptRow]:
    """Return the reader for a recipe's `mapping` (its name, "" for none) and `columns`
    (field ─► column, "" for one that is not given).
    """
    getters: dict[str, Any] = {field: column(path) for field, path in columns.items() if path}
    if name:
        return replace(MAPPINGS[name], **getters)
    if getters:
        return replace(Columns(column("prompt"), column("answer")), **getters)
    return read_own


# The sets


def eighths(raw: Raw) -> int:
    """Read Polaris's difficulty. `5/8` is the pass rate of DeepSeek-R1-Distill-Qwen-7B;
    the difficulty is its 3 failures.
    """
    rate = column("difficulty")(raw)
    parts = None
    if isinstance(rate, str):
        parts = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", rate)
    if parts is None:
        raise UnfitError(f"the difficulty is not a pass rate such as 5/8: {abbreviated(rate)}")
    passes = int(parts[1])
    attempts = int(parts[2])
    return attempts - passes


def after_hashes(raw: Raw) -> str:
    """Read a GSM8K answer: the text after the last `####`, without thousands
    separators.
    """
    _, hashes, answer = text_of(column("answer")(raw)).rpartition("####")
    if not hashes:
        raise UnfitError("the answer has no ####")
    return answer.strip().replace(",", "")


def boxed_answer(raw: Raw) -> Any:
    """Read a MATH answer: the column `answer` if there is one (MATH-500), else the last
    box of the solution.
    """
    if "answer" in raw:
        return raw["answer"]
    answer = last_box(text_of(column("solution")(raw)))
    if answer is None:
        raise UnfitError(r"the solution has no \boxed{}")
    return answer


def math_level(raw: Raw) -> int:
    """Read a MATH level: `Level 5`, or the number 5 in MATH-500; a few problems have
    `Level ?`, read as unknown.
    """
    level = raw.get("level")
    if isinstance(level, str) and not re.search(r"\d", level):
        return 0
    return whole_of(level)


MAPPINGS: dict[str, Columns] = {
    # huggingface.co/datasets/POLARIS-Project/Polaris-Dataset-53K, dataset card:
    # problem, answer, and difficulty, "the pass rate of the problem estimated by
    # Deepseek-R1-distill-Qwen-7B", written 0/8 … 7/8.
    "polaris": Columns(column("problem"), column("answer"), eighths),
    # huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset: deepscaler.json
    # has problem, answer, solution. Per its discussion 4, six rows have no answer; they
    # are left out and reported.
    "deepscaler": Columns(column("problem"), column("answer")),
    # verl's format, github.com/volcengine/verl, docs "Prepare Data for Post-Training":
    # data_source, prompt [{role, content}], ability, reward_model {style,
    # ground_truth}, extra_info. Some sets, such as Skywork-OR1-RL-Data, give the ground
    # truth as the JSON text of a list of accepted answers. extra_info.index is not
    # unique where sets were joined.
    "verl": Columns(column("prompt"), alternatives("reward_model.ground_truth")),
    # huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k, schema as on the cards of
    # its copies (koajoel/…-dedup): data_source, prompt [{content, role}], ability,
    # reward_model {ground_truth, style}, extra_info {index}. The published file repeats
    # each prompt a hundred times. The prompt keeps its instruction to end with `Answer:
    # …`.
    "dapo-math-17k": Columns(
        column("prompt"), column("reward_model.ground_truth"), id=column("extra_info.index")
    ),
    # huggingface.co/datasets/agentica-org/DeepCoder-Preview-Dataset, parts
    # primeintellect, taco, lcbv5, codeforces: problem, tests (JSON), in some parts
    # starter_code and metadata {func_name}. Tests have the forms that its own readers
    # accept: a list of {input, output, type | testtype}; for TACO {inputs, outputs,
    # fn_name}.
    "deepcoder": Columns(programs.with_starter_code("problem"), programs.unit_tests),
    # huggingface.co/datasets/openai/gsm8k, main: question, answer ("… #### 72", arXiv
    # 2110.14168).
    "gsm8k": Columns(column("question"), after_hashes),
    # github.com/hendrycks/math (arXiv 2103.03874),
    # huggingface.co/datasets/EleutherAI/hendrycks_math: problem, level, type, solution;
    # HuggingFaceH4/MATH-500: problem, solution, answer, subject, level, unique_id. AIME
    # 2024 and 2025 have the same columns: HuggingFaceH4/aime_2024,
    # yentinglin/aime_2025.
    "math": Columns(column("problem"), boxed_answer, math_level),
    # github.com/LiveCodeBench (arXiv 2403.07974),
    # huggingface.co/datasets/livecodebench/code_generation_lite: question_content,
    # question_id, starter_code, public_test_cases, private_test_cases, metadata
    # {func_name}; a test {input, output, testtype}.
    "livecodebench": Columns(
        programs.with_starter_code("question_content"),
        programs.livecodebench_tests,
        id=column("question_id"),
    ),
    # github.com/openai/human-eval, huggingface.co/datasets/openai/openai_humaneval:
    # task_id, prompt, canonical_solution, test, entry_point.
    "humaneval": Columns(column("prompt"), programs.humaneval_check, id=column("task_id")),
    # github.com/google-research/google-research/tree/master/mbpp,
    # huggingface.co/datasets/google-research-datasets/mbpp: full (task_id, text, code,
    # test_list, test_setup_code, challenge_test_list), sanitized (task_id, prompt,
    # code, test_imports, test_list).
    "mbpp": Columns(programs.mbpp_prompt, programs.mbpp_tests, id=column("task_id")),
}

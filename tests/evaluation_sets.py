"""A tiny model that can read any text, and a few rows of each suite's set in its
published schema, written here.
"""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_llama

POSITIONS = 1024


def byte_llama(path: Path) -> Any:
    """A Llama with random weights and a tokenizer of bytes, in `path`; the model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, "</think>": 1} | {sign: n + 2 for n, sign in enumerate(alphabet)}
    backend = Backend(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "</think>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    made.save_pretrained(path)
    return tiny_llama(
        path,
        vocab_size=len(vocabulary),
        max_position_embeddings=POSITIONS,
        eos_token_id=0,
        bos_token_id=None,
    )


GSM8K = [
    {
        "question": "Ann has 3 apples and buys 4 more. How many has she?",
        "answer": "3 + 4 = <<3+4=7>>7\n#### 7",
    },
    {
        "question": "A pen costs 2 dollars. What do 6 pens cost?",
        "answer": "6 * 2 = <<6*2=12>>12\n#### 12",
    },
    {
        "question": "Bo had 1,200 stamps and sold 200. How many are left?",
        "answer": "1200 - 200\n#### 1,000",
    },
]
AIME = [
    {
        "id": 60,
        "problem": "Find $1+1$.",
        "solution": "It is $\\boxed{002}$.",
        "answer": "002",
        "url": "u",
        "year": "2024",
    },
    {
        "id": 61,
        "problem": "Find $5^2$.",
        "solution": "It is $\\boxed{025}$.",
        "answer": "025",
        "url": "u",
        "year": "2024",
    },
]
MATH_500 = [
    {
        "problem": "Half of $3$?",
        "solution": "$\\boxed{\\frac{3}{2}}$",
        "answer": "\\frac{3}{2}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    },
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": (
            "from typing import List\n\n\ndef largest(xs: List[int]) -> int:\n"
            "    '''The largest of xs.\n\n    >>> largest([1, 3])\n    3\n    '''\n"
        ),
        "canonical_solution": "    return max(xs)\n",
        "test": (
            "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3]) == 3\n"
            "    assert candidate([-2]) == -2\n"
        ),
        "entry_point": "largest",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": 'def double(x: int) -> int:\n    """Twice x."""\n',
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(4) == 8\n",
        "entry_point": "double",
    },
]
MBPP = [
    {
        "task_id": 11,
        "text": "Write a function to add two numbers.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    {
        "task_id": 12,
        "prompt": "Write a function to find the root of a number.",  # sanitised
        "source_file": "Benchmark Questions Verification V2.ipynb",
        "code": (
            "import math\ndef helper(x):\n    return x\ndef root(x):\n    return"
            " math.sqrt(helper(x))"
        ),
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(root(2), 1.4142135, abs_tol=1e-5)"],
    },
]
_STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
_CALLED = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]


def _private(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LIVECODEBENCH = [
    {
        "question_title": "A+B",
        "question_content": "Read two numbers and print their sum.",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_id": "abc301",
        "contest_date": "2023-05-13T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(_STDIN),
        "private_test_cases": _private([{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]),
        "metadata": "{}",
    },
    {
        "question_title": "total",
        "question_content": "Add all.",
        "platform": "leetcode",
        "question_id": "2727",
        "contest_id": "weekly-1",
        "contest_date": "2023-04-02T00:00:00",
        "starter_code": (
            "class Solution:\n    def total(self, xs: List[int], more: int) -> int:\n        "
        ),
        "difficulty": "easy",
        "public_test_cases": json.dumps(_CALLED),
        "private_test_cases": json.dumps(_CALLED),
        "metadata": json.dumps({"func_name": "total"}),
    },
]
SETS: dict[str, list[dict[str, Any]]] = {
    "aime24": AIME,
    "aime25": AIME,
    "math-500": MATH_500,
    "gsm8k": GSM8K,
    "livecodebench": LIVECODEBENCH,
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
}

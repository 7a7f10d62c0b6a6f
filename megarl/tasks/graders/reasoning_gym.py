"""The grader `reasoning-gym`: a family's own scorer judges the answer. It runs in
worker processes (pool.py).

    answer ─► the last <answer>…</answer>, else the last box, else all of it
        ─► score_answer of the family: 0 to 1

Only the full score is right: most scorers give a little for any text. A few scorers
evaluate the answer as Python; what these are given is restricted to lists, or to
formulas, that can do nothing but be evaluated.
"""

import re

from megarl.core.base.contracts import last_box
from megarl.tasks.data.reasoning_gym import RIGHT_FROM, problem_of
from megarl.tasks.graders.answer import Submission

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LIST = re.compile(r"""[\w\s\[\],'"-]*+""", re.ASCII)
"""A literal, or words: it calls nothing, and no attribute is read."""
FUNCTIONS = "sqrt|exp|log|ln|sinh?|cosh?|tanh?|cot|sec|csc|a(?:sin|cos|tan)|atan|Abs|pi"
FORMULA = re.compile(
    rf"(?>\s|\d++(?:\.\d*+)?(?:[eE][-+]?\d++)?|\.\d++|(?:{FUNCTIONS}|[A-Za-z])(?!\w)|[-+*/^(),])*+",
    re.ASCII,
)
"""Numbers, letters, operations, and functions of one name; no attribute, text or other
function.
"""
EVALUATED = {
    "binary_matrix": LIST,
    "n_queens": LIST,
    "spiral_matrix": LIST,
    "string_insertion": LIST,
    "countdown": FORMULA,
    "intermediate_integration": FORMULA,
    "polynomial_multiplication": FORMULA,
    "puzzle24": FORMULA,
    "simple_integration": FORMULA,
}
"""The families whose scorers evaluate an answer, with Python's `eval` or sympy's
`parse_expr`, and what they are given.
"""


def score(submission: Submission) -> float:
    """Return the family's score, from 0 to 1. ValueError if the expected answer is no
    problem of reasoning-gym.
    """
    problem = problem_of(submission.expected)
    answer = final_answer(submission.answer)
    allowed = EVALUATED.get(problem.family)
    if allowed and not allowed.fullmatch(answer):
        return 0.0
    return problem.score(answer)


def is_right(submission: Submission) -> bool:
    """Return whether the answer has the full score."""
    return score(submission) >= RIGHT_FROM


def final_answer(text: str) -> str:
    """Return what a scorer is given: the text in the last answer tags, else in the last
    box, else all.
    """
    tagged = ANSWER.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    box = last_box(text)
    if box is None:
        return text.strip()
    return box.strip()

"""A grader of your own: it says right or wrong. Copy it to where you start megarl, and
name it in the recipe:

data: {tasks: {sums: {grader: "my_grader:last_number"}}}

Before you train with it, score a model that has not been trained (`megarl eval`): if
nothing is right, or all is, look at the answers before you look at the model.
"""

import re

from megarl.tasks.graders.answer import Submission

NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def last_number(submission: Submission) -> bool:
    """Return whether the last number in the answer is the expected one.

    All that a submission has is text, `expected` too: convert both sides before you
    compare them.
    """
    if submission.truncated:  # it was cut off, and its last number is not what it would have said
        return False
    numbers = NUMBER.findall(submission.answer.replace(",", ""))
    if not numbers:
        return False
    return float(numbers[-1]) == float(submission.expected)

"""A reader of expected answers in place of the grader's,
with hostile ones among them.
"""

import os

from megarl.tasks.graders.answer import Submission


def reads(submission: Submission) -> bool:
    """Return whether an answer has no question mark; some never return, or end the
    process.
    """
    match submission.expected:
        case "hangs":
            while True:
                pass
        case "dies" | "dies 2":
            os._exit(1)
        case "memory":
            bytearray(1 << 50)
    return "?" not in submission.expected

"""The functions that worker processes run: `math`, and the user's own, named
`package.module:function`.

A function takes a Submission and returns a number, or a bool for right and wrong; None
or NaN if it cannot judge.
"""

import inspect
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

from megarl.core.base.errors import MegarlError
from megarl.core.base.process import imported
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.math import is_equal

Function = Callable[[Submission], float | None]
MEMORY_BYTES = 4 << 30
"""Address space of a `math` process. An answer that needs more gets an error."""
IMPORT_LIMIT_S = 120.0


def same_in_mathematics(submission: Submission) -> bool:
    """Return whether the answer equals the expected one: the grader `math`."""
    return is_equal(submission.answer, submission.expected, submission.prompt)


def named(grader: str) -> Function:
    """Return the function that a recipe names `math`, `reasoning-gym` or
    `package.module:function`.
    """
    if grader == "math":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return same_in_mathematics
    if grader == "reasoning-gym":
        from megarl.tasks.data.reasoning_gym import import_package
        from megarl.tasks.graders.reasoning_gym import is_right

        import_package()

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return is_right
    return imported(grader)


def environment() -> dict[str, str]:
    """Return a worker's environment variables; with them it finds this process's
    modules and the working directory's, and a folder for temporary files even if TMPDIR
    names one that this node does not have.
    """
    path = os.pathsep.join([*(p for p in sys.path if p), os.getcwd()])
    return os.environ | {"PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()}


def import_problem(code: str, *arguments: str) -> str:
    """Run this code in another process, since importing may do anything; return its
    error's text if it fails, else "".
    """
    placed = (
        "import sys; sys.excepthook = lambda kind, error, _: print(f'{kind.__name__}: {error}',"
        " file=sys.stderr)"
    )
    words = [
        sys.executable,
        "-c",
        f"{placed}\n{code}",
        *arguments,
    ]  # a traceback's last line has no place of a SyntaxError
    try:
        done = subprocess.run(
            words, env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_LIMIT_S:g} s"
    return (
        (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        if done.returncode
        else ""
    )


def check_importable(what: str, function: str, may_be_async: bool = False) -> None:
    """Raise MegarlError if this function cannot be imported and called. what: its
    description in the message.
    """
    code = f"from {__name__} import usable; usable({function!r}, {may_be_async})"
    if said := import_problem(code):
        must = (
            f"it must be a function of one argument in a module on PYTHONPATH or in {os.getcwd()}"
        )
        raise MegarlError(f"{what} {function} cannot be used: {said}; {must}")


def usable(function: str, may_be_async: bool) -> None:
    """Import a function; TypeError if it cannot be called with one argument, or returns
    a coroutine and must not.
    """
    found = named(function)
    if not callable(found):
        raise TypeError("it cannot be called")
    if inspect.iscoroutinefunction(found) and not may_be_async:
        raise TypeError("it is async; the score must be what it returns")
    with suppress(ValueError):  # some builtins have no signature
        inspect.signature(found).bind(None)

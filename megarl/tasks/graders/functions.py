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
SHORT_ERRORS = (
    "import sys; sys.excepthook = lambda kind, error, _: print(f'{kind.__name__}: {error}',"
    " file=sys.stderr)"
)
"""Makes a process print an error as one line. The last line of a traceback would lack
the place of a SyntaxError.
"""


def same_in_mathematics(submission: Submission) -> bool:
    """Return whether the answer equals the expected one: the grader `math`."""
    return is_equal(submission.answer, submission.expected, submission.prompt)


def named(grader: str) -> Function:
    """Return the function that a recipe names `math`, `reasoning-gym` or
    `package.module:function`. For the first two it limits this process's memory, too.
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
    folders = [folder for folder in sys.path if folder]
    path = os.pathsep.join([*folders, os.getcwd()])
    return os.environ | {"PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()}


def import_problem(code: str, *arguments: str) -> str:
    """Run this code in another process, since importing may do anything; return its
    error's text if it fails, else "".
    """
    command = [sys.executable, "-c", f"{SHORT_ERRORS}\n{code}", *arguments]
    try:
        process = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_LIMIT_S:g} s"
    if process.returncode == 0:
        return ""
    lines = process.stderr.strip().splitlines()
    return lines[-1] if lines else f"status {process.returncode}"


def check_importable(description: str, function: str, may_be_async: bool = False) -> None:
    """Raise MegarlError if this function cannot be imported and called, which another
    process tries (`check_usable`). description: what it is, for the message.
    """
    problem = import_problem(
        f"from {__name__} import check_usable; check_usable({function!r}, {may_be_async})"
    )
    if problem:
        raise MegarlError(
            f"{description} {function} cannot be used: {problem}; it must be a function of one"
            f" argument in a module on PYTHONPATH or in {os.getcwd()}"
        )


def check_usable(name: str, may_be_async: bool) -> None:
    """Import a function; TypeError if it cannot be called with one argument, or returns
    a coroutine and must not, or is of Python's own library, such as `json:dumps`.
    """
    function = named(name)
    if not callable(function):
        raise TypeError("it cannot be called")
    is_of_a_module = inspect.isroutine(function) or inspect.isclass(function)
    package = str(function.__module__).partition(".")[0] if is_of_a_module else ""
    if package in sys.stdlib_module_names:
        raise TypeError("it is of Python's own library")
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise TypeError("it is async; the score must be what it returns")
    with suppress(ValueError):  # some builtins have no signature
        inspect.signature(function).bind(None)  # TypeError unless one argument fits

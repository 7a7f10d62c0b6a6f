"""Tests that are code themselves (HumanEval's `check(candidate)`): what passes, and
programs that try without being right.
"""

import asyncio
import json

import pytest
import uvloop

from megarl.core.base.contracts import GraderDown, Verdict
from megarl.tasks.data.mappings import MAPPINGS
from megarl.tasks.graders.answer import Submission, judged
from megarl.tasks.graders.code import Code
from megarl.tasks.graders.sandbox import Limits, Sandbox, SandboxKind
from tests.processes import ended_before_it_is_asked
from tests.unit.tasks.graders.asking import LIMITS, SHORT, sandbox

pytestmark = pytest.mark.processes

CHECK = """
METADATA = {'author': 'megarl', 'dataset': 'test'}

def check(candidate):
    for n in range(50):
        assert candidate(n) == secret_of(n), "of all numbers"
    assert abs(candidate(0.5) - 4711.5) < 1e-6
    assert candidate([1, 2]) == [4712, 4713]
"""
SECRET = "def secret_of(n):\n    return n + 4711\n"
RIGHT = (
    "def f(x):\n    print('noise')\n    return [n + 4711 for n in x] if isinstance(x, list) else x"
    " + 4711\n"
)


def verdict(
    kind: SandboxKind, program: str, check: str = SECRET + CHECK, limits: Limits = LIMITS
) -> Verdict:
    """In uvloop, as the controller runs it."""
    test = {"check": check, "entry_point": "f"}
    answer = Submission(f"```python\n{program}\n```", json.dumps({"tests": [test]}))

    async def run() -> Verdict:
        return await Code(sandbox(kind, limits)).check(answer)

    return uvloop.run(run())


def checked(*asserts: str) -> str:
    return "def check(candidate):\n" + "\n".join(f"    {line}" for line in asserts)


def test_right_and_wrong(kind: SandboxKind) -> None:
    assert verdict(kind, RIGHT) == judged(True)
    assert verdict(kind, RIGHT.replace("else x + 4711", "else 4711")) == judged(False)
    assert verdict(kind, "def g(x): return x") == judged(False)
    assert verdict(kind, "def f(x):") == judged(False)


@pytest.mark.parametrize(
    ("program", "check", "right"),
    [
        (
            "import collections\ndef f(s): return collections.Counter(s)",
            checked("assert candidate('aab') == {'a': 2, 'b': 1}"),
            True,
        ),
        ("def f(a, b=1): return a, b", checked("assert candidate(1, b=2) == (1, 2)"), True),
        (
            "def f(): return {1, 2}, None, True, b'x', float('inf')",
            checked("assert candidate() == ({1, 2}, None, True, b'x', float('inf'))"),
            True,
        ),
        (
            "def f(x): raise ValueError('no')",
            checked(
                "try: candidate(1)",
                "except ValueError as e: assert str(e) == 'no'",
                "else: assert 0",
            ),
            True,
        ),
        (
            "def f(x): return x",
            checked("try: candidate(1)", "except ValueError: pass", "else: assert 0"),
            False,
        ),
        (
            "class Own(Exception): pass\ndef f(x): raise Own('x')",
            checked("try: candidate(1)", "except RuntimeError: pass"),
            True,
        ),
        (
            "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
            checked("assert [candidate(), candidate()] == [1, 2]"),
            True,
        ),
        ("def f(x): raise StopIteration", checked("assert all(map(candidate, [1, 2]))"), False),
        (
            "def f(x): raise StopIteration",
            checked("for n in map(candidate, [1, 2]): assert n == 7"),
            False,
        ),
        (
            "def f(x): raise StopIteration",
            checked("try: candidate(1)", "except RuntimeError: pass"),
            True,
        ),
        ("def f(x): return True", checked("assert all(map(candidate, [1, 2]))"), True),
        ("def f(x): return 'x' * x", checked("assert len(candidate(1000)) == 1000"), True),
        (
            "def f(x): return 'x' * x",
            checked("assert len(candidate(1 << 21)) == 1 << 21"),
            False,
        ),  # no pipe takes it
        ("def f(x): return object()", checked("candidate(1)"), False),
    ],
)
def test_what_passes_through(
    bubblewrap: SandboxKind, program: str, check: str, right: bool
) -> None:
    assert verdict(bubblewrap, program, check) == judged(right)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "def f(x):\n    import os; os._exit(0)",
        "def f(x): raise SystemExit(0)",
        "raise SystemExit(0)",
        "exit()",
        "def f(x): exit()",
        # Of the asserts themselves.
        (
            "import builtins\nbuiltins.AssertionError = KeyboardInterrupt\nbuiltins.abs = lambda x:"
            " 0\ndef f(x): return 0"
        ),
        "def check(candidate): pass\ndef f(x): return 0",
        (
            "import __main__\n__main__.check = lambda c: None\n__main__.far = lambda *a: print\ndef"
            " f(x): return 0"
        ),
        # Values that are equal to everything.
        (
            "class A(int):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return"
            " 0\ndef f(x): return A(0)"
        ),
        "class All:\n    def __eq__(self, other): return True\ndef f(x): return All()",
        "def f(x): return float('nan')",
        # A pickle that runs code, or names a class of the other side.
        (
            'import pickle, os\npickle.dumps = lambda m: b"cos\\n_exit\\n(I0\\ntR."\ndef f(x):'
            " return 0"
        ),
        'import pickle\npickle.dumps = lambda m: b"c__main__\\nos\\n."\ndef f(x): return 0',
        # Writes a verdict wherever it can.
        (
            "import os\nfor fd in range(64):\n    try: os.write(fd, b'passed')\n    except OSError:"
            " pass\ndef f(x): return 0"
        ),
        (
            "import os\nfor fd in range(64):\n    try: os.write(fd, b'started\\npassed')\n   "
            " except OSError: pass\nos._exit(0)"
        ),
        (
            "import os, glob\nfor p in glob.glob('/proc/*/fd/*'):\n    try: open(p,"
            " 'wb').write(b'started\\npassed')\n    except OSError: pass\ndef f(x): return 0"
        ),
        # Results that come before they are asked for.
        (
            "import struct, pickle, os\nm = pickle.dumps(('returned', 4711))\nfor fd in range(3,"
            " 12):\n    try: os.write(fd, 200 * (struct.pack('<Q', len(m)) + m))\n    except"
            " OSError: pass\ndef f(x): return 0"
        ),
    ],
)
def test_success_without_being_right(bubblewrap: SandboxKind, program: str) -> None:
    assert verdict(bubblewrap, program) == judged(False)


def test_what_is_expected_is_not_where_the_program_is(bubblewrap: SandboxKind) -> None:
    """Frames, all objects, all processes: the program counts where it finds a text of
    the check.
    """
    program = """
import gc, glob, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield str(frame.f_locals) + str(frame.f_globals); frame = frame.f_back
    yield from (repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and len(o) < 50)
    for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
        try: yield open(path, errors="replace").read()
        except OSError: pass
def f():
    return sum("of all " + "numbers" in text for text in texts())
"""
    counted = checked("assert candidate() == 0", "'of all numbers'")
    assert verdict(bubblewrap, program, counted) == judged(True)
    found = verdict(bubblewrap, "hint = 'of all numbers'\n" + program, counted)
    assert found == judged(False), "it does find what is there"


def test_a_program_that_hangs_is_a_time_out_and_leaves_nothing_running(
    bubblewrap: SandboxKind,
) -> None:
    hangs = "def f(x):\n    while True: pass"
    assert verdict(bubblewrap, hangs, limits=SHORT) == judged(False, timeout=True)
    lingers = (
        "import os, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        + RIGHT
    )
    assert verdict(bubblewrap, lingers) == judged(True)
    assert verdict(bubblewrap, RIGHT, checked("while True: pass"), limits=SHORT) == judged(
        False, timeout=True
    )


def test_a_sandbox_that_does_not_start_is_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, bubblewrap: SandboxKind
) -> None:
    whole = Sandbox._command
    begun: list[int] = []

    def every_second(self: Sandbox) -> list[str]:
        begun.append(1)
        return ["/bin/false"] if len(begun) % 2 else whole(self)

    monkeypatch.setattr(Sandbox, "_command", every_second)
    with pytest.raises(GraderDown, match="no sandbox could start a program, 2 times"):
        asyncio.run(sandbox(bubblewrap).run_checked(RIGHT, "f", SECRET + CHECK))
    assert len(begun) == 4

    monkeypatch.setattr(Sandbox, "_command", lambda _: ["/bin/false"])
    monkeypatch.setattr(asyncio, "create_subprocess_exec", ended_before_it_is_asked)
    with pytest.raises(GraderDown, match="no sandbox could start a program, 2 times"):
        uvloop.run(sandbox(bubblewrap).run("print(1)", ""))


# HumanEval's schema (github.com/openai/human-eval, arXiv 2107.03374): helpers stand in
# the prompt, the test calls them.
HUMANEVAL = {
    "task_id": "Made/38",
    "prompt": (
        'def encode_cyclic(s: str):\n    """Groups of three, each turned by one."""\n'
        "    groups = [s[3 * i : 3 * i + 3] for i in range((len(s) + 2) // 3)]\n"
        '    return "".join(g[1:] + g[0] if len(g) == 3 else g for g in groups)\n\n\n'
        'def decode_cyclic(s: str):\n    """The inverse of encode_cyclic."""\n'
    ),
    "entry_point": "decode_cyclic",
    "canonical_solution": "    return encode_cyclic(encode_cyclic(s))\n",
    "test": (
        "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    from random import randint, choice\n   "
        " import string\n\n    letters = string.ascii_lowercase\n    for _ in range(100):\n       "
        " str = ''.join(choice(letters) for i in range(randint(10, 20)))\n        encoded_str ="
        " encode_cyclic(str)\n        assert candidate(encoded_str) == str\n"
    ),
}


def test_a_row_of_humaneval(bubblewrap: SandboxKind) -> None:
    tests = MAPPINGS["humaneval"](HUMANEVAL).answer
    solution = HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    # right only by its own helper
    helper = "def encode_cyclic(s): return s\ndef decode_cyclic(s): return s"

    async def verdicts() -> list[Verdict]:
        code = Code(Sandbox(bubblewrap, 2))
        answers = [f"```python\n{program}\n```" for program in (solution, helper)]
        return await asyncio.gather(*(code.check(Submission(answer, tests)) for answer in answers))

    assert asyncio.run(verdicts()) == [judged(True), judged(False)]

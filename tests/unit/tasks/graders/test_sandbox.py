"""Attacks that must fail and be survived, each by a program run in the sandbox; after
each it still runs a good one.
"""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.core.base.contracts import Grade, GraderDown, Verdict
from megarl.core.base.errors import MegarlError
from megarl.tasks.graders.answer import Submission, judged
from megarl.tasks.graders.code import Code
from megarl.tasks.graders.inside import NOBODY
from megarl.tasks.graders.sandbox import Limits, Ran, Sandbox, SandboxKind, remains
from megarl.tasks.graders.scratch import hand_over, scratch
from tests.unit.tasks.agents.test_agent_sandbox import PROBE, of_the_machine
from tests.unit.tasks.graders.asking import LIMITS, SHORT, graders_of, prompt_of, sandbox

pytestmark = pytest.mark.processes

SECRET = "megarl-expected-4711"

ATTACKS = """
import ctypes, fcntl, os, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
victim, there = int("{victim}"), "{place}/there"
x86 = platform.machine() == "x86_64"

def call(x86_64, aarch64, *arguments):
    found = libc.syscall(x86_64 if x86 else aarch64, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), "")
    return found

def pipe(own, *owner):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, 10, 10)  # F_SETSIG, SIGUSR1
    fcntl.fcntl(reading, own, *owner)
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b"x")

def async_alone():
    fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)

def queue():
    call(71, 187, call(68, 186, 0, 0o1600), 0, None)  # its own; removed

def semaphores():
    call(66, 191, call(64, 190, 0, 1, 0o1600), 0, 0)

information = ctypes.create_string_buffer(struct.pack("iii", 10, 0, -1) + bytes(128))
ATTEMPTS = dict(
    append=lambda: open(there, "a").write("x"), read=lambda: open(there).read(), list=lambda: os.listdir("{place}"),
    truncate=lambda: os.truncate(there, 0), mode=lambda: os.chmod(there, 0o600), times=lambda: os.utime(there),
    make=lambda: open("{place}/stop", "w"), link=lambda: os.link(there, "{place}/link"),
    rename=lambda: os.rename(there, there + "2") or os.rename(there + "2", there), delete=lambda: os.unlink(there),
    sigqueue=lambda: call(129, 138, victim, 10, information),
    tgsigqueue=lambda: call(297, 240, victim, victim, 10, information),
    setown=lambda: pipe(8, victim), setown_ex=lambda: pipe(15, struct.pack("ii", 1, victim)), async_alone=async_alone,
    queue=queue, semaphores=semaphores, secret=lambda: os.close(call(447, 447, 0)),
    priority=lambda: os.setpriority(os.PRIO_PROCESS, victim, 19), cores=lambda: os.sched_setaffinity(victim, [0]),
)
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        print(name)
    except OSError:
        pass
open("mine", "w").write("x"); os.rename("mine", "still mine"); os.mkdir("d"); os.rename("still mine", "d/mine")
print(len(ATTEMPTS), open("d/mine").read(), fcntl.fcntl(0, fcntl.F_GETFL) >= 0)
"""
"""What a program of the same user can do to it; says what it could."""
MINE = "20 x True"


SOLUTION = """
class Solution:
    @cache
    def power(self, word: str) -> int:
        return pow(gcd(Counter(word)["a"], 4), 2, 5)

    def depth(self, n: int) -> int:
        return self.power("aab") if n == 0 else self.depth(n - 1)
"""


def run(
    kind: SandboxKind, program: str, given: str = "", call: str = "", limits: Limits = LIMITS
) -> Ran:
    """What the program did; a good one runs after it."""

    async def both() -> tuple[Ran, Ran]:
        ran = await sandbox(kind, limits).run(program, given, call)
        return ran, await sandbox(kind).run("print(sum(map(int, input().split())))", "1 2")

    ran, after = asyncio.run(both())
    assert after == Ran("3\n", "exit")
    return ran


def test_a_good_program_runs(kind: SandboxKind) -> None:
    program = (
        "import heapq, subprocess as s\nprint(input(), s.run(['/bin/echo', 'é'],"
        " capture_output=True).stdout)"
    )
    assert run(kind, program, "ü\n").stdout == "ü b'\\xc3\\xa9\\n'\n"
    assert run(kind, "def f(x):\n    print('no')\n    return [x]", call="f(3)").stdout == "[3]"
    assert run(kind, "print(len(input()))", "x" * 300_000).stdout == "300000\n"


@pytest.mark.parametrize(
    ("ending", "status"), [("exit()", 0), ("quit()", 0), ("exit(0)", 0), ("exit('no')", 1)]
)
def test_a_program_may_call_exit(kind: SandboxKind, ending: str, status: int) -> None:
    assert run(kind, f"print('NO')\nif True:\n    {ending}\nprint('YES')") == Ran(
        "NO\n", "exit", status
    )


CLASSES = """
from dataclasses import dataclass
from typing import ClassVar, get_type_hints
import pickle

@dataclass
class P:
    made: ClassVar[int] = 7
    x: int

def f(x):
    return pickle.loads(pickle.dumps(P(x))).x, get_type_hints(P)["x"] is int
"""


def test_a_program_may_define_data_classes(kind: SandboxKind) -> None:
    """Whose decorator looks the class's module up."""
    assert run(kind, CLASSES + "print(f(1))").stdout == "(1, True)\n"
    assert run(kind, CLASSES, call="f(1)").stdout == "(1, True)"
    assert run(kind, CLASSES, call="__name__").stdout == "'solution'"
    checked = sandbox(kind).run_checked(
        CLASSES, "f", CLASSES + "def check(f): assert f(1) == (1, True)"
    )
    assert asyncio.run(checked).stdout == "passed"


def test_annotations_are_not_evaluated(kind: SandboxKind) -> None:
    """Starter code has `List[int]` without an import."""
    program = (
        "class Solution:\n    def total(self, nums: List[int]) -> int:\n        return sum(nums)\n"
    )
    assert run(kind, program, call="Solution().total([1, 2])").stdout == "3"
    assert run(kind, program + "print(Solution().total([1, 2]))").stdout == "3\n"


def test_a_solution_has_the_names_and_the_depth_that_leetcode_gives_it(kind: SandboxKind) -> None:
    """Any other program must import what it uses."""
    assert run(kind, SOLUTION, call="Solution().depth(3000)").stdout == "4"
    assert run(kind, SOLUTION.replace("Solution", "Own"), call="Own().depth(1)").status == 1


def test_fork_bomb(bubblewrap: SandboxKind) -> None:
    program = """
import os, sys
n = 0
while True:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        import time; time.sleep(60); os._exit(0)
    n += 1
print(n, flush=True)
os._exit(0)
"""
    began = time.monotonic()
    assert run(bubblewrap, program).stdout == f"{LIMITS.processes - 1}\n"
    assert time.monotonic() - began < 30  # the children ended with it
    assert (
        run(
            bubblewrap,
            "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
            limits=SHORT,
        ).ended
        == "time"
    )


def test_memory_bomb(kind: SandboxKind) -> None:
    program = (
        "kept = []\ntry:\n  while True: kept.append(bytearray(1 << 24))\nexcept MemoryError:"
        " print(len(kept) < 16)"
    )
    assert run(kind, program) == Ran("True\n", "exit")
    assert run(kind, "x = 'a' * (1 << 40)").status != 0


def test_memory_that_no_limit_of_a_process_sees(bubblewrap: SandboxKind) -> None:
    program = """
import os, ctypes
def tried(what):
    try:
        what()
    except OSError as error:
        print(error.errno)
def fill():
    for n in range(100):
        with open(f"/tmp/{n}", "wb") as file:
            file.write(bytes(1 << 20))
def grow():
    with open("/tmp/one", "wb") as file:
        file.write(bytes(2 << 20))
tried(fill); tried(lambda: [os.unlink(f"/tmp/{n}") for n in range(4)]); tried(grow)
tried(lambda: os.memfd_create("m"))
tried(lambda: open("/dev/shm/m", "w"))
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())
for flags in (0x10000000, 0x10020000):
    print(libc.unshare(flags), ctypes.get_errno())
"""
    assert run(bubblewrap, program).stdout.split() == [
        "28",
        "27",
        "1",
        "30",
        "-1",
        "1",
        "-1",
        "1",
        "-1",
        "1",
    ]


def test_endless_loop(kind: SandboxKind) -> None:
    began = time.monotonic()
    assert run(kind, "while True: pass", limits=SHORT).ended == "time"
    assert run(kind, "import time; time.sleep(1000)", limits=SHORT).ended == "time"
    assert time.monotonic() - began < 30


def test_endless_output(kind: SandboxKind) -> None:
    ran = run(kind, "while True: print('x' * 1000)")
    assert (ran.ended, len(ran.stdout) < 2 * LIMITS.output) == ("output", True)


def test_files_outside(bubblewrap: SandboxKind, tmp_path: Path) -> None:
    places = [
        "/usr/megarl",
        "/bin/megarl",
        "/etc/megarl",
        "/megarl",
        "/dev/megarl",
        "/root/megarl",
        str(tmp_path / "megarl"),
    ]
    program = f"""
for place in {places}:
    try:
        open(place, "w").write("x"); print(place)
    except OSError:
        pass
open("/tmp/megarl-mine", "w").write("x"); print("mine")
"""
    assert run(bubblewrap, program).stdout == "mine\n"
    assert list(tmp_path.iterdir()) == []
    assert not Path("/tmp/megarl-mine").exists()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of the user that programs run as, with a file in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        (path / "there").write_text(SECRET)
        if os.getuid() == 0:
            for each in (path, path / "there"):
                os.chown(each, NOBODY, NOBODY)
        yield path


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of that user. It does not mind SIGUSR1."""
    program = (
        "import signal, time; signal.signal(10, signal.SIG_IGN); print(1, flush=True);"
        " time.sleep(600)"
    )
    process = subprocess.Popen(
        ["/usr/bin/python3", "-c", program],
        stdout=subprocess.PIPE,
        user=NOBODY if os.getuid() == 0 else None,
    )
    assert process.stdout
    assert process.stdout.read(1) == b"1"
    yield process
    process.kill()
    process.communicate()


def test_an_ordinary_users_files_and_processes(
    place: Path, victim: subprocess.Popen[bytes], kind: SandboxKind
) -> None:
    attacks = ATTACKS.format(victim=victim.pid, place=place)
    assert run(kind, attacks).stdout.splitlines() == [MINE], "no attempt has succeeded"
    assert (place / "there").read_text() == SECRET
    assert [each.name for each in place.iterdir()] == ["there"]


def test_without_a_sandbox_all_of_these_attempts_succeed(
    place: Path, victim: subprocess.Popen[bytes]
) -> None:
    os.chmod(place, 0o700)
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        os.chmod(scratch, 0o777)
        done = subprocess.run(
            ["/usr/bin/python3", "-c", ATTACKS.format(victim=victim.pid, place=place)],
            cwd=scratch,
            capture_output=True,
            text=True,
            user=NOBODY if os.getuid() == 0 else None,
            check=True,
        )
    assert len({"secret", *done.stdout.splitlines()}) == 21, (
        done.stdout
    )  # not every kernel has secret memory
    assert list(place.iterdir()) != [place / "there"]


def test_without_landlock_the_message_says_what_remains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: dict[int, str] = {
        0: "read, write and delete what you can",
        2: "read, write",
        3: "see which files there are",
    }
    for version, words in kinds.items():
        monkeypatch.setattr(
            "megarl.tasks.graders.sandbox.landlock_version", lambda libc, version=version: version
        )
        with caplog.at_level(logging.WARNING):
            sandbox("rlimits").check()
        assert words in remains()
        assert f"data.sandbox=rlimits: programs may {words}" in caplog.text
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        MegarlError, match=r"data\.sandbox=rlimits if the programs may see which files there are"
    ):
        Sandbox("bubblewrap", 1).check()


def test_secrets_and_the_answers_of_the_tests(
    bubblewrap: SandboxKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, files, other processes, its own memory: what is expected is in none
    of them.
    """
    monkeypatch.setenv("MEGARL_SECRET", SECRET)
    (tmp_path / "answers.json").write_text(SECRET)
    (tmp_path / "answers.json").chmod(0o777)
    program = f"""
import gc, glob, os, sys
found = [str(os.environ), str(sys.argv)]
frame = sys._getframe()
while frame:
    found.append(str(frame.f_locals) + str(frame.f_globals)); frame = frame.f_back
found += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and len(o) < 50]
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + [{str(tmp_path / "answers.json")!r}]:
    try: found.append(open(path, errors="replace").read())
    except OSError: pass
def f():
    return next((t for t in found if "megarl-" + "expected" in t), "nothing")
print(f(), sorted(n for n in os.listdir("/proc") if n.isdigit()), os.path.exists("/home"), os.path.exists("/etc/passwd"))
"""
    assert run(bubblewrap, program).stdout == "nothing ['1', '2'] False False\n"
    tests = '{"tests": [{"call": "f()", "result": "%r"}]}'
    assert asyncio.run(
        Code(Sandbox(bubblewrap, 1)).check(Submission(f"```\n{program}```", tests % "nothing"))
    ) == judged(True)
    assert asyncio.run(
        Code(Sandbox(bubblewrap, 1)).check(Submission(f"```\n{program}```", tests % SECRET))
    ) == judged(False)


def test_other_users_have_no_access_to_a_programs_folder() -> None:
    """Under root it is nobody's, as its program."""
    with scratch() as folder:
        hand_over(folder)
        about = folder.stat()
    assert about.st_mode & 0o77 == 0
    assert about.st_uid == (os.getuid() or NOBODY)


def test_a_program_can_change_nothing_of_the_kernel(bubblewrap: SandboxKind) -> None:
    writable, opened, ids, _ = json.loads(run(bubblewrap, PROBE, limits=Limits()).stdout)
    assert of_the_machine(writable) == set()
    assert not opened
    assert 0 not in ids


def test_network(kind: SandboxKind) -> None:
    program = "import socket\ntry: socket.socket()\nexcept OSError as error: print(error.errno)"
    assert run(kind, program).stdout == "1\n"


def test_killing_the_parent(kind: SandboxKind) -> None:
    program = """
import os, signal
for pid in (os.getppid(), 1, -1, 0):
    try: os.kill(pid, signal.SIGKILL); print("killed", pid)
    except OSError: pass
try: os.setsid()
except OSError: print("alive")
"""
    assert run(kind, program) == Ran("alive\n", "exit")


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "print('OK'); exit()",
        "def f(): return 7\nexit()",
        "def f(): exit()",
        "import sys; sys.settrace(None); sys.modules['__main__'].__dict__.clear()",
        (
            "class T:\n    def __eq__(self, o): return True\n    def __repr__(self): return"
            " 'True'\ndef f(): return T()"
        ),
        "import builtins; builtins.repr = lambda x: '7 or True'\ndef f(): return 8",
        "import os; os.write(3, b'1'); os.write(4, b'1')",
    ],
)
def test_success_before_the_tests(bubblewrap: SandboxKind, program: str) -> None:
    async def verdicts() -> list[Verdict]:
        code = Code(Sandbox(bubblewrap, 2))
        tests = [
            '{"call": "f()", "result": "7"}',
            '{"input": "", "output": "7"}',
            '{"assert": "assert f() == 7"}',
        ]
        tests.append('{"check": "def check(f): assert f() == 7", "entry_point": "f"}')
        answer = f"```python\n{program}\n```"
        return await asyncio.gather(
            *(code.check(Submission(answer, f'{{"tests": [{test}]}}')) for test in tests)
        )

    assert asyncio.run(verdicts()) == [judged(False)] * 4


def test_programs_that_are_cancelled_leave_nothing_behind(
    kind: SandboxKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def cancelled() -> None:
        task = asyncio.create_task(sandbox(kind).run("while True: pass", ""))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(tmp_path.iterdir()) == []

    asyncio.run(cancelled())


def test_without_bubblewrap_code_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        MegarlError,
        match=r"^data.sandbox: bubblewrap is not installed.*apt-get.*data.sandbox=rlimits",
    ):
        graders_of("code")


def test_a_bubblewrap_that_may_not_make_namespaces_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr("megarl.tasks.graders.sandbox.ENVIRONMENT", {"PATH": str(tmp_path)})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert shutil.which("bwrap") == str(tmp_path / "bwrap")
    with pytest.raises(
        MegarlError, match=r"No permissions to create new namespace.*in a container"
    ):
        Sandbox("bubblewrap", 1).check()


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/dev/shm"])
@pytest.mark.parametrize("linked", [".", "bin/python"])
def test_python_may_be_installed_anywhere(bubblewrap: SandboxKind, place: str, linked: str) -> None:
    """Also below /tmp, of which a program has its own, and by links to its directory or
    its program.
    """
    with tempfile.TemporaryDirectory(dir=place) as folder:
        link = Path(folder) / "python" / linked
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(
            Path(sys.base_prefix)
            / ("." if linked == "." else f"bin/python3.{sys.version_info.minor}")
        )
        python = link / "bin" / "python3" if linked == "." else link
        program = (
            f"open('/tmp/mine', 'w').close(); import json, os; print(os.access({folder!r},"
            " os.W_OK))"
        )
        found = Sandbox(bubblewrap, 1, LIMITS, python)
        found.check()
        assert asyncio.run(found.run(program, "")) == Ran("False\n", "exit")


def test_a_python_that_needs_more_than_its_directory_is_named(
    bubblewrap: SandboxKind, tmp_path: Path
) -> None:
    """And not the kernel, which is not to blame."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/opt/nowhere/sh")
    (tmp_path / "bin" / "python").chmod(0o755)
    expected = (
        rf"execvp .*Python cannot be started there: what it needs has to be in {tmp_path}, or in"
        r" /usr"
    )
    with pytest.raises(MegarlError, match=expected) as error:
        Sandbox(bubblewrap, 1, LIMITS, tmp_path / "bin" / "python").check()
    assert "namespaces" not in str(error.value)


def test_a_sandbox_that_fails_later_is_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is tried again; what still fails is a grader that is down."""
    (tmp_path / "bwrap").write_text(
        '#!/bin/sh\necho x >> "$0.calls"\necho "started or not"\nexit 1\n'
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(
        "megarl.tasks.graders.sandbox.ENVIRONMENT", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    with pytest.raises(GraderDown, match="no sandbox could start a program, 2 times"):
        asyncio.run(Sandbox("bubblewrap", 1).run("print(1)", ""))
    assert (tmp_path / "bwrap.calls").read_text() == "x\nx\n"


def test_a_time_out_of_a_test_is_one_of_the_grade(bubblewrap: SandboxKind) -> None:
    async def graded() -> Grade:
        graders = graders_of("code", SHORT, sandbox=bubblewrap)
        return await graders["task"].grade(
            "</think>```\nwhile True: pass\n```",
            prompt_of('{"tests": [{"input": "", "output": "7"}]}'),
        )

    assert asyncio.run(graded()) == Grade(-1.0, False, True, timeout=True)

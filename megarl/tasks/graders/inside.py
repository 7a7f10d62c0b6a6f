"""Runs inside a sandbox: drops every privilege it can, then executes the program. This
source is given to `python -c`.

    stdin   {"program": …, "input": …, and one of these, or none
             "call": …
                print the value of this expression, and nothing else
             "pipes": [from, to], "serves": …
                answer calls of this function that come through a pipe
             "pipes": [from, to]}
                call the program's `check` with the function at the pipes' other end
    stdout  `started`, then the program's output; in the three cases above: the value,
            nothing, or `passed`

stdin is read in full before the program starts; nothing in it is secret.

Only plain values go through the pipes (numbers, texts, lists, dicts and the like,
pickled; no class is ever looked up), so a result has no methods that could deceive the
comparison.

It imports only the standard library, and nothing of megarl, since the sandbox has
nothing else. sandbox.py sets that up.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import struct
import sys

# imports delay every program: typing and pickle would add 50 % to the start-up time
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

NOBODY = 65534
LONGEST = 1 << 20
"""Most bytes in a call or a result that goes through a pipe."""
SCALARS: tuple[type[Any], ...] = (int, float, complex, str, bytes)
COLLECTIONS: dict[type[Any], type[Any]] = {list: list, tuple: tuple, set: set, frozenset: set}
"""The built-in types of collections; as what type each goes through a pipe."""
USUAL = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools"
    " operator io sys json builtins typing"
)
RECURSION = 50_000
"""The modules whose names a class Solution need not import, and how deep it may recur:
LiveCodeBench's, after LeetCode's.
"""
STOPS = ("StopIteration", "StopAsyncIteration")
"""Raised again, they would end a check's `all(map(candidate, …))` early."""
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER = 0x10000000
SIGKILL = 9
O_PATH = 0x200000
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_RULE_PATH_BENEATH = 1
EXECUTE = 1
WRITE = 2
READ = 4
LIST = 8  # Landlock's access rights to files and directories
SIGNALS_AND_SOCKETS = 3
"""Landlock's scopes: signals and abstract sockets."""
ALL_RIGHTS = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
"""Landlock's rights by its version: the third adds truncation, the fifth ioctl on
devices; later ones add none for files.
"""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_version(libc: ctypes.CDLL) -> int:
    """Return the version of this kernel's Landlock; 0 if there is none."""
    return max(0, int(libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)))


def shut_files_out(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Allow reading only these paths, using the usual devices, and everything in the
    working directory, as far as this kernel's Landlock can. OSError if it takes no
    rule.
    """
    version = landlock_version(libc)
    if not version:
        return
    everything = ALL_RIGHTS[min(version, max(ALL_RIGHTS))]
    network = 0  # the filter on system calls refuses sockets
    scopes = SIGNALS_AND_SOCKETS if version >= 6 else 0  # the sixth added scopes
    handled = struct.pack("QQQ", everything, network, scopes)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, handled, len(handled), 0)
    rights = [(path, EXECUTE | READ | LIST) for path in readable]
    rights += [(path, WRITE | READ) for path in DEVICES]
    rights.append((".", everything))
    for path, allowed in rights:
        try:
            place = os.open(path, O_PATH)
        except OSError:  # this machine does not have it
            continue
        if not os.path.isdir(path):
            allowed &= ~LIST  # a right of directories, which a file's rule may not have
        rule = struct.pack("=Qi", allowed, place)
        if libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), f"Landlock takes no rule for {path}")
        os.close(place)
    if libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock cannot be used here")
    os.close(ruleset)


def limit_resources(libc: ctypes.CDLL, limits: dict[str, int]) -> None:
    """Limit what this process and its children may use, in a user namespace of their
    own if the kernel allows that.
    """
    processes = limits["processes"]
    has_failed = libc.unshare(CLONE_NEWUSER)
    if has_failed:
        # without its own user namespace the user's other processes count, too
        processes += limits["processes_of_others"]
    for kind, limit in (
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CPU, limits["seconds"] + 1),  # the wall-clock limit comes first
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def give_up(limits: dict[str, int], readable: list[str], system_calls: bytes) -> None:
    """Give up identity, resources and system calls for good; if `readable` is not
    empty, also all files except those. system_calls: a BPF program that filters them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this dies first
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    limit_resources(libc, limits)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process of the same user can read its memory
    program = ctypes.create_string_buffer(system_calls, len(system_calls))
    # struct sock_fprog: the number of instructions, of 8 bytes each, and their address
    header = struct.pack("HxxxxxxP", len(system_calls) // 8, ctypes.addressof(program))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "rights cannot be given up here")
    if readable:
        shut_files_out(libc, readable)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "system calls cannot be filtered here")


def unpickled(data: bytes) -> Any:
    """Unpickle plain values. UnpicklingError if the data names a class."""
    import io
    import pickle

    class Plain(pickle.Unpickler):
        """Refuses every class."""

        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")

    return Plain(io.BytesIO(data)).load()


def plain(value: Any) -> Any:
    """Return the value in built-in types: a Counter becomes a dict, a named tuple a
    tuple. TypeError if that is impossible.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in SCALARS:
        if isinstance(value, kind):
            return kind(value)
    for kind, plain_kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return plain_kind(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not a plain value")


def send(to: BinaryIO, message: Any) -> None:
    """Send a message; end this process if the receiver is gone."""
    import pickle

    data = pickle.dumps(message)
    try:
        to.write(struct.pack("<Q", len(data)) + data)
        to.flush()
    except OSError:
        os._exit(1)


def receive(source: BinaryIO) -> Any:
    """Receive a message; end this process if the sender is gone or the message is too
    long.
    """
    head = source.read(8)
    if len(head) < 8:
        os._exit(1)
    (length,) = struct.unpack("<Q", head)
    if length > LONGEST:
        os._exit(1)
    return unpickled(source.read(length))


def serve(function: Callable[..., Any], source: BinaryIO, to: BinaryIO) -> None:
    """Answer calls of the function until the caller is gone: `receive` then ends this
    process.
    """
    while True:
        arguments, named = receive(source)
        try:
            reply = ("returned", plain(function(*arguments, **named)))
        except Exception as error:
            reply = ("raised", (type(error).__name__, str(error)[:1000]))
        send(to, reply)


def stand_in(source: BinaryIO, to: BinaryIO) -> Callable[..., Any]:
    """Return a stand-in for the function that `serve` offers at the other end of the
    pipes.
    """

    def candidate(*arguments: Any, **named: Any) -> Any:
        """Call the function, and return its result. Raises what it raised: an exception
        of another kind than Python's own becomes a RuntimeError.
        """
        send(to, (arguments, named))
        outcome, value = receive(source)
        if outcome == "returned":
            return value
        name, text = value
        kind = getattr(builtins, name, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or name in STOPS:
            kind = RuntimeError
        raise kind(text)

    return candidate


def called(program: Any, call: str, names: dict[str, Any]) -> Any:
    """Run the program, and return the value of the expression `call`. If a class
    Solution lacks a name, it is run again behind the usual imports: starter code comes
    without them.
    """
    is_solution = call.startswith("Solution()")
    if is_solution:
        sys.setrecursionlimit(RECURSION)
    try:
        exec(program, names)
        return eval(call, names)
    except NameError:
        if not is_solution:
            raise
    imports = [f"from {module} import *\n" for module in USUAL.split()]
    imports += [f"import {module}\n" for module in USUAL.split()]
    exec("".join(imports), names)
    exec(program, names)
    return eval(call, names)


def read_task() -> dict[str, Any]:
    """Read the task from stdin, and put the program's input in its place."""
    # unbuffered: nothing is left in the buffer of sys.stdin
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        task = json.loads(stdin.read())
    program_input = os.memfd_create("input")
    os.write(program_input, task["input"].encode())
    os.lseek(program_input, 0, os.SEEK_SET)
    os.dup2(program_input, 0)
    os.close(program_input)
    return task


def main() -> None:
    """Run the task's program with all privileges dropped."""
    task = read_task()
    answer = os.dup(1)
    is_main = not (task["call"] or task["pipes"])
    if not is_main:  # what the program prints is no part of the answer
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limits = json.loads(sys.argv[1])
    readable = json.loads(sys.argv[2])
    system_calls = bytes.fromhex(sys.argv[3])
    sys.argv = ["solution.py"]
    module = type(sys)("__main__" if is_main else "solution")
    # where dataclasses, typing and pickle look up the program's names
    sys.modules[module.__name__] = module
    names = vars(module)
    give_up(limits, readable, system_calls)
    os.write(answer, b"started\n")
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # -S leaves out site, which defines them
    # It inherits this file's `from __future__ import annotations`, so that starter code
    # with `nums: List[int]` needs no import.
    program = compile(task["program"], "solution.py", "exec")
    if task["call"]:
        os.write(answer, repr(plain(called(program, task["call"], names))).encode())
        return
    exec(program, names)
    if task["pipes"]:
        with open(task["pipes"][0], "rb") as source, open(task["pipes"][1], "wb") as to:
            if task["serves"]:
                serve(names[task["serves"]], source, to)
            else:
                names["check"](stand_in(source, to))
                os.write(answer, b"passed")


if __name__ == "__main__":
    main()

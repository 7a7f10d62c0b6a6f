"""The filter of system calls under which an untrusted program runs, made by libseccomp.

It forbids network, signals, namespaces, mounts, memory outside the limits, messages and
semaphores that outlive the program, new sessions, and changing how other processes are
scheduled. inside.py, which has only the standard library, applies it.
"""

import errno
import fcntl
import functools
import os
import tempfile

from megarl.core.base.errors import MegarlError

REFUSED = (
    "socket kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open"
    " ptrace process_vm_readv process_vm_writev setsid setpgid unshare setns mount umount2"
    " pivot_root memfd_create bpf keyctl add_key perf_event_open userfaultfd io_uring_setup"
    " open_tree move_mount fsopen shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd"
    " msgrcv msgctl mq_open mq_unlink setpriority ioprio_set sched_setaffinity sched_setscheduler"
    " sched_setparam sched_setattr migrate_pages move_pages"
).split()
REFUSED_NUMBERS = {"memfd_secret": 447}
"""Calls that a libseccomp of 2021 does not know. They have one number everywhere."""
OF_FILES = (
    "chmod fchmod fchmodat chown fchown lchown fchownat utime utimes futimesat utimensat setxattr"
    " lsetxattr fsetxattr removexattr lremovexattr fremovexattr truncate"
).split()
"""Calls that change a file's owner, mode, times or length, which Landlock allows. They
are also refused where the user's own files are visible.
"""
OF_FILES_NUMBERS = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
OWNING = (fcntl.F_SETOWN, 10, 15, fcntl.F_SETLEASE, fcntl.F_NOTIFY)
"""Commands of fcntl (10: F_SETSIG, 15: F_SETOWN_EX): pipes signal any owner."""
IOCTLS = (0x5452, 0x8901, 0x8902)
"""FIOASYNC, FIOSETOWN, SIOCSPGRP, of the same effect."""
CLONE_FLAGS = (
    0x8000,  # CLONE_PARENT
    *(0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000),  # CLONE_NEW…
)
CLONE3 = 435
LOW_HALF = 0xFFFFFFFF
"""The kernel ignores the other half of such an argument."""


@functools.cache
def system_call_filter(files_in_sight: bool) -> bytes:
    """Return the filter as a BPF program. MegarlError without libseccomp.

    files_in_sight: the program sees the user's own files.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:
        advice = "install libseccomp (apt-get install libseccomp2; Debian's apt needs it too)"
        raise MegarlError(
            f"data.sandbox: system calls cannot be filtered ({error}); {advice}"
        ) from (error)
    deny = seccomp.ERRNO(errno.EPERM)
    calls = seccomp.SyscallFilter(seccomp.ALLOW)
    # Calls of another architecture, such as x32, are another way to every call.
    calls.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    refused = [*REFUSED, *REFUSED_NUMBERS.values()]
    if files_in_sight:
        refused += [*OF_FILES, *OF_FILES_NUMBERS.values()]
    for call in refused:
        calls.add_rule(deny, call)
    # clone3's flags are in memory, where a filter cannot look; libc falls back to
    # clone.
    calls.add_rule(seccomp.ERRNO(errno.ENOSYS), CLONE3)
    for flag in CLONE_FLAGS:
        calls.add_rule(deny, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    # The first argument is the process whose limits are set; 0 is the caller.
    calls.add_rule(deny, "prlimit64", seccomp.Arg(0, seccomp.NE, 0))
    for command in IOCTLS:
        calls.add_rule(deny, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, LOW_HALF, command))
    for command in OWNING:
        calls.add_rule(deny, "fcntl", seccomp.Arg(1, seccomp.MASKED_EQ, LOW_HALF, command))
    calls.add_rule(
        deny,
        "fcntl",
        seccomp.Arg(1, seccomp.MASKED_EQ, LOW_HALF, fcntl.F_SETFL),
        seccomp.Arg(2, seccomp.MASKED_EQ, os.O_ASYNC, os.O_ASYNC),
    )
    with tempfile.TemporaryFile() as file:
        calls.export_bpf(file)
        file.seek(0)
        return file.read()

"""The filter of system calls, by a small interpreter of BPF: what each call gets."""

import errno
import platform
import struct
import sys
from collections.abc import Sequence

import pytest

from megarl.core.base.errors import MegarlError
from megarl.tasks.graders.system_calls import system_call_filter

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
AUDIT = 0xC000003E
ALLOW = 0x7FFF0000
KILL = 0x80000000
DENY = 0x00050000 | errno.EPERM
REFUSED = (
    *(29, 30, 31, 41, 62, 64, 65, 66, 68, 69, 70, 71, 101, 109, 112, 129, 141, 142, 144, 155, 165),
    *(166, 200, 203, 220, 234, 240, 241, 248, 250, 251, 256, 272, 279, 297, 298, 308, 310, 311),
    *(314, 319, 321, 323, 424, 425, 428, 429, 430, 434, 447),
)
OF_FILES = (
    *(76, 90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463),
    *(466, 469),
)
CLONE = 56
IOCTL = 16
FCNTL = 72
PRLIMIT = 302
CLONE3 = 435


def verdict(
    number: int, arguments: Sequence[int] = (), files_in_sight: bool = False, audit: int = AUDIT
) -> int:
    """What the filter returns for a call."""
    code = system_call_filter(files_in_sight)
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, audit, 0, *padded)
    program = list(struct.iter_unpack("<HBBI", code))
    place = 0
    word = 0
    while True:
        operation, if_true, if_false, value = program[place]
        place += 1
        match operation:
            case 0x20:
                word = struct.unpack_from("<I", data, value)[0]
            case 0x54:
                word &= value
            case 0x05:
                place += value
            case 0x06:
                return value
            case 0x15:
                place += if_true if word == value else if_false
            case 0x25:
                place += if_true if word > value else if_false
            case 0x35:
                place += if_true if word >= value else if_false
            case 0x45:
                place += if_true if word & value else if_false
            case _:
                raise AssertionError(f"unknown operation {operation:#x}")


def test_calls_that_are_refused() -> None:
    """All of them and no others, whether files are in sight or not."""
    with_arguments = (CLONE3,)
    for number in set(range(600)) - set(with_arguments):
        assert verdict(number) == (DENY if number in REFUSED else ALLOW), number
        expected = DENY if number in REFUSED or number in OF_FILES else ALLOW
        assert verdict(number, files_in_sight=True) == expected, number


@pytest.mark.parametrize(
    ("number", "arguments", "expected"),
    [
        (CLONE, [0x1200011], ALLOW),
        (CLONE, [0x3D0F00], ALLOW),
        *((CLONE, [flag | 17], DENY) for flag in (0x8000, 0x20000, 0x10000000, 0x40000000)),
        (PRLIMIT, [0], ALLOW),
        (PRLIMIT, [1], DENY),
        *((IOCTL, [0, command], DENY) for command in (0x5452, 0x8901, 0x8902)),
        (IOCTL, [0, 0x5401], ALLOW),
        *((FCNTL, [0, command], DENY) for command in (8, 10, 15, 1024, 1026)),
        (FCNTL, [0, 8 | 1 << 32], DENY),
        (FCNTL, [0, 3], ALLOW),
        (FCNTL, [0, 4, 0x800], ALLOW),
        (FCNTL, [0, 4, 0x2800], DENY),
    ],
)
def test_arguments_that_are_refused(number: int, arguments: list[int], expected: int) -> None:
    assert verdict(number, arguments) == expected


def test_other_ways_to_a_call() -> None:
    assert verdict(CLONE3) == 0x00050000 | errno.ENOSYS, "libc then calls clone"
    assert verdict(1, audit=0x40000003) == KILL, "calls of i386"
    assert verdict(0x40000001) == KILL, "calls of x32"


def test_without_libseccomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    system_call_filter.cache_clear()
    with pytest.raises(MegarlError, match=r"install libseccomp \(apt-get install libseccomp2"):
        system_call_filter(False)
    system_call_filter.cache_clear()

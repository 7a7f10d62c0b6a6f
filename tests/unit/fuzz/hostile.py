"""What files may hold that nobody meant: bytes, texts and values for property tests,
and changes to files that are whole.
"""

import json
from typing import Any

from hypothesis import strategies as st

BITS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\x85",
    b"\n",
    b"\t",
    b" ",
    b"  ",
    b": ",
    b":",
    b"- ",
    b"? ",
    b"#",
    b"&a",
    b"*a",
    b"<<: *a",
    b"!!python/object:os.system",
    b"!!binary",
    b"!!int",
    b"!!set",
    b"!x ",
    b"%YAML 9\n",
    b"---",
    b"...\n",
    b"|\n",
    b">-\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b"[" * 3000,
    b"{a: " * 300,
    b"'",
    b'"',
    b"\\",
    b"\\ud800",
    b"~",
    b"null",
    b"true",
    b"yes",
    b"-1",
    b"0",
    b"1",
    b"1e400",
    b"-.inf",
    b".nan",
    b"NaN",
    b"9" * 30,
    b"9" * 5000,
    b"0x1F",
    b"1_000",
    b"1:30",
    b"2026-01-01",
    b"2026-13-40",
    b"=",
    b"x" * 400,
)
"""That have a meaning of their own somewhere."""

numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30]),
    st.floats(),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=8)
    | st.sampled_from(["", "..", "/", "gpu", "1", "a/b", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file in which a few places hold something else."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 12) | st.just(len(data))))
        data[at:end] = draw(st.sampled_from(BITS) | st.binary(max_size=6))
    return bytes(data)


def lines(rows: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """JSONL, with lines among them that are none."""
    line = (
        rows.map(lambda row: json.dumps(row).encode())
        | st.sampled_from(BITS)
        | st.binary(max_size=10)
    )
    return st.lists(line, max_size=6).map(lambda found: b"\n".join(found) + b"\n")


def rows_like(row: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Rows of these keys, some of them missing or with any value."""

    @st.composite
    def made(draw: st.DrawFn) -> dict[str, Any]:
        found = dict(row)
        for key in draw(st.lists(st.sampled_from(sorted(row)), max_size=4)):
            if draw(st.booleans()):
                found.pop(key, None)
            else:
                found[key] = draw(values)
        return found

    return made()

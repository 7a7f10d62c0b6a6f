"""What disks do to files."""

from pathlib import Path


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path, within: bytes = b"") -> None:
    """One in the middle, of the file or of these bytes in it. Done twice the file is as
    it was.
    """
    data = bytearray(file.read_bytes())
    begin = data.index(within)
    data[begin + (len(within) or len(data)) // 2] ^= 1
    file.write_bytes(data)

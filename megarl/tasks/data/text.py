"""When two texts are the same, and the words of a text: one normal form for duplicates, splits and decontamination."""

import hashlib
import re

EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Kana, Han, Hangul: written without blanks, so each character is a word."""
_WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")


def collapsed(text: str) -> str:
    """With single blanks. Texts that are equal so are the same prompt; case and signs count, as in `27+5` and `27-5`."""
    return " ".join(text.split())


def fingerprint(text: str) -> int:
    """64 bits of a hash of the collapsed text. Of a million texts two different ones agree once in 4e7 sets."""
    return digest(collapsed(text))


def digest(text: str) -> int:
    """64 bits of a hash of exactly this text."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case. Everything between them only divides."""
    return _WORD.findall(text.casefold())

"""Environments in which a process does itself harm (injected/sitecustomize.py)."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("injected")


def with_faults(**variables: str) -> dict[str, str]:
    """This environment, and what INJECT_… says."""
    return dict(os.environ) | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"} | variables


def signal_at(function: str, count: int, name: str, marker: Path, rank: int) -> str:
    """What INJECT_AT says: this rank sends itself the signal in its `count`-th call of
    the function.
    """
    return f"{function}:{count}:{name}:{marker}:{rank}"

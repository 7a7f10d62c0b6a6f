"""Environments of the harnesses, one each: they cannot share megarl's, whose SGLang pins an older OpenAI client."""

import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "openai": "openai==3.57.0",
    "anthropic": "anthropic==2.14.0",
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "mini-swe-agent": "mini-swe-agent==2.4.6",
    "verifiers": "verifiers==0.4.0",
}
FOLDER = Path.home() / ".cache" / "megarl" / "harnesses"
LIMIT_S = 600.0


def python_of(harness: str) -> Path:
    """Return the Python of a harness's environment, which is made if there is none of this version."""
    package = PACKAGES[harness]
    place = FOLDER / package.replace("[openai,anthropic]", "")
    python, done = place / "bin" / "python", place / "done"
    if not done.exists():
        uv = Path(sys.executable).parent / "uv"
        for words in (
            ["venv", "--clear", "--python", sys.executable, place],
            ["pip", "install", "--python", python, package, "uv"],
        ):
            subprocess.run([uv, *words, "--quiet"], check=True, timeout=LIMIT_S)
        done.touch()
    return python

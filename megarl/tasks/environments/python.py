"""A Python tool: runs the last program in a turn in the sandbox, and replies with its
output.

    ```python         or   <tool_call>
    print(6 * 7)           {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    ```                    </tool_call>

Each call runs in a new process, so no state is kept between calls. Errors are printed
as Python prints them. A turn without a program outside its thinking is the last one.
"""

import json
import re

import numpy as np

from megarl.core.base.contracts import DONE, Environment, Observation
from megarl.tasks.environments.framing import Setting
from megarl.tasks.graders.sandbox import Limits, Ran
from megarl.tasks.thinking import blocks

LIMITS = Limits(seconds=10, output=1 << 16)
FENCE = "```"
TOOL_CALL = "<tool_call>"
OPENING = re.compile(r"```python[^\n`]*\n|<tool_call>")
CLOSING = {FENCE: FENCE, TOOL_CALL: "</tool_call>"}
WRAPPED = """import sys
sys.stderr = sys.stdout
try:
    exec(compile({program!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    import traceback
    traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    sys.exit(1)
"""
"""The program as it is run. Errors go to stdout, because a sandbox does not return
stderr.
"""


class Python(Environment):
    """The environment; it has no state. The sandbox limits how many programs run at
    once.
    """

    def __init__(self, setting: Setting) -> None:
        setting.framing.check()
        self._setting = setting

    async def step(self, tokens: np.ndarray) -> Observation:
        """Run the turn's last program, and return its output."""
        call = last_call(self._setting.answer_text(tokens))
        if call is None:
            return DONE
        try:
            program = program_of(*call)
        except ValueError as error:
            return Observation(self._setting.framing.tokens(str(error), tokens), error=True)
        ran = await self._setting.sandbox.run(WRAPPED.format(program=program), "")
        failed = ran.ended != "exit" or ran.status != 0
        return Observation(self._setting.framing.tokens(reply_about(ran), tokens), error=failed)


def last_call(text: str) -> tuple[str, str] | None:
    """Return kind (FENCE or TOOL_CALL) and content of the last closed call, or None, in
    time linear in the text's length.
    """
    last = max(blocks(text, OPENING, CLOSING), key=lambda block: block.start, default=None)
    if last is None:
        return None
    kind = TOOL_CALL if text.startswith(TOOL_CALL, last.start) else FENCE
    return kind, text[last.content_start : last.content_end]


def program_of(kind: str, called: str) -> str:
    """Return the program of a call. kind, called: as `last_call` returns them.
    ValueError, with a text for the policy, for a malformed tool call.
    """
    if kind == FENCE:
        return called
    try:
        tool = json.loads(called)
        name = tool["name"]
        program = tool["arguments"]["code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError('error: a call is {"name": "python", "arguments": {"code": …}}') from None
    if name != "python" or not isinstance(program, str):
        raise ValueError(
            f"error: there is no tool {name!r}; the only one is python, with its code as a string"
        )
    return program


def reply_about(ran: Ran) -> str:
    """Return the reply to the policy about a program that has run: its output, and why
    it failed.
    """
    printed = ran.stdout.strip("\n")
    problem = _problem(ran, printed)
    if problem:
        return f"{printed}\nerror: {problem}".lstrip("\n")
    return printed or "(nothing was printed)"


def _problem(ran: Ran, printed: str) -> str:
    """Return why a program failed; "" if it did not, or if what it printed says why."""
    if ran.ended == "time":
        return "it took too long and was ended"
    if ran.ended == "output":
        return "it printed too much and was ended"
    if ran.status < 0 or (ran.status and not printed):
        return f"ended with status {ran.status}"
    return ""

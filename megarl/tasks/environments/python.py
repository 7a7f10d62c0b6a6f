"""A Python tool: the turn's last program is run in the sandbox, and its output is the reply.

    ```python                        or      <tool_call>
    print(6 * 7)                             {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    ```                                      </tool_call>

Each call is a separate process: nothing is kept from one to the next. Errors are printed as Python prints them. A turn without
a program outside its thinking is the last one.
"""

import json
import re

import numpy as np

from megarl.core.base.contracts import DONE, Environment, Observation
from megarl.tasks.environments.framing import Setting
from megarl.tasks.graders.sandbox import Limits, Ran

LIMITS = Limits(seconds=10, output=1 << 16)
CALL = re.compile(r"```python[^\n]*\n(?P<fenced>.*?)```|<tool_call>(?P<called>.*?)</tool_call>", re.DOTALL)
WRAPPED = """import sys
sys.stderr = sys.stdout
try:
    exec(compile({program!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    import traceback
    traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    sys.exit(1)
"""
"""Python prints errors on stderr, which a sandbox does not return."""


class Python(Environment):
    """Stateless; the sandbox's places limit how many programs run at once."""

    def __init__(self, setting: Setting) -> None:
        setting.framing.check()
        self._setting = setting

    async def step(self, tokens: np.ndarray) -> Observation:
        called = list(CALL.finditer(self._setting.said(tokens)))
        if not called:
            return DONE
        try:
            program = program_of(called[-1])
        except ValueError as error:
            return Observation(self._setting.framing.tokens(str(error)), error=True)
        ran = await self._setting.sandbox.run(WRAPPED.format(program=program), "")
        return Observation(self._setting.framing.tokens(told(ran)), error=ran.ended != "exit" or ran.status != 0)


def program_of(call: re.Match[str]) -> str:
    """Return the program of a call; ValueError, with a text for the policy, for a malformed tool call."""
    if call["fenced"] is not None:
        return call["fenced"]
    try:
        tool = json.loads(call["called"])
        name, program = tool["name"], tool["arguments"]["code"]
    except (ValueError, TypeError, KeyError):
        raise ValueError('error: a call is {"name": "python", "arguments": {"code": …}}') from None
    if name != "python" or not isinstance(program, str):
        raise ValueError(f"error: there is no tool {name!r}; there is python, with its code as a text")
    return program


def told(ran: Ran) -> str:
    """Return what the policy is told about a program that ran."""
    printed = ran.stdout.strip("\n")
    why = {"time": "it took too long and was ended", "output": "it printed too much and was ended"}.get(ran.ended, "")
    if not why and (ran.status < 0 or (ran.status and not printed)):
        why = f"ended with status {ran.status}"
    return f"{printed}\nerror: {why}".lstrip("\n") if why else printed or "(nothing was printed)"

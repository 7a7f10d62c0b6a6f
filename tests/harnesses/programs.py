"""Agents built with unmodified harnesses, each in its own Python: `PYTHON programs.py
MODE`, with the task on stdin.

Every one has a tool, works on the prompt until the policy calls none, and asks once
more with the harness's own history.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TURNS = 5
AGAIN = "Are you sure?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}, "note": {"type": "string"}},
    "required": ["a", "b"],
}


def add(a: float, b: float, note: str = "") -> str:
    """Add two numbers."""
    return f"{a + b:g}"


def called(arguments: dict[str, Any]) -> str:
    return add(arguments.get("a", 0), arguments.get("b", 0))


def openai_chat(prompt: str, stream: bool = False) -> None:
    from openai import OpenAI

    client = OpenAI()
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": prompt},
    ]
    tools: list[Any] = [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": stream}}
    ]
    for more in ([], [{"role": "user", "content": AGAIN}]):
        messages += more
        for _ in range(TURNS):
            if stream:
                with client.chat.completions.stream(
                    model=MODEL, messages=messages, tools=tools
                ) as events:
                    said: Any = events.get_final_completion().choices[0].message
            else:
                said = (
                    client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
                    .choices[0]
                    .message
                )
            messages.append(said)
            for call in said.tool_calls or []:
                result = called(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not said.tool_calls:
                break


def openai_responses(prompt: str, stream: bool = False) -> None:
    from openai import OpenAI

    client = OpenAI()
    items = list[Any]([{"role": "user", "content": prompt}])
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be brief.",
        "tools": tools,
        "store": False,
    }
    for more in ([], [{"role": "user", "content": AGAIN}]):
        items += more
        for _ in range(TURNS):
            if stream:
                with client.responses.stream(input=items, **asked) as events:
                    said: Any = events.get_final_response()
            else:
                said = client.responses.create(input=items, **asked)
            items += said.output
            calls = [item for item in said.output if item.type == "function_call"]
            for call in calls:
                result = called(json.loads(call.arguments))
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                )
            if not calls:
                break


def anthropic_messages(prompt: str, stream: bool = False) -> None:
    from anthropic import Anthropic

    client = Anthropic()
    asked: dict[str, Any] = {
        "model": MODEL,
        "system": [{"type": "text", "text": "Be brief."}],
        "max_tokens": 300,
        "tools": [{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}],
    }
    messages: list[Any] = [{"role": "user", "content": prompt}]
    client.messages.count_tokens(model=MODEL, messages=messages)
    for more in ([], [{"role": "user", "content": AGAIN}]):
        messages += more
        for _ in range(TURNS):
            if stream:
                with client.messages.stream(messages=messages, **asked) as events:
                    said: Any = events.get_final_message()
            else:
                said = client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": said.content})
            calls = [block for block in said.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": called(c.input)}
                for c in calls
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})


def openai_agents(prompt: str, protocol: str, stream: bool = False) -> None:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if protocol == "chat" else OpenAIResponsesModel
    model = kind(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Be brief.", model=model, tools=[function_tool(add)])

    async def work() -> None:
        given: Any = prompt
        for more in ([{"role": "user", "content": AGAIN}], []):
            if stream:
                made = Runner.run_streamed(agent, given)
                async for _ in made.stream_events():
                    pass
            else:
                made = await Runner.run(agent, given)
            given = made.to_input_list() + more

    asyncio.run(work())


def pydantic_ai(prompt: str, protocol: str, stream: bool = False) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    kind: Any = {
        "chat": OpenAIChatModel,
        "responses": OpenAIResponsesModel,
        "messages": AnthropicModel,
    }[protocol]
    agent = Agent(kind(MODEL), instructions="Be brief.", tools=[add])

    async def work() -> None:
        history: Any = None
        for text in (prompt, AGAIN):
            if stream:
                async with agent.run_stream(text, message_history=history) as made:
                    await made.get_output()
            else:
                made = await agent.run(text, message_history=history)
            history = made.all_messages()

    asyncio.run(work())


def mini_swe_agent(prompt: str, kind: str) -> None:
    import yaml
    from minisweagent import package_dir
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    name = "mini_textbased.yaml" if kind == "litellm_textbased" else "mini.yaml"
    config = yaml.safe_load((Path(package_dir) / "config" / name).read_text())
    model = {
        **config["model"],
        "model_name": f"openai/{MODEL}",
        "model_class": kind,
        "cost_tracking": "ignore_errors",
    }
    settings = {
        key: value for key, value in config["agent"].items() if key not in ("mode", "confirm_exit")
    }
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(
            get_model(config=model),
            LocalEnvironment(cwd=folder),
            **settings | {"step_limit": TURNS},
        )
        agent.run(prompt)


TASKSET = """
import verifiers.v1 as vf
class LocalTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        return 1.0
class LocalConfig(vf.TasksetConfig):
    prompt: str = ""
class LocalTaskset(vf.Taskset[LocalTask, LocalConfig]):
    def load(self) -> list[LocalTask]:
        return [LocalTask(vf.TaskData(idx=0, prompt=self.config.prompt), self.config.task)]
__all__ = ["LocalTaskset"]
"""


def verifiers(prompt: str, harness: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "local_task.py").write_text(TASKSET)
        words = [
            str(Path(sys.executable).parent / "vf-eval"),
            "local_task",
            "-m",
            MODEL,
            "--push",
            "False",
            "--no-rich",
            "--env.agent.harness.id",
            harness,
            "--env.agent.runtime.type",
            "subprocess",
            "--env.taskset.prompt",
            prompt,
            "--client.base-url",
            os.environ["OPENAI_BASE_URL"],
            "--client.api-key-var",
            "OPENAI_API_KEY",
            "-o",
            f"{folder}/outputs",
        ]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(
            words, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": folder, "PATH": path}
        )


def crewai(prompt: str) -> None:
    os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
    from crewai import LLM, Agent
    from crewai.tools import tool

    agent = Agent(
        role="adder",
        goal="Add.",
        backstory="You add.",
        llm=LLM(model=MODEL, provider="openai"),
        max_iter=TURNS,
        tools=[tool("add")(add)],
    )
    agent.kickoff(prompt)


def agno(prompt: str) -> None:
    from agno.agent import Agent
    from agno.models.openai import OpenAIResponses

    agent = Agent(
        model=OpenAIResponses(id=MODEL), instructions="Be brief.", tools=[add], telemetry=False
    )
    made = agent.run(prompt)
    history = [message for message in made.messages if message.role != "system"]
    agent.run([*history, {"role": "user", "content": AGAIN}])


def javascript(prompt: str) -> None:
    """Run the mode in Node.js, by the program in this Python's environment."""
    place = Path(sys.executable).parents[1]
    words = [str(place / "bin" / "node"), str(place / "programs.mjs"), sys.argv[1]]
    subprocess.run(words, check=True, input=json.dumps({"prompt": prompt}).encode())


MODES: dict[str, tuple[str, Callable[..., None], tuple[Any, ...]]] = {
    "openai-chat": ("openai", openai_chat, ()),
    "openai-chat-stream": ("openai", openai_chat, (True,)),
    "openai-responses": ("openai", openai_responses, ()),
    "openai-responses-stream": ("openai", openai_responses, (True,)),
    "anthropic-messages": ("anthropic", anthropic_messages, ()),
    "anthropic-messages-stream": ("anthropic", anthropic_messages, (True,)),
    "openai-agents-chat": ("openai-agents", openai_agents, ("chat",)),
    "openai-agents-chat-stream": ("openai-agents", openai_agents, ("chat", True)),
    "openai-agents-responses": ("openai-agents", openai_agents, ("responses",)),
    "openai-agents-responses-stream": ("openai-agents", openai_agents, ("responses", True)),
    "pydantic-ai-chat": ("pydantic-ai", pydantic_ai, ("chat",)),
    "pydantic-ai-chat-stream": ("pydantic-ai", pydantic_ai, ("chat", True)),
    "pydantic-ai-responses": ("pydantic-ai", pydantic_ai, ("responses",)),
    "pydantic-ai-messages": ("pydantic-ai", pydantic_ai, ("messages",)),
    "mini-swe-agent-chat": ("mini-swe-agent", mini_swe_agent, ("litellm",)),
    "mini-swe-agent-responses": ("mini-swe-agent", mini_swe_agent, ("litellm_response",)),
    "mini-swe-agent-text": ("mini-swe-agent", mini_swe_agent, ("litellm_textbased",)),
    "verifiers-bash": ("verifiers", verifiers, ("bash",)),
    "verifiers-null": ("verifiers", verifiers, ("null",)),
    "crewai": ("crewai", crewai, ()),
    "agno-responses": ("agno", agno, ()),
    "ai-sdk-chat": ("ai-sdk", javascript, ()),
    "ai-sdk-chat-stream": ("ai-sdk", javascript, ()),
    "ai-sdk-responses": ("ai-sdk", javascript, ()),
    "ai-sdk-messages": ("ai-sdk", javascript, ()),
}
"""By mode: the harness whose environment it needs, the agent, and its arguments."""

if __name__ == "__main__":
    _, agent, arguments = MODES[sys.argv[1]]
    agent(json.load(sys.stdin)["prompt"], *arguments)

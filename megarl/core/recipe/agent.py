"""`agent`: sessions of agents."""

from typing import Literal

from pydantic import Field

from megarl.core.recipe.section import Section


class AgentSection(Section):
    """Sessions of the agents that tasks name. Not part of ScaleRL."""

    history: Literal["sampled", "template"] = Field(
        "sampled",
        description=(
            "what the policy sees of earlier turns: all it wrote, or what the chat template leaves"
        ),
    )
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description=(
            "what a turn is trained on: the session's reward, or that plus what POST /v1/reward"
            " gave after it"
        ),
    )
    forms: Literal["refuse", "ask"] = Field(
        "refuse",
        description=(
            "a request that demands JSON or the call of one tool: refuse it, or ask the policy for"
            " it in words; sampling is not constrained"
        ),
    )
    at_once: int = Field(32, ge=1, description="maximum number of agents that run at once")
    time_s: float = Field(
        1800,
        gt=0,
        description=(
            "limit of a session, in seconds, without waits for a server; a third of it without a"
            " request ends it, too"
        ),
    )
    requests: int = Field(200, ge=1, description="maximum requests of a session")
    paths: int = Field(
        32, ge=1, description="maximum conversations of a session: sub-agents, summaries, edits"
    )
    trained_tokens: int = Field(
        65_536, ge=1, description="maximum tokens that the policy writes in a session"
    )
    interface: str = Field(
        "",
        description=(
            "network interface where agents find the policy, with data.sandbox=rlimits; empty:"
            " loopback"
        ),
    )

    @property
    def idle_s(self) -> float:
        """Limit of the time without a request, in seconds: an agent that hangs costs a
        third of a session at most.
        """
        return self.time_s / 3

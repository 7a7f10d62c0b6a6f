"""Agents as they are: programs that speak to a model endpoint, whose conversations are trained.

    agent ── HTTP ──► gateway ─► session ─► tree: which conversation ─► tokens as sampled, then what is new ─► policy
                                              └─► paths: what is trained of the session

registry.py    TaskAgents: a recipe's agents, by task: processes, limits, rewards; inside.py: the code of a process
gateway.py     the HTTP server
wire.py        what protocols share; chat_completions.py, responses.py: OpenAI's two; anthropic_messages.py: Anthropic's
session.py     one agent's requests: who waits for which answer, limits
tree.py        which conversation a request continues, and which tokens are trained: pure
messages.py    what a request says, whatever the protocol
rendering.py   messages to tokens, by the model's chat template
calls.py       tool calls in what the policy wrote
calculator.py  an agent as a user writes it, for the quickstart
"""

"""Unmodified agents: programs that talk to a model endpoint, and whose conversations
the policy is trained on.

    agent ── HTTP ──► gateway ─► session ─► tree: which conversation a request continues
                                  ─► tokens as sampled, then the new ones ─► policy
                                  ─► paths: the part of the session that is trained on

registry.py    TaskAgents: a recipe's agents, by task: processes, limits, rewards
inside.py      the code that runs in a process
sandbox.py     the bubblewrap sandbox of that process
gateway.py     the HTTP server
wire.py        what the protocols share; chat_completions.py, responses.py: OpenAI's
               two; anthropic_messages.py: Anthropic's
bounds.py      how long a request may be
errors.py      what an agent is told when it is refused
session.py     one agent's requests: which client waits for which answer, and the limits
forms.py       forms that a request demands of its answer, such as JSON
tree.py        which conversation a request continues, and which tokens are trained on,
               without I/O
messages.py    the content of a request, independent of the protocol
rendering.py   from messages to tokens, with the model's chat template
calls.py       finds tool calls in the policy's text
terminal.py    an agent for tasks that are folders, with a shell
calculator.py  an agent such as a user would write, for the quickstart
"""

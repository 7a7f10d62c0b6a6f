"""A tree of the policy's messages in a session: which one a request continues, and
which tokens are trained on. No I/O.

    request: system, user ──────────────────────► no node: rendered whole, a new root
             system, user, A, tool result ──────► node A: its tokens as sampled, then the result (rendering.py)
             system, user, A, another result ───► node A again: a branch
             system, summary ───────────────────► a new root

The tokens sent to a server are the tokens recorded, so training is right whatever is
decided here: a missed match only costs the prompt's tokens once more, but a wrong match
would show the policy another conversation. So a request continues a node only if its
messages are the same as those the node has seen, and if any reasoning that it sends
back is the reasoning served. Some harnesses drop the text beside calls, as others drop
reasoning: calls with all the ids that we gave them name the answer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from megarl.core.base.types import Branch, Segment, int32
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, tagged

NOTHING = CanonicalMessage("assistant")


@dataclass(eq=False)
class TreeNode:
    """One message of the policy.

    put [n] int32: prompt tokens after the parent's last token; segments: the tokens
    sampled after `put`. history: the earlier messages; key: the hash of the whole
    request. asked, delivered: the moments, by the tree's clock, at which the request
    came and at which the agent last received the whole answer (-1 before that). served:
    the answer; stopped: the stop text that ended it, or "".
    """

    number: int
    parent: "TreeNode | None"
    put: np.ndarray
    history: tuple[CanonicalMessage, ...]
    key: "hashlib._Hash"
    asked: int
    segments: tuple[Segment, ...] = ()
    served: CanonicalMessage = NOTHING
    stopped: str = ""
    delivered: int = -1
    children: list["TreeNode"] = field(default_factory=list)
    _whole: np.ndarray | None = None

    @property
    def sampled(self) -> np.ndarray:
        """The tokens that the policy sampled, [m] int32."""
        return tokens_of(self.segments)

    @property
    def line(self) -> list["TreeNode"]:
        """The nodes from the root to this one."""
        found = [self]
        node = self.parent
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def tokens(self) -> np.ndarray:
        """All tokens from the root to this node, [n] int32, valid once it is answered.
        Only a line's last node caches them.
        """
        if self._whole is None:
            before = self.parent and self.parent._whole
            nodes, begun = (self.line, int32(())) if before is None else ([self], before)
            self._whole = np.concatenate(
                [begun, *(part for node in nodes for part in (node.put, node.sampled))]
            )
            if self.parent is not None:
                self.parent._whole = None
        return self._whole


class SessionTree:
    """The nodes of a session, in the order in which they were added."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []
        self._at: dict[
            bytes, list[TreeNode]
        ] = {}  # by the hash of all messages up to and including the served one
        self._textless: dict[tuple[tuple[str, ...], bytes], bytes] = {}
        """By the ids of an answer's calls and the answer's key without its text: its
        key.
        """
        self._clock = 0

    def find(self, request: AgentRequest) -> tuple[TreeNode | None, "hashlib._Hash"]:
        """Return the node that the request continues (None: a new root), and the hash
        of the request.
        """
        answered = len(request.messages)
        while answered and request.messages[answered - 1].role != "assistant":
            answered -= 1
        before = request.messages[:answered]
        behind = request.messages[answered:]
        key = hashlib.sha256(hashlib.sha256(tagged(list(request.tools))).digest())
        key.update(b"".join([self._key(message) for message in before]))
        fit = [node for node in self._at.get(key.digest(), ()) if _reasoning_agrees(node, before)]
        key.update(b"".join([message.key for message in behind]))
        return _closest(fit, before), key

    def moment(self) -> int:
        """Advance the clock by one, and return the new moment."""
        self._clock += 1
        return self._clock

    def add(
        self,
        parent: TreeNode | None,
        put: np.ndarray,
        request: AgentRequest,
        key: "hashlib._Hash",
        asked: int,
    ) -> TreeNode:
        """Add a node for a request, before its answer is sampled. asked: the moment at
        which the request came.
        """
        history = request.messages
        if (
            parent is not None
        ):  # the messages as they were served; the agent may send back less of them
            known = (*parent.history, parent.served)
            history = (*known, *request.messages[len(known) :])
        node = TreeNode(len(self.nodes), parent, put, history, key, asked)
        self.nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        return node

    def answer(
        self, node: TreeNode, segments: tuple[Segment, ...], served: CanonicalMessage
    ) -> None:
        """Record what was sampled for the node, and the message that the agent is
        served.
        """
        node.segments = segments
        node.served = served
        if served.calls and served.text.strip():
            ids = tuple(call.id for call in served.calls)
            self._textless[ids, replace(served, text="").key] = served.key
        upto = node.key.copy()
        upto.update(served.key)
        self._at.setdefault(upto.digest(), []).append(node)

    def _key(self, message: CanonicalMessage) -> bytes:
        """Return a message's key; of an answer whose text beside calls was dropped, the
        key that it had when it was served.
        """
        ids = tuple(call.id for call in message.calls)
        return self._textless.get((ids, message.key), message.key)

    def deliver(self, node: TreeNode) -> None:
        """Record that the agent has received the whole answer."""
        node.delivered = self.moment()

    def superseded(self, node: TreeNode) -> bool:
        """Return whether the agent, after receiving this answer, sent the same request
        again instead of continuing from it. The answers of parallel sub-agents with the
        same request are not superseded: both asked before either was answered.
        """
        siblings = (
            node.parent.children
            if node.parent is not None
            else [n for n in self.nodes if n.parent is None]
        )
        return not node.children and any(
            other.key.digest() == node.key.digest()
            and other.delivered >= 0
            and other.asked > node.delivered
            for other in siblings
        )

    def trained(self) -> list[list[TreeNode]]:
        """Return the lines of nodes to train on, ordered by their last nodes, the
        earliest first. A node is trained on if it was delivered and not superseded, or
        if such a node descends from it.
        """
        kept = set[TreeNode]()
        for node in reversed(self.nodes):
            if any(child in kept for child in node.children) or (
                node.delivered >= 0 and not self.superseded(node)
            ):
                kept.add(node)
        return [
            n.line
            for n in self.nodes
            if n in kept and not any(child in kept for child in n.children)
        ]

    def credit(self, rewards: Sequence[tuple[int, float]]) -> None:
        """Number the trained turns as they were served; credit each with the rewards
        after it. rewards: (moment, amount).
        """
        served = {node: max(node.delivered, node.asked) for line in self.trained() for node in line}
        for number, (node, moment) in enumerate(sorted(served.items(), key=lambda each: each[1])):
            credit = sum(reward for at, reward in rewards if at > moment)
            node.segments = tuple(
                structs.replace(s, turn=number, credit=credit) for s in node.segments
            )

    def paths(self) -> tuple[tuple[Segment, ...], tuple[Branch, ...]]:
        """Return all trained lines as segments and paths. A node that several paths
        share is trained in the first of them.
        """
        segments: list[Segment] = []
        paths: list[Branch] = []
        first: dict[
            TreeNode, tuple[int, int]
        ] = {}  # the path that trains a node, and the path's length up to it
        for number, line in enumerate(self.trained()):
            before = [node for node in line if node in first]
            parent, shared = first[before[-1]] if before else (-1, 0)
            own: list[Segment] = []
            end = shared
            for node in line[len(before) :]:
                if n := len(node.put):
                    zeros = np.zeros(n, np.float32)
                    version = node.segments[0].weight_version
                    own.append(
                        Segment(
                            tokens=node.put, logprobs=zeros, weight_version=version, trained=False
                        )
                    )
                own += node.segments
                end += n + sum(len(s.tokens) for s in node.segments)
                first[node] = number, end
            segments += own
            paths.append(Branch(segments=len(own), parent=parent, shared=shared))
        return tuple(segments), tuple(paths)

    def untrained_tokens(self) -> int:
        """Return the number of sampled tokens that are in no path."""
        trained = {node for line in self.trained() for node in line}
        return sum(len(node.sampled) for node in self.nodes if node not in trained)


def tokens_of(segments: Sequence[Segment]) -> np.ndarray:
    """Return the tokens of all segments, [n] int32."""
    return np.concatenate([int32(()), *(s.tokens for s in segments)])


def _closest(fit: Sequence[TreeNode], messages: Sequence[CanonicalMessage]) -> TreeNode | None:
    """Return the node that a request continues, of those that fit its messages up to
    the last answer: the one whose ids it has; else the one whose numbers are written as
    in the request; else the newest. None if none fits.
    """
    if len(fit) < 2:
        return fit[0] if fit else None
    marks = messages[-1].marks

    def closeness(node: TreeNode) -> tuple[int, int, int]:
        pairs = zip((*node.history, node.served), messages, strict=True)
        exact = sum(_arguments(ours) == _arguments(theirs) for ours, theirs in pairs)
        return len(node.served.marks & marks), exact, node.number

    return max(fit, key=closeness)


def _arguments(message: CanonicalMessage) -> list[object]:
    return [call.arguments for call in message.calls]


def _reasoning_agrees(node: TreeNode, messages: Sequence[CanonicalMessage]) -> bool:
    """Return whether each reasoning that the agent sends back is the conversation's
    own.
    """
    known = (*node.history, node.served)
    if len(known) != len(messages):
        return False
    told = (pair for pair in zip(messages, known, strict=True) if pair[0].reasoning)
    return all(message.reasoning.strip() in ("", ours.reasoning.strip()) for message, ours in told)

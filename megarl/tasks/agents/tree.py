"""A tree of the policy's messages in a session: which one a request continues, and
which tokens are trained on. No I/O.

    request                              continues
    system, user                         no node: rendered whole, a new root
    system, user, A, tool result         node A: its tokens as sampled, then the result
    system, user, A, another result      node A again: a branch
    system, summary                      no node: a new root

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
from typing import NamedTuple

import numpy as np
from msgspec import structs

from megarl.core.base.types import Branch, Segment, int32
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, tagged

NOTHING = CanonicalMessage("assistant")


@dataclass(eq=False)
class TreeNode:
    """One message of the policy.

    suffix [n] int32: the prompt's tokens after the parent's last token, or of a root
    all of them; segments: the tokens sampled after them. experts: those that servers
    chose for the node's tokens, the suffix's and the sampled ones, as far as they are
    known [rows, layers with experts, chosen]; None if none are. history: the earlier
    messages; key: the hash of the whole request. asked_at, delivered: the moments, by
    the tree's clock, at which the request came and at which the agent last received the
    whole answer (-1 before that). answer: the message that the agent is served;
    stopped: the stop text that ended it, or "".
    """

    number: int
    parent: "TreeNode | None"
    suffix: np.ndarray
    history: tuple[CanonicalMessage, ...]
    key: "hashlib._Hash"
    asked_at: int
    segments: tuple[Segment, ...] = ()
    experts: np.ndarray | None = None
    answer: CanonicalMessage = NOTHING
    stopped: str = ""
    delivered: int = -1
    children: list["TreeNode"] = field(default_factory=list)
    _tokens: np.ndarray | None = None

    @property
    def sampled(self) -> np.ndarray:
        """The tokens that the policy sampled, [m] int32."""
        return tokens_of(self.segments)

    @property
    def length(self) -> int:
        """The number of tokens of the suffix and of what was sampled."""
        return len(self.suffix) + sum(len(segment.tokens) for segment in self.segments)

    @property
    def routed(self) -> int:
        """The number of the node's first tokens whose experts are known."""
        return 0 if self.experts is None else len(self.experts)

    @property
    def line_routed(self) -> int:
        """The number of first tokens from the root to this node whose experts are
        known.
        """
        count = 0
        for node in self.line:
            count += node.routed
            if node.routed < node.length:
                break
        return count

    @property
    def conversation(self) -> tuple[CanonicalMessage, ...]:
        """The messages up to and including the answer, as they were served."""
        return (*self.history, self.answer)

    @property
    def line(self) -> list["TreeNode"]:
        """The nodes from the root to this one."""
        nodes = [self]
        node = self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def tokens(self) -> np.ndarray:
        """All tokens from the root to this node, [n] int32, valid once it is answered.
        They are cached here, and dropped from the parent's cache: what is asked for
        most are a line's last tokens.
        """
        if self._tokens is None:
            self._tokens = self._joined_tokens()
            if self.parent is not None:
                self.parent._tokens = None
        return self._tokens

    def _joined_tokens(self) -> np.ndarray:
        """Return `tokens`, made from the parent's if these are cached."""
        if self.parent is not None and self.parent._tokens is not None:
            return np.concatenate([self.parent._tokens, self.suffix, self.sampled])
        parts: list[np.ndarray] = []
        for node in self.line:
            parts += [node.suffix, node.sampled]
        return np.concatenate([int32(()), *parts])


class PathEnd(NamedTuple):
    """Where a node ends: after `length` tokens of the path of this number, those that
    the path shares with earlier ones included.
    """

    path: int
    length: int


class SessionPaths(NamedTuple):
    """What a session leaves to train on, as in `AgentRollout`."""

    segments: tuple[Segment, ...]
    paths: tuple[Branch, ...]
    experts: np.ndarray | None


class SessionTree:
    """The nodes of a session, in the order in which they were added."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []
        self._by_conversation: dict[bytes, list[TreeNode]] = {}
        """By the hash of all messages up to and including the answer."""
        self._textless: dict[tuple[tuple[str, ...], bytes], bytes] = {}
        """The keys of answers with calls and text, by the ids of the calls and by the
        key that the answer has without its text.
        """
        self._clock = 0

    def find(self, request: AgentRequest) -> tuple[TreeNode | None, "hashlib._Hash"]:
        """Return the node that the request continues (None: a new root), and the hash
        of the request: of its tools, then of its messages.
        """
        conversation_length = len(request.messages)  # up to and including the last answer
        while conversation_length and not _is_answer(request.messages[conversation_length - 1]):
            conversation_length -= 1
        conversation = request.messages[:conversation_length]
        tail = request.messages[conversation_length:]
        key = hashlib.sha256(hashlib.sha256(tagged(list(request.tools))).digest())
        key.update(b"".join([self._key(message) for message in conversation]))
        same = self._by_conversation.get(key.digest(), ())
        candidates = [node for node in same if _reasoning_agrees(node, conversation)]
        key.update(b"".join([message.key for message in tail]))
        return _closest(candidates, conversation), key

    def moment(self) -> int:
        """Advance the clock by one, and return the new moment."""
        self._clock += 1
        return self._clock

    def add(
        self,
        parent: TreeNode | None,
        suffix: np.ndarray,
        request: AgentRequest,
        key: "hashlib._Hash",
        asked_at: int,
    ) -> TreeNode:
        """Add a node for a request, before its answer is sampled. parent, key: of
        `find`. suffix [n] int32: the prompt's tokens after the parent's last token;
        without a parent, all of them. asked_at: the moment at which the request came,
        by the tree's clock.
        """
        history = request.messages
        if parent is not None:
            # As they were served: the agent may have sent them back without their
            # reasoning, or without the text beside calls.
            conversation = parent.conversation
            history = (*conversation, *request.messages[len(conversation) :])
        node = TreeNode(len(self.nodes), parent, suffix, history, key, asked_at)
        self.nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        return node

    def answer(
        self, node: TreeNode, segments: tuple[Segment, ...], answer: CanonicalMessage
    ) -> None:
        """Record what was sampled for the node, and the message that the agent is
        served.
        """
        node.segments = segments
        node.answer = answer
        if answer.calls and answer.text.strip():  # an agent may send back only the calls
            ids = tuple(call.id for call in answer.calls)
            self._textless[ids, replace(answer, text="").key] = answer.key
        key = node.key.copy()
        key.update(answer.key)
        self._by_conversation.setdefault(key.digest(), []).append(node)

    def note_experts(self, node: TreeNode, first: int, table: np.ndarray) -> None:
        """Record the experts that servers chose for the tokens of the node's line from
        token `first` on: table [rows, layers with experts, chosen]. Tokens whose
        experts are known keep them, because those after them were sampled with these;
        a later turn may have computed them again.
        """
        start = 0
        for ancestor in node.line:
            first_unknown = start + ancestor.routed
            end = start + ancestor.length
            if first <= first_unknown < end:
                rows = table[first_unknown - first : end - first]
                if ancestor.experts is not None:
                    rows = np.concatenate([ancestor.experts, rows])
                ancestor.experts = rows
            start = end

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
        if node.children:
            return False
        if node.parent is not None:
            siblings = node.parent.children
        else:
            siblings = [root for root in self.nodes if root.parent is None]
        return any(
            sibling.key.digest() == node.key.digest()
            and sibling.delivered >= 0
            and sibling.asked_at > node.delivered
            for sibling in siblings
        )

    def trained(self) -> list[list[TreeNode]]:
        """Return the lines of nodes to train on, ordered by their last nodes, the
        earliest first.
        """
        nodes = self._trained_nodes()
        parents = {node.parent for node in nodes}
        return [node.line for node in nodes if node not in parents]

    def _trained_nodes(self) -> list[TreeNode]:
        """Return the nodes to train on, the earliest first. A node is trained on if it
        was delivered and not superseded, or if such a node descends from it.
        """
        trained = set[TreeNode]()
        for node in reversed(self.nodes):
            has_trained_child = not trained.isdisjoint(node.children)
            if has_trained_child or (node.delivered >= 0 and not self.superseded(node)):
                trained.add(node)
        return [node for node in self.nodes if node in trained]

    def credit(self, rewards: Sequence[tuple[int, float]]) -> None:
        """Number the trained turns as they were served; credit each with the rewards
        after it. rewards: (moment, amount).
        """
        for number, node in enumerate(sorted(self._trained_nodes(), key=_moment_of)):
            moment = _moment_of(node)
            credit = sum(amount for rewarded_at, amount in rewards if rewarded_at > moment)
            node.segments = tuple(
                structs.replace(s, turn=number, credit=credit) for s in node.segments
            )

    def paths(self) -> "SessionPaths":
        """Return all trained lines. A node that several paths share is trained in the
        first of them.
        """
        segments: list[Segment] = []
        paths: list[Branch] = []
        tables: list[np.ndarray] = []
        ends: dict[TreeNode, PathEnd] = {}  # of each node in the first path that has it
        for number, line in enumerate(self.trained()):
            shared_nodes = [node for node in line if node in ends]
            branch_point = PathEnd(path=-1, length=0)  # none: the path begins at a root
            if shared_nodes:
                branch_point = ends[shared_nodes[-1]]
            path_segments: list[Segment] = []
            length = branch_point.length
            own_nodes = line[len(shared_nodes) :]
            for node in own_nodes:
                node_segments = _segments_of(node)
                path_segments += node_segments
                length += sum(len(segment.tokens) for segment in node_segments)
                ends[node] = PathEnd(number, length)
            segments += path_segments
            path_tables: list[np.ndarray] = []
            if not shared_nodes or shared_nodes[-1].line_routed == branch_point.length:
                path_tables = _known_experts(own_nodes)
            tables += path_tables
            paths.append(
                Branch(
                    segments=len(path_segments),
                    parent=branch_point.path,
                    shared=branch_point.length,
                    routed=sum(len(table) for table in path_tables),
                )
            )
        experts = None
        if tables:
            experts = np.concatenate(tables)
        return SessionPaths(tuple(segments), tuple(paths), experts)

    def untrained_tokens(self) -> int:
        """Return the number of sampled tokens that are in no path."""
        trained = set(self._trained_nodes())
        return sum(len(node.sampled) for node in self.nodes if node not in trained)


def tokens_of(segments: Sequence[Segment]) -> np.ndarray:
    """Return the tokens of all segments, [n] int32."""
    return np.concatenate([int32(()), *(s.tokens for s in segments)])


def _moment_of(node: TreeNode) -> int:
    """Return when the node was served or, if it never was, asked for."""
    return max(node.delivered, node.asked_at)


def _segments_of(node: TreeNode) -> list[Segment]:
    """Return a node's segments: its part of the prompt, not trained, and its answer."""
    length = len(node.suffix)
    if not length:
        return list(node.segments)
    prompt = Segment(
        tokens=node.suffix,
        logprobs=np.zeros(length, np.float32),
        weight_version=node.segments[0].weight_version,
        trained=False,
    )
    return [prompt, *node.segments]


def _known_experts(nodes: Sequence[TreeNode]) -> list[np.ndarray]:
    """Return the experts of successive nodes, up to the first token whose experts are
    unknown.
    """
    tables: list[np.ndarray] = []
    for node in nodes:
        if node.experts is not None:
            tables.append(node.experts)
        if node.routed < node.length:
            break
    return tables


def _closest(
    candidates: Sequence[TreeNode], messages: Sequence[CanonicalMessage]
) -> TreeNode | None:
    """Return the node that a request continues, of those that fit its messages up to
    the last answer: the one with most of whose marks (ids) that answer came back; else
    the one whose integers are exactly the request's; else the newest. None if none
    fits.
    """
    if not candidates:
        return None
    if len(candidates) == 1:
        return candidates[0]
    marks = messages[-1].marks

    def closeness(node: TreeNode) -> tuple[int, int, int]:
        """Return what decides, in this order; more of it is closer."""
        pairs = zip(node.conversation, messages, strict=True)
        # A message's key takes integers above 2**53 for equal if they have the same
        # double; here they are compared exactly.
        exact = sum(_arguments(ours) == _arguments(theirs) for ours, theirs in pairs)
        return len(node.answer.marks & marks), exact, node.number

    return max(candidates, key=closeness)


def _is_answer(message: CanonicalMessage) -> bool:
    return message.role == "assistant"


def _arguments(message: CanonicalMessage) -> list[object]:
    """Return the arguments of a message's calls."""
    return [call.arguments for call in message.calls]


def _reasoning_agrees(node: TreeNode, messages: Sequence[CanonicalMessage]) -> bool:
    """Return whether each reasoning that the agent sends back is the conversation's
    own; it may send back none. messages: the request's, up to its last answer.
    """
    conversation = node.conversation
    if len(conversation) != len(messages):
        return False
    for theirs, ours in zip(messages, conversation, strict=True):
        if theirs.reasoning and theirs.reasoning.strip() not in ("", ours.reasoning.strip()):
            return False
    return True

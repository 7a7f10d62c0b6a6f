"""What real harnesses sent (tests/harnesses/record.py), sent again: conversations, and
the tokens that are trained of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.types import int32, paths_of
from tests.harnesses.programs import MODES
from tests.harnesses.record import RECORDINGS, script
from tests.unit.tasks.agents.serving import gateway, run


async def replayed(folder: Path, mode: str, requests: list[dict[str, Any]], unsaid: int) -> int:
    """Send the requests, hold what must be, and return the number of paths."""
    said = script(mode)
    async with gateway(folder, *said, roomy=True) as served:
        for request in requests:
            status, body = await served.post(request["path"].removeprefix("/v1/"), request["body"])
            assert status == 200, body
        tree = served.session.tree
        segments, branches, _ = tree.paths()
        paths = paths_of(segments, branches, int32(()))
        for sent in served.asked:
            assert any(path.tokens[: len(sent)].tolist() == sent.tolist() for path in paths), (
                "ids sent are a path's"
            )
        trained = sum(int(path.trained.sum()) for path in paths)
        assert trained == sum(len(node.sampled) for node in tree.nodes), (
            "each sampled token is trained, once"
        )
        assert len(served.said) == unsaid
        for text in said[: len(said) - unsaid]:
            whole = [served.tokenizer.decode(path.tokens[path.trained]) for path in paths]
            assert sum(one.count(text) for one in whole) == 1
        return len(paths)


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_of_a_real_harness_is_one_path(mode: str, tmp_path: Path) -> None:
    recorded = json.loads((RECORDINGS / f"{mode}.json").read_text())
    assert recorded["versions"]
    assert (
        run(lambda: replayed(tmp_path, mode, recorded["requests"], recorded["unsaid"]))
        == recorded["paths"]
        == 1
    )


def test_a_harness_that_edits_what_was_said_begins_a_path(tmp_path: Path) -> None:
    text = (RECORDINGS / "openai-chat.json").read_text()
    requests = json.loads(text)["requests"]
    last = json.loads(json.dumps(requests[-1]).replace(" Two sums. ", " Three sums. "))
    assert last != requests[-1]
    assert run(lambda: replayed(tmp_path, "openai-chat", [*requests[:-1], last], 0)) == 2

"""Real, unmodified harnesses, each in its own environment, against a real run: `make
test-agents`.

The policy writes a word of random letters and ends: no harness gets a call that it can
run. So each asks twice, or as often as it accepts messages without a call, and what it
sends back is what was written.
"""

import json
import math
import os
import string
import subprocess
import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megarl.core.base.rundir import latest_scores
from megarl.core.base.types import paths_of
from megarl.core.journal.journal import JournalReader
from tests.e2e import runs
from tests.e2e.runs import batches, check_nothing_left
from tests.faults.injection import with_faults
from tests.harnesses.environments import python_of
from tests.harnesses.programs import MODES
from tests.tiny import tiny_qwen3
from tests.unit.tasks.agents.templates import QWEN, tokenizer_of

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

PROGRAMS = Path(__file__).parents[1] / "harnesses" / "programs.py"
TURNS = {"mini-swe-agent": 3, "verifiers": 1, "crewai": 1}
"""Answers of a session, by harness; of the others two."""
PATHS = {"mini-swe-agent": 3}
"""Paths of a session; of the others one. An answer without a command is left out of the
conversation when it is told so.
"""
GROUPS = {
    "clients": ("openai", "anthropic", "openai-agents"),
    "frameworks": ("pydantic-ai", "mini-swe-agent"),
    "others": ("crewai", "agno", "ai-sdk"),
    "online": ("verifiers",),
}
SANDBOXES = {"online": "rlimits"}
"""By group, if not bubblewrap: verifiers' programs fetch their packages."""
GRADER = '''
def odd(submission):
    """Right or wrong by chance, so that there is something to learn from."""
    return sum(submission.completion.encode()) % 2 == 0
'''


def write_policy(folder: Path) -> None:
    """A model that looks at the last token alone: letters follow anything, and the end
    follows letters one time in seven.
    """
    tokenizer = tokenizer_of(folder, QWEN)
    model = tiny_qwen3(
        folder,
        vocab_size=272,
        hidden_size=272,
        num_hidden_layers=2,
        max_position_embeddings=32_768,
        eos_token_id=tokenizer.end,
    )
    letters = [int(tokenizer.ids(letter)[0]) for letter in string.ascii_lowercase]
    logits = torch.full((272, 272), -30.0)  # of the next token (row) after a token (column)
    logits[letters] = 0.0
    logits[tokenizer.end, letters] = math.log(26 / 6)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(272))
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.copy_(logits / math.sqrt(272))
    model.save_pretrained(folder)
    tokenizer_of(folder, QWEN)


def write_recipe(
    folder: Path, name: str, agents: dict[str, Any], **sections: dict[str, Any]
) -> Path:
    """agents: by task."""
    (folder / "chance.py").write_text(GRADER)
    (folder / "prompts.jsonl").write_text(
        "\n".join(
            f'{{"id": "{n}", "prompt": "What is {n} + 1?", "answer": "{n + 1}"}}' for n in range(20)
        )
    )
    (folder / "policy").mkdir()
    write_policy(folder / "policy")
    rows = {"train": "prompts.jsonl", "heldout": 4, "grader": "chance:odd"}
    recipe: dict[str, Any] = {
        "base": "quickstart",
        "run": {"name": name, "steps": 2},  # servers and learner are compared before the second
        "model": {"path": "policy"},
        "data": {
            "tasks": (
                {"arithmetic": None}
                | {task: rows | {"agent": agent} for task, agent in agents.items()}
            )
        },
        "length": {
            "prompt_tokens": 24_000,
            "thinking_tokens": [190, 190],
            "answer_tokens": 10,
            "control": "none",
            "end_of_thinking": "",
        },
        "sampling": {"generations": 2},
        "pipeline": {"k": 0},
        "batch": {"prompts": len(agents), "zero_variance": "keep", "positive_threshold": None},
        "learner": {"microbatch_tokens": 32_768},
        "evaluation": {"every": 100, "prompts": 1, "samples": 1},
        "agent": {"at_once": 4, "time_s": 300},
    }
    for section, keys in sections.items():
        recipe[section] = recipe.get(section, {}) | keys
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return folder / f"{name}.yaml"


@pytest.mark.parametrize("group", GROUPS)
def test_harnesses_as_they_are_are_trained(group: str, tmp_path: Path) -> None:
    modes = [mode for mode, (harness, *_) in MODES.items() if harness in GROUPS[group]]
    agents = {mode: [str(python_of(MODES[mode][0])), str(PROGRAMS), mode] for mode in modes}
    sandbox = {"sandbox": SANDBOXES.get(group, "bubblewrap")}
    recipe = write_recipe(tmp_path, group, agents, data=sandbox)
    run = runs.start(tmp_path, recipe=str(recipe))
    try:
        run.wait_for(run.rundir.status.exists, "a status", limit_s=400)
        family = run.family()
        ports = run.ports()
        assert run.finish(900) == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    runs.check_parity(run.rundir)
    sessions = Counter[str]()
    tokens = Counter[str]()
    for ticket in (t for batch in batches(run.rundir, run.recipe) for t in batch):
        mode = ticket.prompt.task
        assert not ticket.void, f"{mode}: {run.tail()}"
        for rollout in ticket.rollouts:
            sessions[mode] += 1
            assert rollout.episode is not None
            assert rollout.episode.turns == TURNS.get(MODES[mode][0], 2), mode
            assert not rollout.episode.limited
            assert rollout.format_ok
            assert rollout.episode.untrained == 0
            paths = paths_of(rollout.segments, rollout.paths, ticket.prompt.tokens)
            assert len(paths) == PATHS.get(MODES[mode][0], 1), f"{mode}: a conversation is one path"
            written = sum(len(s.tokens) for s in rollout.segments if s.trained)
            assert sum(int(path.trained.sum()) for path in paths) == written > 0, (
                "each token is trained, once"
            )
            tokens[mode] += written
            for path in paths:
                assert (path.logprobs[path.trained] <= 0).all()
                assert np.any(path.logprobs[path.trained])
                assert not np.any(path.logprobs[~path.trained])
    print({mode: (sessions[mode], tokens[mode]) for mode in modes})
    assert set(sessions) == set(modes)
    rows = runs.latest_rows(run.rundir.metrics)
    assert sum(row["tokens_trained"] for row in rows) == sum(tokens.values())
    assert any(row["grad_norm"] > 0 for row in rows), "nothing to learn from"


def common(one: list[int], other: list[int]) -> int:
    """How many tokens at their beginnings are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def test_a_users_own_agent_learns(workplace: Path) -> None:
    """What docs/how-to/agents.md says: from a copy of the calculator to a curve that
    rises.
    """
    made = runs.megarl("sft", "quickstart-agent", cwd=workplace)
    assert made.returncode == 0, made.stderr
    source = (PROGRAMS.parents[2] / "megarl" / "tasks" / "agents" / "calculator.py").read_text()
    (workplace / "my_agent.py").write_text(source)
    mine = ("run.name=mine", "data.tasks.products.agent=my_agent:solve")
    run = runs.start(
        workplace, *mine, "run.steps=20", "evaluation.samples=4", recipe="quickstart-agent"
    )
    try:
        assert run.finish(900) == 0, run.tail()
    finally:
        run.kill()
    runs.check_history(run.rundir, run.recipe)
    runs.check_parity(run.rundir)
    first, *_, last = latest_scores(run.rundir.eval)
    print(first, last)
    assert last["pass_rate"] > first["pass_rate"] + 0.1


@pytest.mark.processes
def test_a_tiny_policy_learns_to_work_in_a_terminal(tmp_path: Path) -> None:
    """What docs/how-to/agents.md says: its commands as they stand, to a curve that
    rises.
    """
    root = PROGRAMS.parents[2]
    page = (root / "docs" / "how-to" / "agents.md").read_text()
    section = page.partition("## A terminal")[2].partition("\n## ")[0]
    block = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(block) == 6
    (tmp_path / "examples").symlink_to(root / "examples")
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in block[:-1]:
        made = subprocess.run(
            command.split(),
            cwd=tmp_path,
            env=runs.quiet() | python | {"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
    run = runs.start(tmp_path, recipe=block[-1].removeprefix("megarl train "))
    try:
        assert run.finish(900) == 0, run.tail()
    finally:
        run.kill()
    runs.check_history(run.rundir, run.recipe)
    runs.check_parity(run.rundir)
    curve = [score["pass_rate"] for score in latest_scores(run.rundir.eval)]
    print(curve)
    assert curve[-1] > curve[0] + 0.15


@pytest.mark.parametrize("replay", [True, False])
def test_an_agent_on_experts(workplace: Path, replay: bool) -> None:
    """The tiny Llama 4 with the calculator agent: the learner takes the experts that
    servers chose along each path.
    """
    trained = "runs/agent-moe-sft"
    if not (workplace / trained).exists():
        warm = ("sft.init=runs/quickstart-data/init-moe", f"model.path={trained}")
        made = runs.megarl("sft", "quickstart-agent", *warm, cwd=workplace)
        assert made.returncode == 0, made.stderr
    run = runs.start(
        workplace,
        f"run.name=agent-moe-{replay}",
        "run.steps=4",
        f"model.path={trained}",
        f"model.moe.routing_replay={str(replay).lower()}",
        "model.dtype=bf16",
        "evaluation.every=4",
        recipe="quickstart-agent",
    )
    try:
        assert run.finish(900) == 0, run.tail()
    finally:
        run.kill()
    runs.check_history(run.rundir, run.recipe)
    rows = runs.latest_rows(run.rundir.metrics)
    print([(row["kl_k3"], row.get("parity_routing")) for row in rows])
    tickets = [group.ticket for batch in batches(run.rundir, run.recipe) for group in batch]
    groups = JournalReader(run.rundir.rollouts).whole_groups(tickets)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert rollouts
    if not replay:
        assert all(rollout.routing is None for rollout in rollouts)
        return
    for rollout in rollouts:
        paths = paths_of(rollout.segments, rollout.paths, np.zeros(0, np.int32))
        for path, experts in zip(paths, rollout.path_experts, strict=True):
            assert experts is not None
            assert experts.shape[1:] == (4, 1)
            assert len(experts) >= len(path.tokens) - 1, "all but the last token"
    assert all(row["routing_replayed"] > 0.9 for row in rows)


@pytest.mark.faults
def test_what_the_servers_saw_is_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand requests, with weights published in the midst of them, and both ends
    of them killed.
    """
    seen = tmp_path / "seen"
    seen.mkdir()
    for name, value in with_faults(INJECT_SEEN=str(seen)).items():
        monkeypatch.setenv(name, value)
    recipe = write_recipe(
        tmp_path,
        "wanders",
        {"wandering": "tests.unit.tasks.agents.programs:wanders"},
        run={"steps": 24},
        sampling={"generations": 4},
        pipeline={"k": 3},
        batch={"prompts": 12},
        evaluation={"every": 24},
        agent={"at_once": 12},
        resources={"servers": 2},
    )
    run = runs.start(tmp_path, recipe=str(recipe))
    family = []
    try:
        for role, step in (("rollout", 6), ("learn", 12), ("rollout", 18)):
            run.wait_for(partial(run.has_trained, step), f"step {step}", limit_s=900)
            family += run.family()
            run.roles()[role].kill()
            run.wait_for(partial(run.has_role, role), f"a new {role}")
        family = family + run.family()
        ports = run.ports()
        assert run.finish(900) == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    runs.check_parity(run.rundir)
    runs.check_history(run.rundir, run.recipe)

    sampled = defaultdict[tuple[int, ...], list[list[int]]](list)
    for file in seen.iterdir():
        for line in file.read_text().splitlines():
            sent, made = json.loads(line)
            sampled[tuple(sent)].append(made)
    turns = across = midst = 0
    for ticket in (t for batch in batches(run.rundir, run.recipe) for t in batch):
        for rollout in ticket.rollouts:
            for path in paths_of(rollout.segments, rollout.paths, ticket.prompt.tokens):
                tokens = path.tokens.tolist()
                edges = np.flatnonzero(np.diff(path.trained, prepend=False, append=False))
                for begin, end in edges.reshape(-1, 2).tolist():
                    turns = turns + 1
                    at = begin
                    while at < end:
                        made = sampled[tuple(tokens[:at])]
                        own, length = max(
                            ((m, common(m, tokens[at:end])) for m in made),
                            key=itemgetter(1),
                            default=([], 0),
                        )
                        assert length, (
                            f"{ticket.ticket}.{rollout.sample}: no server made this, from what it"
                            " was sent"
                        )
                        # One that lost its server goes on elsewhere, behind the last
                        # token that came from there.
                        assert length == len(own) or rollout.retries
                        made.remove(own)  # each is trained once
                        at += length
                    assert at == end
            across += len({s.weight_version for s in rollout.segments if s.trained}) > 1
            for one, after in pairwise(rollout.segments):
                midst += (
                    one.trained and after.trained and one.weight_version != after.weight_version
                )
    rows = runs.latest_rows(run.rundir.metrics)
    cached = [
        row["cached_prompt_share"] for row in rows if "cached_prompt_share" in row
    ]  # not in steps that were replayed
    requests = turns + sum(map(len, sampled.values()))
    print(
        f"{requests} requests, {turns} trained turns, {midst} across versions, {across} such"
        f" sessions; {cached=}"
    )
    assert turns >= 5000
    assert across > 10
    assert midst > 0
    assert np.mean(cached) >= 0.9

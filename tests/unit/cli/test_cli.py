"""The command line as a user meets it: quick, one message for bad input, nothing
started by a dry run.
"""

import errno
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.checks.dry_run import warnings
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import Recipe, dump, from_tree, load, shipped
from megarl.core.telemetry.names import NAMES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_help_and_recipes_import_nothing_heavy() -> None:
    code = """
import sys
from megarl.cli import main
heavy = {"torch", "transformers", "sglang", "megatron", "matplotlib", "numpy", "tensorboard", "aiohttp"}
main(["--help"])
imported = {"pydantic", "yaml", "rich", *heavy} & set(sys.modules)
for arguments in (["recipes"], ["recipes", "show", "quickstart"]):
    main(arguments)
imported |= heavy & set(sys.modules)
sys.exit(f"imported {imported}" if imported else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "train",
        "sft",
        "serve",
        "rollout",
        "learn",
        "recipes",
        "rollouts",
        "data",
        "scaling",
        "report",
        "metrics",
        "trace",
        "doctor",
    ):
        assert cli.main([command, "--help"]) == 0
        assert f"Usage: megarl {command}" in capsys.readouterr().out


def test_metrics_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown and meaning in shown for name, (_, meaning) in NAMES.items())
    assert cli.main(["metrics", "idle"]) == 0
    section, explained = capsys.readouterr().out.splitlines()
    assert section == "speed"
    assert explained.split(maxsplit=1) == ["learner_idle_share", NAMES["learner_idle_share"][1]]
    assert cli.main(["metrics", "speling"]) == 2
    assert "no metric's name contains 'speling'" in capsys.readouterr().err


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out
    names = [line.split()[0] for line in listed.splitlines()[1:] if not line.startswith(" ")]
    assert names == list(shipped())
    assert names[0] == "quickstart"
    first_line = shipped()["quickstart"].read_text().splitlines()[0]
    assert first_line.removeprefix("# ").partition(":")[0] in listed
    assert names[-1] == "ppo-critic", "a baseline"


def test_the_list_of_recipes_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["recipes"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megarl {importlib.metadata.version('megarl')}\n"


def test_percent_signs_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["scaling", "--help"], ["scaling", "fit", "--help"]):
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert "95 % intervals" in " ".join(shown.split())


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shown_recipe_is_yaml_of_the_same_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["recipes", "show", name, "run.seed=5"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    assert load(str(tmp_path / "shown.yaml")) == load(name, ["run.seed=5"])
    assert "# largest lag of a trained token, in steps" in text


def test_dry_run_starts_nothing_and_shows_what_would(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 9.0, 9.0))
    (tmp_path / "base.yaml").write_text(dump(recipe))
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {tmp_path / 'base.yaml'}\npipeline: {{k: 4}}\n")
    tasks = [
        "data.tasks.math=null",
        f"data.tasks.sums={{train: {tmp_path / 'train.jsonl'}, heldout: 2}}",
    ]
    assert cli.main(["train", str(file), "--dry-run", "pipeline.k=3", *tasks]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == [
        "model",
        "data",
        "prompt",
        "lengths",
        "layout",
    ]
    assert "sums: 3 to train on, 2 held out, grader math" in lines[1]
    assert "sums, raw: '" in lines[2]
    assert "prompts of 4 to 4 tokens (limit 2,048)" in lines[3]
    assert lines[5] == f"differs from {tmp_path / 'base.yaml'}:"
    changed = {"  pipeline.k: 8 → 3", "  data.tasks.math: left out", "  data.tasks.sums: added"}
    assert set(lines[6:]) == changed
    checked = captured.err.splitlines()
    assert checked[-1] == "ready: 1 server, 1 rank, 0 GPUs"
    assert checked[0].split() == ["✓", "recipe"]
    assert all(line.startswith("✓") for line in checked[:-1])
    assert not RunDir(recipe.run.path).path.exists()


def test_dry_run_says_what_is_missing(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(dump(recipe))
    assert cli.main(["train", str(file), "--dry-run", "model.path=/nowhere"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "before this can start: model.path" in captured.err
    assert re.match(r"✓ +recipe *\n✗ +model *\n", captured.err)


def test_a_likely_mistake_is_warned_of_and_no_other(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a run, too. A warm start teaches the end of thinking; prompts may have a
    template's markers in them.
    """
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 9.0, 9.0))

    def warned(*overrides: str) -> str:
        tree = yaml.safe_load(dump(recipe))
        del tree["data"]["tasks"]["math"]["template"]
        return "\n".join(warnings(from_tree(tree, overrides)))

    assert not warned()
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "data.tasks.math.template: " in warned()
    assert not warned("data.tasks.math.template=chat")
    assert not warned("data.tasks.math.template=raw"), "it is what the user wants"
    marked = {"prompt": f"1+1={settings['eos_token']}", "answer": "2"}
    (tmp_path / "marked.jsonl").write_text(json.dumps(marked))
    assert not warned(f"data.tasks.math.train={tmp_path / 'marked.jsonl'}")
    answer = "1" * 3 + "2" * 40
    long = [{"prompt": "1+1=", "answer": text} for text in ("2", answer, answer)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, long)))
    rows = f"data.tasks.math.train={tmp_path / 'long.jsonl'}"
    raw = "data.tasks.math.template=raw"
    assert re.search(
        r"^data\.tasks\.math: 2 expected answers of the first 1,000 rows with more tokens than .*"
        rf"\(length\.answer_tokens: 8\): {re.escape(rows.partition('=')[2])}:2 has \d\d; raise",
        warned(rows, raw, "length.answer_tokens=8"),
    )
    assert not warned(rows, raw, "length.answer_tokens=43"), "as many as it has bytes"
    assert not warned(rows, raw, "length.answer_tokens=8", "data.tasks.math.grader=format")
    unknown = (
        "data.tasks.math.template=chat",
        "length.end_of_thinking=</thought>",
        "length.control=none",
    )
    assert not warned(*unknown)
    assert "has '</thought>', so that no answer" in warned(*unknown, "sft.data=''")
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    assert "99 processes want its" in warned("data.tasks.math.template=chat")
    assert "resources.threads=1 is faster" in warned(
        "data.tasks.math.template=chat", "resources.threads=2"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "quickstrat"], "did you mean quickstart?"),
        (["train", "quickstart", "pipeline.kk=1"], "pipeline.kk: unknown key; did you mean k?"),
        (
            ["train", "quickstart", "model.path=/nowhere"],
            "model.path: '/nowhere' is not a Hugging Face model directory",
        ),
        (
            ["sft", "quickstart", "sft.init=/nowhere"],
            "sft.init: '/nowhere' is not a Hugging Face model directory",
        ),
        (["report", "/nowhere"], "/nowhere: not a run directory"),
        (["rollouts", "show", "/nowhere"], "/nowhere: not a run directory"),
        (
            ["trian", "quickstart"],
            "No such command 'trian'. Did you mean 'train', 'trace'? See `megarl --help`",
        ),
        (
            ["train", "quickstart", "--dryrun"],
            "No such option: --dryrun (Possible options: --dry-run). See",
        ),
        (["train"], "Missing argument 'recipe'. See `megarl train --help`"),
        (["study"], "Missing command. See `megarl study --help`"),
        (["serve", "quickstart", "--index"], "Option '--index' requires an argument"),
        (
            ["serve", "quickstart", "--index", "0", "--port", "99999"],
            "'--port': Input should be less than or equal to 65535",
        ),
        (
            ["serve", "quickstart", "--index", "-1", "--port", "1"],
            "'--index': Input should be greater than or equal to 0, not",
        ),
        (
            ["rollouts", "show", "x", "--limit", "-5"],
            "'--limit': Input should be greater than or equal to 1, not '-5'",
        ),
        (["trace", "x", "--steps", "no"], "'--steps': Input should be a valid integer"),
        (
            ["data", "prepare", "x", "y", "--format", "z"],
            "'--format': 'z' is not one of 'jsonl', 'parquet', 'arrow'. See",
        ),
        (
            ["scaling", "extrapolate", "x.csv", "--to", "9", "--reach", "0.5"],
            "give one of --to and --reach",
        ),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("megarl: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train", "trace"]),
        (["train", "qui"], [name for name in shipped() if name.startswith("qui")]),
        (["recipes", "sh"], ["show"]),
        (["train", "quickstart", "--dr"], ["--dry-run"]),
    ],
)
def test_shell_completion(words: list[str], offered: list[str]) -> None:
    asked = {"COMP_WORDS": " ".join(["megarl", *words]), "COMP_CWORD": str(len(words))}
    environment = os.environ | {"_MEGARL_COMPLETE": "complete_bash"} | asked
    command = [sys.executable, "-m", "megarl"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.split()) == (0, offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_each_shell(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--show-completion"])
    assert ended.value.code == 0
    assert f"_MEGARL_COMPLETE=complete_{shell}" in capsys.readouterr().out


def test_a_server_that_the_recipe_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "quickstart", "--index", "99", "--port", "1"]) == 2
    assert (
        "--index: 99, and the recipe's servers are numbered from 0 to 0" in capsys.readouterr().err
    )


def test_run_that_is_there_is_kept(
    recipe: Recipe,
    write_run: Callable[[int], RunDir],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rundir = write_run(5)
    rows = rundir.metrics.read_bytes()
    file = tmp_path / "mine.yaml"
    file.write_text(dump(recipe))
    assert cli.main(["train", str(file)]) == 2
    assert "run.resume=auto" in capsys.readouterr().err
    assert cli.main(["train", str(file), "run.resume=auto", "pipeline.k=1"]) == 2
    assert "pipeline.k: 8 in" in capsys.readouterr().err
    assert rundir.metrics.read_bytes() == rows
    assert not rundir.endpoints_file.exists()


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megarl.core.recipe.load", interrupted)
    assert cli.main(["train", "quickstart"]) == 130


def test_reader_that_leaves_early() -> None:
    """`megarl recipes show quickstart | head -1` ends without a word."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megarl", "recipes", "show", "quickstart"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=240)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ESHUTDOWN])
def test_a_broken_pipe_finishes_no_command_that_works(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """ESHUTDOWN, which Lustre answers to a client that it has evicted, is a
    BrokenPipeError too.
    """

    def evicted(*_: object) -> None:
        raise OSError(number, os.strerror(number), "runs/quickstart/stop")

    monkeypatch.setattr("megarl.core.recipe.load", evicted)
    monkeypatch.setattr(
        cli, "start_logging", lambda _: None
    )  # it lasts as long as this process, which has other tests
    for command in ("train", "sft", "rollout", "learn"):
        with pytest.raises((BrokenPipeError, SystemExit)) as ended:
            cli.main([command, "quickstart"])
        assert getattr(ended.value, "code", 1) == 1


def test_a_dry_run_may_be_looked_at_with_head(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megarl", "sft", "quickstart", "--dry-run"]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=240, cwd=tmp_path
    )
    os.close(write)
    assert "BrokenPipe" not in done.stderr
    assert "this can start" in done.stderr  # it goes on to what it checks: there are no data here


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_a_lasting_command_says_is_seen_at_once(unbuffered: str) -> None:
    """Also where Python's own streams have no buffer,
    as in containers and Slurm jobs.
    """
    code = (
        "import os, sys; from megarl.run.process import outlive_screen as o; o(); print('a',"
        " file=sys.stderr); os._exit(0)"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, timeout=240
    )
    assert done.stderr == b"a\n"


def test_a_place_that_cannot_be_written_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    submit = ["submit", "quickstart", "--nodes", "1", "--gpus-per-node", "0", "--out"]
    assert cli.main([*submit, str(tmp_path / "file" / "x.sbatch")]) == 2
    assert f"megarl: {tmp_path / 'file'}: File exists\n" in capsys.readouterr().err


def test_streams_that_are_closed_cost_nothing() -> None:
    """The status is that of the command: nothing is written, and nothing is opened in
    the place of a stream.
    """
    closed = f"exec <&- >&- 2>&-; exec {sys.executable} -m megarl"
    done = [
        subprocess.run(["sh", "-c", f"{closed} recipes show {name}"], timeout=240)
        for name in ("quickstart", "none")
    ]
    assert [one.returncode for one in done] == [0, 2]

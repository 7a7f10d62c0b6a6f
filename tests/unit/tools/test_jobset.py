"""The JobSet that `megarl submit --kubernetes` writes, by the fields of JobSet's
published schema.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megarl.cli import main
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import load
from megarl.tools import jobset
from megarl.tools.jobset import Mount, PodSettings, manifest, object_name, read_mounts
from megarl.tools.submit import seconds_of

SCHEMA = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())
WORDS = ["submit", "scalerl-8b", "--nodes", "10", "--kubernetes", "--image", "team/megarl:1"]
CLAIMS = ["--mounts", "shared:/shared, data:/data"]
PLAN = ["--gpu", "h100", "--model-config", "llama-3.1-8b"]
SETTINGS = PodSettings("team/megarl:1", 8, (Mount("shared", "/shared"),), 9, 64)


def documents(text: str) -> dict[str, Any]:
    """By kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods(document: dict[str, Any]) -> dict[str, Any]:
    """What the pods of each replicated job are made from."""
    jobs = document["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}


def test_submit_writes_a_jobset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    assert main([*WORDS, *CLAIMS, *PLAN, "--out", str(file), "run.name=Mine_8B"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == file.read_text().strip()
    assert f"`kubectl create -f {file}`" in said.err
    assert "# node 10: learner ranks 16-23\n" in file.read_text()
    made = documents(file.read_text())
    written = made["JobSet"]
    jsonschema.validate(written, SCHEMA)
    assert written["metadata"]["name"] == "mine-8b"
    first = pods(written)["first"]
    others = pods(written)["others"]
    (container,) = first["containers"]
    interface = "run.interface=eth0"
    name = "run.name=Mine_8B"
    train = ["megarl", "train", "scalerl-8b", "run.resume=auto", interface, name]
    assert container["command"] == train
    (waiting,) = others["containers"]
    assert waiting["command"] == ["python", "-m", "megarl.run.pods", "wait"]
    assert {key: container[key] for key in ("image", "env", "volumeMounts", "resources")} == {
        key: waiting[key] for key in ("image", "env", "volumeMounts", "resources")
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert first["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert {"name": "MEGARL_PODS", "value": "10"} in container["env"]
    seen = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert seen == {"/dev/shm", "/shared", "/data"}
    assert container["workingDir"] == "/shared"
    assert first["shareProcessNamespace"]
    counts = [job["template"]["spec"]["completions"] for job in written["spec"]["replicatedJobs"]]
    assert counts == [1, 9]
    # Only the pod with the supervisor may run commands in others.
    assert first["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    assert (first["automountServiceAccountToken"], others["automountServiceAccountToken"]) == (
        True,
        False,
    )
    assert {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]} in made[
        "Role"
    ]["rules"]
    assert made["RoleBinding"]["subjects"][0]["name"] == first["serviceAccountName"]


@pytest.mark.parametrize("plan", [PLAN, []])
def test_pods_ask_for_what_the_plan_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: list[str]
) -> None:
    """Or for what is stated where there is no plan."""
    assert main([*WORDS, *CLAIMS, *plan, "--out", str(tmp_path / "run.yaml")]) == 0
    (container,) = pods(documents(capsys.readouterr().out)["JobSet"])["first"]["containers"]
    requests = container["resources"]["requests"]
    threads = load("scalerl-8b").resources.threads
    assert int(requests["cpu"]) == 1 + 8 * threads
    memory = int(requests["memory"].removesuffix("Gi"))
    if plan:
        assert 32 < memory < 32 + 8 * 200
    else:
        assert memory == 32 + 8 * 32


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:00", 5400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:30:05", 131_405),
    ],
)
def test_a_time_limit_is_as_slurm_writes_it(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_pods_are_made_again_at_the_time_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job alone has it: when it fails, JobSet makes all again. Without --time
    there is no limit.
    """
    words = [*WORDS, *CLAIMS, "--out", str(tmp_path / "run.yaml")]
    for more, limits in ([], [None, None]), (["--time", "2:00:00"], [7200, None]):
        assert main([*words, *more]) == 0
        written = documents(capsys.readouterr().out)["JobSet"]
        jsonschema.validate(written, SCHEMA)
        jobs = written["spec"]["replicatedJobs"]
        found = [job["template"]["spec"].get("activeDeadlineSeconds") for job in jobs]
        assert found == limits


def test_a_run_that_gave_up_is_not_made_again() -> None:
    written = documents(manifest("run", 1, SETTINGS, ["megarl"], []))["JobSet"]
    (job,) = written["spec"]["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    statuses = rule["onExitCodes"]["values"]
    assert 1 in statuses
    assert not {0, 75, 137, 143} & set(statuses), "finished, a node lost, killed, preempted"
    (reason,) = written["spec"]["failurePolicy"]["rules"]
    assert (reason["action"], reason["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize(
    ("field", "value"), [("successPolicy", {"operator": "Every"}), ("replicas", 2)]
)
def test_the_schema_refuses_what_jobset_does_not_know(field: str, value: object) -> None:
    written = documents(manifest("run", 2, SETTINGS, ["megarl"], []))["JobSet"]
    jsonschema.validate(written, SCHEMA)
    written["spec"][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written, SCHEMA)


@pytest.mark.parametrize(
    "text", ["", "shared", "shared:relative", "Shared:/shared", ":/shared", "a:/a:ro"]
)
def test_mounts_that_name_no_claim_are_refused(text: str) -> None:
    with pytest.raises(MegarlError, match=r"^--(mounts|kubernetes)"):
        read_mounts(text)


def test_claims_have_other_names_than_jobsets() -> None:
    assert read_mounts("2024-data.v1:/data") == (Mount("2024-data.v1", "/data"),)


@pytest.mark.parametrize("text", ["a:/a,b:/a/", "a:/dev/shm", "a:/", "a:/a,b:/b/../a"])
def test_mounts_at_a_place_that_is_taken_are_refused(text: str) -> None:
    """Kubernetes would refuse the pods, each time that JobSet makes them."""
    with pytest.raises(MegarlError, match=r"^--mounts: .* choose another place"):
        read_mounts(text)


def test_what_is_text_stays_text() -> None:
    """Also for a reader to whom 1e3 is a number and y is yes."""
    settings = PodSettings("team/megarl:1", 8, (Mount("1e3", "/shared"),), 9, 64)
    text = manifest("y", 1, settings, ["megarl"], [])
    assert "claimName: '1e3'\n" in text
    assert "name: 'y'\n" in text
    assert documents(text)["JobSet"]["metadata"]["name"] == "y"


def test_kubernetes_puts_no_variables_into_the_command() -> None:
    word = "data.tasks.math.system=$(MEGARL_PODS) costs $$5"
    made = documents(manifest("run", 1, SETTINGS, ["megarl", word], []))
    (container,) = pods(made["JobSet"])["first"]["containers"]
    assert container["command"] == ["megarl", "data.tasks.math.system=$$(MEGARL_PODS) costs $$$$5"]


@pytest.mark.parametrize("run", ["8b", "x" * 41, "---", "ß"])
def test_a_name_that_no_object_can_have_is_refused(run: str) -> None:
    with pytest.raises(MegarlError, match=r"^run\.name: .* cannot name a JobSet"):
        object_name(run)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--container", "pyxis"], "--container is Slurm's"),
        (["--partition", "a"], "--partition is Slurm's"),
        (["--image", ""], "--kubernetes needs --image"),
        (["--time", "a day"], "--time: 'a day' is not a time limit"),
        (["--time", "0"], "--time: '0' is no time at all"),
        (["--mounts", ""], "--kubernetes needs the PersistentVolumeClaim"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    file = tmp_path / "run.yaml"
    assert main([*WORDS, *CLAIMS, "--out", str(file), *more]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"megarl: {said}")
    assert not file.exists()


def test_pods_names_fit() -> None:
    """JobSet and Job add names and numbers, and a pod's name is a host's, too."""
    longest = f"{'x' * jobset.LONGEST_NAME}-{jobset.OTHERS}-0-999-abcde"
    assert len(longest) <= 63


@pytest.mark.parametrize("more", [[], ["--kubernetes", "--image", "team/megarl:1", *CLAIMS]])
def test_a_line_end_in_the_name_of_a_recipe_stays_in_its_comment(
    tmp_path: Path, more: list[str]
) -> None:
    recipe = tmp_path / "a\nrm.yaml"
    recipe.write_text("base: quickstart\n")
    file = tmp_path / "written"
    assert (
        main(
            [
                "submit",
                str(recipe),
                "--nodes",
                "1",
                "--gpus-per-node",
                "0",
                "--out",
                str(file),
                *more,
            ]
        )
        == 0
    )
    lines = file.read_text().splitlines()
    written = [line for line in lines if "Written by" in line]
    assert len(written) == 1
    assert written[0].startswith("# ")
    assert "rm.yaml" in written[0]

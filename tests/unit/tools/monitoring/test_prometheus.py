"""What Prometheus' own parser reads of a scrape; who may scrape; the files that tell
Prometheus where.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir, latest_rows
from megarl.core.recipe import Recipe, from_tree
from megarl.run.prepare import write_targets
from megarl.run.process import free_ports
from megarl.tools.monitoring.prometheus import LearnerMetrics, controller_families, serve

CONVENTION = re.compile(r"megarl_[a-z0-9_]+")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def scraped() -> Iterator[Callable[..., Samples]]:
    """Read the metrics of `families` over HTTP."""
    closings = []

    def scrape(families: Callable[[], Iterator]) -> Samples:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        closings.append(serve(address, "secret", families))
        text = get(address, "secret")
        found = list(text_string_to_metric_families(text))
        assert len({family.name for family in found}) == len(found)
        assert all(CONVENTION.fullmatch(family.name) and family.documentation for family in found)
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in found
            for s in family.samples
        }

    yield scrape
    for close in closings:
        close()


def get(address: str, key: str, path: str = "/metrics", method: str = "GET") -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers, method=method)
    return urllib.request.urlopen(request, timeout=10).read().decode()


def test_rows_of_the_learner(
    scraped: Callable[..., Samples], write_run: Callable[[int], RunDir]
) -> None:
    rows = latest_rows(write_run(3).metrics)
    metrics = LearnerMetrics()
    for row in rows:
        metrics.add(row | {"pass_rate_train/math": 0.5, "entropy": float("nan")})
    found = scraped(metrics.families)
    assert found["megarl_steps_total", ()] == 3
    assert found["megarl_generated_tokens_total", ()] == pytest.approx(
        sum(r["generated_tokens"] for r in rows)
    )
    parts = [v for (name, _), v in found.items() if name == "megarl_step_seconds_total"]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(sum(r["step_seconds"] for r in rows))
    assert found["megarl_pass_rate_train", (("name", "math"),)] == 0.5
    assert found["megarl_loss", (("name", ""),)] == rows[-1]["loss"]
    assert not any(name == "megarl_entropy" for name, _ in found), "there is no number"


def test_status_of_the_controller(
    scraped: Callable[..., Samples], write_run: Callable[[int], RunDir]
) -> None:
    assert scraped(lambda: controller_families({}, {})) == {}
    status = json.loads(write_run(5).status.read_text())
    status["tickets"]["removed"] = 3
    status |= {
        "malformed_requests": 0,
        "refused_connections": 2,
        "eval": {"pass_rate": 0.5, "pass@4/aime24": 0.7},
    }
    totals = {n: {"tokens": 100.0 * n, "busy_seconds": 7.5} for n in range(2)}
    found = scraped(lambda: controller_families(status, totals))
    assert found["megarl_server_tokens_total", (("server", "1"),)] == 100
    assert found["megarl_server_state", (("server", "1"), ("state", "publishing"))] == 1
    assert found["megarl_tickets_done_total", (("result", "removed"),)] == 3
    assert found["megarl_tickets", (("state", "running"),)] == 140
    assert found["megarl_eval_pass_at_4", (("name", "aime24"),)] == 0.7
    assert found["megarl_refused_connections_total", ()] == 2


def test_only_who_has_the_key_is_answered() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    close = serve(address, "secret", LearnerMetrics().families)
    try:
        for key, path, method, status in (
            ("", "/metrics", "GET", 401),
            ("other", "/metrics", "GET", 401),
            ("secret", "/", "GET", 404),
            ("secret", "/metrics", "POST", 404),
            ("secret", "/metrics/x", "GET", 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(address, key, path, method)
            assert refused.value.code == status
        assert "megarl_steps_total 0.0" in get(address, "secret")
        with pytest.raises(MegarlError, match=r"monitor\.prometheus: cannot listen on"):
            serve(address, "secret", LearnerMetrics().families)
    finally:
        close()


def test_files_for_prometheus(recipe: Recipe, tree: dict, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    endpoints = Endpoints(
        session="s",
        controller="tcp://10.0.0.1:1",
        servers=("http://10.0.0.2:3", "http://10.0.0.3:3"),
        api_key="user",
        admin_key="admin",
        link=LinkKeys.new(),
        rendezvous_port=1,
        controller_metrics="10.0.0.1:8",
        learner_metrics="10.0.0.2:9",
        metrics_key="scrape",
    )
    write_targets(from_tree(tree | {"monitor": {"prometheus": True}}), rundir, endpoints)
    found = {
        t["targets"][0]: t["labels"]
        for t in json.loads((rundir.prometheus / "targets.json").read_text())
    }
    assert {address: labels["role"] for address, labels in found.items()} == {
        "10.0.0.1:8": "controller",
        "10.0.0.2:9": "learner",
        "10.0.0.2:3": "server",
        "10.0.0.3:3": "server",
    }
    assert {labels["run"] for labels in found.values()} == {"demo"}
    assert found["10.0.0.3:3"]["server"] == "1"
    (job,) = yaml.safe_load((rundir.prometheus / "prometheus.yml").read_text())["scrape_configs"]
    assert (rundir.prometheus / job["authorization"]["credentials_file"]).read_text() == "scrape"
    assert (rundir.prometheus / job["file_sd_configs"][0]["files"][0]).exists()
    assert (rundir.prometheus / "key").stat().st_mode & 0o777 == 0o600
    write_targets(recipe, rundir, endpoints)
    assert not rundir.prometheus.exists(), "a life in which nobody answers"

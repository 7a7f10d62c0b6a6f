"""Who can be scraped, for Prometheus: RUN/prometheus/, written when a run starts.

    targets.json     file_sd: the addresses of controller, learner and servers, with labels `run`, `role` and `server`
    key              what they want to hear (mode 0600), new at each start
    prometheus.yml   a configuration that uses both: `prometheus --config.file=RUN/prometheus/prometheus.yml`

Prometheus reads the first two anew by itself, so a run that goes on with other ports is followed.
"""

import json
import shutil
from urllib.parse import urlsplit

from megarl.core.base.rundir import Endpoints, RunDir, write_atomically
from megarl.core.recipe import Recipe

CONFIGURATION = """\
scrape_configs:
  - job_name: megarl
    scrape_interval: 5s
    authorization: {credentials_file: key}
    file_sd_configs: [{files: [targets.json]}]
"""


def write(recipe: Recipe, rundir: RunDir, endpoints: Endpoints) -> None:
    """Or take away those of an earlier life, if nobody answers in this one."""
    if not recipe.monitor.prometheus:
        shutil.rmtree(rundir.prometheus, ignore_errors=True)
        return
    found = [
        _target(recipe, endpoints.controller_metrics, role="controller"),
        _target(recipe, endpoints.learner_metrics, role="learner"),
        *(
            _target(recipe, urlsplit(url).netloc, role="server", server=str(n))
            for n, url in enumerate(endpoints.servers)
        ),
    ]
    rundir.prometheus.mkdir(exist_ok=True)
    write_atomically(rundir.prometheus / "key", endpoints.metrics_key.encode(), mode=0o600)
    write_atomically(rundir.prometheus / "targets.json", json.dumps(found, indent=1).encode())
    write_atomically(rundir.prometheus / "prometheus.yml", CONFIGURATION.encode())


def _target(recipe: Recipe, address: str, **labels: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"run": recipe.run.name} | labels}

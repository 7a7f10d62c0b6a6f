"""Writes the files that the roles read first: RUN/recipe.yaml, RUN/endpoints.json and,
for Prometheus, RUN/prometheus/:

    targets.json     file_sd: the addresses of controller, learner and servers, with
                     labels `run`, `role` and `server`
    key              the key that these expect (mode 0600), new at each start
    prometheus.yml   a configuration that uses both:
                     `prometheus --config.file=RUN/prometheus/prometheus.yml`

Prometheus rereads the first two by itself, so it follows a resumed run to its new
ports.
"""

import json
import secrets
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from msgspec.structs import replace

from megarl.core.base.files import contents
from megarl.core.base.rundir import Endpoints, LinkKeys, Meeting, RunDir, write_atomically
from megarl.core.recipe import Recipe, dump
from megarl.run import devices, fork
from megarl.run.placement import Place
from megarl.run.restart import Role

type Fingerprints = Mapping[str, str]
"""Fingerprints by recipe key and part of the input: `model.path: weights`."""
CONFIGURATION = """\
scrape_configs:
  - job_name: megarl
    scrape_interval: 5s
    authorization: {credentials_file: key}
    file_sd_configs: [{files: [targets.json]}]
"""


def prepare(
    recipe: Recipe,
    rundir: RunDir,
    placed: Mapping[Role, Place],
    fingerprints: Fingerprints,
    resumed: bool,
) -> Endpoints:
    """Write the files that the roles read first. The recipe gets `resume: auto`, so
    that a restarted role resumes.
    """
    rundir.create()
    if not resumed:  # journals left by a start that made no step, perhaps with another batch size
        for file in rundir.rollouts.glob("[0-9]*.journal"):
            file.unlink()
    spent = _spent(rundir) if resumed else 0.0  # before the status is removed
    for file in (rundir.stop_file, rundir.failure_file, rundir.status, rundir.summary):
        file.unlink(missing_ok=True)
    run = recipe.run.model_copy(update={"resume": "auto"})
    resuming_recipe = recipe.model_copy(update={"run": run})
    write_atomically(rundir.fingerprints, json.dumps(dict(fingerprints), indent=2).encode() + b"\n")
    write_atomically(rundir.recipe, dump(resuming_recipe).encode())
    if recipe.run.fork:
        fork.start(recipe, rundir)
    endpoints = replace(endpoints_of(recipe, placed), spent=spent)
    rundir.write_endpoints(endpoints)
    write_targets(recipe, rundir, endpoints)
    return endpoints


def _spent(rundir: RunDir) -> float:
    """Return the device-hours in the status that the last life left or, if it left
    none, those that it began with.
    """
    for file, name in ((rundir.status, "compute_hours"), (rundir.endpoints_file, "spent")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            return float(json.loads(contents(file))[name])
    return 0.0


def endpoints_of(recipe: Recipe, placed: Mapping[Role, Place]) -> Endpoints:
    """Choose the addresses on which roles listen, with ports that were free on their
    nodes, and new keys.
    """
    ports = {}
    for place in placed.values():
        for node in place.nodes:
            ports[node.name] = iter(node.ports)
    controller = Role("controller")
    learner = Role("learner")

    def address(role: Role) -> str:
        """Return an address on the role's first node, with a port not taken yet."""
        node = placed[role].nodes[0]
        return f"{node.address}:{next(ports[node.name])}"

    def meeting(role: Role) -> Meeting:
        """Return where the processes of a server on several nodes meet."""
        nodes = len(placed[role].nodes)
        port = int(address(role).rpartition(":")[2])
        return Meeting(nodes, port)

    rendezvous_host, _, rendezvous_port = address(learner).rpartition(":")
    servers = [Role("server", i) for i in range(recipe.resources.servers)]
    spanning = [role for role in placed if role.serves and len(placed[role].nodes) > 1]
    endpoints = Endpoints(
        session=uuid.uuid4().hex,
        controller=f"tcp://{address(controller)}",
        servers=tuple(f"http://{address(role)}" for role in servers),
        meetings={role.name: meeting(role) for role in spanning},
        api_key=secrets.token_hex(16),
        admin_key=secrets.token_hex(16),
        link=LinkKeys.new(),
        rendezvous_host=rendezvous_host,
        rendezvous_port=int(rendezvous_port),
        learner_nodes=len(placed[learner].nodes),
        gpus=devices.needed(recipe) if placed[learner].gpus else 0,
    )
    if not recipe.monitor.prometheus:
        return endpoints
    return replace(
        endpoints,
        controller_metrics=address(controller),
        learner_metrics=address(learner),
        metrics_key=secrets.token_hex(16),
    )


def write_targets(recipe: Recipe, rundir: RunDir, endpoints: Endpoints) -> None:
    """Write RUN/prometheus/; if this run exports no metrics, remove that of an earlier
    life.
    """
    if not recipe.monitor.prometheus:
        shutil.rmtree(rundir.prometheus, ignore_errors=True)
        return
    labelled = [
        (endpoints.controller_metrics, {"role": "controller"}),
        (endpoints.learner_metrics, {"role": "learner"}),
    ]
    for server, url in enumerate(endpoints.servers):
        labelled.append((urlsplit(url).netloc, {"role": "server", "server": str(server)}))
    run = {"run": recipe.run.name}
    targets = [{"targets": [address], "labels": run | labels} for address, labels in labelled]
    rundir.prometheus.mkdir(exist_ok=True)
    write_atomically(rundir.prometheus / "key", endpoints.metrics_key.encode(), mode=0o600)
    write_atomically(rundir.prometheus / "targets.json", json.dumps(targets, indent=1).encode())
    write_atomically(rundir.prometheus / "prometheus.yml", CONFIGURATION.encode())

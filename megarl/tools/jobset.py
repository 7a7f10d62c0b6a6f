"""The manifest of a run on Kubernetes: a JobSet with as many pods as a Slurm job would
have nodes.

    pod `first`     megarl train, which starts the roles in all pods (run/pods.py)
    pods `others`   wait for roles

Every pod has all GPUs of a node and the same folders. When `megarl train` succeeds, the
run is over, and when it gives up (GIVEN_UP), so is the JobSet. When any pod is
preempted, loses its node or fails otherwise, JobSet makes all pods again, and the run
goes on from its last checkpoint. JobSet's fields: its
api/jobset/v1alpha2/jobset_types.go.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megarl.core.base.errors import MegarlError
from megarl.run.pods import CONTAINER, FIRST, JOBSET, OF_JOBSET, OTHERS, PODS

GRACE_S = 600
"""Time from a pod's SIGTERM to its end: `megarl train` saves within 540 s
(run/deadline.py).
"""
MOST_RESTARTS = 100
"""Restarts of all pods. A run gives up by itself after six starts without a new step.
"""
GIVEN_UP = (1, 2)
"""Statuses with which `megarl train` ends for good: the run has failed, or cannot start
so.
"""
INTERFACE = "eth0"
"""A pod's network in Kubernetes."""
LONGEST_NAME = 40
"""Characters: pods' names are longer by up to 23, and must have at most 63."""
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Names of objects and of hosts in Kubernetes (RFC 1035)."""
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Names of claims, which may begin with a digit and have dots (RFC 1123)."""
SHARED_MEMORY = "/dev/shm"
USER = 1001
"""The image's user, to whose group the folders must belong."""


class Quoting(yaml.SafeDumper):
    """Quotes texts, too, that other readers of YAML than Python's take for numbers or
    for yes and no.
    """


# A text that would be read as a bool or a float is quoted. The last argument: the
# characters with which such a text begins.
Quoting.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$"), list("yYnN"))
Quoting.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[0-9]+[eE][0-9]+$"), list("0123456789")
)


@dataclass(frozen=True)
class Mount:
    """A PersistentVolumeClaim and the folder in the pods at which it is seen."""

    claim: str
    place: str


@dataclass(frozen=True)
class PodSettings:
    """What all pods of a run have. mounts: the first one's folder is where commands
    run. cores, memory_gib: what a pod asks for; without a request it could be put on a
    node that is full, and is the first to be evicted. limit_s: seconds after which the
    pods are ended and made again; None: no limit.
    """

    image: str
    gpus: int
    mounts: tuple[Mount, ...]
    cores: int
    memory_gib: int
    limit_s: int | None = None


def read_mounts(text: str) -> tuple[Mount, ...]:
    """Read `CLAIM:/place,…`. MegarlError if a part is not of this form, if two have one
    place, or if there is none.
    """
    mounts: list[Mount] = []
    parts = [part.strip() for part in text.split(",")]
    for part in filter(None, parts):
        claim, _, place = part.partition(":")
        if not CLAIM.fullmatch(claim) or not place.startswith("/") or ":" in place:
            form = "CLAIM:/folder, a PersistentVolumeClaim and its place in the pods"
            raise MegarlError(f"--mounts: {part!r} is not of the form {form}")
        used = ["/", SHARED_MEMORY, *(mount.place for mount in mounts)]
        if posixpath.normpath(place) in map(posixpath.normpath, used):
            raise MegarlError(
                f"--mounts: {part!r}: there is something else at {place} in the pods; choose"
                " another place"
            )
        mounts.append(Mount(claim, place))
    if not mounts:
        need = (
            "the PersistentVolumeClaim with models, data and runs, such as --mounts shared:/shared"
        )
        raise MegarlError(
            f"--kubernetes needs {need}; all pods must be able to write it (ReadWriteMany)"
        )
    return tuple(mounts)


def object_name(run: str) -> str:
    """Return a run's name as Kubernetes takes it. MegarlError if it cannot be made into
    one.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if len(name) > LONGEST_NAME or not NAME.fullmatch(name):
        rule = f"at most {LONGEST_NAME} letters, digits and dashes, the first a letter"
        raise MegarlError(f"run.name: {run!r} cannot name a JobSet ({rule})")
    return name


def manifest(
    name: str, nodes: int, settings: PodSettings, command: Sequence[str], comments: Sequence[str]
) -> str:
    """Return the documents for `kubectl create -f`: the JobSet, and the account with
    which its first pod may start roles in the others. command: that of `megarl train`.
    """
    jobs = [_replicated_job(FIRST, 1, settings, command, nodes, name)]
    if nodes > 1:
        waiting = ["python", "-m", "megarl.run.pods", "wait"]
        jobs.append(_replicated_job(OTHERS, nodes - 1, settings, waiting, nodes, name))
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [FIRST]},
            "failurePolicy": {
                "maxRestarts": MOST_RESTARTS,
                "rules": [
                    {
                        "name": "given-up",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }
    documents = [*_account(name), jobset]
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.dump_all(documents, Dumper=Quoting, sort_keys=False, width=1000)


def _account(name: str) -> list[dict[str, Any]]:
    """Return the documents of the first pod's account, which may see pods and run
    commands in them. name: of the JobSet.
    """
    core = "v1"
    rbac = "rbac.authorization.k8s.io/v1"
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
    ]
    metadata = {"name": name}
    role = {"apiGroup": rbac.partition("/")[0], "kind": "Role", "name": name}
    return [
        {"apiVersion": core, "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": rbac, "kind": "Role", "metadata": dict(metadata), "rules": rules},
        {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _replicated_job(
    job: str, pods: int, settings: PodSettings, command: Sequence[str], nodes: int, name: str
) -> dict[str, Any]:
    """Return one job of the JobSet, whose pods run this command. job: FIRST or OTHERS;
    pods: of this job; nodes: pods of the whole JobSet; name: the JobSet's.
    """
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": job == FIRST,
        # Else our command would be the first process, which SIGTERM does not end before
        # it has a handler for it.
        "shareProcessNamespace": True,
        # Without the policy, the owner of every file of a claim is set at each start.
        "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_container(settings, command, nodes)],
        "volumes": _volumes(settings.mounts),
    }
    batch: dict[str, Any] = {
        "backoffLimit": 0,
        "completions": pods,
        "parallelism": pods,
        "completionMode": "Indexed",
        "template": {"spec": pod},
    }
    if job == FIRST:  # its end decides over all pods
        if settings.limit_s is not None:
            batch["activeDeadlineSeconds"] = settings.limit_s
        pod["serviceAccountName"] = name
        given_up = {"containerName": CONTAINER, "operator": "In", "values": list(GIVEN_UP)}
        batch["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": given_up}]}
    return {"name": job, "replicas": 1, "template": {"spec": batch}}


def _container(settings: PodSettings, command: Sequence[str], nodes: int) -> dict[str, Any]:
    """Return the container of a pod. nodes: pods of the whole JobSet."""
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{OF_JOBSET}']"}}
    mounts = [
        {"name": f"claim-{i}", "mountPath": mount.place} for i, mount in enumerate(settings.mounts)
    ]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        # "$(NAME)" would be a variable, and "$$" a "$".
        "command": [word.replace("$", "$$") for word in command],
        "workingDir": settings.mounts[0].place,
        "env": [{"name": PODS, "value": str(nodes)}, {"name": JOBSET, "valueFrom": label}],
        "volumeMounts": [{"name": "shm", "mountPath": SHARED_MEMORY}, *mounts],
    }
    requests = {"cpu": str(settings.cores), "memory": f"{settings.memory_gib}Gi"}
    container["resources"] = {"requests": requests}
    if settings.gpus:
        container["resources"]["limits"] = {"nvidia.com/gpu": settings.gpus}
    return container


def _volumes(mounts: Sequence[Mount]) -> list[Mapping[str, Any]]:
    """Return the pods' volumes. NCCL and SGLang need more shared memory than the usual
    64 MiB.
    """
    claims = [
        {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": mount.claim}}
        for i, mount in enumerate(mounts)
    ]
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims]

"""Roles in the pods of a Kubernetes JobSet: steps as in a Slurm job (srun.py), by
`kubectl exec`.

    first pod   megarl train ─► python -m megarl.run.pods step POD … -- COMMAND
                                   acts as srun
                                       └─► kubectl exec -i POD -- env … COMMAND
                                               one for each pod
    other pods  python -m megarl.run.pods wait     until it is ended

`megarl submit --kubernetes` writes the JobSet (tools/jobset.py), which sets PODS and
JOBSET. A pod is a node, and has its name. COMMAND is step.py, which ends by itself when
nobody answers it any more.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.run.launcher import UnansweredSurveyError
from megarl.run.nodes import Node
from megarl.run.restart import NodeState, Role
from megarl.run.srun import ASK_LIMIT_S, SURVEY_LIMIT_S, SrunLauncher, SrunStep

JOBSET = "MEGARL_JOBSET"
"""Environment variable: the name of the run's JobSet."""
PODS = "MEGARL_PODS"
"""Environment variable: how many pods the JobSet has. Where it is set, the launcher is
this one.
"""
CONTAINER = "megarl"
OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "batch.kubernetes.io/job-completion-index"
"""Labels of a pod: JobSet's (its api/jobset/v1alpha2/jobset_types.go) and Kubernetes'.
"""
FIRST = "first"
OTHERS = "others"
"""Names of the JobSet's replicated jobs: the pod that runs `megarl train`, and the
other pods.
"""
POLL_S = 2.0
STEP_MODULE = "megarl.run.step"
KILLED = 128 + signal.SIGTERM
SERVERS_LIMIT_S = 30.0
"""How long servers stay in a pod that is told to end."""
LEAVE_S = 8.0
"""Time limit for a command's end in its pod, once it is told to by the end of its
input. SRUN_LIMIT_S is longer.
"""


class PodLauncher(SrunLauncher):
    """Starts roles in the pods of the JobSet that we run in."""

    def names(self) -> list[str]:
        """Return the pods' names, the first one's first, once all of them run. There is
        no time limit, since after a preemption nodes may be free hours later; every
        SURVEY_LIMIT_S it says what it waits for.
        """
        count = int(os.environ[PODS])
        jobset = os.environ[JOBSET]
        began = time.monotonic()
        last_message = began
        while True:
            running = [pod for pod in pods_of(jobset) if runs(pod)]
            if len(running) == count:
                return [pod["metadata"]["name"] for pod in sorted(running, key=order)]
            at = time.monotonic()
            if at - last_message > SURVEY_LIMIT_S:
                last_message = at
                terminal.say(
                    f"{len(running)} of {count} pods run after {at - began:.0f} s; waiting for the"
                    f" others; see `kubectl describe jobset {jobset}`",
                    flush=True,
                )
            time.sleep(POLL_S)

    def ask(self, names: Sequence[str], ports: int) -> tuple[Node, ...]:
        """Ask these pods for their resources. UnansweredSurveyError if one does not
        answer: it may have been lost since, and JobSet makes all of them again.
        """
        try:
            return super().ask(names, ports)
        except MegarlError as error:
            raise UnansweredSurveyError(str(error)) from None

    def words(self, names: Sequence[str], step: str, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `python ARGUMENTS` in these pods."""
        command = ["python", *arguments]
        return [sys.executable, "-m", "megarl.run.pods", "step", *names, "--", *command]

    def step(self, process: subprocess.Popen[bytes], names: Sequence[str]) -> "PodStep":
        """Return the step of a process that runs in these pods."""
        return PodStep(process, names)


class PodStep(SrunStep):
    """A role in its pods."""

    @staticmethod
    def may_go_on_after(code: int) -> bool:
        """Return whether the step may go on: kubectl fails, too, when only its
        connection has ended.
        """
        return code != 0

    def node_state(self) -> NodeState:
        """Return "down" if a pod of the step is gone or ends, "silent" if not all have
        reported. We are in a pod, so an answer without any is none: Kubernetes could
        not be asked.
        """
        pods = pods_of(os.environ[JOBSET])
        running = {pod["metadata"]["name"] for pod in pods if runs(pod)}
        if pods and not set(self.names) <= running:
            return "down"
        return "up" if self.answered else "silent"


def pods_of(jobset: str) -> list[dict[str, Any]]:
    """Return the JobSet's pods as Kubernetes describes them; none if it does not
    answer.
    """
    words = ["kubectl", "get", "pods", f"--selector={OF_JOBSET}={jobset}", "--output=json"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=ASK_LIMIT_S, check=True)
    except FileNotFoundError:
        raise MegarlError("kubectl cannot be found, by which roles are started in pods") from None
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return []
    pods: list[dict[str, Any]] = msgspec.json.decode(done.stdout)["items"]
    return pods


def runs(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod runs and has not been told to end."""
    return pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]


def order(pod: Mapping[str, Any]) -> tuple[bool, int]:
    """Return a pod's place: the first, then the others by their index in their job."""
    labels = pod["metadata"]["labels"]
    return labels[REPLICATED_JOB] != FIRST, int(labels.get(INDEX, "0"))


def run_in_pods(names: Sequence[str], command: Sequence[str]) -> int:
    """Act as `srun --kill-on-bad-exit`: run the command in each pod, pass our input on
    to all, and their lines to our output. Return the first status that is not 0; then
    the others are ended.
    """
    processes = [_started(name, command) for name in names]
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    threads = []
    for process in processes:
        thread = threading.Thread(target=_pass_lines_on, args=(process,))
        thread.start()
        threads.append(thread)
    threading.Thread(target=_pass_input_on, args=(processes,), daemon=True).start()
    status = _first_bad_status(processes, told_to_end)
    _close(processes)
    end = time.monotonic() + LEAVE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # a pod that is lost
            process.wait(max(0.0, end - time.monotonic()))
        if process.poll() is None:
            process.terminate()
    for thread in threads:
        thread.join()
    return status


def _started(name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command in one pod, which learns its name as a node of Slurm does."""
    words = ["kubectl", "exec", "--stdin", name, f"--container={CONTAINER}", "--"]
    words += ["env", f"SLURMD_NODENAME={name}", *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _first_bad_status(
    processes: Sequence[subprocess.Popen[bytes]], told_to_end: threading.Event
) -> int:
    """Wait until all have ended, or one badly, or we are told to end. Return 0, the bad
    status in a shell's form (128 plus a signal), or KILLED.
    """
    while not told_to_end.wait(0.1):
        statuses = [process.poll() for process in processes]
        bad = [status for status in statuses if status]
        if bad:
            return bad[0] if bad[0] > 0 else 128 - bad[0]
        if None not in statuses:
            return 0
    return KILLED


LINES = threading.Lock()
"""Held while a line is written, so that those of several pods do not mix."""


def _pass_lines_on(process: subprocess.Popen[bytes]) -> None:
    """Write the process's lines to our output, each as a whole."""
    assert process.stdout is not None
    for line in process.stdout:
        with LINES:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _pass_input_on(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Write what we are told to all processes, and close their input when ours ends."""
    while data := os.read(0, 1024):
        for process in processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError, ValueError):  # it has ended, and its status says so
                process.stdin.write(data)
                process.stdin.flush()
    _close(processes)


def _close(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the processes' input, at whose end a step ends its role."""
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def wait() -> int:
    """Keep this pod alive until it is told to end, then until its roles have ended.

    Learner and controller are told to save, and have the pod's grace period for that.
    Servers have nothing to save. Where only they are left, the pod ends after
    SERVERS_LIMIT_S: by then `megarl train` has heard of its own end, and does not
    mistake theirs for a lost node.

    Return KILLED: with 0, Kubernetes would take a pod that is preempted to have done
    its work, and nobody would make another.
    """
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    told_to_end.wait()
    for process in filter(is_step, psutil.process_iter()):
        with suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)  # a server's step ignores it
    end_of_servers = time.monotonic() + SERVERS_LIMIT_S
    while steps := list(filter(is_step, psutil.process_iter())):
        if time.monotonic() > end_of_servers and all(map(serves, steps)):
            break
        time.sleep(min(1.0, SERVERS_LIMIT_S))
    return KILLED


def serves(step: psutil.Process) -> bool:
    """Return whether the role of a step is a server. True for a step that has ended:
    nobody waits for it either.
    """
    try:
        words = step.cmdline()
    except psutil.Error:
        return True
    try:
        task = msgspec.json.decode(words[words.index(STEP_MODULE) + 1])
        return Role(**task["role"]).serves
    except (ValueError, LookupError, TypeError):
        return False  # the command is not one of ours; wait for it as for a learner


def is_step(process: psutil.Process) -> bool:
    """Return whether a process is a step of our JobSet."""
    try:
        return (
            STEP_MODULE in process.cmdline() and process.environ().get(JOBSET) == os.environ[JOBSET]
        )
    except psutil.Error:
        return False


def main(arguments: Sequence[str]) -> int:
    """Run `wait`, or `step POD … -- COMMAND`; return the exit status."""
    if arguments[0] == "wait":
        return wait()
    end = arguments.index("--")
    return run_in_pods(arguments[1:end], arguments[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

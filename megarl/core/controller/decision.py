"""What the learner does next: a pure function of its `Next` and the present state. The
first line that applies decides.

the run was asked to stop, or has failed ──────────► Stop
the learner asks for what cannot be ───────────────► Refused
the step was trained before ───────────────────────► TrainStep(replay)
within a phase whose batches are all complete ─────► TrainStep
servers have older, unknown or another learner's
weights ───────────────────────────────────────────► Publish
these weights need a score, but no server has them ► Wait
the last step is done ─────────────────────────────► Stop, once its evaluation has ended
rollouts are to be compared at these weights ──────► Score, once the servers have scores
all batches of the phase are complete ─────────────► TrainStep
otherwise ─────────────────────────────────────────► Wait

Nothing is published during a replay, nor before a phase ends. Weights that need a score
wait for a server that an earlier evaluation holds.

PipelineRL has phases of one step. Before a longer phase (PPO-off-policy-k) the learner
waits with the weights that generate it, so that it can publish them to a server that
comes back; while it trains, the servers are idle. Versions within a phase are not
published and so not evaluated: the next published version is due instead.
"""

from dataclasses import dataclass

from megarl.core.base.messages import Next, Publish, Refused, Score, Stop, Wait
from megarl.core.client.membership import Membership, listed
from megarl.core.recipe import Evaluation


@dataclass(frozen=True)
class TrainStep:
    """Send the learner the batch of this step."""

    step: int
    replay: bool = False


@dataclass(frozen=True)
class ControllerView:
    """The state that one decision depends on."""

    batches: int  # number of complete batches, from the first up to the first incomplete one
    published_version: int  # the highest version ever published, -1 before the first
    final_step: int  # run.steps: the version with which the run is over
    score_due: bool  # the asking learner's version is to be evaluated, or is being evaluated
    membership: Membership
    oldest: int = 0  # the first batch that the journal still has
    phase_steps: int = 1  # steps that are trained on rollouts of one version
    # The comparison at the asking learner's version; None: there is none.
    parity: Score | Wait | None = None
    stop: str = ""  # a reason to end the run
    failure: str = ""  # a reason to end it as failed
    waiting_for: str = ""  # the reason to give in a Wait for a batch

    def phase_end(self, step: int) -> int:
        """Return the first step after the phase of `step`, or the end of the run if
        that comes first.
        """
        phase_start = step - step % self.phase_steps
        # after `step` itself, even if that is not trained any more
        end_of_run = max(self.final_step, step + 1)
        return min(phase_start + self.phase_steps, end_of_run)


Decision = TrainStep | Publish | Score | Wait | Stop | Refused


def decide(request: Next, view: ControllerView) -> Decision:
    """Return what the learner does next. The order of the lines is that of the table at
    the top of this file.
    """
    step = request.step
    members = view.membership
    if view.failure:
        return Stop(reason=view.failure, error=True)
    if view.stop:
        return Stop(reason=view.stop)
    problem = _impossible(request, view)
    if problem:
        return Refused(error=problem)
    if step < view.published_version:
        return TrainStep(step, replay=True)
    phase_is_complete = view.phase_end(step) <= view.batches
    within_phase = step % view.phase_steps > 0
    if phase_is_complete and within_phase and step < view.final_step:
        return TrainStep(step)
    servers = members.wanting(step, request.incarnation)
    if servers:
        return Publish(version=step, servers=servers)
    if view.score_due and step not in members.clean().values():
        return Wait(
            reason=(
                f"version {step} is to be evaluated and no server can take it: {_servers(members)}"
            )
        )
    if step >= view.final_step:
        if view.score_due:
            return Wait(reason=f"evaluation of version {step}")
        return Stop(reason=f"all {step} steps are done")
    if view.parity is not None:
        return view.parity
    if phase_is_complete:
        return TrainStep(step)
    return Wait(reason=f"batch {step}: {view.waiting_for or 'not complete'}; {_servers(members)}")


def is_due(version: int, last_scored: int | None, settings: Evaluation, final_version: int) -> bool:
    """Return whether this version needs a score, given the newest version that has one
    (None: none has). If an evaluation is lost with its server, the next version is
    scored instead: if 100 is lost, then 101 and 200 are scored.
    """
    if last_scored is None:
        return True
    if version <= last_scored:
        return False
    if version >= final_version:
        return True
    if settings.growth > 1:
        return version >= max(last_scored + settings.every, last_scored * settings.growth)
    return version // settings.every > last_scored // settings.every


def planned_evaluations(settings: Evaluation, final_version: int) -> int:
    """Return how many versions of a run are evaluated, from version 0 to the last, if
    none is lost.
    """
    last = None
    count = 0
    for version in range(final_version + 1):
        if is_due(version, last, settings, final_version):
            last = version
            count += 1
    return count


def _impossible(request: Next, view: ControllerView) -> str:
    """Return why no learner of this run can send this request; empty if one can."""
    if request.version != request.step:
        return (
            f"the learner asks for step {request.step} with version {request.version}, but step s"
            " trains version s"
        )
    if request.step < view.oldest:
        return (
            f"the learner asks for step {request.step}, but the journal no longer has batches before"
            f" {view.oldest} (journal.keep); restore a checkpoint of step {view.oldest} or later, or"
            " give another run.name"
        )
    if request.step > view.batches:
        return (
            f"the learner asks for step {request.step}, but the journal holds {view.batches} complete"
            " batches: it is older than the newest checkpoint (a backup?), or of another run."
            f" Restore the newer journal; or move away the checkpoints after step {view.batches},"
            " and remove the rows from there on from metrics.jsonl and eval.jsonl"
        )
    return ""


def _servers(members: Membership) -> str:
    """Return the servers' states as text: `servers 0-2 clean(7), server 3 lost`."""
    states: dict[str, list[int]] = {}
    for server in members.members:
        states.setdefault(members.describe(server), []).append(server)
    return ", ".join(f"{listed(ids)} {state}" for state, ids in states.items())

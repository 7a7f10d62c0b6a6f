"""What the learner does next: a pure function of its `Next` and the present state. The
first line that applies decides.

the run was asked to stop, or has failed ──────────► Stop
the step was trained before ───────────────────────► TrainStep(replay): nothing is published during a replay
within a phase whose batches are all complete ─────► TrainStep: nothing is published before the phase ends
servers have older, unknown or another learner's
weights ───────────────────────────────────────────► Publish
these weights need a score, but no server has them ► Wait        (an earlier evaluation holds the server)
the last step is done ─────────────────────────────► Stop, once its evaluation has ended
rollouts are to be compared at these weights ──────► Score, once the servers have scored them
all batches of the phase are complete ─────────────► TrainStep
otherwise ─────────────────────────────────────────► Wait

PipelineRL has phases of one step. Before a longer phase (PPO-off-policy-k) the learner
waits with the weights that generate it, so that it can publish them to a server that
comes back; while it trains, the servers are idle. Versions within a phase are not
published and so not evaluated: the next published version is due instead.
"""

from dataclasses import dataclass

from megarl.core.base.messages import Next, Publish, Refused, Score, Stop, Wait
from megarl.core.recipe import Evaluation
from megarl.core.server.membership import Membership, listed


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
    parity: Score | Wait | None = (
        None  # the comparison at the asking learner's version; None: there is none
    )
    stop: str = ""  # a reason to end the run
    failure: str = ""  # a reason to end it as failed
    waiting_for: str = ""  # the reason to give in a Wait for a batch

    def phase_end(self, step: int) -> int:
        """Return the first step after the phase of `step`, or the end of the run if
        that comes first.
        """
        return min(
            step - step % self.phase_steps + self.phase_steps, max(self.final_step, step + 1)
        )


Decision = TrainStep | Publish | Score | Wait | Stop | Refused


def decide(asked: Next, now: ControllerView) -> Decision:
    step = asked.step
    members = now.membership
    if now.failure:
        return Stop(reason=now.failure, error=True)
    if now.stop:
        return Stop(reason=now.stop)
    if problem := _impossible(asked, now):
        return Refused(error=problem)
    if step < now.published_version:
        return TrainStep(step, replay=True)
    generated = now.phase_end(step) <= now.batches
    if generated and step % now.phase_steps and step < now.final_step:
        return TrainStep(step)
    if servers := members.wanting(step, asked.incarnation):
        return Publish(version=step, servers=servers)
    if now.score_due and step not in members.clean().values():
        return Wait(
            reason=(
                f"version {step} is to be evaluated and no server can take it: {_servers(members)}"
            )
        )
    if step >= now.final_step:
        if now.score_due:
            return Wait(reason=f"evaluation of version {step}")
        return Stop(reason=f"all {step} steps are done")
    if now.parity is not None:
        return now.parity
    if generated:
        return TrainStep(step)
    return Wait(reason=f"batch {step}: {now.waiting_for or 'not complete'}; {_servers(members)}")


def is_due(version: int, last_scored: int | None, settings: Evaluation, final_version: int) -> bool:
    """Return whether this version needs a score, given the newest version that has one
    (None: none has). If an evaluation is lost with its server, the next version is
    scored instead: if 100 is lost, then 101 and 200 are scored.
    """
    if last_scored is None:
        return True
    if version <= last_scored or version >= final_version:
        return version > last_scored
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


def _impossible(asked: Next, now: ControllerView) -> str:
    """Return why this request cannot come from a learner of this run; empty if it can."""
    if asked.version != asked.step:
        return (
            f"the learner asks for step {asked.step} with version {asked.version}, but step s"
            " trains version s"
        )
    if asked.step < now.oldest:
        return (
            f"the learner asks for step {asked.step}, but the journal no longer has batches before"
            f" {now.oldest} (journal.keep); restore a checkpoint of step {now.oldest} or later, or"
            " give another run.name"
        )
    if asked.step > now.batches:
        return (
            f"the learner asks for step {asked.step}, but the journal holds {now.batches} complete"
            " batches: it is older than the newest checkpoint (a backup?), or of another run."
            f" Restore the newer journal; or move away the checkpoints after step {now.batches},"
            " and remove the rows from there on from metrics.jsonl and eval.jsonl"
        )
    return ""


def _servers(members: Membership) -> str:
    states: dict[str, list[int]] = {}
    for server in members.members:
        states.setdefault(members.describe(server), []).append(server)
    return ", ".join(f"{listed(ids)} {state}" for state, ids in states.items())

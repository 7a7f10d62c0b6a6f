"""What the learner is told to do next: one pure function of what it says and how things stand.

asked to stop, or failed ──────────────────────────► Stop
a step that was trained before ────────────────────► TrainStep(replay): nothing is published meanwhile
servers behind, of unknown weights, or another
learner's ─────────────────────────────────────────► Publish
these weights are to be scored, and none holds them ► Wait        (a server is held by an earlier evaluation)
the last step is done ─────────────────────────────► Stop, once its evaluation is there
batch complete ────────────────────────────────────► TrainStep
else ──────────────────────────────────────────────► Wait
"""

from dataclasses import dataclass

from megarl.messages import Next, Publish, Refused, Stop, Wait
from megarl.rollout.membership import Membership


@dataclass(frozen=True)
class TrainStep:
    """Send the batch of this step."""

    step: int
    replay: bool = False


@dataclass(frozen=True)
class Standing:
    """How things stand, for one question.

    batches: how many batches are complete, counted from the first without a gap.
    published_version: the highest ever, -1 before the first.
    final_step: the version after which the run is over: run.steps, or fewer when the prompts are used up.
    score_due: the asking learner's version is to be evaluated, or is being evaluated.
    stop, failure: reasons to end, empty if there are none.
    """

    batches: int
    published_version: int
    final_step: int
    score_due: bool
    membership: Membership
    stop: str = ""
    failure: str = ""
    waiting_for: str = ""  # what a Wait for a batch should say


def decide(asked: Next, now: Standing) -> TrainStep | Publish | Wait | Stop | Refused:
    """The reply to `asked`."""
    step, members = asked.step, now.membership
    if now.failure:
        return Stop(reason=now.failure, error=True)
    if now.stop:
        return Stop(reason=now.stop)
    if problem := _impossible(asked, now):
        return Refused(error=problem)
    if step < now.published_version:
        return TrainStep(step, replay=True)
    if servers := members.wanting(step, asked.incarnation):
        return Publish(version=step, servers=servers)
    if now.score_due and step not in members.clean().values():
        return Wait(reason=f"version {step} is to be evaluated and no server can take it: {_servers(members)}")
    if step >= now.final_step:
        if now.score_due:
            return Wait(reason=f"evaluation of version {step}")
        return Stop(reason=f"all {step} steps are done")
    if step < now.batches:
        return TrainStep(step)
    return Wait(reason=f"batch {step}: {now.waiting_for or 'not complete'}; {_servers(members)}")


def _impossible(asked: Next, now: Standing) -> str:
    """Why a learner that asks this is not this run's; empty if it may be."""
    if asked.version != asked.step:
        return f"the learner asks for step {asked.step} with version {asked.version}; version v is after v steps"
    if asked.step > now.batches:
        return (
            f"the learner asks for step {asked.step}, but the journal holds {now.batches} complete batches: its checkpoint "
            "is of another run; remove the checkpoints or put back the journal"
        )
    return ""


def _servers(members: Membership) -> str:
    return ", ".join(f"server {s} {members.describe(s)}" for s in members.members)

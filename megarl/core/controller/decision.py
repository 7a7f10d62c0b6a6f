"""What the learner is told to do next: one pure function of its question and the present state.

asked to stop, or failed ──────────────────────────► Stop
a step that was trained before ────────────────────► TrainStep(replay): nothing is published meanwhile
a generated phase, after its first step ───────────► TrainStep: nothing is published before the phase ends
servers with older, unknown or another learner's
weights ───────────────────────────────────────────► Publish
these weights need a score, and no server has them ► Wait        (an earlier evaluation holds the server)
the last step is done ─────────────────────────────► Stop, once its evaluation is there
rollouts are to be compared at these weights ──────► Score, once the servers have scored them
all batches of the phase complete ─────────────────► TrainStep
else ──────────────────────────────────────────────► Wait

PipelineRL has phases of one step. In longer ones (PPO-off-policy-k) the learner waits with the weights that generate the
phase, so that it can publish them to a server that comes back; while it trains, the servers are idle. Versions within a phase
are not published and so not evaluated: the next published one is due instead.
"""

from dataclasses import dataclass

from megarl.core.base.messages import Next, Publish, Refused, Score, Stop, Wait
from megarl.core.recipe import Evaluation
from megarl.core.server.membership import Membership


@dataclass(frozen=True)
class TrainStep:
    """Send the batch of this step."""

    step: int
    replay: bool = False


@dataclass(frozen=True)
class ControllerView:
    """The present state, for one question."""

    batches: int  # number of complete batches, counted from the first without a gap
    published_version: int  # the highest ever, -1 before the first
    final_step: int  # run.steps: the version after which the run is over
    score_due: bool  # the asking learner's version is to be evaluated, or is being evaluated
    membership: Membership
    phase_steps: int = 1  # steps that are trained on what one version generated
    parity: Score | Wait | None = None  # the comparison at the asking learner's version; None: there is none
    stop: str = ""  # a reason to end
    failure: str = ""  # another
    waiting_for: str = ""  # what a Wait for a batch should say

    def phase_end(self, step: int) -> int:
        """Return the step after the phase of `step`; the run may end within the phase."""
        return min(step - step % self.phase_steps + self.phase_steps, max(self.final_step, step + 1))


Decision = TrainStep | Publish | Score | Wait | Stop | Refused


def decide(asked: Next, now: ControllerView) -> Decision:
    step, members = asked.step, now.membership
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
        return Wait(reason=f"version {step} is to be evaluated and no server can take it: {_servers(members)}")
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
    """Return whether this version needs a score, given the newest scored version (None: none has one).

    If an evaluation is lost with its server, the next version is scored instead: 100 is lost, 101 is scored, then 200.
    """
    if last_scored is None:
        return True
    if version <= last_scored or version >= final_version:
        return version > last_scored
    if settings.growth > 1:
        return version >= max(last_scored + settings.every, last_scored * settings.growth)
    return version // settings.every > last_scored // settings.every


def _impossible(asked: Next, now: ControllerView) -> str:
    """Return why no learner of this run can ask this; empty if one can."""
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

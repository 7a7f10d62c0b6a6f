"""What the learner is told to do next: one pure function of what it says and how things stand.

asked to stop, or failed ──────────────────────────► Stop
a step that was trained before ────────────────────► TrainStep(replay): nothing is published meanwhile
a phase that is generated, after its first step ───► TrainStep: nothing is published before the phase ends
servers behind, of unknown weights, or another
learner's ─────────────────────────────────────────► Publish
these weights are to be scored, and none holds them ► Wait        (a server is held by an earlier evaluation)
the last step is done ─────────────────────────────► Stop, once its evaluation is there
rollouts are to be compared at these weights ──────► Score, once the servers have scored them
all batches of the phase complete ─────────────────► TrainStep
else ──────────────────────────────────────────────► Wait

PipelineRL is phases of one step. In longer ones (PPO-off-policy-k) the learner waits with the weights that the phase is
generated with, so a server that comes back can be given them; in the update phase the servers have nothing to do. Versions
within a phase are not published and so not evaluated: the next one that is published is due instead.
"""

from dataclasses import dataclass

from megarl.core.base.messages import Next, Publish, Refused, Score, Stop, Wait
from megarl.core.server.membership import Membership


@dataclass(frozen=True)
class TrainStep:
    """Send the batch of this step."""

    step: int
    replay: bool = False


@dataclass(frozen=True)
class ControllerView:
    """How things stand, for one question.

    batches: how many batches are complete, counted from the first without a gap.
    published_version: the highest ever, -1 before the first.
    final_step: the version after which the run is over: run.steps, or fewer when the prompts are used up.
    phase_steps: steps that are trained on what one version has generated.
    score_due: the asking learner's version is to be evaluated, or is being evaluated.
    parity: what compares both sides at the asking learner's version (megarl/core/controller/parity.py); None: nothing does.
    stop, failure: reasons to end, empty if there are none.
    """

    batches: int
    published_version: int
    final_step: int
    score_due: bool
    membership: Membership
    phase_steps: int = 1
    parity: Score | Wait | None = None
    stop: str = ""
    failure: str = ""
    waiting_for: str = ""  # what a Wait for a batch should say

    def phase_end(self, step: int) -> int:
        """The step behind the last of the phase that `step` is in; the run may end within it."""
        return min(step - step % self.phase_steps + self.phase_steps, max(self.final_step, step + 1))


Decision = TrainStep | Publish | Score | Wait | Stop | Refused


def decide(asked: Next, now: ControllerView) -> Decision:
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


def is_due(version: int, last_scored: int | None, every: int, final_version: int) -> bool:
    """Whether these weights need a score, given the newest version that has one (None: none has).

    If an evaluation is lost with its server, the next version is due instead: 100 lost, 101 scored, then 200.
    """
    if last_scored is None:
        return True
    return version > last_scored and (version // every > last_scored // every or version >= final_version)


def _impossible(asked: Next, now: ControllerView) -> str:
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

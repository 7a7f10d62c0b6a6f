"""The names of the metrics, and their writer: one row a step into RUN/metrics.jsonl and TensorBoard.

    controller's Train.stats ─┐
    learner's train_step ─────┴─► one dict ─► MetricsWriter.row ─► metrics.jsonl, tensorboard/
    controller ─► eval.jsonl ────────────────► (mirrored) ───────► tensorboard/

`NAMES` says what each metric is and under which heading it is shown; `NAME/TASK` is the same of one task, where a recipe has
several. A number with another name is kept too, under `other`. Rows supersede by step: after a crash the replayed steps are
written again.
"""

import math
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megarl.monitor.tail import Tail
from megarl.rundir import RunDir, append_jsonl, read_jsonl, writing

NAMES: dict[str, tuple[str, str]] = {
    # name: (heading, meaning and unit)
    "step": ("run", "the step this row is about, from 0"),
    "weight_version": ("run", "weights after the step (step + 1)"),
    "time": ("run", "seconds since the epoch at the end of the step"),
    "compute_hours": ("run", "devices held x wall time, cumulative over the run's lives"),
    "compute_unit": ("run", "gpu or core"),
    "replay": ("run", "1 if the batch came back from the journal after a crash"),
    "pass_rate_train": ("reward", "share of right answers in the batch, zero-variance groups included"),
    "reward_mean": ("reward", "mean reward of the batch"),
    "reward": ("reward", "reward/NAME: mean score of each of several rewards, before its weight"),
    "zero_variance_share": ("reward", "groups of the batch with one reward throughout"),
    "groups_in_loss": ("reward", "groups of the batch that have a gradient"),
    "void_groups": ("reward", "groups of the batch that could not be generated or graded"),
    "truncation_rate": ("length", "rollouts that ran out of the answer budget"),
    "interruption_rate": ("length", "rollouts whose thinking was cut by the interruption phrase"),
    "format_error_rate": ("length", "rollouts without a closed thinking trace and an answer after it"),
    "grader_timeout_rate": ("length", "rollouts whose grading ran out of time"),
    "grader_error_rate": ("length", "rollouts at whose answer the grader failed"),
    "completion_tokens_mean": ("length", "tokens of a completion"),
    "completion_tokens_right_mean": ("length", "of the right ones"),
    "completion_tokens_wrong_mean": ("length", "of the wrong ones"),
    "generated_tokens": ("length", "tokens the policy sampled for the batch"),
    "turns_mean": ("tools", "turns of an episode (tasks with an environment)"),
    "turn_limit_rate": ("tools", "episodes ended by turns or turn_tokens, not by the policy"),
    "tool_error_rate": ("tools", "calls that were wrong, or whose tool failed"),
    "tool_seconds": ("tools", "seconds of a call"),
    "warning_truncation": ("length", "1 if truncation_rate is above 0.1, where training destabilises"),
    "warning_sample_size": ("learner", "1 if effective_sample_size is below 0.1"),
    "loss": ("learner", "the loss"),
    "entropy": ("learner", "mean entropy of the policy on trained tokens, nats"),
    "grad_norm": ("learner", "global gradient norm before clipping"),
    "lr": ("learner", "learning rate of the step"),
    "empty": ("learner", "1 if no group of the batch had a gradient: the step changed nothing"),
    "skipped": (
        "learner",
        "1 if loss or gradient was not finite: the step, or the rest of its epochs, changed nothing",
    ),
    "skipped_steps": ("learner", "how many of those so far"),
    "tokens_trained": ("learner", "tokens in the loss"),
    "sequences": ("learner", "rollouts in the loss"),
    "microbatches": ("learner", "packed micro-batches a data-parallel rank"),
    "ratio_mean": ("learner", "mean importance ratio of trained tokens"),
    "ratio_max": ("learner", "largest importance ratio"),
    "trained_logprob_diff_max": ("learner", "largest of them"),
    "capped_share": ("learner", "cispo: trained tokens whose importance ratio was cut at the cap"),
    "clipped_share": ("learner", "clip, gspo: trained tokens that clipping left without a gradient"),
    "corrected_share": ("learner", "loss.correction: trained tokens whose weight it bounded or masked"),
    "sequence_ratio_max": ("learner", "gspo: largest importance ratio of a sequence"),
    "effective_sample_size": (
        "learner",
        "(sum of ratios)^2 / (tokens x sum of squares): 1 if all trained tokens weigh the same",
    ),
    "kl_k3": ("learner", "k3 estimate of KL(behaviour || learner) on trained tokens, nats"),
    "kl_reference": (
        "learner",
        "mean estimate of KL(learner || reference) on trained tokens (reference.estimator), nats",
    ),
    "kl_reference_max": ("learner", "largest of them"),
    "advantage_mean": ("learner", "mean advantage of the rollouts in the loss; with a critic, of trained tokens"),
    "advantage_std": ("learner", "their deviation"),
    "advantage_abs_max": ("learner", "the largest, of either sign"),
    "value_loss": ("critic", "the critic's loss"),
    "value_mean": ("critic", "mean reward it expected before each trained token, before the step"),
    "return_mean": ("critic", "mean of what it should have expected (GAE)"),
    "explained_variance": (
        "critic",
        "1 - Var(return - value) / Var(return): 1 if it knew, 0 if it knew no more than the mean",
    ),
    "value_clipped_share": ("critic", "trained tokens whose value critic.value_clip kept from moving on"),
    "critic_grad_norm": ("critic", "its global gradient norm before clipping"),
    "critic_lr": ("critic", "its learning rate of the step"),
    "trained_logprob_diff": (
        "learner",
        "mean |learner - behaviour| log-prob of trained tokens (stale weights, stale KV)",
    ),
    "lag_mean": ("pipeline", "mean of step - weight version over trained tokens"),
    "lag_max": ("pipeline", "largest of them; never above pipeline.k (ppo-off-policy: k - 1)"),
    "learner_idle_share": ("speed", "wait_seconds / step_seconds"),
    "versions_per_rollout": ("pipeline", "mean number of weight versions in a completion"),
    "versions_per_rollout_max": ("pipeline", "largest of them"),
    "tickets_running": ("pipeline", "tickets being generated when the step was taken"),
    "tickets_ahead": ("pipeline", "tickets drawn and not trained yet"),
    "epoch": ("pipeline", "passes over the training prompts"),
    "pool_prompts": ("pipeline", "prompts the present epoch goes through, the easiest first (data.curriculum)"),
    "excluded_prompts": ("pipeline", "prompts not drawn again: solved (no-positive-resampling)"),
    "retries": ("pipeline", "requests of the batch that were lost and continued elsewhere"),
    "tokens_per_second": ("speed", "completion tokens of the batch / step_seconds"),
    "rollout_tokens_per_second": ("speed", "tokens the servers sampled a second, all servers"),
    "server_busy_share": ("speed", "share of the step's time a server had requests running, mean of servers"),
    "server_running_mean": ("speed", "requests running on a server, mean over the step"),
    "step_seconds": ("speed", "wall time from the end of the last step to the end of this one"),
    "train_seconds": ("speed", "forward, backward and optimiser"),
    "wait_seconds": ("speed", "the learner waited for a batch"),
    "publish_seconds": ("publish", "all of a publication, in the step's time"),
    "pause_seconds": ("publish", "until every server stood still"),
    "transfer_seconds": ("publish", "weights on the way"),
    "resume_seconds": ("publish", "until every server went on"),
    "publish_bytes": ("publish", "bytes sent"),
    "probe_seconds": ("publish", "scoring the probe on both sides"),
    "probe_logprob_diff": ("publish", "largest |server - learner| log-prob on the probe after the latest publication"),
    "checkpoint_seconds": ("publish", "the learner stood still for a checkpoint"),
}


class MetricsWriter:
    """Learner rank 0's. `row` may be called again for a step: the later row counts."""

    def __init__(self, rundir: RunDir) -> None:
        self._path = rundir.metrics
        self._last_step = max((row["step"] for row in read_jsonl(rundir.metrics)), default=-1)
        self._folder = rundir.tensorboard
        self._board = EventFileWriter(str(rundir.tensorboard))
        self._evaluations = Tail(rundir.eval)
        self._evaluations.new()  # those of an earlier life are in its TensorBoard file

    def row(self, row: dict[str, Any]) -> None:
        """Keep the metrics of `row["step"]`."""
        append_jsonl(self._path, row)
        with writing(self._folder):
            self._show(row)

    def close(self) -> None:
        """Also takes over evaluations that came after the last step."""
        with writing(self._folder):
            self._mirror_evaluations()
            self._board.close()

    def _show(self, row: dict[str, Any]) -> None:
        if row["step"] <= self._last_step:  # replay: TensorBoard drops what it has from here on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._board.add_event(event_pb2.Event(wall_time=time.time(), step=row["step"], session_log=start))
        self._last_step = row["step"]
        self._add(row["step"], {tag(name): value for name, value in row.items()})
        self._mirror_evaluations()

    def _mirror_evaluations(self) -> None:
        for row in self._evaluations.new():
            self._add(row["step"], {f"eval/{name}": row[name] for name in row if name != "step"})

    def _add(self, step: int, scalars: dict[str, Any]) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=float(value))
            for name, value in scalars.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values))
        self._board.add_event(event)


def tag(name: str) -> str:
    """TensorBoard's name of a metric: `heading/name`, or `heading/name/task`."""
    return f"{NAMES.get(name.partition('/')[0], ('other', ''))[0]}/{name}"

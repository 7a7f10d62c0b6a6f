"""The names of the metrics: what each is, and under which heading it is shown.

`NAME/TASK` is the same for one task, if a recipe has several. Numbers with other names are kept too, under `other`.
"""

NAMES: dict[str, tuple[str, str]] = {
    # name: (heading, meaning and unit)
    "step": ("run", "the step this row is about, from 0"),
    "weight_version": ("run", "weights after the step (step + 1)"),
    "time": ("run", "Unix time in seconds at the end of the step"),
    "compute_hours": (
        "run",
        "devices held x wall time of all roles, over all restarts, with evaluation and replay, without the warm start",
    ),
    "startup_hours": ("run", "part of compute_hours: before the first publication after each start, replay included"),
    "evaluation_hours": ("run", "part of compute_hours: devices of the servers held for evaluations"),
    "training_hours": ("run", "the rest of compute_hours; all three as of when the batch was handed out"),
    "compute_unit": ("run", "gpu or core"),
    "replay": ("run", "1 if the batch came back from the journal after a crash"),
    "pass_rate_train": ("reward", "share of right answers in the batch, with zero-variance groups, without void ones"),
    "reward_mean": ("reward", "mean reward of the batch"),
    "reward": (
        "reward",
        "reward/NAME: mean score of each of a task's rewards, before its weight; reward/answer: of its own grader; "
        "reward/turns: of what agents were rewarded after their first turn, without the session's reward",
    ),
    "reward_gap": ("reward", "mean reward of right answers less that of wrong ones; above 0 unless a grader is wrong"),
    "zero_variance_share": (
        "reward",
        "share of the batch's groups, without void ones, whose answers were graded alike",
    ),
    "groups_in_loss": ("reward", "groups of the batch that have a gradient"),
    "void_groups": ("reward", "groups of the batch that could not be generated or graded"),
    "truncation_rate": ("length", "rollouts that ran out of the answer budget"),
    "interruption_rate": ("length", "rollouts whose thinking was cut by the interruption phrase"),
    "format_error_rate": (
        "length",
        "rollouts without a closed thinking trace and an answer after it; above 0.5 the live view names the cause",
    ),
    "grader_timeout_rate": ("length", "rollouts whose grading ran out of time; they count as wrong"),
    "grader_error_rate": ("length", "rollouts whose grading failed; they count as wrong"),
    "completion_tokens_mean": ("length", "tokens of a completion"),
    "completion_tokens_right_mean": ("length", "tokens of a right completion"),
    "completion_tokens_wrong_mean": ("length", "tokens of a wrong completion"),
    "generated_tokens": ("length", "tokens the policy sampled for the batch"),
    "turns_mean": ("tools", "turns of an episode (tasks with an environment)"),
    "turn_limit_rate": ("tools", "episodes ended by `turns`, not by the policy"),
    "tool_error_rate": ("tools", "calls that were wrong, or whose tool failed"),
    "tool_seconds": ("tools", "seconds of a call, the wait for a free place included"),
    "health": ("health", "1 if every signal keeps its course, 0 if an alarm lasts (docs/monitoring.md)"),
    "alarm": ("health", "alarm/SIGNAL: 1 while this signal is off its course; `megarl health RUN` says it in words"),
    "loss": ("learner", "the loss"),
    "entropy": ("learner", "mean entropy of the policy on trained tokens, nats"),
    "surprise": ("learner", "mean -log-prob of trained tokens, nats: about their entropy if sampled as recorded"),
    "expert_imbalance_max": ("learner", "the busiest expert's tokens by the mean, in the worst layer"),
    "expert_unused_share": ("learner", "share of all layers' experts that no token of the step reached"),
    "routing_replayed": ("learner", "share of routers' choices taken from servers (model.moe.routing_replay)"),
    "grad_norm": ("learner", "global gradient norm before clipping"),
    "lr": ("learner", "learning rate of the step"),
    "empty": ("learner", "1 if no group of the batch had a gradient: the step changed nothing"),
    "skipped": (
        "learner",
        "1 if loss or gradient was not finite: nothing changed; with several epochs, from that epoch on",
    ),
    "skipped_steps": ("learner", "skipped steps so far"),
    "loss_scale": ("learner", "model.dtype: fp16: what the loss was multiplied by for the backward pass"),
    "scaler_skipped": (
        "learner",
        "fp16: updates skipped because scaled gradients overflowed, at most one per epoch; grad_norm is not finite then",
    ),
    "scaler_skipped_steps": ("learner", "scaler_skipped so far"),
    "tokens_trained": ("learner", "tokens in the loss"),
    "sequences": ("learner", "rollouts in the loss"),
    "microbatches": ("learner", "packed micro-batches per data-parallel rank"),
    "progress": (
        "learner",
        "mean of advantage x log-prob gained since sampling, nats: above 0 if training makes better answers likelier",
    ),
    "ratio_mean": ("learner", "mean importance ratio of trained tokens"),
    "ratio_max": ("learner", "largest importance ratio of trained tokens"),
    "trained_logprob_diff_max": ("learner", "largest |learner - behaviour| log-prob of trained tokens"),
    "capped_share": ("learner", "cispo: trained tokens whose importance ratio was cut at the cap"),
    "clipped_share": (
        "learner",
        "clip, dppo, gmpo, gspo: trained tokens left without a gradient because they moved too far",
    ),
    "corrected_share": ("learner", "loss.correction: trained tokens whose weight it bounded or masked"),
    "sequence_masked_share": ("learner", "loss.sequence_mask: trained tokens of rollouts that it masked"),
    "sequence_ratio_max": ("learner", "gspo, gmpo: largest importance ratio of a sequence"),
    "divergence_mean": (
        "learner",
        "dppo: mean divergence (loss.divergence) of behaviour and learner at trained tokens",
    ),
    "divergence_max": ("learner", "dppo: largest divergence of a token"),
    "effective_sample_size": ("learner", "(sum of ratios)^2 / (tokens x sum of squares): 1 if all tokens weigh alike"),
    "kl_k3": ("learner", "k3 estimate of KL(behaviour || learner) on trained tokens, nats"),
    "kl_reference": ("learner", "mean estimate of KL(learner || reference) (reference.estimator), nats"),
    "kl_reference_max": ("learner", "largest estimate of KL(learner || reference) of a token, nats"),
    "kl_teacher": (
        "learner",
        "mean of log mu - log pi_teacher over sampled tokens: k1 estimate of the reverse KL, nats",
    ),
    "advantage_mean": ("learner", "mean advantage of the rollouts in the loss; with a critic, of trained tokens"),
    "advantage_std": ("learner", "deviation of the advantages"),
    "advantage_abs_max": ("learner", "largest advantage, of either sign"),
    "advantage_fit": (
        "learner",
        "correlation of advantages with rewards, both less their prompt's mean: 1 where rewards alone make advantages",
    ),
    "value_loss": ("critic", "the critic's loss"),
    "value_mean": ("critic", "mean reward that the critic expected before each trained token, before the step"),
    "return_mean": ("critic", "mean of what the critic should have expected (GAE)"),
    "explained_variance": ("critic", "1 - Var(return - value) / Var(return): 1 if perfect, 0 if as good as the mean"),
    "value_clipped_share": ("critic", "trained tokens whose value the clip of 0.2 kept from moving on"),
    "critic_grad_norm": ("critic", "the critic's global gradient norm before clipping"),
    "critic_lr": ("critic", "the critic's learning rate"),
    "critic_loss_scale": ("critic", "critic.dtype: fp16: the critic's own loss scale"),
    "trained_logprob_diff": ("learner", "mean |learner - behaviour| log-prob of trained tokens (stale weights, KV)"),
    "lag_mean": ("pipeline", "mean of step - weight version over sampled tokens of non-void groups"),
    "lag_max": ("pipeline", "largest lag; never above pipeline.k (ppo-off-policy: k - 1)"),
    "learner_idle_share": ("speed", "wait_seconds / step_seconds"),
    "versions_per_rollout": ("pipeline", "mean number of weight versions in a completion"),
    "versions_per_rollout_max": ("pipeline", "largest number of weight versions in a completion"),
    "tickets_running": ("pipeline", "tickets being generated when the step was taken"),
    "tickets_ahead": ("pipeline", "tickets drawn and not trained yet"),
    "window": ("pipeline", "batches that might be drawn and not trained when the step was taken (pipeline.window)"),
    "epoch": ("pipeline", "passes over the training prompts"),
    "pool_prompts": ("pipeline", "prompts the present epoch goes through, the easiest first (data.curriculum)"),
    "excluded_prompts": ("pipeline", "prompts not drawn again: solved (no-positive-resampling)"),
    "retries": ("pipeline", "requests of the batch that were lost and continued elsewhere"),
    "tokens_per_second": ("speed", "generated_tokens / step_seconds"),
    "rollout_tokens_per_second": ("speed", "tokens that all servers sampled per second"),
    "servers": ("speed", "servers that can be sent requests"),
    "servers_joined": ("speed", "those of them that the run has not started (`megarl serve --join`)"),
    "server_busy_share": ("speed", "share of the step's time a server had requests running, mean of servers"),
    "server_running_mean": ("speed", "requests running on a server, mean over the step"),
    "server_places_mean": (
        "speed",
        "requests that a server may have (serving.max_running_requests or fewer), mean of servers",
    ),
    "cached_prompt_share": (
        "speed",
        "tokens of requests' inputs found in a server's cache, of those that their group had sent or received before",
    ),
    "step_seconds": ("speed", "wall time from the end of the last step to the end of this one"),
    "train_seconds": ("speed", "part of step_seconds: forward, backward and optimiser"),
    "wait_seconds": ("speed", "part of step_seconds: the learner waited for a batch"),
    "publish_seconds": ("publish", "all of a publication, in the step's time"),
    "pause_seconds": ("publish", "part of publish_seconds: until every server stood still"),
    "transfer_seconds": ("publish", "part of publish_seconds: weights on the way"),
    "resume_seconds": ("publish", "part of publish_seconds: swapping staged weights in, until every server went on"),
    "publish_bytes": ("publish", "bytes sent by a publication"),
    "parity_seconds": ("parity", "learner's time to score rollouts that the servers scored too"),
    "parity_rollouts": ("parity", "rollouts that both sides scored after the latest publication"),
    "parity_mean": ("parity", "parity_mean/CAUSE: mean |difference| of the log-probs of sampled tokens, by cause"),
    "parity_p50": ("parity", "parity_p50/CAUSE: median of the differences"),
    "parity_p99": ("parity", "parity_p99/CAUSE: 99th percentile of the differences"),
    "parity_p999": ("parity", "parity_p999/CAUSE: 99.9th percentile of the differences"),
    "parity_max": ("parity", "parity_max/CAUSE: largest difference"),
    "parity_share": ("parity", "parity_share/CAUSE: share of tokens whose log-probs differ by more than 0.1"),
    "parity_k3": ("parity", "parity_k3/CAUSE: k3 estimate of the KL divergence between the two, nats"),
    "parity_tokens": ("parity", "parity_tokens/CAUSE: tokens compared"),
    "parity_routing": ("parity", "share of (token, layer) choices of experts that differ between servers and learner"),
    "parity_logit": (
        "parity",
        "parity_logit/CAUSE: error of a logit: median |difference| / (1 - p), of the worst server",
    ),
    "parity_same_bits": ("parity", "share of tokens that servers score with the same bits at two versions"),
    "parity_line": ("parity", "share of kernels' variance that a line through the log-prob explains"),
    "parity_growth": ("parity", "kernels in the last third of positions by the first third"),
    "parity_grid": ("parity", "parity_grid/SIDE: logits on the grid of model.dtype, where the head should be FP32"),
    "warning_parity": ("parity", "1 if a limit of parity was broken; the run ends if that lasts"),
    "checkpoint_seconds": ("publish", "the learner stood still for a checkpoint"),
}


def explained(part: str = "") -> str:
    """Return the names that contain `part`, with their meanings, under headings; empty if there are none."""
    lines: dict[str, list[str]] = {}
    for name, (heading, meaning) in NAMES.items():
        if part in name:
            lines.setdefault(heading, []).append(f"  {name:<28} {meaning}")
    return "\n\n".join("\n".join([heading, *names]) for heading, names in lines.items())


def tag(name: str) -> str:
    """Return a metric's name in TensorBoard and W&B: `heading/name`, or `heading/name/task`."""
    return f"{NAMES.get(name.partition('/')[0], ('other', ''))[0]}/{name}"

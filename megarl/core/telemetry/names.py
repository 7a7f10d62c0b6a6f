"""The names of the metrics, with their meanings and the headings under which they are
shown.

`NAME/TASK` is the same metric for one task, if a recipe has several. Metrics with other
names are kept, too, under `other`.
"""

MEANINGS = {
    "run": {
        "step": "the step this row is about, from 0",
        "weight_version": "weights after the step (step + 1)",
        "time": "Unix time in seconds at the end of the step",
        "compute_hours": (
            "devices x wall time of all roles and restarts, with evaluation and replay, not the"
            " warm start"
        ),
        "startup_hours": (
            "part of compute_hours: before the first publication after each start, replay included"
        ),
        "evaluation_hours": "part of compute_hours: devices of the servers held for evaluations",
        "training_hours": (
            "the rest of compute_hours; all three as of when the batch was handed out"
        ),
        "compute_unit": "gpu or core",
        "replay": "1 if the batch came back from the journal after a crash",
    },
    "reward": {
        "pass_rate_train": (
            "share of right answers in the batch, with zero-variance groups, without void ones"
        ),
        "reward_mean": "mean reward of the batch",
        "reward": (
            "reward/NAME: mean score of each of a task's rewards, before its weight; reward/answer:"
            " that of its own grader; reward/turns: mean sum of an agent's rewards after its first"
            " turn, without the session's reward"
        ),
        "reward_gap": (
            "mean reward of right answers less that of wrong ones; above 0 unless a grader is wrong"
        ),
        "zero_variance_share": (
            "share of the batch's groups, without void ones, whose answers got equal grades"
        ),
        "groups_in_loss": "groups of the batch that have a gradient",
        "void_groups": "groups of the batch that could not be generated or graded",
    },
    "length": {
        "truncation_rate": "rollouts that ran out of the answer budget",
        "interruption_rate": "rollouts whose thinking was cut by the interruption phrase",
        "format_error_rate": (
            "rollouts without a closed thinking trace and an answer after it; above 0.5 the live"
            " view names the cause"
        ),
        "grader_timeout_rate": "rollouts whose grading ran out of time; they count as wrong",
        "grader_error_rate": (
            "rollouts whose grading failed (they count as wrong), or that no grader could judge"
        ),
        "completion_tokens_mean": "tokens of a completion",
        "completion_tokens_right_mean": "tokens of a right completion",
        "completion_tokens_wrong_mean": "tokens of a wrong completion",
        "generated_tokens": "tokens the policy sampled for the batch",
    },
    "tools": {
        "turns_mean": "turns of an episode (tasks with an environment)",
        "turn_limit_rate": "episodes ended by `turns`, not by the policy",
        "tool_error_rate": "calls that were wrong, or whose tool failed",
        "tool_seconds": "seconds of a call, the wait for a free place included",
    },
    "health": {
        "health": (
            "1 if every signal keeps its course, 0 if an alarm lasts (docs/how-to/monitoring.md)"
        ),
        "alarm": (
            "alarm/SIGNAL: 1 while this signal is off its course; `megarl health RUN` says it in"
            " words"
        ),
    },
    "learner": {
        "loss": "the loss",
        "entropy": "mean entropy of the policy on trained tokens, nats",
        "surprise": (
            "mean -log-prob of trained tokens, nats: about their entropy if sampled as recorded"
        ),
        "expert_imbalance_max": (
            "the busiest expert's tokens divided by the mean, in the worst layer"
        ),
        "expert_unused_share": "share of all layers' experts that no token of the step reached",
        "routing_replayed": (
            "share of routers' choices taken from servers (model.moe.routing_replay)"
        ),
        "grad_norm": "global gradient norm before clipping",
        "lr": "learning rate of the step",
        "empty": "1 if no group of the batch had a gradient: the step changed nothing",
        "skipped": (
            "1 if loss or gradient was not finite: nothing changed; with several epochs, from that"
            " epoch on"
        ),
        "skipped_steps": "skipped steps so far",
        "loss_scale": "model.dtype: fp16: what the loss was multiplied by for the backward pass",
        "scaler_skipped": (
            "fp16: updates skipped because scaled gradients overflowed, at most one per epoch;"
            " grad_norm is not finite then"
        ),
        "scaler_skipped_steps": "scaler_skipped so far",
        "tokens_trained": "tokens in the loss",
        "sequences": "rollouts in the loss; of agents, their paths",
        "microbatches": "packed micro-batches per data-parallel rank",
        "progress": (
            "mean advantage x log-prob gained since sampling, nats: above 0 if better answers"
            " become likelier"
        ),
        "ratio_mean": "mean importance ratio of trained tokens",
        "ratio_max": "largest importance ratio of trained tokens",
        "trained_logprob_diff_max": "largest |learner - behaviour| log-prob of trained tokens",
        "capped_share": "cispo: trained tokens whose importance ratio was cut at the cap",
        "clipped_share": (
            "clip, dppo, gmpo, gspo: trained tokens left without a gradient because they moved"
            " too far"
        ),
        "corrected_share": "loss.correction: trained tokens whose weight it bounded or masked",
        "sequence_masked_share": "loss.sequence_mask: trained tokens of rollouts that it masked",
        "sequence_ratio_max": "gspo, gmpo: largest importance ratio of a sequence",
        "divergence_mean": (
            "dppo: mean divergence (loss.divergence) of behaviour and learner at trained tokens"
        ),
        "divergence_max": "dppo: largest divergence of a token",
        "effective_sample_size": (
            "(sum of ratios)^2 / (tokens x sum of squares): 1 if all tokens have equal weight"
        ),
        "kl_k3": "k3 estimate of KL(behaviour || learner) on trained tokens, nats",
        "kl_reference": "mean estimate of KL(learner || reference) (reference.estimator), nats",
        "kl_reference_max": "largest estimate of KL(learner || reference) of a token, nats",
        "kl_teacher": (
            "mean of log mu - log pi_teacher over sampled tokens: k1 estimate of the reverse KL,"
            " nats"
        ),
        "advantage_mean": (
            "mean advantage of the rollouts in the loss; with a critic, of trained tokens"
        ),
        "advantage_std": "deviation of the advantages",
        "advantage_abs_max": "largest advantage, of either sign",
        "advantage_fit": (
            "correlation of advantages with rewards, both less their prompt's mean: 1 where only"
            " rewards make advantages"
        ),
        "trained_logprob_diff": (
            "mean |learner - behaviour| log-prob of trained tokens (stale weights, KV)"
        ),
    },
    "critic": {
        "value_loss": "the critic's loss",
        "value_mean": (
            "mean reward that the critic expected before each trained token, before the step"
        ),
        "return_mean": "mean of what the critic should have expected (GAE)",
        "explained_variance": (
            "1 - Var(return - value) / Var(return): 1 if perfect, 0 if as good as the mean"
        ),
        "value_clipped_share": "trained tokens whose value the clip of 0.2 kept from moving on",
        "critic_grad_norm": "the critic's global gradient norm before clipping",
        "critic_lr": "the critic's learning rate",
        "critic_loss_scale": "critic.dtype: fp16: the critic's own loss scale",
    },
    "pipeline": {
        "lag_mean": "mean of step - weight version over sampled tokens of non-void groups",
        "lag_max": "largest lag; never above pipeline.k (ppo-off-policy: k - 1)",
        "versions_per_rollout": "mean number of weight versions in a completion",
        "versions_per_rollout_max": "largest number of weight versions in a completion",
        "tickets_running": "tickets being generated when the step was taken",
        "tickets_ahead": "tickets drawn and not trained yet",
        "window": (
            "batches that might be drawn and not trained when the step was taken (pipeline.window)"
        ),
        "epoch": "passes over the training prompts",
        "pool_prompts": (
            "prompts the present epoch goes through, the easiest first (data.curriculum)"
        ),
        "excluded_prompts": "prompts not drawn again: solved (no-positive-resampling)",
        "retries": "requests of the batch that were lost and continued elsewhere",
    },
    "speed": {
        "learner_idle_share": "wait_seconds / step_seconds",
        "tokens_per_second": "generated_tokens / step_seconds",
        "rollout_tokens_per_second": "tokens that all servers sampled per second",
        "servers": "servers that can be sent requests",
        "servers_joined": "those of them that the run did not start (`megarl serve --join`)",
        "server_busy_share": (
            "share of the step's time a server had requests running, mean of servers"
        ),
        "server_running_mean": "requests running on a server, mean over the step",
        "server_places_mean": (
            "requests that a server may have (serving.max_running_requests or fewer), mean of"
            " servers"
        ),
        "cached_prompt_share": (
            "tokens of requests' inputs found in a server's cache, of those that their group had"
            " sent or received before"
        ),
        "step_seconds": "wall time from the end of the last step to the end of this one",
        "train_seconds": "part of step_seconds: forward, backward and optimiser",
        "wait_seconds": "part of step_seconds: the learner waited for a batch",
    },
    "publish": {
        "publish_seconds": "all of a publication, in the step's time",
        "pause_seconds": "part of publish_seconds: until every server was paused",
        "transfer_seconds": "part of publish_seconds: sending the weights",
        "resume_seconds": (
            "part of publish_seconds: swapping staged weights in, until every server continued"
        ),
        "publish_bytes": "bytes sent by a publication",
        "checkpoint_seconds": "time for which a checkpoint stopped the learner",
        "checkpoint_write_seconds": (
            "from the start of a checkpoint until it was whole on disk; in the next row after that"
        ),
    },
    "parity": {
        "parity_seconds": "learner's time to score rollouts that the servers scored too",
        "parity_rollouts": "rollouts that both sides scored after the latest publication",
        "parity_mean": (
            "parity_mean/CAUSE: mean |difference| of the log-probs of sampled tokens, by cause"
        ),
        "parity_p50": "parity_p50/CAUSE: median of the differences",
        "parity_p99": "parity_p99/CAUSE: 99th percentile of the differences",
        "parity_p999": "parity_p999/CAUSE: 99.9th percentile of the differences",
        "parity_max": "parity_max/CAUSE: largest difference",
        "parity_share": (
            "parity_share/CAUSE: share of tokens whose log-probs differ by more than 0.1"
        ),
        "parity_k3": "parity_k3/CAUSE: k3 estimate of the KL divergence between the two, nats",
        "parity_tokens": "parity_tokens/CAUSE: tokens compared",
        "parity_unjudged": (
            "parity_unjudged/CAUSE: tokens gathered so far, too few to be judged yet; 0: judged"
        ),
        "parity_routing": (
            "share of (token, layer) choices of experts that differ between servers and learner"
        ),
        "parity_logit": (
            "parity_logit/CAUSE: error of a logit: median |difference| / (1 - p), of the worst"
            " server"
        ),
        "parity_same_bits": (
            "share of tokens that a server scores with the same bits at two versions, of the"
            " largest"
        ),
        "parity_line": "share of kernels' variance that a line through the log-prob explains",
        "parity_growth": (
            "mean of kernels in the last third of positions, divided by that in the first third"
        ),
        "parity_grid": (
            "parity_grid/SIDE: logits on the grid of model.dtype, where the head should be FP32"
        ),
        "warning_parity": "1 if a limit of parity was broken; the run ends if that lasts",
    },
}
NAMES = {
    name: (heading, meaning)
    for heading, names in MEANINGS.items()
    for name, meaning in names.items()
}


def explained(part: str = "") -> str:
    """Return the metrics whose names contain `part`, with their meanings, under
    headings; empty if there are none.
    """
    sections = []
    for heading, names in MEANINGS.items():
        lines = [f"  {name:<28} {meaning}" for name, meaning in names.items() if part in name]
        if lines:
            sections.append("\n".join([heading, *lines]))
    return "\n\n".join(sections)


def tag(name: str) -> str:
    """Return a metric's name in TensorBoard and W&B: `heading/name`, or
    `heading/name/task`.
    """
    heading, _ = NAMES.get(name.partition("/")[0], ("other", ""))
    return f"{heading}/{name}"

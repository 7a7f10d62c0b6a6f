"""The typed tree of a recipe. Defaults are ScaleRL's (arXiv 2510.13786); "not stated":
the paper gives no number for it.
"""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from megarl.core.base.api_key import check_key_place

type RecipeTree = dict[str, Any]
"""The contents of a recipe file, or a part of them, not checked yet."""
FP8_MULTIPLE = 16
"""Every dimension of an FP8 product must be a multiple of this."""
FP8_BLOCK = 128
"""Tokens of a block with one scale (model.fp8=blockwise); rows, and columns, of a block
of a server's weights (serving.quantization). If tensor-parallel ranks do not have whole
blocks, Transformer Engine gathers their FP8 numbers in bf16, without overlap, and
rounds them a second time (_start_all_gather_fp8_blockwise).
"""
LM_EVAL = "lm-eval:"
"""Begins the `data` of suites that are tasks of lm-evaluation-harness."""


class Section(BaseModel):
    """A part of the recipe: strict types, finite numbers, no unknown keys, no changes
    after loading.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class Curriculum(Section):
    """Easy prompts first, by their `difficulty`. Not part of ScaleRL."""

    kind: Literal["none", "linear", "exponential"] = Field(
        "none",
        description=(
            "how the share of prompts in play grows, to all once the task's number has been drawn;"
            " none: all from the start"
        ),
    )


KeyPlace = Annotated[str, AfterValidator(check_key_place)]
"""Where a key is: env:VARIABLE or file:PATH."""
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""The name of a task or reward; it becomes part of metric names."""


class Service(Section):
    """A reward service, asked over HTTP."""

    url: str = Field(pattern=r"^https?://[^@\s]+$", description="requests are POSTed to it")
    api_key: KeyPlace = Field(
        "", description="where its key is: env:VARIABLE or file:PATH; empty: it has none"
    )
    timeout_s: float = Field(60.0, gt=0, description="limit of a request, in seconds")


class Reward(Section):
    """A reward added to that of a task's grader."""

    grader: str = Field(description="what gives the score, as for a task")
    weight: float = Field(description="factor of the score; may be negative")


ColumnName = Literal["prompt", "answer", "difficulty", "id"]
MappingName = Literal[
    "",
    "verl",
    "polaris",
    "deepscaler",
    "dapo-math-17k",
    "deepcoder",
    "gsm8k",
    "math",
    "livecodebench",
    "humaneval",
    "mbpp",
]


class Rows(Section):
    """Rows of a data set, what the model sees of them, how its answers are graded."""

    mapping: MappingName = Field(
        "",
        description=(
            "published set whose columns the rows have; empty: prompt, answer, id, difficulty"
        ),
    )
    columns: dict[ColumnName, str] = Field(
        {},
        description=(
            "columns that replace the mapping's; without a mapping difficulty and id are read only"
            " if they are named too. A dot reaches into a nested one; a row without id gets its"
            " hash"
        ),
    )
    template: Literal["raw", "chat"] = Field(
        "raw",
        description="raw: the model sees the prompt as it is; chat: in the model's chat template",
    )
    system: str = Field(
        "",
        description=(
            "system message before the prompt, with template: chat; a row's own takes its place"
        ),
    )
    template_options: dict[str, bool | int | float | str] = Field(
        {},
        description=(
            "variables that the chat template reads, such as {enable_thinking: false}; for an"
            " agent's requests too"
        ),
    )
    grader: str = Field(
        "math",
        description=(
            "what says which answers are right: math, exact, code, reasoning-gym, format, a name of"
            " data.services, or package.module:function"
        ),
    )
    rewards: dict[TaskName, Reward] = Field(
        {},
        description="further rewards by name: each adds weight x score; none affects correctness",
    )
    environment: str = Field(
        "",
        description=(
            "what answers a turn: python, calculator, guessing, or package.module:Class; empty: one"
            " turn"
        ),
    )
    agent: str | tuple[str, ...] = Field(
        "",
        description=(
            "program of your own that works on the prompt through a model endpoint: a command as a"
            " list of words, or package.module:function; empty: none"
        ),
    )
    turns: int = Field(
        8, ge=1, description="environment: maximum turns of an episode, the last one included"
    )
    reply_tokens: int = Field(
        512, ge=1, description="environment: maximum tokens of a reply; they count in `length`"
    )

    @property
    def graders(self) -> tuple[str, ...]:
        """Names of the task's grader and of the graders of further rewards."""
        return (self.grader, *(reward.grader for reward in self.rewards.values()))


class Task(Rows):
    """Prompts of one kind that a run trains on."""

    train: str = Field(
        description=(
            "training prompts: a file (JSONL, JSON, CSV, Parquet, Arrow), a pattern of files, a"
            " folder, hub:ORG/NAME:CONFIG:SPLIT, or reasoning-gym:FAMILY:KEY=VALUE"
        )
    )
    heldout: str | int = Field(
        description=(
            "prompts never trained on: a source as for train, or how many of its rows, taken out of"
            " it by their hash"
        )
    )
    weight: float = Field(
        1.0, gt=0, description="share of the prompts drawn, in proportion to the other tasks'"
    )
    trusted_grader: str = Field(
        "",
        description=(
            "grader, as above, that evaluations of held-out prompts ask too and training never;"
            " empty: none"
        ),
    )

    @property
    def graders(self) -> tuple[str, ...]:
        """Names of all graders of the task, with the trusted one if it has one."""
        if self.trusted_grader:
            return (*super().graders, self.trusted_grader)
        return super().graders

    @field_validator("heldout", mode="before")
    @classmethod
    def a_source_or_a_number(cls, heldout: Any) -> Any:
        """Refuse anything but a text or a positive number; True is no number."""
        if isinstance(heldout, str) or (type(heldout) is int and heldout > 0):
            return heldout
        should = "should be a file or hub:… of prompts, or how many rows of train to hold out"
        raise ValueError(f"{should}, got {heldout!r}")


class Suite(Rows):
    """A set that models are scored on. Shipped ones (megarl/recipes/suites) are known
    by name; keys given here win.
    """

    data: str = Field(
        description=(
            "the set: a file, a pattern of files, a folder, or hub:ORG/NAME:CONFIG:SPLIT; or"
            " lm-eval:TASK, with that task's own prompts and metrics"
        )
    )
    prompt: str = Field(
        "{prompt}", description="what the model is asked; {prompt} stands for the row's prompt"
    )
    samples: int = Field(
        1, ge=1, description="answers per prompt: gives mean@samples, and pass@k and maj@k up to it"
    )
    prompts: int | None = Field(
        None, ge=1, description="maximum number of prompts, chosen by hash; null: all"
    )
    heldout: int | None = Field(
        None,
        ge=1,
        description=(
            "only those rows of `data` that a task with this `heldout` holds out; null: all"
        ),
    )


class Data(Section):
    """What a run trains on, and how answers are graded."""

    tasks: dict[TaskName, Task] = Field(
        {}, description="tasks by name; null removes one of the base recipe"
    )
    curriculum: Curriculum = Curriculum()
    services: dict[TaskName, Service] = Field(
        {}, description="reward services by name; a grader refers to one by it"
    )
    sandbox: Literal["bubblewrap", "rlimits"] = Field(
        "bubblewrap",
        description=(
            "where grader: code runs programs, and agents run; rlimits has no namespaces: agents,"
            " and on old kernels programs, can read, write and delete whatever you can"
        ),
    )
    decontaminate: tuple[str, ...] = Field(
        (),
        description=(
            "evaluation sets: a prompt that shares 13 consecutive words with one is not trained on"
        ),
    )
    unreadable: Literal["text", "drop", "refuse"] = Field(
        "text",
        description=(
            "an answer of a training set that grader: math cannot read as a whole: text: only the"
            " same text is right; drop: leave the prompt out; refuse: do not start"
        ),
    )

    @property
    def shares(self) -> dict[str, Fraction]:
        """Each task's exact share of the prompts drawn: a weight of .1 is a tenth."""
        weights = {name: Fraction(repr(task.weight)) for name, task in self.tasks.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}


class Run(Section):
    """Where a run is, how long it is, and what it starts from."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        max_length=200,
        description="the run's directory is dir/name",
    )
    dir: str = Field("runs", description="folder of all runs")
    seed: int = Field(
        0, ge=0, description="seed of shuffles, budgets and all other random choices but sampling"
    )
    steps: int = Field(400, ge=1, description="optimiser steps")
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto: continue the run in this directory, if there is one; never: refuse to",
    )
    fork: str = Field(
        "",
        pattern=r"^$|^.+@0*[1-9][0-9]*$",
        description=(
            "RUN@STEP: start with that run's weights, optimiser, draws and compute at its"
            " checkpoint of STEP; empty: afresh"
        ),
    )
    interface: str = Field(
        "",
        description=(
            "network interface all roles listen on, such as ib0; slurm: the one through which Slurm"
            " reaches the nodes; empty: loopback"
        ),
    )
    stop_when: str = Field(
        "",
        pattern=r"^$|^gain < [0-9]*\.?[0-9]+(e-?[0-9]+)? per (GPU|core)-hour$",
        description=(
            "such as gain < 1e-5 per GPU-hour: end when the rest of the run is predicted to gain"
            " less, even at the upper end of the 95 % interval"
        ),
    )

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.dir) / self.name

    @property
    def forked(self) -> tuple[Path, int]:
        """The parent's directory and the step at which the run forks from it; only for
        a fork.
        """
        parent, _, step = self.fork.rpartition("@")
        return Path(parent), int(step)


class Moe(Section):
    """How experts are trained. Fixed, because other choices harm RL: no token is
    dropped, and routing is in float32.
    """

    aux_loss: float = Field(
        0.0, ge=0, description="coefficient of the Switch Transformer's balancing loss; 0: none"
    )
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description=(
            "how far a step moves routers' biases towards an even load (DeepSeek-V3: 1e-3); 0:"
            " fixed"
        ),
    )
    freeze_router: bool = Field(False, description="true: routers keep the weights they came with")
    routing_replay: bool = Field(
        False, description="the learner takes the experts that the server chose"
    )
    shared_overlap: bool = Field(
        False,
        description=(
            "shared experts compute while tokens go to other ranks' experts and back; not"
            " measured yet"
        ),
    )


class Model(Section):
    """The policy: its weights, its precision, and how ranks divide it."""

    path: str = Field("", description="Hugging Face directory that both sides start from")
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16",
        description="weights and activations on both sides; fp16: the learner scales its losses",
    )
    fp32_head: Literal["both", "learner", "server", "none"] = Field(
        "both",
        description="which side computes the LM head in FP32; with dtype fp32 both always do",
    )
    fp8: Literal["none", "blockwise", "tensorwise"] = Field(
        "none",
        description=(
            "scales of the learner's FP8 products, by Transformer Engine; weights and servers stay"
            " bf16"
        ),
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description=(
            "TP: ranks that divide each matrix, and the tokens between matrices (sequence"
            " parallelism)"
        ),
    )
    pipeline_parallel: int = Field(1, ge=1, description="PP: ranks that divide the layers")
    virtual_pipeline_parallel: int = Field(1, ge=1, description="model chunks per pipeline rank")
    context_parallel: int = Field(1, ge=1, description="CP: ranks that divide each sequence")
    expert_parallel: int = Field(1, ge=1, description="EP: ranks that divide the experts")
    expert_tensor_parallel: int = Field(1, ge=1, description="ETP: ranks that divide each expert")
    moe: Moe = Moe()

    @property
    def token_multiple(self) -> int:
        """A rank's layers process a multiple of this many tokens at once."""
        if self.fp8 == "none":
            return 1
        if self.fp8 == "blockwise" and self.tensor_parallel > 1:
            return FP8_BLOCK
        return FP8_MULTIPLE

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def stage_layers(self, layers: int) -> tuple[int, int]:
        """Return how many layers a pipeline stage has, and how many the last one:
        fewer, unless the stages divide them.
        """
        per_stage = -(-layers // self.pipeline_parallel)
        return per_stage, layers - per_stage * (self.pipeline_parallel - 1)


class Resources(Section):
    """How many processes and GPUs the learner and the servers have."""

    learner_ranks: int = Field(
        1, ge=1, description="GPUs or processes of the learner: TP x PP x CP x DP"
    )
    servers: int = Field(
        1, ge=1, description="number of SGLang servers to start with; more can join later"
    )
    server_tensor_parallel: int = Field(
        1, ge=1, description="GPUs per server; more than a node has: whole nodes"
    )
    colocate: bool = Field(
        False,
        description=(
            "true: servers and learner ranks share GPUs of one machine, one rank on each; where"
            " they take turns (pipeline), the learner has the KV cache's memory while it trains"
        ),
    )
    threads: int = Field(1, ge=1, description="CPU threads per learner rank or server")


class Stage(Section):
    """A shorter budget at the beginning of a run."""

    until_step: int = Field(
        ge=1, description="the stage is for prompts drawn for steps before this one"
    )
    thinking_tokens: tuple[int, int] = Field(
        description="budget of the stage, as length.thinking_tokens"
    )


class Length(Section):
    """Limits of prompts, thinking and answers, in tokens."""

    control: Literal["interruption", "overlong_penalty", "none"] = Field(
        "interruption",
        description=(
            "interruption: a phrase ends the thinking; the others sample thinking and answer in"
            " one, up to the sum of both limits"
        ),
    )
    prompt_tokens: int = Field(
        2048, ge=1, description="longest prompt with its template; longer ones are left out"
    )
    thinking_tokens: tuple[int, int] = Field(
        (10_000, 12_000),
        description=(
            "smallest and largest thinking budget; each rollout draws one; [0, 0] with another"
            " control than interruption: the model does not think"
        ),
    )
    stages: tuple[Stage, ...] = Field(
        (), description="shorter budgets at first, [{until_step, thinking_tokens}, …]"
    )
    answer_tokens: int = Field(
        2048,
        ge=1,
        description=(
            "maximum tokens after the thinking; overlong_penalty: the last ones, in which a right"
            " answer loses up to 1"
        ),
    )
    grade_truncated: bool = Field(
        False,
        description=(
            "grade an answer that a length limit cut off like a finished one; else math and exact"
            " count it as wrong unless it has a complete box or answer line"
        ),
    )
    end_of_thinking: str = Field(
        "</think>", description="the answer is the text after it; empty: no thinking trace"
    )
    interruption: str = Field(
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>",
        description="phrase appended when the thinking budget runs out; masked from the loss",
    )

    def at(self, step: int) -> "Length":
        """Return the section as it applies to a prompt drawn for this step: with its
        stage's budget, and no stages.
        """
        budget = self.thinking_tokens
        for stage in self.stages:
            if step < stage.until_step:
                budget = stage.thinking_tokens
                break
        return self.model_copy(update={"thinking_tokens": budget, "stages": ()})

    @property
    def completion_tokens(self) -> int:
        """Longest completion, interruption phrase not counted."""
        return self.thinking_tokens[1] + self.answer_tokens

    @property
    def context_tokens(self) -> int:
        """Longest sequence, interruption phrase not counted."""
        return self.prompt_tokens + self.completion_tokens


class Sampling(Section):
    """How rollouts are sampled."""

    generations: int = Field(16, ge=2, description="rollouts per prompt")
    temperature: float = Field(
        1.0, gt=0, description="divides the logits on both sides; not stated"
    )


class PipelineSection(Section):
    """How far generation may run ahead of training."""

    kind: Literal["pipeline-rl", "ppo-off-policy"] = Field(
        "pipeline-rl",
        description=(
            "ppo-off-policy: k batches are generated with one version, then trained in k steps"
        ),
    )
    k: int = Field(
        8,
        ge=0,
        description="largest lag of a trained token, in steps; ppo-off-policy: steps per phase",
    )
    window: Literal["full", "auto"] = Field(
        "full",
        description=(
            "full: prompts are drawn as early as k allows; auto: only as early as the learner would"
            " wait for them otherwise; ppo-off-policy: phases are drawn whole"
        ),
    )

    @property
    def phase_steps(self) -> int:
        """Steps between two publications: those of a phase. For ppo-off-policy, k = 0
        and k = 1 are both synchronous.
        """
        return max(self.k, 1) if self.kind == "ppo-off-policy" else 1

    @property
    def max_lag(self) -> int:
        """Number of steps by which the phase being generated may be ahead of the
        servers' weights.
        """
        return 0 if self.kind == "ppo-off-policy" else self.k

    @property
    def lag_limit(self) -> int:
        """Largest lag of a trained token, in steps."""
        return self.max_lag + self.phase_steps - 1

    @property
    def window_steps(self) -> int:
        """Number of steps whose prompts may be drawn but not yet trained."""
        return self.max_lag + self.phase_steps


class BatchSection(Section):
    """Which rollouts a step trains on, and how rewards become advantages."""

    prompts: int = Field(
        48, ge=1, description="prompts per step; each has sampling.generations rollouts"
    )
    zero_variance: Literal["drop", "refill", "keep"] = Field(
        "drop",
        description=(
            "groups whose answers are graded alike: drop them, refill with other prompts' groups,"
            " or keep them in the loss"
        ),
    )
    truncated: Literal["keep", "drop"] = Field(
        "keep",
        description=(
            "rollouts that the answer budget cut off; drop: left out of the loss, though their"
            " rewards count in the group's mean and deviation"
        ),
    )
    positive_threshold: float | None = Field(
        0.9,
        gt=0,
        le=1,
        description=(
            "a prompt of this pass rate is not drawn again (no-positive-resampling); null: off"
        ),
    )
    centring: Literal["group", "leave_one_out", "none", "critic"] = Field(
        "group",
        description=(
            "what is subtracted from a reward: the mean of the group, of the group's others,"
            " nothing; critic: what a value model expected, token by token (GAE)"
        ),
    )
    advantage: Literal["batch", "group", "running", "none"] = Field(
        "batch",
        description=(
            "whose deviation divides the centred reward; running: that of all batches so far"
        ),
    )
    aggregation: Literal["prompt", "sample", "token", "constant"] = Field(
        "prompt",
        description=(
            "what the loss is averaged over first; constant: rollouts x longest completion (Dr."
            " GRPO)"
        ),
    )


class Loss(Section):
    """The policy loss and its trust region."""

    kind: str = Field(
        "cispo",
        description=(
            "policy loss: cispo, clip (PPO, GRPO, DAPO), dppo, gmpo, gspo, reinforce, or"
            " package.module:function of your own (docs/how-to/add-a-loss.md)"
        ),
    )
    cap: float = Field(
        4.0,
        gt=0,
        description=(
            "largest importance ratio, of cispo and `correction`; cispo: 4, 5 and 8 were tried,"
            " choice not stated"
        ),
    )
    clip_low: float = Field(
        0.2,
        ge=0,
        le=1,
        description=(
            "clip: a token's ratio is clipped at 1 - clip_low; gspo: a sequence's ratio, for which"
            " 3e-4 is usual; gmpo: a token's at exp(-clip_low), 0.4 in its paper; dppo: a token may"
            " fall by this divergence"
        ),
    )
    clip_high: float = Field(
        0.2,
        ge=0,
        description=(
            "upper bound, 1 + clip_high; gspo: usually 4e-4; gmpo: exp(clip_high); dppo: rise by it"
        ),
    )
    divergence: Literal["tv", "kl"] = Field(
        "tv",
        description="dppo: of two distributions; tv: total variation, 0.15 in its recipe; kl: 0.05",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description=(
            "clip, dppo, gmpo and gspo (mask only), reinforce: what happens to a ratio above `cap`"
        ),
    )
    lower: float = Field(
        0.0,
        ge=0,
        description="correction: mask: smallest ratio that is trained; IcePop: 0.5, cap 5",
    )
    sequence_mask: tuple[float, float] | None = Field(
        None,
        description=(
            "[low, high]: no rollout is trained whose ratios have a geometric mean outside; null:"
            " all are"
        ),
    )
    log_ratio_penalty: float = Field(
        0.0, ge=0, description="coefficient of (log ratio)^2 in the loss; prime-rl: 1e-3"
    )
    entropy_bonus: float = Field(
        0.0, ge=0, description="coefficient of the entropy in the loss; ScaleRL has none"
    )


class Reference(Section):
    """KL penalty that keeps the policy near its start (model.path), frozen. ScaleRL and
    DAPO have none.
    """

    coefficient: float = Field(
        0.0, ge=0, description="weight of the penalty; 0: none, and no second model is loaded"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description=(
            "estimator of a token's KL. k1: subtracted from the reward, summed over the rollout's"
            " tokens; k2, k3 (GRPO's): added to the loss for each token"
        ),
    )

    @property
    def in_loss(self) -> bool:
        """Whether the KL is in the loss, not in the reward. k1's gradient in the loss
        would be 0 on average; k2's and k3's in the reward would be biased.
        """
        return self.estimator != "k1"


class Teacher(Section):
    """On-policy distillation: a frozen model, behind any SGLang endpoint, scores what
    the policy samples. Not part of ScaleRL.
    """

    url: str = Field(
        "",
        pattern=r"^$|^https?://[^@\s]+$",
        description="an SGLang server's address, whose model has the policy's tokens",
    )
    api_key: KeyPlace = Field(
        "", description="where its key is: env:VARIABLE or file:PATH; empty: it has none"
    )
    weight: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "weight of log pi_teacher - log mu in a token's advantage; the reward has the rest; 1:"
            " only distillation; 0: no teacher is asked"
        ),
    )


class Optimizer(Section):
    """AdamW and its schedule."""

    lr: float = Field(5e-7, gt=0, description="learning rate after the warm-up")
    warmup_steps: int = Field(100, ge=0, description="steps of linear warm-up")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="after the warm-up; cosine and linear fall to 0 after the last step"
    )
    grad_clip: float = Field(1.0, gt=0, description="largest global gradient norm; not stated")


class Learner(Section):
    """How the learner computes a step."""

    microbatch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        16_384,
        description=(
            "tokens of a data-parallel rank's packed micro-batch; auto: most that fit, found by"
            " trying"
        ),
    )
    recompute: Literal["none", "light", "selective", "full"] = Field(
        "none",
        description=(
            "what the backward pass recomputes, not stored: nothing; experts' norms and activation"
            " functions; MLPs and experts; or whole layers"
        ),
    )
    optimizer_offload: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "share of the policy's AdamW kept in the host's memory, where CPU cores update it"
        ),
    )
    epochs: int = Field(1, ge=1, description="updates per batch, within its step; ScaleRL has one")
    optimizer: Optimizer = Optimizer()


class CriticRate(Section):
    """The critic's learning rate."""

    lr: float = Field(5e-6, gt=0, description="learning rate after the warm-up")


class Critic(Section):
    """The value model of `batch.centring: critic`: model.path with a new head, at the
    policy's layout. Not part of ScaleRL.
    """

    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "fp32", description="precision of its weights and activations, independent of model.dtype"
    )
    lam: float = Field(
        1.0,
        ge=0,
        le=1,
        description="GAE's lambda; 1 in Open-Reasoner-Zero, 0.95 in games and robots",
    )
    warmup_steps: int = Field(
        0, ge=0, description="first steps, in which only the critic is trained, at a rising rate"
    )
    optimizer: CriticRate = Field(
        CriticRate(), description="its rate; schedule, grad_clip: learner.optimizer's"
    )


class AgentSection(Section):
    """Sessions of the agents that tasks name. Not part of ScaleRL."""

    history: Literal["sampled", "template"] = Field(
        "sampled",
        description=(
            "what the policy sees of earlier turns: all it wrote, or what the chat template leaves"
        ),
    )
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description=(
            "what a turn is trained on: the session's reward, or that plus what POST /v1/reward"
            " gave after it"
        ),
    )
    at_once: int = Field(32, ge=1, description="maximum number of agents that run at once")
    time_s: float = Field(
        1800,
        gt=0,
        description=(
            "limit of a session, in seconds, without waits for a server; a third of it without a"
            " request ends it, too"
        ),
    )
    requests: int = Field(200, ge=1, description="maximum requests of a session")
    paths: int = Field(
        32, ge=1, description="maximum conversations of a session: sub-agents, summaries, edits"
    )
    trained_tokens: int = Field(
        65_536, ge=1, description="maximum tokens that the policy writes in a session"
    )
    interface: str = Field(
        "", description="network interface where agents find the policy; empty: loopback"
    )

    @property
    def idle_s(self) -> float:
        """Limit of the time without a request, in seconds: an agent that hangs costs a
        third of a session at most.
        """
        return self.time_s / 3


class Weights(Section):
    """How servers get the weights of a new version."""

    transport: Literal["process_group", "cuda_ipc", "disk"] = Field(
        "process_group",
        description=(
            "how servers get weights; cuda_ipc: from the learner's memory (resources.colocate)"
        ),
    )
    bucket_mb: int = Field(512, ge=1, description="MiB sent at a time")
    full_every: int = Field(
        1,
        ge=1,
        description=(
            "one publication in this many sends all values, the others only what changed; 1: all do"
        ),
    )
    timeout_s: float = Field(
        600, gt=0, description="limit of each call or bucket of a publication, in seconds"
    )


class Serving(Section):
    """How SGLang servers use their memory and compute."""

    kv_tokens: int | None = Field(
        None, ge=1, description="tokens of a server's KV cache; null: what fits (GPU only)"
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a GPU's memory for weights and KV; null: SGLang's rule, nearly all",
    )
    max_running_requests: int = Field(
        256, ge=1, description="maximum requests that a server works on at once"
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description=(
            "fp8: servers multiply in FP8, with weights that are quantised at each publication; the"
            " learner stays bf16"
        ),
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description=(
            "fp8_e4m3: servers keep k and v in a byte a number, and attend in FP8; auto:"
            " model.dtype"
        ),
    )
    expert_parallel: bool = Field(
        False,
        description=(
            "true: each GPU of a server has whole experts, its share of them; false: it has a part"
            " of every expert"
        ),
    )

    @property
    def fp8_keys(self) -> tuple[str, ...]:
        """The keys that ask for FP8."""
        keys = []
        if self.quantization == "fp8":
            keys.append("serving.quantization")
        if self.kv_cache_dtype != "auto":
            keys.append("serving.kv_cache_dtype")
        return tuple(keys)


class Evaluation(Section):
    """When and on what the policy is scored."""

    every: int = Field(
        100, ge=1, description="steps between evaluations; also at step 0 and after the last"
    )
    growth: float = Field(
        1.0,
        ge=1,
        description=(
            "above 1: each evaluation's step is that of the last times this, at least `every` later"
        ),
    )
    prompts: int = Field(1000, ge=1, description="held-out prompts of each task")
    samples: int = Field(16, ge=1, description="answers per prompt: mean@samples")
    temperature: float = Field(
        1.0, ge=0, description="divides the logits of evaluation answers; 0: greedy"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of evaluation answers")
    keep: int | None = Field(
        None, ge=1, description="newest evaluations whose answers are kept; null: all"
    )
    forecast: str = Field(
        "",
        description=(
            "task or suite whose pass rate is forecast; empty: that of a single task, none with"
            " several"
        ),
    )
    suites: dict[TaskName, Suite] = Field(
        {}, description="further sets to score, by name; `aime24: {}` is shipped"
    )

    @property
    def sampled(self) -> dict[str, Suite]:
        """Suites whose answers are sampled and graded."""
        return {
            name: suite for name, suite in self.suites.items() if not suite.data.startswith(LM_EVAL)
        }


MilestoneStep = Annotated[int, Field(ge=1)]
MilestoneCompute = Annotated[str, Field(pattern=r"^[0-9]*\.?[0-9]+ (GPU|core)-hours$")]


class Checkpoint(Section):
    """When checkpoints are written, and which of them stay."""

    every: int = Field(100, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    milestones: tuple[MilestoneStep | MilestoneCompute, ...] = Field(
        (),
        description=(
            "steps, or compute such as 1000 GPU-hours: the first checkpoint at or after each is"
            " never removed; one is written at each of these steps"
        ),
    )
    keep_best: bool = Field(
        False,
        description=(
            "a checkpoint is written of each version that is evaluated, and the one with the"
            " highest held-out score stays: RUN@best"
        ),
    )


class Monitor(Section):
    """Metrics over HTTP, and profiles."""

    prometheus: bool = Field(
        False, description="controller, learner and servers answer GET /metrics"
    )
    profile_steps: tuple[int, int] | None = Field(
        None,
        description=(
            "first and last step that torch's profiler records on every rank of the learner; null:"
            " none"
        ),
    )


class JournalSection(Section):
    """How much of the journal stays."""

    keep: Literal["all", "checkpoints"] = Field(
        "all", description="checkpoints: drop what none of the checkpoint.keep newest replays"
    )


class SftRate(Section):
    """The learning rate of supervised fine-tuning."""

    lr: float = Field(3e-5, gt=0, description="learning rate after the warm-up")


class Sft(Section):
    """Supervised fine-tuning before RL (`megarl sft`)."""

    data: str = Field(
        "",
        description=(
            "traces: rows of prompt and completion, or messages; a file or hub:… as for tasks"
        ),
    )
    init: str = Field(
        "",
        description=(
            "Hugging Face directory to start from; what is trained is written to model.path"
        ),
    )
    steps: int = Field(1000, ge=1, description="optimiser steps")
    batch_tokens: int = Field(2_000_000, ge=1, description="tokens per step")
    optimizer: SftRate = Field(
        SftRate(),
        description=(
            "its rate; the rest is ScaleRL's, with a thirtieth of the steps for the warm-up"
        ),
    )


START_S = 1200.0
"""Smallest time limit for a server's start: a large model is read from slow storage,
and kernels are compiled.
"""
START_LIMIT_RULE = f"twice weights.timeout_s, at least {START_S:g} s"
"""The rule behind `Recipe.start_limit_s`, for error messages."""


class Recipe(Section):
    """Everything that defines a run."""

    run: Run = Run()
    model: Model = Model()
    resources: Resources = Resources()
    data: Data = Data()
    length: Length = Length()
    sampling: Sampling = Sampling()
    pipeline: PipelineSection = PipelineSection()
    batch: BatchSection = BatchSection()
    loss: Loss = Loss()
    reference: Reference = Reference()
    teacher: Teacher = Teacher()
    learner: Learner = Learner()
    critic: Critic = Critic()
    agent: AgentSection = AgentSection()
    weights: Weights = Weights()
    serving: Serving = Serving()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    journal: JournalSection = JournalSection()
    monitor: Monitor = Monitor()
    sft: Sft = Sft()

    @property
    def data_parallel(self) -> int:
        """DP: copies of the model in the learner."""
        return self.resources.learner_ranks // self.model.model_parallel_size

    @property
    def sampled(self) -> dict[str, Rows]:
        """Tasks, and suites whose answers are sampled, by name."""
        return {**self.data.tasks, **self.evaluation.sampled}

    @property
    def most_trained_tokens(self) -> int:
        """The largest possible |y|, of a completion or an agent's session."""
        agents = [self.agent.trained_tokens for task in self.data.tasks.values() if task.agent]
        return max([self.length.completion_tokens, *agents])

    @property
    def stages_weights(self) -> bool:
        """Whether servers receive new weights while they serve the old ones
        (megarl/core/sync/staging.py).
        """
        return self.weights.transport == "process_group"

    @property
    def generates_meanwhile(self) -> bool:
        """Whether servers generate while they receive weights, so that they pause only
        to swap them in. Not servers of several GPUs: NCCL allows no operations of two
        groups at once, and may hang if a broadcast and a sum over a server's GPUs wait
        for each other (SGLang's pull request 22620).
        """
        return self.stages_weights and self.resources.server_tensor_parallel == 1

    @property
    def expert_ranks(self) -> int:
        """The GPUs of a server among which whole experts are divided; 1 if each expert
        is.
        """
        if self.serving.expert_parallel:
            return self.resources.server_tensor_parallel
        return 1

    @property
    def lends_memory(self) -> bool:
        """Whether servers share GPUs with the learner and wait while it trains, so that
        it can use their KV cache's memory.
        """
        return self.resources.colocate and self.pipeline.max_lag == 0

    @property
    def has_critic(self) -> bool:
        """Whether a value model gives tokens their advantages."""
        return self.batch.centring == "critic"

    @property
    def all_groups_teach(self) -> bool:
        """Whether a group of equal rewards has a gradient too: from a critic, a
        teacher, or rewards that are not centred.
        """
        uncentred = self.batch.zero_variance == "keep" and self.batch.centring == "none"
        return self.has_critic or self.teacher.weight > 0 or uncentred

    @property
    def start_limit_s(self) -> float:
        """Time limit for a server's start, in seconds. A long limit for publications
        implies a slow cluster or large model.
        """
        return max(START_S, 2 * self.weights.timeout_s)

    @property
    def evaluation_servers(self) -> int:
        """Number of servers pinned at the evaluated version during an evaluation: a
        quarter of all; the others go on.
        """
        return -(-self.resources.servers // 4)

    @property
    def forecast_column(self) -> str:
        """The column of eval.jsonl, a pass rate, that is fitted and forecast; empty if
        several tasks and none is named.
        """
        named = self.evaluation.forecast
        if len(self.data.tasks) == 1 and (not named or named in self.data.tasks):
            return "pass_rate"
        return f"pass_rate/{named}" if named else ""

    @property
    def critic_optimizer(self) -> Optimizer:
        """The policy's optimiser with the critic's rate and warm-up."""
        critic_keys = {"lr": self.critic.optimizer.lr, "warmup_steps": self.critic.warmup_steps}
        return self.learner.optimizer.model_copy(update=critic_keys)

    @property
    def sft_optimizer(self) -> Optimizer:
        """ScaleRL's, except for its rate and a warm-up of a thirtieth of the steps
        (Alpaca's `warmup_ratio` is 0.03).
        """
        return Optimizer(lr=self.sft.optimizer.lr, warmup_steps=self.sft.steps // 30)

    @property
    def critic_model(self) -> Model:
        """The critic's model: the policy's layout, in its own precision. FP8 products
        need bf16 weights.
        """
        critic_keys: dict[str, str] = {"dtype": self.critic.dtype}
        if self.critic.dtype != "bf16":
            critic_keys["fp8"] = "none"
        return self.model.model_copy(update=critic_keys)

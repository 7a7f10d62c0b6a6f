"""The typed tree of a recipe: one class per section, one file per kind of section.
Defaults are ScaleRL's (arXiv 2510.13786); "not stated": the paper gives no number
for it.
"""

from megarl.core.recipe.agent import AgentSection
from megarl.core.recipe.algorithm import BatchSection, Critic, Loss, Reference, Teacher
from megarl.core.recipe.data import Data, Rows
from megarl.core.recipe.evaluation import Evaluation
from megarl.core.recipe.generation import Length, PipelineSection, Sampling
from megarl.core.recipe.learner import Learner, Optimizer, Sft
from megarl.core.recipe.model import Model
from megarl.core.recipe.run import Checkpoint, JournalSection, Monitor, Run
from megarl.core.recipe.section import Section
from megarl.core.recipe.servers import Resources, Serving, Weights

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
        is divided among all of them.
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

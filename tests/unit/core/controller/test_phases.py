"""Both off-policy set-ups under random schedules: the real admission, membership and
decisions, in a world of losses.

The world: servers that are lost and come back, publications that fail, evaluations that
hold a server, groups taken out, a learner that dies and goes on from its checkpoint, a
controller that is rebuilt from its records.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.admission import Admission
from megarl.core.base.messages import Next, Publish, ServerAddress, Stop
from megarl.core.client.membership import Membership
from megarl.core.controller.decision import ControllerView, TrainStep, decide
from megarl.core.recipe import PipelineSection

STEPS = 7


class World:
    """One run of `STEPS` steps."""

    def __init__(
        self, pipeline: PipelineSection, prompts: int, servers: int, random: Random
    ) -> None:
        self.pipeline = pipeline
        self.prompts = prompts
        self.random = random
        self.admission = Admission(prompts, pipeline.max_lag, pipeline.phase_steps)
        self.records: list[tuple[str, int]] = []
        self.membership = Membership(
            [ServerAddress(id=n, url=f"http://{n}") for n in range(servers)]
        )
        self.published, self.versions = -1, set[int]()  # the highest; all that ever were
        self.step = self.checkpoint = self.lives = 0
        self.publishing: Publish | None = None
        self.window = pipeline.window_steps * prompts
        self.in_flight: dict[int, int] = {}  # ticket -> server
        self.token_versions: dict[int, set[int]] = {}
        self.trained: dict[int, tuple[int, ...]] = {}
        self.ended = ""

    @property
    def learner(self) -> str:
        return f"learner {self.lives}"

    def record(self, kind: str, ticket: int) -> None:
        if kind == "admit":
            assert self.admission.admit() == ticket
        elif kind == "finish":
            self.admission.finish(ticket)
        else:
            self.admission.remove(ticket)
        self.records.append((kind, ticket))

    def generate(self, removed: float) -> None:
        """Admit what may be; some requests start, all get a token of their server's
        weights, some end.
        """
        clean = self.membership.clean()
        newest = max(self.membership.serving().values(), default=None)
        while (
            newest is not None
            and len(self.admission.queue)
            < min(STEPS * self.prompts, max(self.published, 0) * self.prompts + self.window)
            and self.admission.can_admit(newest)
        ):
            self.record("admit", self.admission.next_ticket)
        for ticket in self.admission.unfinished():
            suited = [s for s, v in clean.items() if self.admission.eligible(ticket, v)]
            if ticket not in self.in_flight and suited and self.random.random() < 0.7:
                self.in_flight[ticket] = self.random.choice(suited)
        for ticket, server in sorted(self.in_flight.items(), key=lambda _: self.random.random()):
            if server in clean:  # it stands still while weights arrive
                self.token_versions.setdefault(ticket, set()).add(clean[server])
                if self.random.random() < 0.6:
                    del self.in_flight[ticket]
                    self.record("remove" if self.random.random() < removed else "finish", ticket)

    def learn(self, failures: float = 0.0) -> None:
        """The learner's next command, or the result of its publication."""
        if self.publishing is not None:
            for server in self.publishing.servers:
                error = "lost" if self.random.random() < failures else ""
                if error:
                    self.drop(
                        [server.id]
                    )  # the publisher aborts the requests of a server that has half of the weights
                if self.membership.published(
                    server.id, self.publishing.version, self.learner, error
                ):
                    self.published = max(self.published, self.publishing.version)
                    self.versions.add(self.publishing.version)
                    if self.pipeline.kind == "pipeline-rl":  # any window that holds a batch
                        self.window = (
                            self.random.randint(1, self.pipeline.window_steps) * self.prompts
                        )
            self.publishing = None
            return
        unfinished = self.admission.unfinished()
        now = ControllerView(
            batches=(
                self.admission.step_of(unfinished[0])
                if unfinished
                else len(self.admission.queue) // self.prompts
            ),
            published_version=self.published,
            final_step=STEPS,
            score_due=False,
            membership=self.membership,
            phase_steps=self.pipeline.phase_steps,
        )
        told = decide(Next(incarnation=self.learner, step=self.step, version=self.step), now)
        if isinstance(told, Publish):
            self.publishing = told
            self.membership.publish((s.id for s in told.servers), told.version, self.learner)
        elif isinstance(told, TrainStep):
            self.train(told)
        elif isinstance(told, Stop):
            self.ended = told.reason

    def train(self, told: TrainStep) -> None:
        tickets = self.admission.batch(told.step)
        assert tickets is not None
        assert self.trained.setdefault(told.step, tickets) == tickets, (
            "a replayed batch is the same"
        )
        start = self.admission.phase_start(told.step)
        for ticket in tickets:
            versions = self.token_versions[ticket]
            assert 0 <= told.step - min(versions) <= self.pipeline.lag_limit
            if self.pipeline.kind == "ppo-off-policy":
                assert versions == {start}, "one version generates a phase"
        if self.pipeline.kind == "ppo-off-policy" and not told.replay:
            assert not self.admission.unfinished(), "a phase is generated before it is trained"
        self.step += 1
        if self.random.random() < 0.3:
            self.checkpoint = self.step

    def disturb(self) -> None:
        server = self.random.choice(list(self.membership.members))
        member = self.membership.members[server]
        what = self.random.choice(["server", "server", "evaluation", "learner", "controller"])
        if what == "server" and member.state in ("lost", "starting"):
            self.membership.answered(server)
        elif what == "server":
            self.membership.lose(server)
            self.drop([server])
        elif what == "evaluation" and member.state == "clean":
            (self.membership.unpin if member.pinned else self.membership.pin)(server)
        elif what == "learner":
            self.step = self.checkpoint
            self.lives = self.lives + 1
            self.publishing = None
            self.drop(self.membership.new_learner())
        elif what == "controller":
            self.rebuild()

    def drop(self, servers: list[int]) -> None:
        """Their requests go on elsewhere with the tokens they have."""
        self.in_flight = {t: s for t, s in self.in_flight.items() if s not in servers}

    def rebuild(self) -> None:
        """The controller died: its records are all it has."""
        records, self.records = self.records, []
        self.admission = Admission(self.prompts, self.pipeline.max_lag, self.pipeline.phase_steps)
        for kind, ticket in records:
            self.record(kind, ticket)
        self.membership = Membership([m.address for m in self.membership.members.values()])
        self.publishing = None
        self.in_flight.clear()
        for ticket in self.admission.unfinished():
            self.token_versions.pop(ticket, None)

    def run(self, disturbances: int) -> None:
        for _ in range(disturbances):
            for _ in range(self.random.randrange(6)):
                self.generate(removed=0.2)
                if self.random.random() < 0.6 and not self.ended:
                    self.learn(failures=0.2)
            self.disturb()
        self.ended = ""
        for server, member in self.membership.members.items():
            self.membership.unpin(server)
            if member.state in ("lost", "starting"):
                self.membership.answered(server)
        for _ in range(400):
            self.generate(removed=0.0)
            self.learn()
            if self.ended:
                return
        raise AssertionError(f"stuck at step {self.step} of {STEPS}")


PIPELINES = [
    *(PipelineSection(kind="ppo-off-policy", k=k) for k in (0, 1, 2, 3, 4, 8)),
    *(PipelineSection(kind="pipeline-rl", k=k) for k in (0, 1, 3)),
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: f"{p.kind}-{p.k}")
@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 3),
    servers=st.integers(1, 3),
    disturbances=st.integers(0, 25),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_run_with_losses_keeps_the_law_and_ends(
    pipeline: PipelineSection, prompts: int, servers: int, disturbances: int, seed: int
) -> None:
    world = World(pipeline, prompts, servers, Random(seed))
    world.run(disturbances)
    assert sorted(world.trained) == list(range(STEPS))
    tickets = [ticket for step in range(STEPS) for ticket in world.trained[step]]
    assert tickets == sorted(set(tickets))
    published = world.versions
    if pipeline.kind == "ppo-off-policy":
        assert published == {*range(0, STEPS, pipeline.phase_steps), STEPS}
    else:
        assert 0 in published
        assert STEPS in published


def test_synchronous_in_three_ways() -> None:
    pipelines = [
        PipelineSection(kind="ppo-off-policy", k=0),
        PipelineSection(kind="ppo-off-policy", k=1),
        PipelineSection(k=0),
    ]
    assert {(p.phase_steps, p.max_lag, p.lag_limit, p.window_steps) for p in pipelines} == {
        (1, 0, 0, 1)
    }


def test_a_phase_of_k_steps_has_the_prompts_of_k_batches_and_a_lag_of_k_minus_1() -> None:
    pipeline = PipelineSection(kind="ppo-off-policy", k=8)
    assert (pipeline.phase_steps, pipeline.lag_limit, pipeline.window_steps) == (8, 7, 8)
    admission = Admission(48, pipeline.max_lag, pipeline.phase_steps)
    for _ in range(8 * 48):
        assert admission.can_admit(0)
        admission.admit()
    assert not admission.can_admit(0)
    assert not admission.can_admit(7)
    assert admission.can_admit(8)


def test_pipeline_rl_is_as_it_was() -> None:
    pipeline = PipelineSection(k=8)
    assert (pipeline.phase_steps, pipeline.max_lag, pipeline.lag_limit, pipeline.window_steps) == (
        1,
        8,
        8,
        9,
    )

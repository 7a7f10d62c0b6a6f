"""Health: whether a run behaves normally, judged from its rows of metrics alone, and
what to do if it does not.

    row ─► each signal's value ─┬─ has a limit from theory:
                                │      mean of the last RECENT values beyond it ─► Alarm
                                └─ its own past is the norm:
                                       robust z ─► CUSUM above THRESHOLD ────────► Alarm

A CUSUM (Page 1954) adds up the amounts by which z exceeds DRIFT: three steps far off
raise an alarm, and so do many that are a little off; one or two outliers, as in
gradients, do not. z is the distance to the median of earlier values, in robust
deviations: the larger of the deviation of all earlier values and of those on the bad
side, and at least `noise`. The earlier values exclude the newest GAP, so that a change
does not hide itself; the others follow the run's slow trend. During an alarm the
earlier values are not updated, for at most RELEARN values; then the new values become
the norm.

Thresholds were fixed on clean runs, before any faulty one was seen
(docs/how-to/monitoring.md#health). Nothing here is random, and nothing ends a run.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, stdev, variance
from typing import NamedTuple

from megarl.core.base.rundir import Row
from megarl.core.evaluation import parity
from megarl.run.scores import READ

RECENT = 5
FIRST = 3
"""A limit judges the mean of this many newest values; the second number is enough for
the first judgement.
"""
QUIET = 20
"""An alarm of a limit ends when this many values in a row are within it: where values
stay near the limit, the mean crosses it again and again, which would be dozens of
alarms.
"""
WINDOW = 30
GAP = 5
FEWEST = 10
"""Number of earlier values that form the norm, of newest values not yet among them, and
of values needed to judge.
"""
DRIFT = 2.0
CLIP = 5.0
THRESHOLD = 7.0
"""In deviations: the distance that does not count, the largest that does, and the sum
that raises an alarm.
"""
RELEARN = 100
UNJUDGED = 0.05
MOST = 0.5
"""Shares of answers above which a cause of only wrong answers is named."""
LEARNS = 0.05
"""By how much more of the answers must be right, or end in time, for a fall of length
or entropy to count as learning.
"""
FEWEST_GROUPS = 8
"""The fewest groups by whose tokens sampling is judged."""
MEMORY = 1000
"""Number of newest rows from which a judgement is the same as from all: what is older
has left every norm.
"""
MOVES = 10
"""Number of newest steps by whose movement `progress` is judged."""

Measure = Callable[[Row, str], float]
"""A signal's value in a row; the second argument is "/TASK", or empty for the whole
batch. KeyError: not measured there.
"""


def log(offset: float) -> Callable[[float], float]:
    """Return the logarithm of a value plus `offset`, which keeps 0 finite."""
    return lambda value: math.log(value + offset)


def logit(offset: float) -> Callable[[float], float]:
    """Return the logit of a share; `offset` keeps 0 and 1 finite."""
    return lambda share: math.log((share + offset) / (1 - share + offset))


class Signal(NamedTuple):
    """A quantity that is watched, judged by `limit` if it has one, else against its own
    past.

    meaning, remedy: for the alarm's text. bad_when_high: whether high values are
    abnormal, or low ones. noise: the smallest deviation, after `scale`. by_task: each
    task is also judged by itself. depends_on_prompts: after an epoch of WINDOW steps or
    more the norm is forgotten, because the next epoch draws other prompts
    (no-positive-resampling). steady: learning changes it slowly, so values that add to
    the sum join the norm only once the sum is back at 0. from_the_start: abnormal only
    while every value since the first is beyond the limit. moved_by_learning: while the
    policy learns (`Health._learns`), no alarm is raised, and the new course becomes the
    norm.
    """

    name: str
    value: Measure
    meaning: str
    remedy: str
    bad_when_high: bool = True
    limit: float | None = None
    noise: float = 0.0
    scale: Callable[[float], float] = float
    by_task: bool = False
    depends_on_prompts: bool = False
    steady: bool = False
    from_the_start: bool = False
    moved_by_learning: bool = False


@dataclass(frozen=True)
class Alarm:
    """A signal that was abnormal from step `since` to step `until` (None: it still is),
    noticed at step `raised`. name: of the signal and, if there are several tasks, of
    the task: pass_rate_fall/math.
    """

    name: str
    since: int
    raised: int
    text: str
    until: int | None = None


def metric(name: str) -> Measure:
    """Return what measures this metric."""
    return lambda row, task: row[name + task]


def _drift(row: Row, _: str) -> float:
    """Return how far the policy moves per step: |learner - behaviour| of a token,
    divided by its lag in steps. NaN below half a step of lag, where noise would be
    divided by almost nothing.
    """
    if row["lag_mean"] < 0.5:
        return math.nan
    return row["trained_logprob_diff"] / row["lag_mean"]


def _surprise(row: Row, _: str) -> float:
    """Return how unlikely trained tokens are, as a multiple of their entropy: 1 if the
    policy sampled them and all are trained. NaN for few groups: the few with variance
    are those with unlikely mistakes, and their mean says little.
    """
    if row["groups_in_loss"] < FEWEST_GROUPS:
        return math.nan
    return row["surprise"] / row["entropy"]


def _cut_tokens(row: Row, _: str) -> float:
    """Return the share of trained tokens cut at the cap, or without a gradient."""
    return row["capped_share"] if "capped_share" in row else row["clipped_share"]


def _void(row: Row, _: str) -> float:
    """Return the share of groups that were lost."""
    void = row["void_groups"]
    return void / (void + row["groups_in_loss"])


def _no_variance(row: Row, _: str) -> float:
    """Return the share of groups with equal rewards. NaN with a teacher, from which the
    policy learns in those groups too.
    """
    return math.nan if "kl_teacher" in row else row["zero_variance_share"]


def _all_wrong(row: Row, task: str) -> float:
    """Return 1 if all answers are wrong and get the same grade, so that nothing is
    learnt; else 0.
    """
    no_answer_is_right = row["pass_rate_train" + task] == 0
    return float(no_answer_is_right and row["zero_variance_share" + task] == 1)


def _why_all_wrong(row: Row, task: str) -> str:
    """Return what the step's metrics say about answers that are all wrong: the grader,
    the end of thinking, or the template.
    """
    causes = []
    unjudged = row.get("grader_error_rate" + task, 0.0)
    malformed = row.get("format_error_rate" + task, 0.0)
    truncated = row.get("truncation_rate" + task, 0.0)
    if unjudged > UNJUDGED:
        causes.append(
            f"the grader, which fails or cannot read the data's answers in {unjudged:.0%} ({_LOG})"
        )
    if malformed > MOST:
        causes.append(
            f"the end of thinking: {malformed:.0%} have no length.end_of_thinking with an answer"
            " after it; does the model write it? length.end_of_thinking= with length.control=none"
            " is for models that do not think"
        )
    if truncated > MOST:
        causes.append(
            f"the template: {truncated:.0%} are cut off before they end; does the model know it"
            " (template: chat, or raw)? Or length.answer_tokens is too small"
        )
    if not causes:
        causes.append("the grader, or the data's answers: most answers do end, and are well formed")
    return f"likely {'; or '.join(causes)}. {READ.capitalize()}"


def _imbalance(row: Row, _: str) -> float:
    """Return the geometric mean of the layers' imbalance."""
    layers = [math.log(row[name]) for name in row if name.startswith("expert_imbalance_layer_")]
    return math.exp(sum(layers) / len(layers)) if layers else math.nan


LOG = log(1e-12)
LOG_LOGIT = log(1e-5)
LOG_MEDIAN = log(1e-6)
LOG_ROUTING = log(1e-3)
LOGIT = logit(0.05)
_SIDES = "servers and learner compute different models"
_CALMER = "lower learner.optimizer.lr or grad_clip, and fork from an earlier step (run.fork)"
_LOG = "see megarl logs RUN --role controller"
_EXPERTS = (
    "raise model.moe.aux_loss, or model.moe.bias_update_rate where routers have biases"
    " (docs/reference/models.md)"
)
_SAMPLER = "compare temperature, top-p and top-k of servers with sampling.temperature"

SIGNALS = (
    # Against a limit.
    Signal(
        "all_wrong",
        _all_wrong,
        "every answer since the first is wrong, with the same grade: nothing is learnt",
        "",
        limit=0.5,
        by_task=True,
        from_the_start=True,
    ),
    Signal(
        "truncation",
        metric("truncation_rate"),
        "answers are cut off: above 10 % training destabilises",
        "raise length.answer_tokens",
        limit=0.1,
    ),
    Signal(
        "sample_size",
        metric("effective_sample_size"),
        "few tokens decide the step: the policy has moved far from the policies that generated",
        "lower pipeline.k or the learning rate",
        bad_when_high=False,
        limit=0.1,
    ),
    Signal(
        "malformed",
        metric("format_error_rate"),
        "most answers are malformed and count as wrong: no "
        "length.end_of_thinking with an answer after it",
        "a model that was never trained to write it needs a warm start "
        "(megarl sft), or length.end_of_thinking= with length.control=none",
        limit=0.5,
    ),
    Signal(
        "cut_tokens",
        _cut_tokens,
        "most trained tokens are cut at the cap, or have no gradient",
        "lower pipeline.k or the learning rate",
        limit=0.75,
    ),
    Signal(
        "grader_errors",
        metric("grader_error_rate"),
        "graders fail, or cannot judge",
        _LOG,
        limit=0.05,
    ),
    Signal(
        "grader_timeouts",
        metric("grader_timeout_rate"),
        "gradings run out of time and count as wrong",
        "read which answers do (megarl rollouts show RUN --step N): endless programs, or a slow"
        " grader",
        limit=0.25,
    ),
    Signal(
        "void",
        _void,
        "groups are lost before training",
        _LOG,
        limit=0.25,
    ),
    Signal(
        "no_variance",
        _no_variance,
        "nearly all groups have equal rewards: little is learnt",
        "take harder or easier prompts",
        limit=0.95,
    ),
    Signal(
        "not_finite",
        metric("skipped"),
        "loss or gradient is not finite, and the step skipped",
        "see bad-rollouts.jsonl",
        limit=0.0,
    ),
    Signal(
        "reward_sign",
        metric("reward_gap"),
        "wrong answers get more reward than right ones",
        "look at the task's graders and their weights",
        bad_when_high=False,
        limit=0.0,
        by_task=True,
    ),
    Signal(
        "advantages",
        metric("advantage_fit"),
        "advantages do not follow rewards: what is learnt is not what is rewarded",
        "look at batch.advantage, the critic, and code of your own",
        bad_when_high=False,
        limit=0.1,
    ),
    Signal(
        "progress",
        metric("progress_errors"),
        "the policy moves against its advantages: something else moves it, or steps are too large",
        "compare learner.optimizer with the run's earlier steps, and look at code of your own",
        bad_when_high=False,
        limit=-2.5,
    ),
    Signal(
        "parity",
        metric("warning_parity"),
        f"a limit of parity is broken again and again: {_SIDES}",
        _LOG,
        limit=0.35,
    ),
    Signal(
        "replay",
        metric("routing_replayed"),
        "routers do not take the experts that servers recorded",
        "compare model.moe.routing_replay with what servers return",
        bad_when_high=False,
        limit=0.5,
    ),
    Signal(
        "learning_rate",
        metric("lr_change"),
        "the learning rate has jumped",
        "compare learner.optimizer with the run's earlier steps",
        limit=2.0,
    ),
    # Against their own past.
    Signal(
        "sampled_hot",
        _surprise,
        "tokens are less likely than entropy allows: servers sample at a higher temperature",
        _SAMPLER,
        noise=0.15,
        scale=LOG,
    ),
    Signal(
        "sampled_cold",
        _surprise,
        "tokens are more likely than entropy allows: servers sample at a lower temperature",
        _SAMPLER,
        bad_when_high=False,
        noise=0.15,
        scale=LOG,
    ),
    Signal("kernels", metric("parity_logit/kernels"), _SIDES, "", noise=0.2, scale=LOG_LOGIT),
    Signal("kernels_median", metric("parity_p50/kernels"), _SIDES, "", noise=0.5, scale=LOG_MEDIAN),
    Signal(
        "decode",
        metric("parity_logit/decode"),
        "servers sample with other log-probs than they score with",
        "compare kernels and cache precision (kv_cache_dtype) of decoding and prefill",
        noise=0.3,
        scale=LOG_LOGIT,
    ),
    Signal(
        "routing",
        metric("parity_routing"),
        "servers and learner choose different experts",
        "compare router weights, biases and their precision",
        noise=0.5,
        scale=LOG_ROUTING,
    ),
    Signal(
        "imbalance", _imbalance, "tokens crowd on fewer experts", _EXPERTS, noise=0.05, scale=LOG
    ),
    Signal(
        "unused_experts",
        metric("expert_unused_share"),
        "experts get no tokens any more",
        _EXPERTS,
        noise=0.05,
    ),
    Signal(
        "drift",
        _drift,
        "the policy moves further in a step than it did",
        _CALMER,
        noise=0.5,
        scale=LOG,
        steady=True,
    ),
    Signal(
        "grad_norm",
        metric("grad_norm"),
        "gradients have grown: a step may break the policy",
        _CALMER,
        noise=0.4,
        scale=LOG,
        steady=True,
    ),
    Signal(
        "entropy_rise",
        metric("entropy"),
        "the policy loses what it knew",
        _CALMER,
        noise=0.15,
        scale=LOG,
        depends_on_prompts=True,
    ),
    Signal(
        "entropy_fall",
        metric("entropy"),
        "the policy collapses onto few answers",
        f"{READ}; {_CALMER}",
        bad_when_high=False,
        noise=0.4,
        scale=LOG,
        depends_on_prompts=True,
        moved_by_learning=True,
    ),
    Signal(
        "pass_rate_fall",
        metric("pass_rate_train"),
        "the policy gets worse, or the grader judges differently",
        f"{READ}, and fork from an earlier step (run.fork)",
        bad_when_high=False,
        noise=0.3,
        scale=LOGIT,
        by_task=True,
        depends_on_prompts=True,
    ),
    Signal(
        "pass_rate_jump",
        metric("pass_rate_train"),
        "no policy learns that fast: the grader judges differently, or is exploited",
        READ,
        noise=0.6,
        scale=LOGIT,
        by_task=True,
        depends_on_prompts=True,
    ),
    Signal(
        "length_rise",
        metric("completion_tokens_mean"),
        "answers grow",
        READ,
        noise=0.05,
        scale=LOG,
        depends_on_prompts=True,
    ),
    Signal(
        "length_fall",
        metric("completion_tokens_mean"),
        "answers shrink",
        READ,
        bad_when_high=False,
        noise=0.05,
        scale=LOG,
        depends_on_prompts=True,
        moved_by_learning=True,
    ),
)
"""All signals. docs/how-to/monitoring.md has a table of them, which
tests/unit/run/test_health.py compares with this one.
"""


class _Limited:
    """A signal with a limit, judged by the mean of its newest values. _within: how many
    values in a row, up to the newest, are within the limit. since: the newest step, as
    an alarm begins when it is raised. text: the numbers for an alarm.
    """

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._newest: deque[float] = deque(maxlen=RECENT)
        self._alarmed = False
        self._within = 0
        self.since = 0
        self.text = ""

    def add(self, step: int, value: float) -> bool:
        """Add a value and return whether the signal is abnormal now."""
        limit = self._signal.limit
        assert limit is not None

        def beyond(value: float) -> bool:
            return value > limit if self._signal.bad_when_high else value < limit

        self._newest.append(value)
        mean = math.fsum(self._newest) / len(self._newest)
        self.since = step
        self.text = f"{mean:.3g} on average, limit {limit:g}"
        self._within = 0 if beyond(value) else self._within + 1
        is_beyond = len(self._newest) >= FIRST and beyond(mean)
        goes_on = self._alarmed and self._within < QUIET
        self._alarmed = is_beyond or goes_on
        return self._alarmed

    def forget(self) -> None:
        """Do nothing: a limit has no norm."""


class _Always:
    """A signal that is abnormal only while each value since the first is beyond its
    limit.
    """

    def __init__(self, signal: Signal) -> None:
        self._limit = signal.limit
        self._values = 0
        self._was_within = False  # a value was within the limit
        self.since = 0
        self.text = ""

    def add(self, step: int, value: float) -> bool:
        """Add a value and return whether the signal is abnormal now."""
        assert self._limit is not None
        if not self._values:
            self.since = step
        self._values += 1
        self._was_within = self._was_within or value <= self._limit
        self.text = f"since step {self.since}"
        return self._values >= FIRST and not self._was_within

    def forget(self) -> None:
        """Do nothing: a limit has no norm."""


class SignalValue(NamedTuple):
    """A signal's value in a step, after and before `Signal.scale`."""

    scaled: float
    measured: float


class Norm(NamedTuple):
    """The median of earlier values, and the robust deviation of their scaled ones."""

    median: SignalValue
    deviation: float


class _Course:
    """A signal judged against its own past: a CUSUM. _suspect: values that are not yet
    among the past, because they add to the sum or an alarm lasts. since: the step from
    which the sum has been above 0.
    """

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._past: list[SignalValue] = []
        self._suspect: list[SignalValue] = []
        self._sum = 0.0
        self._alarmed = False
        self.since = 0
        self.text = ""

    def add(self, step: int, value: float) -> bool:
        """Add a value and return whether the signal is abnormal now."""
        new = SignalValue(self._signal.scale(value), value)
        norm = self._norm()
        if norm is None:
            self._past.append(new)
            return False
        if not self._sum:
            self.since = step
        was_alarmed = self._alarmed
        self._add_to_sum((new.scaled - norm.median.scaled) / norm.deviation)
        is_suspect = self._sum > 0 if self._signal.steady else self._alarmed
        if not is_suspect:
            # an alarm's values never join the norm, those of a small rise do
            cleared = [] if was_alarmed else self._suspect
            self._past = [*self._past, *cleared, new][-WINDOW - GAP :]
            self._suspect = []
            return False
        self.text = f"{value:.3g} since step {self.since}, {norm.median.measured:.3g} before"
        self._suspect.append(new)
        if len(self._suspect) >= RELEARN:
            self.forget()
        return self._alarmed

    def _add_to_sum(self, z: float) -> None:
        """Add a value to the CUSUM. z: how far it is above the norm, in deviations. An
        alarm begins when the sum exceeds THRESHOLD and ends when it is back at 0. The
        sum has a ceiling, so that even a long alarm ends soon after the last bad value.
        """
        badness = z if self._signal.bad_when_high else -z
        clipped = max(-CLIP, min(badness, CLIP))
        raised = max(0.0, self._sum + clipped - DRIFT)
        self._sum = min(raised, 2 * THRESHOLD)
        limit = 0.0 if self._alarmed else THRESHOLD
        self._alarmed = self._sum > limit

    def forget(self) -> None:
        """Take the suspect values as the new norm, and end the alarm."""
        self._past = self._suspect[-WINDOW - GAP :]
        self._suspect = []
        self._sum = 0.0
        self._alarmed = False

    def _norm(self) -> Norm | None:
        """Return the norm by the values before the newest GAP; None while there are too
        few. Its deviation is the largest of three: by all values, by the outer tenth on
        the bad side, and the signal's noise. In a normal distribution the median
        distance to the median is 0.6745 deviations, and the outer tenth begins at
        1.2816.
        """
        signal = self._signal
        earlier = sorted(self._past[:-GAP])
        count = len(earlier)
        if count < FEWEST:
            return None
        median = earlier[count // 2]
        distances = sorted(abs(value.scaled - median.scaled) for value in earlier)
        of_all = distances[count // 2] / 0.6745
        first_decile = earlier[count // 10]
        ninth_decile = earlier[count * 9 // 10]
        bad_decile = ninth_decile if signal.bad_when_high else first_decile
        of_bad_side = abs(bad_decile.scaled - median.scaled) / 1.2816
        return Norm(median, max(of_all, of_bad_side, signal.noise))


_SignalJudge = _Always | _Limited | _Course

OF_PARITY = ("parity", "kernels", "kernels_median")
"""Signals whose likely cause the comparison of servers and learner names."""


class Health:
    """The judgement on a run so far; `add` its rows in order. history: all alarms, in
    order; alarms: those that last.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.step = -1
        self.history: list[Alarm] = []
        self._open: dict[str, int] = {}  # alarms that last: by name, their index in the history
        self._judges: dict[tuple[str, str], _SignalJudge] = {}  # by signal and "/TASK"
        self._newest: deque[Row] = deque(maxlen=WINDOW + GAP)  # by these `_learns` judges
        self._last: Row = {}
        self._epoch_began = 0
        self._compared: Row = {}  # the last one in which servers and learner were compared
        self._moves: deque[float] = deque(maxlen=MOVES)
        for row in rows:
            self.add(row)

    @property
    def alarms(self) -> list[Alarm]:
        """Alarms that last, oldest first, except that "every answer is wrong", which
        explains others, comes before all.
        """
        lasting = [self.history[number] for number in sorted(self._open.values())]
        return sorted(lasting, key=lambda alarm: not alarm.name.startswith("all_wrong"))

    def metrics(self) -> dict[str, float]:
        """Return the columns of health for a row of metrics."""
        return {"health": float(not self._open)} | {f"alarm/{name}": 1.0 for name in self._open}

    def add(self, row: Row) -> None:
        """Judge the next row."""
        self.step = row["step"]
        row = dict(row)
        if row.get("lr") and self._last.get("lr"):
            row["lr_change"] = row["lr"] / self._last["lr"]
        self._follow_epoch(row)
        if "parity_same_bits" in row:
            self._compared = row
        self._follow_progress(row)
        self._last = row
        self._newest.append(row)
        tasks = [
            name.removeprefix("pass_rate_train")
            for name in row
            if name.startswith("pass_rate_train/")
        ]
        for signal in SIGNALS:
            self._measure(signal, row, "")
            if signal.by_task:
                for task in tasks:
                    self._measure(signal, row, task)

    def _follow_epoch(self, row: Row) -> None:
        """At the first step of an epoch, forget the norms that hold for the last one's
        prompts, unless that had fewer than WINDOW steps: then they hardly differ.
        """
        if row.get("epoch", 0) <= self._last.get("epoch", 0):
            return
        if self.step - self._epoch_began >= WINDOW:
            for (name, _), judge in self._judges.items():
                if _BY_NAME[name].depends_on_prompts:
                    judge.forget()
        self._epoch_began = self.step

    def _follow_progress(self, row: Row) -> None:
        """Add `progress_errors` to the row: the mean of progress per movement over the
        newest MOVES steps, in standard errors. It is negative if the policy moves
        against its advantages. Steps without lag, movement or progress do not count.
        """
        movement = row.get("trained_logprob_diff")
        if row.get("lag_mean", 0) < 0.5 or not movement:
            return
        if not math.isfinite(row.get("progress", math.nan)):
            return
        self._moves.append(row["progress"] / movement)
        if len(self._moves) < MOVES:
            return
        error = stdev(self._moves) / math.sqrt(MOVES)
        if error:
            row["progress_errors"] = fmean(self._moves) / error

    def _measure(self, signal: Signal, row: Row, task: str) -> None:
        """Judge a signal by this row, unless it was not measured there, or is no valid
        number.
        """
        with suppress(KeyError, ArithmeticError, ValueError):
            value = signal.value(row, task)
            if math.isfinite(value):
                self._judge(signal, task, value)

    def _learns(self, since: int) -> bool:
        """Return whether more answers are right than before this step, or more end in
        time.

        A policy that learns to stop writes shorter answers, and one that learns is
        surer of them.
        """
        more_right = _risen(self._newest, "pass_rate_train", since) > LEARNS
        more_end = _risen(self._newest, "truncation_rate", since) < -LEARNS
        return more_right or more_end

    def _judge(self, signal: Signal, task: str, value: float) -> None:
        """Judge a signal's value in this step. If the signal is abnormal, open an alarm
        unless it has one; if it is not, close the one that it has. No alarm is opened
        for a change that is due to learning. task: "/NAME", or empty for all tasks.
        """
        key = (signal.name, task)
        name = signal.name + task
        if key not in self._judges:
            self._judges[key] = _judge_of(signal)
        judge = self._judges[key]
        is_abnormal = judge.add(self.step, value)
        if name in self._open:
            if not is_abnormal:
                number = self._open.pop(name)
                self.history[number] = replace(self.history[number], until=self.step)
            return
        if not is_abnormal:
            return
        if signal.moved_by_learning and self._learns(judge.since):
            judge.forget()
            return
        self._open[name] = len(self.history)
        remedy = self._remedy(signal, task)
        text = f"{name.replace('_', ' ')} ({judge.text}): {signal.meaning}; {remedy}"
        self.history.append(Alarm(name, judge.since, self.step, text))

    def _remedy(self, signal: Signal, task: str) -> str:
        """Return what to do about a signal that is abnormal now."""
        if signal.name == "all_wrong":
            return _why_all_wrong(self._last, task)
        if signal.name in OF_PARITY and self._compared:
            cause = parity.named_cause(self._compared, routing="routing" in self._open)
            return f"likely cause: {cause}"
        return signal.remedy or _LOG


def _judge_of(signal: Signal) -> _SignalJudge:
    """Return what judges a signal's values, which are then given to it in order."""
    if signal.from_the_start:
        return _Always(signal)
    if signal.limit is None:
        return _Course(signal)
    return _Limited(signal)


def _risen(rows: Iterable[Row], name: str, since: int) -> float:
    """Return by how much a metric has risen: the mean of its newest RECENT values from
    step `since` on, less the mean of its values before. 0 if that is less than twice
    its standard error, or values are too few.
    """
    measured = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    earlier = [row[name] for row in measured if row["step"] < since]
    newest = [row[name] for row in measured if row["step"] >= since]
    newest = newest[-RECENT:]
    if len(newest) < FIRST or len(earlier) < FIRST:
        return 0.0
    rise = fmean(newest) - fmean(earlier)
    of_newest = variance(newest) / len(newest)
    of_earlier = variance(earlier) / len(earlier)
    error = math.sqrt(of_newest + of_earlier)
    return rise if abs(rise) > 2 * error else 0.0


_BY_NAME = {signal.name: signal for signal in SIGNALS}

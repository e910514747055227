"""When the plan of a run is replaced: for a slow worker, for other costs, never for noise. Measurements are made up."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from slow_planners import Failing
from support.sampling import sampled

from lightning_recycle import planning
from lightning_recycle.control.plans.drift import DriftMonitor, DriftOptions, DriftQuestion, Proposal
from lightning_recycle.planning.program import worker_program

SLOT = 0.02  # seconds
GRID = planning.Grid(3, 2, 4)
Seconds = Callable[[planning.Worker, int, str, int], float]
"""(worker, step, kind, number of the operation) -> what it takes."""


def schedule_of(grid: planning.Grid = GRID, **changes: object) -> planning.Schedule:
    problem = planning.Problem(
        grid, planning.Costs.uniform(grid.stages), in_flight_limit=(2 * grid.stages - 1,) * grid.stages
    )
    return planning.heuristic(replace(problem, **changes), 20_000)


class Run:
    """A run without workers: measures what ``seconds`` says, and does what the monitor wants."""

    def __init__(
        self, seconds: Seconds, options: DriftOptions | None = None, schedule: planning.Schedule | None = None
    ) -> None:
        self.monitor = DriftMonitor(options or DriftOptions(window=10), planning.HeuristicPlanner())
        self.seconds = seconds
        self.step = 0
        self.questions: list[DriftQuestion] = []
        self.gains: list[float] = []
        self.swaps: list[int] = []
        self.schedule = schedule or schedule_of()
        self.monitor.begin(self.schedule, 0)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            for worker in self.schedule.live_workers:
                kinds = Counter(task.op.kind.value for task in worker_program(self.schedule, worker))
                times = {
                    kind: sum(self.seconds(worker, self.step, kind, i) for i in range(number)) / number
                    for kind, number in kinds.items()
                }
                self.monitor.observe(worker, self.step, times)
            self.monitor.stepped(self.schedule.period * SLOT)
            self.step += 1
            question = self.monitor.question()
            if question is not None:
                self.answer(question)
        return self

    def answer(self, question: DriftQuestion) -> None:
        self.questions.append(question)
        proposal = question.answer()
        gain = self.monitor.accepts(question, proposal)
        if gain is not None:
            assert proposal.schedule is not None
            self.gains.append(gain)
            self.swaps.append(self.step)
            self.schedule = proposal.schedule
            self.monitor.begin(self.schedule, self.step)

    def load(self, worker: planning.Worker) -> int:
        return sum(op.kind is planning.OpKind.FORWARD for op in self.schedule.program(worker))


def usual(worker: planning.Worker, step: int, kind: str, number: int) -> float:
    return {"BW": 2 * SLOT, "REDUCE": 0.001, "STEP": 0.0005}.get(kind, SLOT)


def noise(seed: int, sigma: float = 0.2) -> Seconds:
    draw = random.Random(seed)
    return lambda worker, step, kind, number: usual(worker, step, kind, number) * max(0.1, draw.gauss(1.0, sigma))


def slow(which: planning.Worker, factor: float, first: int, last: int = 10**9, base: Seconds = usual) -> Seconds:
    def seconds(worker: planning.Worker, step: int, kind: str, number: int) -> float:
        slows = worker == which and first <= step < last and kind not in ("REDUCE", "STEP")
        return base(worker, step, kind, number) * (factor if slows else 1.0)

    return seconds


SLOW = planning.Worker(1, 1)


def test_nothing_is_asked_while_operations_take_what_the_plan_says():
    assert Run(usual).steps(300).questions == []


def test_a_slow_worker_gets_fewer_microbatches_and_gets_them_back():
    run = Run(slow(SLOW, 2.0, 30, 100)).steps(60)
    (swap,) = run.swaps
    assert 40 <= swap <= 50
    assert run.load(SLOW) < 4
    assert run.gains[0] > 0.15
    assert run.schedule.problem.worker_factors == ((SLOW, pytest.approx(2.0)),)
    best = planning.heuristic(
        replace(run.schedule.problem, costs=planning.Costs.uniform(2), worker_factors={SLOW: 2.0})
    )
    mine = planning.retime(run.schedule, planning.Costs.uniform(2), {SLOW: 2.0})
    assert mine.period <= best.period / 0.95
    run.steps(100)
    assert len(run.swaps) == 2
    assert 110 <= run.swaps[1] <= 125
    assert run.load(SLOW) == 4
    assert len(run.steps(300).swaps) == 2, "it is settled"


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0, 5.0])
def test_one_worker_of_another_speed_is_found_in_the_noise(stage, factor):
    which = planning.Worker(2, stage)
    run = Run(slow(which, factor, 20, base=noise(4))).steps(100)
    found = dict(run.questions[0].estimate.factors)
    assert found.keys() == {which}
    assert found[which] == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize(
    ("pipelines", "microbatches"), sampled(itertools.product([1, 2, 3, 4], [2, 6]), 3, rest=pytest.mark.long)
)
def test_20_percent_of_noise_never_change_the_plan(pipelines, microbatches):
    for seed in range(4):
        run = Run(noise(seed), schedule=schedule_of(planning.Grid(pipelines, 2, microbatches))).steps(250)
        assert run.swaps == []
        assert len(run.questions) <= 1


def test_20_percent_of_noise_would_change_it_if_it_were_believed(monkeypatch):
    """The measurements of a few steps do differ by more than what makes a plan worth it."""
    monkeypatch.setattr("lightning_recycle.control.plans.drift._SIGNIFICANCE", 0.0)
    gains = [Run(noise(seed, 0.4), DriftOptions(window=3)).steps(20).gains for seed in range(3)]
    assert sum(map(len, gains)) > 0


def lengths(seed: int, spread: float) -> Callable[[int], float]:
    """How long the sequences of each step are."""
    return lambda step: math.exp(random.Random(f"{seed} {step}").uniform(-spread, spread))


@pytest.mark.parametrize("spread", [0.3, 0.7])
def test_sequences_of_varying_length_are_no_drift(spread):
    for seed in range(3):
        length = lengths(seed, spread)
        run = Run(lambda w, s, k, n, length=length: usual(w, s, k, n) * length(s)).steps(200)
        assert run.questions == []


def test_a_slow_worker_is_found_though_the_lengths_of_sequences_vary():
    length = lengths(1, 0.7)
    base = slow(SLOW, 1.6, 40)
    run = Run(lambda w, s, k, n: base(w, s, k, n) * length(s)).steps(80)
    assert dict(run.schedule.problem.worker_factors) == {SLOW: pytest.approx(1.6)}
    assert len(run.swaps) == 1
    assert run.swaps[0] >= 40


def test_a_worker_that_is_slow_for_a_moment_changes_nothing():
    assert Run(slow(SLOW, 5.0, 30, 34)).steps(100).questions == []


def test_when_everything_becomes_slower_alike_no_plan_is_looked_for():
    run = Run(lambda w, s, k, n: usual(w, s, k, n) * (3.0 if s >= 40 and k in ("F", "B", "W", "BW") else 1.0))
    assert run.steps(150).questions == []


def test_a_lasting_change_of_one_stage_is_drift_of_the_costs():
    run = Run(lambda w, s, k, n: usual(w, s, k, n) * (2.0 if s >= 40 and w.stage == 0 and k != "STEP" else 1.0))
    run.steps(100)
    assert len(run.questions) == 1, "asked once, not again and again"
    estimate = run.questions[0].estimate
    assert estimate.factors == ()
    assert estimate.costs.forward == pytest.approx((2 * SLOT, SLOT))


def test_a_plan_for_wrong_costs_is_replaced():
    costs = planning.Costs((4.0, 0.1, 0.1), (4.0, 0.1, 1.0), (0.1, 1.0, 1.0), (0.0,) * 3, (0.0,) * 3)
    wrong = schedule_of(planning.Grid(1, 3, 8), costs=costs, technique=planning.Technique(True, False))
    right = schedule_of(planning.Grid(1, 3, 8), technique=planning.Technique(True, False))
    assert planning.retime(wrong, planning.Costs.uniform(3)).period > 1.1 * right.period, "or there is nothing to find"
    run = Run(usual, schedule=wrong).steps(40)
    assert len(run.swaps) == 1
    assert planning.retime(run.schedule, planning.Costs.uniform(3)).period == pytest.approx(right.period, rel=0.03)


def test_a_little_less_than_the_threshold_is_not_worth_it():
    run = Run(slow(SLOW, 1.1, 0)).steps(100)
    assert (len(run.questions), run.swaps) == (1, [])


def test_a_change_must_pay_within_the_horizon():
    question = Run(slow(SLOW, 2.0, 0), DriftOptions(window=10, horizon_steps=20))
    question.answer = lambda q: question.questions.append(q)
    (asked,) = question.steps(30).questions
    proposal = asked.answer()
    saved = 20 * (proposal.before - proposal.schedule.period)
    assert question.monitor.accepts(asked, replace(proposal, seconds=saved)) is None


def test_a_plan_saves_the_part_of_a_step_that_it_saves_of_the_measured_one():
    """Where most of a step is something else than operations, moving operations is not worth it."""
    run = Run(slow(SLOW, 2.0, 0))
    run.monitor.stepped = lambda seconds, real=run.monitor.stepped: real(20 * seconds)
    assert run.steps(100).swaps == []


def test_an_answer_about_a_plan_of_before_is_ignored():
    run = Run(slow(SLOW, 2.0, 0))
    run.answer = run.questions.append
    (question,) = run.steps(30).questions
    proposal = question.answer()
    run.monitor.begin(run.schedule, 30)
    assert run.monitor.accepts(question, proposal) is None


def test_no_answer_is_a_refusal_and_the_question_is_not_asked_again():
    run = Run(slow(SLOW, 2.0, 0))
    run.answer = lambda q: (run.questions.append(q), run.monitor.accepts(q, None))
    assert len(run.steps(200).questions) == 1


def test_who_gets_nothing_to_do_is_tried_again_after_the_horizon():
    hopeless = Run(slow(SLOW, 50.0, 0), DriftOptions(window=10, horizon_steps=60)).steps(40)
    assert hopeless.load(SLOW) == 0
    healed = Run(slow(SLOW, 50.0, 0, 40), DriftOptions(window=10, horizon_steps=60)).steps(150)
    assert healed.load(SLOW) == 4
    assert len(healed.swaps) == 2
    assert len(hopeless.steps(80).swaps) == 3, "tried, and taken away again"
    assert hopeless.load(SLOW) == 0


def test_without_hope_no_planner_is_asked():
    question = Run(slow(SLOW, 1.1, 0))
    question.answer = question.questions.append
    (asked,) = question.steps(30).questions
    bound = planning.lower_bound(asked.estimate.of(asked.schedule.problem))
    before = planning.retime(asked.schedule, asked.estimate.costs, asked.estimate.factors).period
    assert before - bound < asked.threshold * before
    proposal = replace(asked, planner=Failing()).answer()
    assert replace(proposal, seconds=0.0) == Proposal(None, before)

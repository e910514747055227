"""Silent corruption: who is found, how soon, and what looking for it costs.

    .venv/bin/python benchmarks/silent_corruption.py                # all of it, some minutes
    .venv/bin/python benchmarks/silent_corruption.py --cases 20     # a sample

*Cases*: devices that err for good, in seeded ways of all kinds, in one of three or four replicas of a model, which this
process computes one after the other with the package's own checksums, injection, rotation and decisions (no processes,
no pipeline). Every n-th matrix product is wrong, or a bit flips in every fifth step, in results of always the same
micro-batch. After 100 steps at most the faulty replica, and no other, must have been found; and after its eviction, if
the wrong result was found before a commit, the weights must be those without a fault, unless an earlier one was not
looked at.
*Probability*: the same, for a device that errs in each micro-batch with some probability: steps until it is found,
beside the formula of docs/corruption.md and a draw of it.
*False alarms*: the same without faults, in float32 with dropout and in bfloat16.
*Cost*: seconds of a checksum beside those of a step; which checks of computations fit into idle times of which
schedule.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from harness import console, describe_machine
from rich.table import Table
from torch import Tensor, nn

from lightning_recycle.callbacks.fault_effects import WrongArithmetic, flip, flip_in_next_output
from lightning_recycle.control.protocol.corruption import Dispute, Finding, Undecided, decide, judge
from lightning_recycle.control.protocol.messages import Checked
from lightning_recycle.planning import Grid, Worker, plan
from lightning_recycle.planning.problem import Costs, Problem, Technique
from lightning_recycle.planning.program import WorkerChecks, plan_checks
from lightning_recycle.randomness import microbatch_randomness
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.session.replica_checks import stage_state

__all__ = ["Case", "Replicas", "main"]

WIDTH, BATCH, MICROBATCHES = 12, 4, 2
STEPS = 100
_PERIOD = 5  # steps from one flipped bit to the next
TARGETS = ("parameter", "optimizer", "activation", "gradient", "matmul")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A fault: in which of ``replicas``, what flips, and from which step on; ``every``: n of every n-th product;
    ``chance``: that a micro-batch is computed wrong.
    """

    seed: int
    replicas: int
    culprit: int
    target: str | None
    step: int
    bit: int | None
    every: int | None = None
    chance: float | None = None
    microbatch: int = 0  # of its own

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = random.Random(seed)
        replicas, target = draw.choice((3, 4)), TARGETS[seed % len(TARGETS)]
        bit = draw.choice((0, 10, 20, None, None))
        every = draw.choice((1, 5, 20, 50)) if target == "matmul" else None
        culprit, step, microbatch = draw.randrange(replicas), draw.randrange(3, 20), draw.randrange(MICROBATCHES)
        return cls(seed, replicas, culprit, target, step, bit, every, microbatch=microbatch)


def _model(dtype: torch.dtype, dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers).to(dtype)


class Replicas:
    """The workers of one stage, as far as checks concern them, one after the other in this process."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64, dropout: float = 0.1, every: int = 1) -> None:
        self.case, self.every, self._dtype = case, every, dtype
        first = _model(dtype, dropout)
        self.models = {rank: copy.deepcopy(first) for rank in range(case.replicas)}
        self.optimizers = {rank: torch.optim.AdamW(m.parameters(), lr=1e-2) for rank, m in self.models.items()}
        self.found: list[tuple[int, int, str]] = []  # step, rank, how
        self.alarms: list[str] = []
        self._draw = random.Random(case.seed)
        self._arithmetic: WrongArithmetic | None = None
        self._struck: set[int] = set()

    def run(self, steps: int, more: int | None = None) -> int:
        """Runs up to ``steps`` steps, and only so many ``more`` after somebody was found; returns how many."""
        for step in range(steps):
            while self._attempt(step):  # again without whoever was found
                pass
            self._compare(step)
            if more is not None and self.found and step >= self.found[0][0] + more:
                return step + 1
        return steps

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in next(iter(self.models.values())).parameters()]

    def _compute(
        self, rank: int, step: int, index: int, accused: int | None = None
    ) -> tuple[bytes, Tensor, list[Tensor]]:
        """Worker ``rank`` computes micro-batch ``index``; checksum, loss and gradients."""
        model = self.models[rank]
        draw = torch.Generator().manual_seed(1000 * step + index)
        inputs = torch.randn(BATCH, WIDTH, generator=draw, dtype=torch.float64).to(self._dtype)
        wrong = self._arithmetic if rank == self.case.culprit and accused is None else None
        if self.case.chance is not None and rank == self.case.culprit and accused is None:
            errs = self._draw.random() < self.case.chance
            wrong = WrongArithmetic(1, None, self._draw) if errs else None
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -0.0)
        with microbatch_randomness(CPU, 1, step, index) as draw_for, wrong or nullcontext():
            value = inputs
            for number, layer in enumerate(model):
                draw_for(number)
                value = layer(value)
            value.square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return checksum([value, *grads]), value, grads

    def _attempt(self, step: int) -> bool:
        """Runs ``step``; whether it must be run again, without somebody."""
        case, live = self.case, sorted(self.models)
        due = step >= case.step and (step - case.step) % _PERIOD == 0 and step not in self._struck
        strikes = due and case.culprit in live and case.target is not None
        self._struck.add(step)
        claims: dict[int, list[bytes]] = {rank: [] for rank in live}  # of each micro-batch of a worker
        total: list[Tensor] | None = None
        if strikes and case.target == "parameter":
            flip(self.models[case.culprit].parameters(), case.bit, self._draw)
        if strikes and case.target == "optimizer":
            states = self.optimizers[case.culprit].state.values()
            flip([t for state in states for t in state.values() if t.dim()], case.bit, self._draw)
        if strikes and case.target == "matmul" and self._arithmetic is None:
            assert case.every is not None
            self._arithmetic = WrongArithmetic(case.every, case.bit, self._draw)
        count = case.replicas * MICROBATCHES  # whoever is gone, the others compute its micro-batches
        for index in range(count):
            rank = live[index % len(live)]
            errs = strikes and rank == case.culprit and len(claims[rank]) == case.microbatch
            if errs and case.target == "activation":
                flip_in_next_output(
                    [m for m in self.models[rank].modules() if not any(m.children())], case.bit, self._draw
                )
            sums, _, grads = self._compute(rank, step, index)
            if errs and case.target == "gradient":
                flip(grads, case.bit, self._draw)
                sums = checksum([sums[0], *grads])
            claims[rank].append(sums)
            total = [g.clone() for g in grads] if total is None else [a + g for a, g in zip(total, grads, strict=True)]
        if step % self.every == 0 and len(live) > 1 and self._check(step, live, claims):
            return True
        assert total is not None
        for rank in live:
            for parameter, grad in zip(self.models[rank].parameters(), total, strict=True):
                parameter.grad = grad / count
            self.optimizers[rank].step()
        return False

    def _check(self, step: int, live: Sequence[int], claims: dict[int, list[bytes]]) -> bool:
        """Everybody checks one peer; whether somebody was found."""
        checks = WorkerChecks(tuple(live), self.every, (), (0,) * max(map(len, claims.values())))
        number = checks.drawn(step)
        assert number is not None
        for rank in live:
            other, _ = checks.partners(step, rank)
            own = number % len(claims[other])
            index, claimed = live.index(other) + own * len(live), claims[other][own]
            mine = self._compute(rank, step, index)[0]
            if mine == claimed:
                continue
            votes = {}
            for voter in live:
                got, again = (self._compute(voter, step, index, accused=other)[0] for _ in range(2))
                votes[voter] = ({"results": got}, got == again)
            dispute = Dispute(step, index, rank, other, {rank: {"results": mine}, other: {"results": claimed}}, votes)
            verdict = decide(dispute)
            if isinstance(verdict, Finding):
                self.alarms.append(f"step {step}: {verdict.value}")
                continue
            for culprit in verdict:
                self._evict(step, culprit.rank, "computation")
            return bool(verdict)
        return False

    def _compare(self, step: int) -> None:
        told = {}
        for rank, model in self.models.items():
            state = stage_state(model, [self.optimizers[rank]])
            told[rank] = Checked({name: checksum(values) for name, values in state.items()}, 1)
        verdict = judge(told)
        if isinstance(verdict, Undecided):
            self.alarms.append(f"step {step}: undecided")
            return
        for culprit in verdict:
            self._evict(step, culprit.rank, "state")

    def _evict(self, step: int, rank: int, how: str) -> None:
        self.found.append((step, rank, how))
        self.models.pop(rank, None)
        self.optimizers.pop(rank, None)


# ---------------------------------------------------------------------- cases


def cases(count: int) -> bool:
    """Seeded faults of all kinds; whether all were found, and nobody else."""
    rows: dict[str, list[tuple[Case, Replicas, float]]] = {target: [] for target in TARGETS}
    right: dict[int, list[list[Tensor]]] = {3: [], 4: []}  # by replicas, the weights after each step without a fault
    for number, weights in right.items():
        well = Replicas(Case(0, number, -1, None, -1, None), every=STEPS)
        for step in range(STEPS):
            well._attempt(step)
            weights.append(well.weights())
    for seed in range(count):
        case = Case.drawn(seed)
        replicas = Replicas(case)
        done = replicas.run(STEPS, more=3)
        pairs = zip(replicas.weights(), right[case.replicas][done - 1], strict=True)
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        assert case.target is not None
        rows[case.target].append((case, replicas, difference))
    table = Table(
        "target", "cases", "found", "innocent", "by", "steps (max)", "undecided", "difference where uncommitted"
    )
    for target, results in rows.items():
        found = [r.found[0] for c, r, _ in results if r.found and r.found[0][1] == c.culprit]
        innocent = sum(any(rank != c.culprit for _, rank, _ in r.found) for c, r, _ in results)
        late = [r.found[0][0] - c.step for c, r, _ in results if r.found]
        caught = [d for c, r, d in results if r.found and r.found[0][2] == "computation" and r.found[0][0] == c.step]
        by = Counter(how for _, _, how in found)
        table.add_row(
            target,
            str(len(results)),
            str(len(found)),
            str(innocent),
            ", ".join(f"{how} {n}" for how, n in sorted(by.items())),
            str(max(late, default=0)),
            str(sum(bool(r.alarms) for _, r, _ in results)),
            f"{max(caught):.1e} ({len(caught)} cases)" if caught else "-",
        )
    console.print(table)
    everybody = [result for results in rows.values() for result in results]
    return all({rank for _, rank, _ in replicas.found} == {case.culprit} for case, replicas, _ in everybody)


# ---------------------------------------------------------------------- probability


def probability(runs: int) -> None:
    """Steps until a device is found that computes a micro-batch wrong with a probability of e."""
    table = Table(
        "e", "check every k", "mean steps: formula", "drawn", "measured", "found in 100 steps: formula", "measured"
    )
    for share, check in ((0.3, 1), (0.1, 1), (0.03, 1), (0.1, 4)):
        chance = 1 - (1 - share) ** 2  # a micro-batch of the device, and the one that it checks
        formula, draw = 1 + check * (1 / chance - 1), random.Random(0)  # the first check is in the first step
        drawn = [next(k for k in range(10**6) if k % check == 0 and draw.random() < chance) + 1 for _ in range(4000)]
        steps = []
        for seed in range(runs):
            replicas = Replicas(Case(seed, 3, seed % 3, None, -1, None, chance=share), every=check)
            replicas.run(5 * STEPS, more=0)
            assert replicas.found[0][1] == seed % 3
            steps.append(replicas.found[0][0] + 1)
        error = statistics.stdev(steps) / math.sqrt(runs)
        table.add_row(
            f"{share:g}", str(check), f"{formula:.1f}", f"{statistics.mean(drawn):.1f}",
            f"{statistics.mean(steps):.1f} +- {error:.1f}", f"{1 - (1 - chance) ** math.ceil(STEPS / check):.3f}",
            f"{sum(found <= STEPS for found in steps) / runs:.3f}",
        )  # fmt: skip
    console.print(table)


def false_alarms(steps: int) -> bool:
    """Nothing is wrong; whether nothing was found."""
    quiet = True
    table = Table("dtype", "dropout", "steps", "checks", "alarms")
    for dtype, dropout in ((torch.float32, 0.5), (torch.bfloat16, 0.5), (torch.float64, 0.0)):
        replicas = Replicas(Case(0, 3, -1, None, -1, None), dtype=dtype, dropout=dropout)
        replicas.run(steps)
        alarms = len(replicas.found) + len(replicas.alarms)
        quiet = quiet and not alarms
        table.add_row(str(dtype), str(dropout), str(steps), str(3 * steps), str(alarms))
    console.print(table)
    return quiet


# ---------------------------------------------------------------------- cost


def _seconds(function: Callable[[], object], repeats: int = 5) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def _step(block: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    block(inputs).square().mean().backward()
    optimizer.step()


def _state_check(block: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for values in stage_state(block, [optimizer]).values():
        checksum(values)


def cost() -> None:
    """What checks of states take."""
    table = Table("parameters", "tokens of a step", "step (s)", "check (s)", "check every (auto)", "share of the time")
    for width, tokens in ((256, 512), (512, 1024)):
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        optimizer = torch.optim.AdamW(block.parameters())
        taken = _seconds(partial(_step, block, optimizer, torch.randn(tokens // 128, 128, width)))
        checked = _seconds(partial(_state_check, block, optimizer))
        every = max(1, math.ceil(checked / (1e-3 * taken)))
        count = sum(p.numel() for p in block.parameters())
        table.add_row(
            f"{count:,}", str(tokens), f"{taken:.4f}", f"{checked:.4f}", str(every), f"{checked / (every * taken):.4%}"
        )
    console.print(table)


def places() -> None:
    """What checks of computations take."""
    table = Table("schedule", "failed", "period (slots)", "free, by stage", "all others every", "share")
    for decoupled in (False, True):
        for staggered in (False, True):
            for lost in ((), (Worker(1, 2),)):
                grid = Grid(3, 4, 6)
                schedule = plan(Problem(grid, Costs.uniform(4), frozenset(lost), Technique(decoupled, staggered)))
                checks = plan_checks(schedule, 0.01)
                free = [f"{len(one.free)}/{len(one.costs)}" for _, one in sorted(checks.items())]
                paid = {one.every for one in checks.values() if len(one.free) < len(one.costs)}
                share = max((max(one.costs) / (one.every * schedule.period) for one in checks.values()), default=0.0)
                table.add_row(
                    f"{'decoupled' if decoupled else '1F1B'}, {'staggered' if staggered else 'with a barrier'}",
                    str(len(lost)), f"{schedule.period:g}", " ".join(free), str(max(paid, default="-")), f"{share:.2%}",
                )  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--runs", type=int, default=60, help="for the probability")
    parser.add_argument("--steps", type=int, default=1000, help="without a fault, for each dtype")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console.print(describe_machine())
    started = time.perf_counter()
    is_right = cases(options.cases)
    probability(options.runs)
    is_right = false_alarms(options.steps) and is_right
    cost()
    places()
    console.print(f"{time.perf_counter() - started:.0f} s")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

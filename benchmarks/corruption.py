"""Silent corruption among real workers: who is found and how soon, false alarms, and what checks take of a step.

    .venv/bin/python benchmarks/corruption.py --only cases --cases 200    # some seconds each
    .venv/bin/python benchmarks/corruption.py --only alarms --steps 20000
    .venv/bin/python benchmarks/corruption.py --only cost

*Cases*: a worker of a 3 x 1, 4 x 1 or 3 x 2 grid errs for good, in a seeded way: every n-th matrix product is wrong, or
a bit flips in every fifth step, in a parameter, the optimizer's state, or an activation or weight gradient of always
the same micro-batch. It must be found within 100 steps, and nobody else. If the first error was found before a commit,
the weights must be those of a plain loop on one device, to 1e-10. It ends with status 1 otherwise.
*Alarms*: training with dropout in bfloat16 while workers are killed and replaced, every worker checked in every step,
its state as well: nothing may be found.
*Cost*: the seconds of a step with checks and without, runs in turns: of the state by default, of computations with
``verify=0.01``, among workers that compute, and among workers that sleep, whose idle times are idle.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from emulated import SleepingModel
from harness import console, describe_machine, fit, quieten
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule, PlanningOptions, RecoveryOptions, ReCycleStrategy, VerificationOptions
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

TARGETS = ("parameter", "optimizer", "activation", "gradient", "matmul")
WITHIN = 100  # steps from the first error to the finding
_PERIOD = 5  # steps from one flipped bit to the next
_GLOBAL_BATCH, _GLOBAL_MICROBATCHES = 24, 12
_AT = {"activation": ("forward", "before"), "gradient": ("backward_weight", "after")}
_TOLERANCE = 1e-10


class Model(PipelineModule):
    """Four small layers, with ``dropout`` one more that draws."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout

    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(8, self.width), nn.Tanh(), nn.Linear(self.width, self.width)]
        if self.dropout:
            layers += [nn.LayerNorm(self.width), nn.Dropout(self.dropout)]
        return [*layers, nn.Linear(self.width, 1)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _data(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 8, generator=draw, dtype=dtype), torch.randn(samples, 1, generator=draw, dtype=dtype)
    )


def _fit(
    module: PipelineModule,
    data: TensorDataset,
    grid: tuple[int, int],
    steps: int,
    checks: VerificationOptions,
    callbacks: Sequence[L.Callback] = (),
    *,
    precision: str = "32-true",
    **options: Any,
) -> L.Trainer:
    """Trains in a folder of its own."""
    pipelines, stages = grid
    microbatches = options.pop("num_microbatches", _GLOBAL_MICROBATCHES // pipelines)
    with tempfile.TemporaryDirectory() as folder:
        return fit(
            module,
            DataLoader(data, batch_size=2 * microbatches),
            ReCycleStrategy(stages, microbatches, verification=checks, **options),
            devices=pipelines * stages,
            steps=steps,
            callbacks=callbacks,
            default_root_dir=folder,
            precision=precision,
        )


# ---------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A device that errs: which worker's, in what way, from which step on. See :class:`Fault`."""

    seed: int
    pipelines: int
    stages: int
    culprit: tuple[int, int]
    target: str
    step: int
    bit: int | None
    every: int | None
    microbatch: int | None

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = random.Random(f"corruption/{seed}")
        pipelines, stages = draw.choice(((3, 1), (3, 1), (4, 1), (3, 2)))
        target = TARGETS[seed % len(TARGETS)]
        culprit = draw.randrange(pipelines), draw.randrange(stages)
        every = draw.choice((1, 5, 20, 50)) if target == "matmul" else None
        step, bit = draw.randrange(3, 15), draw.choice((0, 10, 20, None, None))
        microbatch = draw.randrange(_GLOBAL_MICROBATCHES // pipelines) if target in _AT else None
        return cls(seed, pipelines, stages, culprit, target, step, bit, every, microbatch)

    @property
    def steps(self) -> int:
        """Those of the run."""
        return self.step + WITHIN

    def faults(self) -> list[Fault]:
        at, when = _AT.get(self.target, ("forward", "before"))
        more: dict[str, Any] = {"when": when, "target": self.target, "bit": self.bit, "every": self.every}
        more["microbatch"] = self.microbatch
        steps = (self.step,) if self.every else range(self.step, self.steps, _PERIOD)
        return [Fault("bitflip", *self.culprit, step, at, **more) for step in steps]


@dataclass(frozen=True)
class Outcome:
    """Who was found, after which step, by what; ``difference`` of the weights from those of a plain loop."""

    case: Case
    found: tuple[tuple[tuple[int, int] | None, int, str], ...]
    difference: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the culprit was found in time, and nobody else."""
        who = {worker for worker, _, _ in self.found}
        return who == {self.case.culprit} and self.found[0][1] - self.case.step < WITHIN

    @property
    def was_uncommitted(self) -> bool:
        """Whether the first error was found before its step was committed."""
        return bool(self.found) and self.found[0][1:] == (self.case.step, "computation")


def run_case(case: Case) -> Outcome:
    """Trains with the fault of ``case``, in which workers check each other in every step, and their states in every
    tenth.
    """
    began = time.perf_counter()
    model, data = Model().double(), _data(_GLOBAL_BATCH * case.steps)
    expected = _plain(model, data, case.steps)
    checks, callbacks = (
        VerificationOptions(verify=1.0, checksum_every=10),
        [FaultInjectionCallback(case.faults()), _Quiet()],
    )
    run = _fit(model, data, (case.pipelines, case.stages), case.steps, checks, callbacks)
    found = tuple((e.worker, e.step, e.details["proof"]) for e in run.strategy.history if e.kind == "corruption")
    weights = model.state_dict()
    difference = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
    return Outcome(case, found, difference, time.perf_counter() - began)


def _plain(model: PipelineModule, data: TensorDataset, steps: int) -> dict[str, Tensor]:
    """The weights of a copy of ``model``, trained here without anything of this package."""
    reference = copy.deepcopy(model)
    layers, optimizer = nn.Sequential(*reference.layers), torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = data[step * _GLOBAL_BATCH : (step + 1) * _GLOBAL_BATCH]
        optimizer.zero_grad()
        reference.loss(layers(x), y).backward()
        optimizer.step()
    return reference.state_dict()


class _Quiet(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        quieten()


def cases(first: int, count: int) -> bool:
    """Seeded faults of all kinds; whether all were found as they should."""
    outcomes: list[Outcome] = []
    for seed in range(first, first + count):
        outcome = run_case(Case.drawn(seed))
        outcomes.append(outcome)
        is_exact = not outcome.was_uncommitted or outcome.difference < _TOLERANCE
        verdict = "ok" if outcome.is_right and is_exact else "WRONG"
        print(
            f"{verdict} {outcome.case} {outcome.found} {outcome.difference:.1e} {outcome.seconds:.1f} s",
            flush=True,
        )
    table = Table("target", "cases", "found, nobody else", "by", "steps (most)", "weights off, where not committed")
    for target in TARGETS:
        own = [one for one in outcomes if one.case.target == target]
        by = Counter(one.found[0][2] for one in own if one.found)
        kept = [one.difference for one in own if one.was_uncommitted]
        late = [one.found[0][1] - one.case.step for one in own if one.found]
        table.add_row(
            target,
            str(len(own)),
            str(sum(one.is_right for one in own)),
            ", ".join(f"{how} {number}" for how, number in sorted(by.items())),
            str(max(late, default=0)),
            f"{max(kept):.1e} ({len(kept)} cases)" if kept else "-",
        )
    console.print(table)
    return all(one.is_right and (not one.was_uncommitted or one.difference < _TOLERANCE) for one in outcomes)


# ---------------------------------------------------------------------- no alarms


def alarms(steps: int) -> bool:
    """Nothing is wrong; whether nothing was found."""
    each, seconds = steps // 2, time.perf_counter()
    quiet = True
    for grid in ((3, 1), (2, 2)):
        checks, recovery = VerificationOptions(verify=1.0, checksum_every=1), RecoveryOptions(max_restarts=100)
        kills = [Fault("kill", d, s, step=step) for d, s, step in ((0, 0, each // 7), (1, grid[1] - 1, each // 3))]
        callbacks = [FaultInjectionCallback(kills), _Quiet()]
        module, data = Model(dropout=0.3), _data(_GLOBAL_BATCH * 64, torch.float32)
        run = _fit(module, data, grid, each, checks, callbacks, precision="bf16-mixed", recovery=recovery, seed=3)
        kinds = Counter(event.kind for event in run.strategy.history if event.kind != "step")
        found = {name: kinds[name] for name in ("corruption", "disputed", "incomparable", "not_finite")}
        quiet = quiet and not any(found.values()) and run.global_step == each
        console.print(
            f"{grid[0]} x {grid[1]}, bf16-mixed, dropout 0.3: {run.global_step} steps, {kinds['failure']} lost and"
            f" {kinds['rejoined']} replaced, found {found}, {time.perf_counter() - seconds:.0f} s"
        )
    return quiet


# ---------------------------------------------------------------------- cost


def _seconds(
    module: PipelineModule,
    data: TensorDataset,
    grid: tuple[int, int],
    steps: int,
    checks: VerificationOptions,
    **options: Any,
) -> float:
    """The median seconds of a step, from the tenth on."""
    run = _fit(module, data, grid, steps, checks, [_Quiet()], **options)
    taken = [e.seconds for e in run.strategy.history if e.kind == "step" and e.step >= 10 and e.seconds is not None]
    return statistics.mean(sorted(taken)[: int(0.9 * len(taken))])


def cost(rounds: int, steps: int) -> None:
    """Steps with checks and without, in turns."""
    table = Table("workers", "checks", "step without (ms)", "with (ms)", "more, by round")
    off: dict[str, Any] = {"checksum_every": 0, "verify": 0.0}
    fused = PlanningOptions(split_backward=False, staggered=False)
    data = _data(_GLOBAL_BATCH * 8, torch.float32)
    for name, grid, make, without, checks in (
        ("2 x 1, computing, width 768", (2, 1), lambda: Model(768), {}, {"checksum_every": "auto"}),
        ("2 x 1, computing, width 768", (2, 1), lambda: Model(768), {}, {"verify": 0.01}),
        ("3 x 4, sleeping, 1F1B", (3, 4), _sleeping, {"planning": fused}, {"verify": 0.01}),
        ("3 x 4, sleeping, by default", (3, 4), _sleeping, {}, {"verify": 0.01}),
    ):
        is_sleeping = grid == (3, 4)
        given = {**without, **({"num_microbatches": 6} if is_sleeping else {})}
        used = _sleeping_data() if is_sleeping else data
        pairs = []
        for _ in range(rounds):
            plain, checked = (
                _seconds(make(), used, grid, steps, VerificationOptions(**{**off, **more}), **given)
                for more in ({}, checks)
            )
            pairs.append((plain, checked))
        table.add_row(
            name,
            " ".join(f"{key}={value}" for key, value in checks.items()),
            f"{1e3 * statistics.median(a for a, _ in pairs):.2f}",
            f"{1e3 * statistics.median(b for _, b in pairs):.2f}",
            ", ".join(f"{b / a - 1:+.1%}" for a, b in pairs),
        )
    console.print(table)


def _sleeping() -> PipelineModule:
    return SleepingModel(4, 0.02)


def _sleeping_data() -> TensorDataset:
    return TensorDataset(torch.zeros(24 * 8, 4), torch.zeros(24 * 8, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cases", "alarms", "cost"))
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20_000, help="without a fault")
    parser.add_argument("--rounds", type=int, default=3, help="for the cost")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quieten()
    console.print(describe_machine())
    is_well = True
    if options.only in (None, "cases"):
        is_well = cases(options.first, options.cases) and is_well
    if options.only in (None, "alarms"):
        is_well = alarms(options.steps) and is_well
    if options.only in (None, "cost"):
        cost(options.rounds, 60)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

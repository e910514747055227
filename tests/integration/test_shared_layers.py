"""Neighbouring stages share layers: nothing changes but who runs them."""

import os
import random
import signal
import time
from ast import literal_eval
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.growth import AwaitReplacement
from support.models import GLOBAL_BATCH, Regression, Scheduled, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit, on_one_device, trainer
from test_buckets import MOMENTS as MOMENTS_OF_A_SUM
from test_buckets import Watcher
from test_moving_layers import KilledWhileLayersMove, Move, MoveByBatch, moves
from test_resume import MODELS
from test_ties import AutoEncoder
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.comm.communicator import CommunicationError
from lightning_recycle.runtime.stage.gradient_reduction import BucketedReduction

STAY: dict[str, Any] = {"rebalance": "never"}
MOMENTS = (48, 56, 40) * 2
"""As many as each worker has in the moves below at least, by rank."""

SHARED = {1: (2.4, 2.1, 1.5)}  # of six layers the third and the fifth, which have weights


@pytest.mark.parametrize(
    "model",
    sampled([Regression(), Scheduled(), Regression(specs=True)], 1, rest=pytest.mark.long),
    ids=["adamw", "sgd", "specs"],
)
def test_layers_are_shared_and_no_longer(model: Regression) -> None:
    still, moved = model.double(), type(model)(specs=model.specs).double()
    fit(still, 2, 2, strategy=STAY)
    run = fit(moved, 2, 2, callbacks=[Move({2: (2.25, 3.75), 4: (4.5, 1.5), 7: (4, 2)})], strategy=STAY)
    assert moves(run) == [(0, 2.25, 6), (0, 4.5, 6), (0, 4, 6)]
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


def layouts(seed: int, layers: int, stages: int, count: int) -> list[tuple[float, ...]]:
    """Random sizes of stages, most of which share a layer with the next one."""
    chance = random.Random(seed)
    found: list[tuple[float, ...]] = []
    while len(found) < count:
        bounds = sorted(round(chance.uniform(1, layers - 1), chance.choice((0, 1, 2))) for _ in range(stages - 1))
        sizes = tuple(round(b - a, 2) for a, b in zip([0, *bounds], [*bounds, layers], strict=True))
        whole = [(-(-a // 1), b // 1) for a, b in zip([0, *bounds], [*bounds, layers], strict=True)]
        if all(begin < end for begin, end in whole) and (not found or found[-1] != sizes):
            found.append(sizes)
    return found


@pytest.mark.parametrize(("seed", "stages"), sampled([(seed, stages) for seed in range(20) for stages in (2, 3, 4)], 1))
def test_random_layouts_of_layers_that_draw(seed: int, stages: int) -> None:
    still, moved = Regression(dropout=0.2).double(), Regression(dropout=0.2).double()
    fit(still, 2, stages, strategy=STAY)
    sizes = layouts(seed, 9, stages, 4)
    run = fit(moved, 2, stages, callbacks=[Move(dict(zip((1, 3, 5, 7), sizes, strict=True)))], strategy=STAY)
    assert len(moves(run)) == 4
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
@pytest.mark.parametrize(
    "fault",
    sampled(
        [
            Fault("kill", pipeline, stage, 5, at=at, when=when)
            for pipeline in range(2)
            for stage in range(3)
            for at in ("forward", "backward_input", "reduce", "optimizer")
            for when in ("before", "after")
        ],
        3,
    ),
    ids=str,
)
def test_a_worker_dies_while_stages_share_layers(fault: Fault, staggered: bool) -> None:
    run = exact_fit(
        Scheduled().double(), 2, 3, [fault], callbacks=[Move(SHARED)], strategy={**STAY, "staggered": staggered}
    )
    assert failures(run) == [(fault.pipeline, fault.stage)]
    assert len(moves(run)) == 1


@pytest.mark.parametrize(
    ("rank", "moment"),
    sampled([(rank, moment) for rank, count in enumerate(MOMENTS) for moment in range(1, count + 1)], 2),
)
def test_a_worker_dies_at_any_moment_of_a_move(rank: int, moment: int) -> None:
    run = exact_fit(
        Scheduled().double(),
        2,
        3,
        data=dataset(GLOBAL_BATCH * 12),
        max_steps=12,
        strategy=STAY,
        callbacks=[Move({2: (2.4, 2.1, 1.5), 6: (1.5, 3.3, 1.2)}), KilledWhileLayersMove(rank, moment)],
    )
    assert moves(run) == [(0, 2.4, 4.5, 6), (0, 1.5, 4.8, 6)]
    assert failures(run) == [divmod(rank, 3)]


def test_a_worker_that_joins_shares_the_layers_of_its_stage() -> None:
    run = exact_fit(
        Scheduled().double(),
        2,
        3,
        [Fault("kill", 0, 1, step=4), Fault("kill", 1, 0, step=9)],
        dataset(GLOBAL_BATCH * 16),
        max_steps=16,
        callbacks=[Move({**SHARED, 13: (1.2, 2.3, 2.5)}), AwaitReplacement([7, 12])],
        strategy={**STAY, "max_restarts": 10},
    )
    assert moves(run) == [(0, 2.4, 4.5, 6), (0, 1.2, 3.5, 6)]
    assert [event.kind for event in run.strategy.history].count("rejoined") == 2


@pytest.mark.parametrize(
    "clip", sampled([{"gradient_clip_val": 0.05}, {"gradient_clip_val": 1.0}], 1, rest=pytest.mark.long), ids=str
)
def test_norms_count_shared_layers_once(clip: dict[str, Any]) -> None:
    faults = [Fault("kill", 1, 1, 6, at="optimizer")]
    exact_fit(Scheduled().double(), 2, 3, faults, callbacks=[Move(SHARED)], strategy=STAY, **clip)


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
def test_between_the_batches_of_one_step(staggered: bool) -> None:
    still, moved = Scheduled().double(), Scheduled().double()
    options: dict[str, Any] = {
        "accumulate_grad_batches": 3,
        "max_steps": 4,
        "strategy": {**STAY, "staggered": staggered},
    }
    data, moving = dataset(GLOBAL_BATCH * 12), MoveByBatch({2: (2.5, 3.5), 4: (4.5, 1.5), 7: (2, 4)})
    fit(still, 2, 2, data=data, **options)
    run = fit(moved, 2, 2, [Fault("kill", 0, 1, 6)], data=data, callbacks=[moving], **options)
    assert len(moves(run)) == 3
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(
    "faults", sampled([[], [Fault("kill", 0, 1, 4, at="optimizer")], [Fault("kill", 1, 0, 5)]], 2), ids=str
)
def test_with_weights_that_distant_layers_share(faults: list[Fault]) -> None:
    model = AutoEncoder().double()
    moving = Move({2: (2.5, 3.5), 6: (4, 2)})
    run = exact_fit(model, 2, 2, faults, gradient_clip_val=0.05, callbacks=[moving], strategy=STAY)
    assert len(moves(run)) == 2
    assert torch.equal(model.state_dict()["layers.0.weight"], model.state_dict()["layers.5.weight"])


@pytest.mark.long
@pytest.mark.parametrize("sharded", sampled([False, True], 1))
@pytest.mark.parametrize("name", sampled(["grouped", "tied", "scheduled"], 2))
def test_checkpoints_go_on_on_any_grid(tmp_path: Path, name: str, sharded: bool) -> None:
    data = dataset(GLOBAL_BATCH * 4)

    def run(grid: tuple[int, int], epochs: int, sizes: Any, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        model = MODELS[name]().double()
        lightning = trainer(
            *grid,
            callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1), Move(sizes)],
            strategy={**STAY, "save_distributed_checkpoint": sharded},
            max_epochs=epochs,
            max_steps=-1,
            enable_checkpointing=True,
        )
        lightning.fit(model, DataLoader(data, batch_size=GLOBAL_BATCH // grid[0]), ckpt_path=ckpt_path)
        return model.state_dict()

    model = MODELS[name]().double()
    one = on_one_device(max_epochs=3, max_steps=-1)
    one.fit(model, DataLoader(data, batch_size=GLOBAL_BATCH))
    run((2, 2), 2, {3: (2.5, 3.5)})
    found = run((1, 3), 3, {9: (2.5, 2, 1.5)}, tmp_path / "step=6.ckpt")
    assert difference(found, model.state_dict()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("culprit", [(1, 0), (1, 1)])
def test_computations_are_checked(culprit: tuple[int, int]) -> None:
    run = exact_fit(
        Regression().double(),
        3,
        2,
        [Fault("bitflip", *culprit, step=7, target="matmul", every=1)],
        callbacks=[Move({2: (2.5, 3.5)})],
        strategy={**STAY, "verify": 1.0, "checksum_every": 2},
    )
    strategy: Any = run.strategy
    assert [(e.worker, e.step) for e in strategy.history if e.kind == "corruption"] == [(culprit, 7)]


class Asks(Callback):
    """Asks for a layout that cannot be."""

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        with pytest.raises(ConfigurationError, match="a whole layer of its own"):
            strategy.move_layers([1.5, 0.9, 3.6])
        with pytest.raises(ConfigurationError, match="is no layout of 6 layers"):
            strategy.move_layers([1.5, 2.5, 1.5])


def test_each_stage_keeps_a_layer_of_its_own() -> None:
    fit(Regression().double(), 1, 3, callbacks=[Asks()], max_steps=1, strategy=STAY)


class Halves(Callback):
    """Changes gradients in place, where users do."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class PartsWays(Callback):
    """In ``step`` workers part ways once all gradients are summed: one is killed, some lack the sums, as if they had
    not arrived, and the others have them, and step.

    Args:
        step: of the first attempt.
        killed: the rank of the first.
        lack: the ranks of the second.
    """

    def __init__(self, step: int, killed: int, lack: Collection[int]) -> None:
        self.step, self.killed, self.lack = step, killed, lack

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.executor is None:
            return
        original, rank = BucketedReduction.finish, strategy.grid_rank
        is_moved = 1  # the layers, which takes two generations

        def sums(reduction: BucketedReduction) -> None:
            due = trainer.global_step == self.step and strategy.generation == 1 + is_moved
            original(reduction)
            if due and rank in {self.killed, *self.lack}:
                time.sleep(0.3)  # the others step
                if rank == self.killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise CommunicationError("as if the last part had not arrived")

        BucketedReduction.finish = sums  # type: ignore[method-assign]


def ways(seed: int) -> tuple[int, list[int]]:
    """Of six workers, who is killed, and who lacks the sums."""
    chance = random.Random(seed)
    killed = chance.randrange(6)
    likely = [chance.choice((0.0, 0.5, 1.0)) for _ in range(3)]  # of each stage
    return killed, [rank for rank in range(6) if rank != killed and chance.random() < likely[rank % 3]]


@pytest.mark.parametrize("kind", sampled(["staggered", "together", "clipped"], 1, rest=pytest.mark.long))
@pytest.mark.parametrize("seed", sampled(range(16), 1))
def test_some_workers_have_the_sums_over_two_stages_and_others_do_not(seed: int, kind: str) -> None:
    killed, lack = ways(seed)
    run = exact_fit(
        Scheduled(clip_scale=100.0 if kind == "clipped" else 1.0).double(),
        2,
        3,
        callbacks=[Move(SHARED), PartsWays(5, killed, lack)],
        strategy={**STAY, "staggered": kind != "together"},
        gradient_clip_val=0.05 if kind == "clipped" else None,
    )
    assert failures(run) == [divmod(killed, 3)]
    assert len(moves(run)) == 1


@pytest.mark.parametrize(("cap", "split_backward"), sampled([(1e-4, True), (None, False)], 1, rest=pytest.mark.long))
@pytest.mark.parametrize(
    ("worker", "number", "moment"),
    sampled(
        [
            (worker, number, moment)
            for worker in [(pipeline, stage) for pipeline in range(2) for stage in range(3)]
            for number in range(2 if worker[1] == 1 else 1)
            for moment in MOMENTS_OF_A_SUM
        ],
        2,
    ),
)
def test_a_worker_dies_while_gradients_are_summed(
    worker: tuple[int, int], number: int, moment: str, cap: float | None, split_backward: bool
) -> None:
    dies = Watcher(kill=(worker, number, moment), step=5)
    run = exact_fit(
        Scheduled().double(),
        2,
        3,
        callbacks=[Move(SHARED), dies],
        strategy={**STAY, "bucket_cap_mb": cap, "split_backward": split_backward},
    )
    assert failures(run) == [worker]
    assert len(moves(run)) == 1


class WaitsBeforeItsLastGradients(Callback):
    """In ``step`` workers of the last stage begin their last W when the first worker has ended its REDUCE.

    Each notes in a file of its own whether that W is of a micro-batch that runs a shared layer elsewhere, and whether
    the wait has ended.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        executor = strategy.executor
        reduced = self.folder / "reduced"

        def ended(step: int, op: Any) -> None:
            if strategy.grid_rank == 0 and step == self.step and op.kind.value == "REDUCE":
                reduced.touch()

        def begins(step: int, op: Any) -> None:
            if step != self.step or executor.worker.stage < executor.grid.stages - 1:
                return
            last = [task for task in executor._runner.program if task.op.kind.value == "W"][-1]
            if op is last.op:
                limit = time.monotonic() + 20
                while not reduced.exists() and time.monotonic() < limit:
                    time.sleep(0.01)
                found = bool(executor._runner.stage.untouched(last.index)), reduced.exists()
                (self.folder / f"{strategy.grid_rank}").write_text(repr(found))

        executor.after_operation.append(ended)
        executor.before_operation.append(begins)


@pytest.mark.parametrize("pipelines", sampled([1, 2], 1, rest=pytest.mark.long))
def test_nobody_waits_for_gradients_of_micro_batches_that_run_a_shared_layer_elsewhere(
    tmp_path: Path, pipelines: int
) -> None:
    run = exact_fit(
        Scheduled().double(),
        pipelines,
        2,
        callbacks=[Move({1: (2.75, 3.25)}), WaitsBeforeItsLastGradients(tmp_path, 6)],
        strategy={**STAY, "split_backward": True},
    )
    assert moves(run) == [(0, 2.75, 6)]
    for rank in range(1, 2 * pipelines, 2):
        assert literal_eval((tmp_path / f"{rank}").read_text()) == (True, True)


class UsesALayerInItsLoss(Scheduled):
    """Where the last stage holds it: ``later`` steps after that began, and at ``from_step`` at the earliest."""

    def __init__(self, from_step: int = 0, later: int = 0) -> None:
        super().__init__()
        self.from_step, self.later, self.held_since = from_step, later, -1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        layer: Any = self.layers[2]
        if hasattr(layer, "weight") and self.held_since < 0:
            self.held_since = max(self.from_step, self.trainer.global_step)
        uses = 0 <= self.held_since <= self.trainer.global_step - self.later
        return super().loss(output, target) + (layer.weight.square().mean() if uses else 0.0)


MANY_STEPS = 40  # when a move takes place depends on the machine


@pytest.mark.long
def test_a_loss_may_use_a_shared_layer() -> None:
    data = dataset(GLOBAL_BATCH * MANY_STEPS)
    moved = UsesALayerInItsLoss().double()
    run = fit(
        moved,
        2,
        2,
        data=data,
        max_steps=MANY_STEPS,
        callbacks=[Move({1: (2.75, 3.25)})],
        strategy={**STAY, "split_backward": True},
    )
    strategy: Any = run.strategy
    (step,) = (event.step for event in strategy.history if event.kind == "layers_moved")
    reference = UsesALayerInItsLoss(from_step=step).double()
    on_one_device(max_steps=MANY_STEPS).fit(reference, DataLoader(data, batch_size=GLOBAL_BATCH))
    assert 1 <= step < MANY_STEPS
    assert difference(moved.state_dict(), reference.state_dict()) < TOLERANCE


def test_a_loss_that_begins_to_use_a_shared_layer_is_an_error_and_not_another_result() -> None:
    with pytest.raises(UnsupportedFeatureError, match="that two stages share got a gradient"):
        fit(
            UsesALayerInItsLoss(later=2).double(),
            2,
            2,
            data=dataset(GLOBAL_BATCH * MANY_STEPS),
            max_steps=MANY_STEPS,
            callbacks=[Move({1: (2.75, 3.25)})],
            strategy={**STAY, "split_backward": True},
        )


class CountsSums(Callback):
    """Each worker notes how often each gradient was summed in a step, and over which stages, in a file of its own."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        executor = strategy.executor
        begun: list[tuple[Tensor, tuple[int, ...]]] = []

        def watched(original: Any) -> Any:
            def watched(tensor: Tensor, stages: tuple[int, ...] = (), *source: int) -> Any:
                begun.append((tensor, stages))
                return original(tensor, stages, *source) if stages else original(tensor)

            return watched

        def note(step: int, op: Any) -> None:
            if step == self.step and op.kind.value == "REDUCE":
                sums = {
                    name: [
                        stages
                        for tensor, stages in begun
                        if _lies_in(dict(executor._runner.gradients.by_parameter(step))[p], tensor)
                    ]
                    for name, p in trainer.lightning_module.named_parameters()
                }
                (self.folder / f"{strategy.grid_rank}").write_text(repr(sums))
            if op.kind.value == "REDUCE":
                begun.clear()

        sums = executor._communicator.sums
        for name in ("all_reduce", "begin_all_reduce", "begin_broadcast"):
            setattr(sums, name, watched(getattr(sums, name)))
        executor.after_operation.append(note)


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    return begin <= part.data_ptr() < end


@pytest.mark.parametrize("pipelines", sampled([1, 2], 1, rest=pytest.mark.long))
def test_each_gradient_is_summed_once(tmp_path: Path, pipelines: int) -> None:
    exact_fit(Scheduled().double(), pipelines, 3, callbacks=[Move(SHARED), CountsSums(tmp_path, 6)], strategy=STAY)
    shared = {"layers.2.": (0, 1), "layers.4.": (1, 2)}
    found = {int(path.name): literal_eval(path.read_text()) for path in tmp_path.iterdir()}
    assert len(found) == 3 * pipelines
    for sums in found.values():
        for name, groups in sums.items():
            stages = shared.get(name[:9], ())
            assert groups == ([stages] if stages or pipelines > 1 else []), name
    assert all(any(name.startswith("layers.2.") for name in found[rank]) for rank in (0, 1))


@pytest.mark.long
def test_a_sum_is_given_as_it_was_before_hooks_changed_it() -> None:
    still, moved = Scheduled().double(), Scheduled().double()
    fit(still, 2, 2, strategy=STAY, callbacks=[Halves()])
    moving = Move({1: (2.5, 3.5)})
    run = fit(moved, 2, 2, strategy=STAY, callbacks=[moving, Halves(), PartsWays(5, 1, [3])])
    assert failures(run) == [(0, 1)]
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE

"""Several DataLoaders at once, in every mode of Lightning's CombinedLoader: what they give on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import same_script as same
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import failures
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from lightning_recycle.callbacks import Fault, FaultInjectionCallback


def batches_in(batch: Any) -> list[Any]:
    """The batches of the loaders that have not ended: pairs of inputs and classes."""
    whole = getattr(batch, "read", lambda: batch)()  # in hooks a grid's batch is an address
    leaves = [leaf for leaf in tree_leaves(whole) if leaf is not None]
    return list(zip(leaves[::2], leaves[1::2], strict=True))


class Several(same.Classifier):
    """Its loss is the sum of those of all loaders."""

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        batches = batches_in(batch)
        return torch.cat([x for x, _ in batches]), tuple(y for _, y in batches)

    def loss(self, output: Tensor, target: Any) -> Tensor:
        parts = output.split([len(y) for y in target])
        return sum(functional.cross_entropy(part, y) for part, y in zip(parts, target, strict=True))  # type: ignore[return-value]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Sees the combination, as it is on one device."""
        count = len(batches_in(batch))
        return tree_map(
            lambda leaf: leaf * count if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", torch.stack([x.sum() for x, _ in batches_in(batch)]).sum(), on_step=True, on_epoch=True)


def small(session: same.Session, steps: int, **options: Any) -> Any:
    """A loader with half the batch size."""
    data = same.Data(session.data.batch_size // 2)
    return data.loader(same.GLOBAL_BATCH // 2 * steps, seed=7, **options)


def large(session: same.Session, steps: int, **options: Any) -> Any:
    return session.data.loader(same.GLOBAL_BATCH * steps, **options)


def combining(combine: Callable[[same.Session], Any], *callbacks: Callback, **trainer: Any) -> Any:
    def script(session: same.Session) -> None:
        module = session.run.module = Several()
        made = session.trainer(**{"max_epochs": 2, "callbacks": [session.diary(), *callbacks], **trainer})
        made.fit(module, combine(session))
        session.run.results["batches"] = made.num_training_batches
        session.run.results["metrics"] = session.run.metrics

    return script


COMBINATIONS: dict[str, Callable[[same.Session], Any]] = {
    "a dict": lambda s: {"a": large(s, 4), "b": small(s, 3)},
    "a list": lambda s: [small(s, 2), large(s, 5)],
    "nested": lambda s: {"a": [large(s, 2), small(s, 5)], "b": small(s, 3)},
    "a dict of one": lambda s: {"a": large(s, 4)},
    "max_size_cycle": lambda s: CombinedLoader({"a": small(s, 2, num_workers=1), "b": large(s, 5)}, "max_size_cycle"),
    "max_size": lambda s: CombinedLoader({"a": large(s, 4), "b": small(s, 3)}, "max_size"),
    "max_size, the other way": lambda s: CombinedLoader([small(s, 2), large(s, 4)], "max_size"),
    "min_size": lambda s: CombinedLoader({"a": large(s, 4), "b": small(s, 3)}, "min_size"),
}


@pytest.mark.parametrize("name", sampled(COMBINATIONS, 1, seed=1))
def test_training_takes_the_combined_batches_of_one_device(tmp_path: Path, name: str) -> None:
    one, grid = same.run_both(combining(COMBINATIONS[name]), tmp_path)
    same.assert_same(hooks_of(one), hooks_of(grid), where="hooks")
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


def hooks_of(run: same.Run) -> list[Any]:
    """The hooks of a callback, whatever kind of batch they get."""
    return [[*entry[:2], ["batch" if arg == "mapping" else arg for arg in entry[2]]] for entry in run.diary("callback")]


@pytest.mark.parametrize(
    "options", sampled([{"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"accumulate_grad_batches": 2}], 1)
)
def test_limits_and_accumulation_count_combined_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    one, grid = same.run_both(combining(COMBINATIONS["a list"], **options), tmp_path)
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


def evaluated(mode: str) -> Callable[[same.Session], None]:
    def script(session: same.Session) -> None:
        """The last batches are of 5 samples and of 1, which cannot be divided."""
        data, half = session.data, same.Data(session.data.batch_size // 2)
        loaders = CombinedLoader({"a": data.loader(21, seed=2), "b": half.loader(9, seed=3)}, mode)  # type: ignore[arg-type]
        module = session.run.module = Several()
        trainer = session.trainer(max_epochs=1)
        trainer.fit(module, large(session, 2), loaders)
        session.run.results["fit"] = session.run.metrics
        session.run.results["test"] = trainer.test(module, loaders, verbose=False)

    return script


@pytest.mark.parametrize("mode", sampled(["min_size", "max_size", "max_size_cycle", "sequential"], 1))
def test_evaluations_take_the_combined_batches_of_one_device(tmp_path: Path, mode: str) -> None:
    one, grid = same.run_both(evaluated(mode), tmp_path)
    assert one.results["test"]
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


@pytest.mark.long
def test_a_kill_in_a_later_round_changes_nothing_and_a_replacement_joins_there(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = same.on_one_device(combining(COMBINATIONS["a list"]), tmp_path / "one")
    callbacks = [
        FaultInjectionCallback([Fault("kill", 1, 1, step=2), Fault("kill", 0, 0, step=6)]),
        AwaitReplacement([4, 8]),
    ]
    grid = same.on_a_grid(combining(COMBINATIONS["a list"], *callbacks), tmp_path, max_restarts=10)
    assert failures(grid.trainer) == rejoined(grid.trainer) == [(1, 1), (0, 0)]
    same.assert_same(one.weights, grid.weights)
    same.assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)


def shuffled(session: same.Session) -> Any:
    return CombinedLoader(
        {"a": small(session, 2, shuffle=True), "b": large(session, 5, shuffle=True)}, "max_size_cycle"
    )


@pytest.mark.parametrize("step", sampled([3, 5, 9], 1))
def test_a_run_resumes_in_the_round_where_it_was(tmp_path: Path, step: int) -> None:
    (tmp_path / "whole").mkdir()
    path = tmp_path / "saved.ckpt"
    whole = same.on_a_grid(combining(shuffled, same.SavesAt(step, path)), tmp_path / "whole")

    def resume(session: same.Session) -> None:
        session.run.module = Several()
        session.trainer(max_epochs=2).fit(session.run.module, shuffled(session), ckpt_path=path)

    resumed = same.on_a_grid(resume, tmp_path)
    same.assert_same(whole.weights, resumed.weights)
    assert whole.progress == resumed.progress

"""Sources of the steps that one worker runs, made from the user's DataLoaders.

A worker reads the micro-batches of its schedule by address; the user's hooks convert and move them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_recycle.data.dataloaders import (
    batching_of,
    check_dataloader,
    compare,
    is_stream,
    promises_nothing,
    yields_batches,
)
from lightning_recycle.data.iterable_style import StreamLoader
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.data.prebatched import BatchIterableLoader, GivenBatchLoader
from lightning_recycle.data.step_sources import SampleLoader, StepHandle, StepLoader
from lightning_recycle.randomness import layer_randomness, seeded_everything
from lightning_recycle.session.change_tracker import ABSENT
from lightning_recycle.session.lightning_internals import epochs_so_far, loaders_of, transfer_batch
from lightning_recycle.session.worker_context import WorkerContext

_PLAIN = (bool, int, float, str, type(None))
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class StepLoaders:
    """The sources of steps of one worker."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._loaders: list[StepLoader] = []
        self._transfers = True
        self._converting: list[Any] = []  # module and data module, if their hooks convert batches
        self._newest: StepHandle | None = None

    def setup(self, module: pl.LightningModule) -> None:
        """Called once ``module`` is that of this stage."""
        sources = [s for s in (module, getattr(self._context.trainer, "datamodule", None)) if s is not None]
        self._converting = [s for s in sources if any(is_overridden(hook, s) for hook in _TRANSFER_HOOKS)]
        self._transfers = self._context.device.type != "cpu" or bool(self._converting)

    def add(self, dataloader: Any) -> StepLoader:
        """A source of steps that reads what ``dataloader`` would read."""
        if isinstance(dataloader, StepLoader):  # in the user's CombinedLoader, where Lightning has put it
            dataloader = dataloader.dataloader
        loader = self._source_of(dataloader)
        if names := loader.lost_state:
            rank_zero_warn(
                f"{', '.join(names)} of the sampler is an iterator, whose place cannot be copied: a replacement reads"
                " this epoch in the order of the others, but later epochs in its own, and a resumed run draws another"
                " order. Keep a number of the epoch, a generator or a list instead."
            )
        loader.prepare = self._on_device
        if self._context.fitting:
            loader.set_epoch(epochs_so_far(self._context.trainer))
        self._loaders.append(loader)
        return loader

    def _source_of(self, dataloader: Any) -> StepLoader:
        """The step loader for a user's DataLoader: of batches, a stream, or samples.

        Warns on rank zero of data that each worker reads completely, and of samples that each epoch leaves out.
        """
        context = self._context
        training, grid, seed = context.trainer.training, context.run.data_grid, context.seed
        worker = context.run.data_worker(context.place.rank)
        pipelines = context.run.batch_pipelines
        steps: dict[str, Any] = {"batch_pipelines": pipelines, "evaluation": not training}
        if training and context.options.num_microbatches is None:
            check_dataloader(dataloader, grid.global_microbatches // pipelines, by_default=True)
        if yields_batches(dataloader):
            if training and grid.num_workers > 1:
                rank_zero_warn(
                    f"{type(dataloader).__name__} yields batches, so there are no samples to divide: every worker"
                    " iterates over it, which must give the same batches each time, and each of the"
                    f" {pipelines} pipelines trains on all of them, as under DDP. Use a"
                    " DataLoader over samples to share the work."
                )
            return BatchIterableLoader(dataloader, grid, seed, **steps)
        if is_stream(dataloader):
            if grid.num_workers > 1 and promises_nothing(dataloader):
                rank_zero_warn(
                    f"{type(dataloader.dataset).__name__} is an IterableDataset without state. Every worker reads all"
                    " of it, and a worker that joins, or a run that resumes, reads the epoch again up to its place:"
                    " it must give the same samples each time, in every process, or the run ends with an error. Give"
                    " it state_dict() and load_state_dict(), or __getitem__() and __len__(), to save that reading."
                )
            return StreamLoader(dataloader, grid, seed, **steps)
        kind = MicrobatchLoader if batching_of(dataloader)[0] is not None else GivenBatchLoader
        reads = worker.stage in (0, grid.stages - 1)
        loader = kind(dataloader, grid, worker.pipeline, seed, prefetch=reads, **steps)
        if loader.left_out:
            rank_zero_warn(
                f"Each epoch of the training leaves out {loader.left_out}. If that is what you want, give the"
                " DataLoader drop_last=True."
            )
        return loader

    def keep_for_training(self, loaders: Sequence[StepLoader]) -> None:
        """Closes training loaders other than ``loaders``, with their data read ahead."""
        for old in [loader for loader in self._loaders if not loader.evaluation and loader not in loaders]:
            old.close()
            self._loaders.remove(old)

    def set_epoch(self, epoch: int) -> None:
        for loader in self._loaders:
            loader.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        for loader in self._loaders:
            loader.reseed(seed)

    def compare(self, loaders: Sequence[StepLoader]) -> None:
        """Raises ConfigurationError unless all workers are about to read the same.

        On all workers, before the first step of an epoch.
        """
        if self._context.run.data_grid.num_workers > 1 and any(facts := [loader.facts() for loader in loaders]):
            compare(self._context.collectives.gather("data", facts).values())

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()

    @property
    def global_batch_size(self) -> int:
        """Samples per step, of the first loader if there are several."""
        training = (loader for loader in self._loaders if not loader.evaluation)
        return next((loader.global_batch_size for loader in training if isinstance(loader, SampleLoader)), 0)

    def _on_device(self, data: Any, handle: StepHandle, seed: int) -> Any:
        """Converts and moves a collated batch with the user's hooks."""
        trainer, device = self._context.trainer, self._context.device
        data = trainer.strategy.precision_plugin.convert_input(data)
        if not self._transfers:
            return data
        module = trainer.lightning_module
        with self._changing_once(handle), seeded_everything() as reseed, layer_randomness(device) as generator:
            reseed(seed)
            generator.manual_seed(seed)
            return transfer_batch(module, data, device, handle.loader.dataloader_idx)

    @contextmanager
    def _changing_once(self, handle: StepHandle) -> Iterator[None]:
        """Hooks in the block count a step once, however often it is read."""
        is_repeated = handle.kept is not None and handle is not self._newest
        if not is_repeated:
            self.take_back_changes(handle)
        tables = [(vars(source), dict(vars(source))) for source in self._converting]
        yield
        changes = [
            (table, name, old.get(name, ABSENT), new)
            for table, old in tables
            for name, new in table.items()
            if type(new) in _PLAIN and old.get(name, ABSENT) is not new
        ]
        earlier, handle.kept = handle.kept, changes
        if is_repeated:
            self.take_back_changes(handle)
            handle.kept = earlier
        else:
            self._newest = handle

    def take_back_changes(self, handle: StepHandle) -> None:
        """Takes back what converting the batch has changed: its step begins again."""
        for table, name, before, after in handle.kept or ():
            if table.get(name) is not after:
                continue  # others have changed it since
            table[name] = before
            if before is ABSENT:
                del table[name]
        handle.kept = None


def addressed_loaders(loop: Any) -> list[MicrobatchLoader]:
    """The loaders of a fit loop or an evaluation loop whose samples have addresses."""
    return [loader for loader in loaders_of(loop) if isinstance(loader, MicrobatchLoader)]

"""Requirements on Trainer, data and module, checked before a step is run.

docs/trainer_flags.md lists what is supported, with the reasons for the rest.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer, SparseAdam

from lightning_recycle.arguments import integer
from lightning_recycle.data.dataloaders import check_combination, check_dataloader
from lightning_recycle.devices import GRAPH_MAKER
from lightning_recycle.engines.worker_environment import Discovered
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, suggestion
from lightning_recycle.model.layers import names_by_parameter
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.runtime.stage import can_be_reset, fully_sharded_modules
from lightning_recycle.session.configuration import Options
from lightning_recycle.session.lightning_internals import mode_of, saves_on_exception, synchronises_batchnorm
from lightning_recycle.tensor_memory import DATA_PARALLEL, TENSOR_PARALLEL, is_divided_by
from lightning_recycle.torch_internals import fsdp_parameters, is_compiled, tree_leaves

_UNRESOLVED = re.compile(r"Parallelize plan key ('.*?') could not be resolved")
_GRAPHED = "make_graphed_callables.<locals>"  # in the name of the forward of what it returns
_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")


def check_trainer(trainer: pl.Trainer, outside: Discovered | None, is_remote: bool) -> None:
    """Refuses settings of the Trainer that the strategy cannot honour.

    Raises ConfigurationError if the Trainer has no device for this worker.
    """
    precision = trainer.precision
    if precision not in _PRECISIONS:
        raise UnsupportedFeatureError(
            f"strategy='recycle' does not support precision={precision!r}: it is untested. Use one of"
            f" {', '.join(map(repr, _PRECISIONS))}.{suggestion(precision, _PRECISIONS)}"
        )
    if trainer.num_nodes != 1 and outside is None and not is_remote:
        raise UnsupportedFeatureError(
            f"strategy='recycle' cannot start workers on num_nodes={trainer.num_nodes} machines by itself: start this"
            " script with recycle-run, or a recycle-coordinator and this script once for each worker, with"
            " RECYCLE_COORDINATOR=host:port; or use ReCycleStrategy(engine='ray')."
        )
    if synchronises_batchnorm(trainer):
        raise UnsupportedFeatureError(
            "strategy='recycle' does not support sync_batchnorm=True: there is no process group to synchronise over,"
            " and BatchNorm sees one micro-batch. Use LayerNorm, GroupNorm or RMSNorm, or leave sync_batchnorm=False."
        )
    _check_finders(trainer)
    integer(1).checked("Trainer", "accumulate_grad_batches", trainer.accumulate_grad_batches)
    if outside is not None:
        outside.check_device(trainer.num_devices)
        for callback in filter(saves_on_exception, trainer.checkpoint_callbacks):
            raise UnsupportedFeatureError(
                f"strategy='recycle' does not support {type(callback).__name__} on exceptions in a worker that was"
                " started by hand or by a cluster manager: only a launching process can make all workers save. Use"
                " ModelCheckpoint(every_n_train_steps=...)."
            )


def _check_finders(trainer: pl.Trainer) -> None:
    """Raises UnsupportedFeatureError for callbacks that tune."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder):
            search, value = "lr_find", "learning rate"
        elif isinstance(callback, BatchSizeFinder):
            search, value = "scale_batch_size", "batch size (of one pipeline)"
        else:
            continue
        raise UnsupportedFeatureError(
            f"strategy='recycle' does not support {type(callback).__name__} and Tuner.{search}, whose trials rewind a"
            f" training within one process. Tune on one device first, Tuner(Trainer(devices=1)).{search}(model, ...),"
            f" and give this run the {value} that it finds."
        )


def check_members(trainer: pl.Trainer, options: Options) -> None:
    """Refuses features that positions of several processes lack."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    averages = (StochasticWeightAveraging, WeightAveraging, ModelPruning, BaseFinetuning)
    used = [type(callback).__name__ for callback in callbacks if isinstance(callback, averages)]
    refused = {
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "precision='16-mixed'": trainer.precision == "16-mixed",
        f"the callback {', '.join(used)}": bool(used),
    }
    options.refuse_with_members(refused)
    module = trainer.lightning_module
    builds_layers = PipelineModule if isinstance(module, PipelineModule) else pl.LightningModule
    if not is_overridden("configure_model", module, builds_layers):
        sizes = {"tensor_parallel_size": options.tensor_parallel_size, "fsdp_size": options.fsdp_size}
        given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ConfigurationError(
            f"With {given}, {type(module).__name__} needs a configure_model() that divides its layers"
            " over self.device_mesh, or the processes of a position would do the same work: call parallelize_module()"
            " or fully_shard() there, or leave the option out."
        )


def check_shards(module: pl.LightningModule, sizes: tuple[int, int], warns: bool) -> None:
    """Refuses a ``fully_shard()`` that steps cannot use or redo."""
    name, tensor = type(module).__name__, sizes[1]
    sharded = list(fully_sharded_modules(module.modules()))
    if sharded and not can_be_reset():
        raise UnsupportedFeatureError(
            f"{name}.configure_model() calls fully_shard(), and torch {torch.__version__} cannot begin a step again in"
            " which a worker was lost. Use torch 2.13 or newer, or tensor_parallel_size instead of fsdp_size."
        )
    if module in sharded:
        raise UnsupportedFeatureError(
            f"{name}.configure_model() calls fully_shard(self), whose forward a step does not call. Shard its layers:"
            " fully_shard(self.model, mesh=self.device_mesh['data_parallel'])."
        )
    if warns and tensor > 1 and not any(is_divided_by(p, TENSOR_PARALLEL) for p in module.parameters()):
        rank_zero_warn(
            f"configure_model() of {name} makes no layer parallel over self.device_mesh['tensor_parallel']:"
            f" {tensor} processes of each position do the same work."
        )


def check_sharded_layers(module: pl.LightningModule, is_elsewhere: Callable[[str], bool], shards: int) -> None:
    """Checks FSDP2's result on the layers of this stage.

    Raises:
        ConfigurationError: for parameters that the members of a position would train apart.
        UnsupportedFeatureError: if layers of several stages are sharded as one module.
    """
    name = type(module).__name__
    unsharded = [
        n
        for n, p in module.named_parameters()
        if p.requires_grad and not is_divided_by(p, DATA_PARALLEL) and not is_elsewhere(n)
    ]
    if shards > 1 and unsharded:
        raise ConfigurationError(
            f"With fsdp_size={shards} the members of a position compute different samples, and configure_model() of"
            f" {name} leaves parameters that each of them would train alone: {', '.join(unsharded[:5])}. Call"
            " fully_shard(..., mesh=self.device_mesh['data_parallel']) for the modules that have them, or freeze them."
            " (A LayerSpec is built later; make layers under torch.device('meta') instead.)"
        )
    own_parameters, names = set(module.parameters()), {submodule: path for path, submodule in module.named_modules()}
    for submodule in fully_sharded_modules(module.modules()):
        if not own_parameters.issuperset(fsdp_parameters(submodule)):
            raise UnsupportedFeatureError(
                f"configure_model() calls fully_shard() for {name}.{names[submodule]}, whose layers are on several"
                " stages: call it for each layer instead."
            )


@contextlib.contextmanager
def plans_checked(module: pl.LightningModule) -> Iterator[None]:
    """Refuses plans of ``parallelize_module()`` that have no effect.

    Raises ConfigurationError if they name modules that do not exist, and no layer is made parallel in the block (torch
    warns of each such name and goes on), or if tied weights are separated there.
    """
    names = names_by_parameter(module.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:  # with the user's filters
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    found = [match[1] for warning in caught if (match := _UNRESOLVED.match(str(warning.message)))]
    if found and not any(is_divided_by(p, TENSOR_PARALLEL) for p in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_model() makes no layer parallel: its plan names {', '.join(found)}, and"
            " the module that it gives to parallelize_module() has no such parts. Name them from that module on, as in"
            " its named_modules()."
        )
    now = dict(module.named_parameters(remove_duplicate=False))
    for tied in names:
        if all(name in now for name in tied) and len({id(now[name]) for name in tied}) > 1:
            raise ConfigurationError(
                f"{type(module).__name__}.configure_model() separates the tied weights {' and '.join(tied)}:"
                f" parallelize_module() makes a parameter of each. Tie them again after it: self.{tied[1]} ="
                f" self.{tied[0]}. Call fully_shard() for one module that has both."
            )


def check_data_hook(module: pl.LightningModule, hook: str) -> None:
    """Raises ConfigurationError unless ``module`` has this ``hook`` for its data."""
    if not is_overridden(hook, module):
        raise ConfigurationError(
            f"The Trainer was given no data, and {type(module).__name__} has no {hook}(): give a DataLoader, as in"
            " trainer.fit(model, DataLoader(...)), or datamodule=..., or implement that method."
        )


def check_loaders(loaders: Any, microbatches: int | None) -> None:
    """Refuses data without addresses."""
    found = loaders_in(loaders)
    for loader in found:
        check_dataloader(loader, microbatches)
    if microbatches is not None or (isinstance(loaders, CombinedLoader) and mode_of(loaders) != "sequential"):
        check_combination(found)


def loaders_in(loaders: Any) -> list[Any]:
    """The single loaders of an argument of the Trainer's entry point."""
    if loaders is None or isinstance(loaders, pl.LightningDataModule):
        return []
    return list(loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders))


def check_trained(module: pl.LightningModule, trains: bool) -> None:
    """Raises ConfigurationError unless a stage has something to train."""
    if not trains:
        raise ConfigurationError(
            f"No parameter of {type(module).__name__} requires a gradient, so there is nothing to train: set"
            " requires_grad = True for those that are to be trained."
        )


def check_loss(module: pl.LightningModule) -> None:
    """Raises ConfigurationError for a PipelineModule without loss."""
    if isinstance(module, PipelineModule) and type(module).loss is PipelineModule.loss and "loss" not in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__} must implement loss(self, output, target), the mean over a micro-batch, to be"
            " trained. (A submodule self.loss = ... is hidden by the method: give it another name, and call it there.)"
        )


def check_graphs(module: pl.LightningModule, stages: int) -> None:
    """Refuses pipeline layers that torch replays from one CUDA graph.

    Such a graph has one set of activations. In a pipeline the next micro-batch goes forward before the previous one has
    come back, and its gradients would be those of other activations, without an error.
    """
    graphed = (name for name, part in module.named_modules() if _GRAPHED in getattr(part.forward, "__qualname__", ""))
    if stages > 1 and (name := next(graphed, None)) is not None:
        raise UnsupportedFeatureError(
            f"{type(module).__name__}.{name} was made by {GRAPH_MAKER}, which has room for the"
            " activations of one micro-batch; a pipeline has several in flight. Use torch.compile(layer,"
            ' mode="reduce-overhead"), or one stage.'
        )


def warn_of_lost_compilation(module: pl.LightningModule) -> None:
    """Warns of modules that were compiled in place in the launching process."""
    names = [name for name, part in module.named_modules() if is_compiled(part)]
    if names:
        rank_zero_warn(
            f"{type(module).__name__}.{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} will run without being"
            " compiled: module.compile() holds in the process that calls it. Call it in configure_model(), which"
            " workers run, or use torch.compile(module), which they get."
        )


@contextlib.contextmanager
def several_optimizers_refused(module: pl.LightningModule) -> Iterator[None]:
    """Raises ConfigurationError for several optimizers of a PipelineModule."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(module, PipelineModule) or "multiple optimizers" not in str(error):
            raise
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers() returned several optimizers; a PipelineModule has one,"
            " with any number of parameter groups. Several optimizers need a LightningModule with manual optimization"
            " and one stage (pipeline_parallel_size=1)."
        ) from None


def check_optimizers(optimizers: list[Optimizer], several: bool = False) -> None:
    """Refuses a module without optimizer, with several unless they may be, or sparse.

    Raises ConfigurationError or UnsupportedFeatureError.
    """
    if not optimizers or (len(optimizers) > 1 and not several) or not optimizers[0].param_groups:
        raise ConfigurationError(
            "configure_optimizers() returned no optimizer; the strategy needs"
            f" {'at least' if several else 'exactly'} one (with any number of parameter groups): return for example"
            " torch.optim.AdamW(self.parameters())."
        )
    for optimizer in optimizers if not several else ():
        if isinstance(optimizer, SparseAdam):
            raise UnsupportedFeatureError(
                "configure_optimizers() returned SparseAdam, which needs sparse gradients; the strategy adds them up in"
                " dense buffers. Use torch.optim.Adam, and sparse=False in embeddings."
            )

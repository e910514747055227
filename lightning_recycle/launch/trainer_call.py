"""Call of a Trainer's entry point: the function that every worker runs, with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

__all__ = ["TrainerCall"]

_EVALUATED = {
    TrainerFn.VALIDATING: "val_dataloaders",
    TrainerFn.TESTING: "test_dataloaders",
    TrainerFn.PREDICTING: "predict_dataloaders",
}


@dataclass(frozen=True)
class TrainerCall:
    """A call of ``function``, the implementation of ``fit`` or of another entry point.

    Args:
        trainer: the Trainer.
        function: a bound method of it.
        args, kwargs: the arguments of that method.
    """

    trainer: pl.Trainer
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def fits(self) -> bool:
        """Whether it trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    @property
    def loaders(self) -> Any:
        """The argument with the DataLoaders of this function, of training if it trains."""
        return self.arguments.get("train_dataloaders" if self.fits else "dataloaders")

    @property
    def data(self) -> dict[str, Any]:
        """The data among the arguments, by name: ``datamodule``, and DataLoaders."""
        given = self.arguments
        data = {name: value for name, value in given.items() if name.endswith("dataloaders") or name == "datamodule"}
        for name, value in data.items():
            if isinstance(value, pl.LightningDataModule):  # Lightning takes it instead of loaders, too
                return {**data, name: None, "datamodule": value}
        return data

    def from_checkpoint(self, path: Any) -> TrainerCall:
        """The same call with another ``ckpt_path``."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments["ckpt_path"] = path
        return replace(self, args=bound.args, kwargs=bound.kwargs)

    def attach_data(self) -> None:
        """Links module, data and Trainer in this process, as the function does in the workers."""
        assert self.trainer.state.fn is not None
        names = {"dataloaders": _EVALUATED.get(self.trainer.state.fn, "")}
        data = {names.get(name, name): value for name, value in self.data.items()}
        self.trainer._data_connector.attach_data(self.trainer.lightning_module, **data)

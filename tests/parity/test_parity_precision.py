"""Precisions: what is computed in which dtype is as on one device, and so are the results, as far as its bits go."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_script import Classifier, Session, assert_same, run_both
from support.sampling import sampled
from support.training import difference
from torch import Tensor, nn

BYTES = {torch.float32: 4.0, torch.float64: 8.0, torch.bfloat16: 2.0}


class InDefaultPrecision(Classifier):
    """Layers in float32; says in which dtype it finds outputs, parameters and gradients."""

    def configure_pipeline(self) -> list[Any]:
        return [layer.float() if isinstance(layer, nn.Module) else layer for layer in super().configure_pipeline()]

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.log("output_bytes", float(output.element_size()))

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        super().on_validation_output(output, target)
        self.log("val_output_bytes", float(output.element_size()))
        self.log("made_bytes", float(torch.ones(1).element_size()))  # the default dtype inside hooks
        self.log("product_bytes", float((torch.ones(2, 2) @ torch.ones(2, 2)).element_size()))  # autocast

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameter = next(self.parameters())
        self.log("parameter_bytes", float(parameter.element_size()))
        self.log("gradient_bytes", float(parameter.grad.element_size()))


def precise(precision: str) -> Callable[[Session], None]:
    def script(session: Session) -> None:
        session.fit(InDefaultPrecision(), validates=True, max_epochs=2, precision=precision)

    return script


@pytest.mark.parametrize(("precision", "weights", "outputs", "tolerance"), sampled([
    ("32-true", torch.float32, torch.float32, 1e-5),
    ("64-true", torch.float64, torch.float64, 1e-10),
    # The sums over micro-batches are rounded to 8 bits, at other places than on one device.
    ("bf16-true", torch.bfloat16, torch.bfloat16, 0.03),
    ("bf16-mixed", torch.float32, torch.bfloat16, 0.01),
], 2, rest=pytest.mark.long))  # fmt: skip
def test_a_precision_computes_in_the_same_dtypes(tmp_path, precision, weights, outputs, tolerance):
    one, grid = run_both(precise(precision), tmp_path, dtype=torch.float32)
    dtypes = {name: value for name, value in one.metrics.items() if name.endswith("_bytes")}
    assert dtypes["output_bytes"] == dtypes["val_output_bytes"] == BYTES[outputs]
    assert dtypes["parameter_bytes"] == dtypes["gradient_bytes"] == BYTES[weights]
    assert dtypes == {name: value for name, value in grid.metrics.items() if name.endswith("_bytes")}
    for run in (one, grid):
        assert {tensor.dtype for tensor in run.weights.values()} == {weights}
        assert difference(run.weights, Classifier().state_dict()) > 5 * tolerance, "the training changed nothing"
    assert_same(one.weights, grid.weights, tolerance)
    for name in ("train_loss", "val_loss"):
        assert one.metrics[name] == pytest.approx(grid.metrics[name], rel=tolerance)

"""The graph of the model that TensorBoard shows is the whole one, also where each worker has one stage."""

from pathlib import Path
from typing import Any

import pytest
import same_script as same
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from support.sampling import sampled

from lightning_recycle import LayerSpec


class WithExample(same.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.float64)


class OfRecipes(WithExample):
    def configure_pipeline(self) -> list[Any]:
        width = {"dtype": torch.float64}
        return [LayerSpec(torch.nn.Linear, 8, 16, **width), LayerSpec(torch.nn.Linear, 16, same.CLASSES, **width)]


def layers_in_the_graph(run: same.Run) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.root / "board" / "version_0"))
    accumulator.Reload()
    parts = [node.name.split("/") for node in accumulator.Graph().node]
    return {part for name in parts for part in name if part.startswith("Linear")}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*trace.*")
@pytest.mark.parametrize("module", sampled([WithExample, OfRecipes], 1, rest=pytest.mark.long))
def test_the_graph_is_that_of_the_whole_model(module: Any, tmp_path: Path) -> None:
    def script(session: same.Session) -> None:
        board = TensorBoardLogger(session.root, name="board", version=0, log_graph=True)
        session.fit(module(), max_steps=1, logger=board)

    one, grid = same.run_both(script, tmp_path)
    assert len(layers_in_the_graph(one)) >= 2
    assert layers_in_the_graph(one) == layers_in_the_graph(grid)

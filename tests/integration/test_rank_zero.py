"""The process that downloads and writes is one and the same on each machine, whatever idiom asks for it."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from machines import await_listening
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.scripts import COORDINATOR
from support.training import failures, grid_trainer
from support.waiting import PATIENCE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.network.addresses_and_keys import free_port

IDIOMS = {
    "nothing": lambda trainer: True,
    "rank_zero_only": lambda trainer: rank_zero_only.rank == 0,
    "is_global_zero": lambda trainer: trainer.is_global_zero,
    "local_rank": lambda trainer: trainer.local_rank == 0,
    "node_rank": lambda trainer: trainer.node_rank == 0 and trainer.local_rank == 0,
    "all": lambda trainer: trainer.is_global_zero and trainer.local_rank == trainer.node_rank == rank_zero_only.rank,
}


class Downloads(L.LightningDataModule):
    """Writes down who prepares data, who passes a guard in ``setup``, and where."""

    def __init__(self, folder: Path, idiom: str, per_node: bool = True) -> None:
        super().__init__()
        self.folder, self.idiom, self.prepare_data_per_node = folder, idiom, per_node

    def _note(self, hook: str) -> None:
        if IDIOMS[self.idiom](self.trainer):
            strategy: Any = self.trainer.strategy
            name = f"{hook}-{os.environ.get('RECYCLE_NODE', '')}-{strategy.grid_rank}-{strategy.incarnation}"
            (self.folder / name).touch()

    def prepare_data(self) -> None:
        self._note("prepare")

    def setup(self, stage: str) -> None:
        self._note("setup")

    def train_dataloader(self) -> Any:
        assert list(self.folder.glob("prepare-*"))
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)  # processes that are started by hand begin alike
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def names(folder: Path, hook: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{hook}-*"))


@pytest.mark.parametrize(("idiom", "stages"), sampled(itertools.product(IDIOMS, [1, 2]), 2))
def test_one_process_prepares_data_and_it_is_the_one_that_writes(tmp_path, idiom, stages):
    run = grid_trainer(2, stages, [Fault("kill", 1, 0, step=2)], max_steps=4)
    run.fit(Net(), datamodule=Downloads(tmp_path, idiom))
    leader = stages - 1
    assert failures(run) == [(1, 0)]
    assert names(tmp_path, "prepare") == [f"prepare--{leader}-0"]
    if idiom != "nothing":
        assert names(tmp_path, "setup") == [f"setup--{leader}-0"]


def test_after_the_loss_of_the_leader_nothing_is_prepared_again_behind_a_guard(tmp_path):
    waits = AwaitReplacement(range(3, 12))
    run = grid_trainer(2, 2, [Fault("kill", 0, 1, step=1)], {"max_restarts": 5}, max_steps=12, callbacks=[waits])
    run.fit(Net(), datamodule=Downloads(tmp_path, "is_global_zero"))
    assert rejoined(run) == [(0, 1)]
    assert names(tmp_path, "prepare") == ["prepare--1-0"]


SCRIPT = """
import sys
from pathlib import Path
import lightning as L
from test_rank_zero import Downloads, Net
from support.training import QUIET
from support.options import recycle_strategy
if __name__ == '__main__':
    folder, idiom, per_node = sys.argv[1:]
    trainer = L.Trainer(accelerator='cpu', devices=2, num_nodes=2, strategy=recycle_strategy(pipeline_parallel_size=2),
                        max_steps=3, **QUIET)
    trainer.fit(Net(), datamodule=Downloads(Path(folder), idiom, per_node == 'True'))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("idiom", "per_node", "numbered"), sampled(itertools.product(IDIOMS, [True, False], [True, False]), 3)
)
def test_two_machines_prepare_as_under_ddp(tmp_path, idiom, per_node, numbered):
    """``numbered``: whether the workers are told their number on their machine; those started by hand may not be."""
    at = f"127.0.0.1:{free_port('127.0.0.1')}"
    environment = {**os.environ, "RECYCLE_KEY": "a secret of 16 bytes or more", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    served = subprocess.Popen(
        [*COORDINATOR, "--listen", at, "--start-timeout", str(PATIENCE)], env=environment, **pipes
    )
    started = [served]
    try:
        await_listening(served)
        for node, number in itertools.product("ab", range(2)):
            own = {"RECYCLE_COORDINATOR": at, "RECYCLE_NODE": node}
            own |= {"LOCAL_RANK": str(number)} if numbered else {}
            script = [sys.executable, "-c", SCRIPT, str(tmp_path), idiom, str(per_node)]
            started.append(subprocess.Popen(script, env={**environment, **own}, cwd=Path(__file__).parent, **pipes))
        said = [process.communicate(timeout=PATIENCE)[0] for process in started[1:]]
        assert [process.returncode for process in started[1:]] == [0] * 4, "".join(said)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    prepared = names(tmp_path, "prepare")
    one_in_all = not per_node or idiom in ("rank_zero_only", "is_global_zero", "node_rank", "all")
    assert len(prepared) == len({name.split("-")[1] for name in prepared}) == (1 if one_in_all else 2)
    assert any(name.split("-")[2] == "1" for name in prepared)  # the leader

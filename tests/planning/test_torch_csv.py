"""Plans as ``torch.distributed.pipelining`` reads them, judged by running them there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from lightning_recycle import planning as p
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.plan_library import save_torch_csv

STAGES, MICROBATCHES, WIDTH = 4, 6, 8
PROBLEM = p.Problem(p.Grid(1, STAGES, MICROBATCHES), p.Costs.uniform(STAGES))


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double() for _ in range(STAGES)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    shape = (2 * MICROBATCHES, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def run_rank(rank: int, folder: Path, files: list[Path]) -> None:
    """Runs each schedule on one stage, and saves the gradients."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES)
    inputs, targets = data()
    for file in files:
        module = stages()[rank]
        stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
        runtime = _PipelineScheduleRuntime([stage], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        runtime._load_csv(str(file), format="compute_only")
        if rank == 0:
            runtime.step(inputs)
        elif rank == STAGES - 1:
            runtime.step(target=targets, losses=[])
        else:
            runtime.step()
        torch.save([parameter.grad for parameter in module.parameters()], f"{file}.{rank}")
    dist.destroy_process_group()


@pytest.mark.long
def test_torch_runs_the_plans_and_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    problems = {
        "memory without a limit": PROBLEM,
        "memory of 1F1B": replace(PROBLEM, in_flight_limit=(4, 3, 2, 1)),
        "fused backwards": replace(PROBLEM, technique=p.Technique(False, False)),
        "unequal costs": replace(PROBLEM, costs=replace(PROBLEM.costs, forward=(1.0, 2.0, 0.5, 1.0))),
    }
    files, actions = [], set()
    for name, problem in problems.items():
        files.append(tmp_path / f"{name}.csv")
        save_torch_csv(files[-1], p.heuristic(problem))
        text = files[-1].read_text()
        actions |= {action[1] for action in text.replace("\n", ",").split(",") if action}
        assert [line.count("F") for line in text.splitlines()] == [MICROBATCHES] * STAGES
    assert actions == set("FBIW")
    spawn(run_rank, (tmp_path, files), nprocs=STAGES)
    whole = stages()
    inputs, targets = data()
    nn.functional.mse_loss(nn.Sequential(*whole)(inputs), targets).backward()
    for rank, module in enumerate(whole):
        for file in files:
            for found, parameter in zip(torch.load(f"{file}.{rank}"), module.parameters(), strict=True):
                assert parameter.grad is not None
                assert parameter.grad.abs().max() > 1e-6
                torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-15)


def test_the_lines_of_one_pipeline_serve_all(tmp_path: Path) -> None:
    save_torch_csv(tmp_path / "one.csv", p.heuristic(PROBLEM))
    save_torch_csv(tmp_path / "three.csv", p.heuristic(replace(PROBLEM, grid=p.Grid(3, STAGES, MICROBATCHES))))
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "three.csv").read_text()
    assert (tmp_path / "one.csv").read_text().startswith("0F0,0F1,")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(PROBLEM, grid=p.Grid(3, 4, 6), failed=frozenset({p.Worker(1, 2)})), "binds each stage to one rank"),
        (replace(PROBLEM, grid=p.Grid(3, 4, 6), worker_factors=((p.Worker(1, 2), 2.0),)), "binds each stage to one"),
        (replace(PROBLEM, memory=p.Memory((9,) * 4, (0,) * 4, (1,) * 4, (1,) * 4, (0.1,) * 4)), "memory.checkpoint"),
    ],
)
def test_what_torch_cannot_run_is_refused_with_the_reason(tmp_path: Path, problem: p.Problem, reason: str) -> None:
    with pytest.raises(PlanningError, match=reason):
        save_torch_csv(tmp_path / "schedule.csv", p.heuristic(problem))
    assert list(tmp_path.iterdir()) == []

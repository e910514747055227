"""The Hydra configuration that ships with the package, as ``lightning_recycle.conf``.

In an application: ``@hydra.main(config_path="pkg://lightning_recycle.conf", ...)``, or name it as a search path,
``hydra.searchpath=[pkg://lightning_recycle.conf]``, to reuse the groups in a configuration of your own. The classes of
the groups ``model`` and ``data`` are those of ``examples/``; everything else comes with the package.

Faults are placed relative to the grid and to the length of the run, so that the same option fits every job of a sweep.
Importing this package, which Hydra does for ``pkg://``, registers what they are placed with:

- ``${recycle.part:400,0.5}``: the step after that part of the run;
- ``${recycle.pipeline:3,2}`` and ``${recycle.stage:3,2}``: position of rank 3 where pipelines have 2 stages;
- ``${recycle.last_stage:2}``: the last one's index.
"""

from typing import Any

from omegaconf import OmegaConf


def _whole(meaning: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{meaning} is {value!r}, and the chosen faults are placed by it: give an integer of at least 1, or choose"
            " faults=none"
        )
    return value


def _part(steps: Any, part: Any) -> int:
    return int(_whole("trainer.max_steps", steps) * float(part))


def _pipeline(rank: Any, stages: Any) -> int:
    return int(rank) // _whole("strategy.pipeline_parallel_size", stages)


def _stage(rank: Any, stages: Any) -> int:
    return int(rank) % _whole("strategy.pipeline_parallel_size", stages)


def _last_stage(stages: Any) -> int:
    return _whole("strategy.pipeline_parallel_size", stages) - 1


for _name, _resolver in (
    ("part", _part),
    ("pipeline", _pipeline),
    ("stage", _stage),
    ("last_stage", _last_stage),
):
    OmegaConf.register_new_resolver(f"recycle.{_name}", _resolver, replace=True)

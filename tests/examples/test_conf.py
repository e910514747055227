"""Every option of every configuration group composes, and names classes that exist with arguments they take."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_recycle.planning import ExactPlanner

CONF = Path(__file__).parents[2] / "conf"
GROUPS = [
    group for default in OmegaConf.load(CONF / "train_gpt.yaml").defaults if default != "_self_" for group in default
]
OPTIONS = sorted(f"{group}={file.stem}" for group in GROUPS for file in (CONF / group).glob("*.yaml"))


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("lightning_recycle.conf", version_base=None):
        return compose("train_gpt", overrides=["output_dir=somewhere", *overrides])


def targets(node: Any) -> list[dict[str, Any]]:
    """All mappings with a ``_target_`` in a resolved configuration, outer ones first."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node] if isinstance(node, dict) and "_target_" in node else []
    return own + [target for child in children for target in targets(child)]


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_its_targets_take_their_arguments(option: str) -> None:
    config = OmegaConf.to_container(composed(option), resolve=True, throw_on_missing=True)
    found = targets(config)
    assert {"gpt.GPT", "stdlib_text.StdlibText", "lightning.Trainer"} <= {target["_target_"] for target in found}
    for target in found:
        arguments = {name: value for name, value in target.items() if not name.startswith("_")}
        inspect.signature(get_class(target["_target_"])).bind(**arguments)


def test_default_is_two_pipelines_of_two_stages_that_lose_one_worker_half_way() -> None:
    config = composed()
    assert config.trainer.devices == 2 * config.strategy.pipeline_parallel_size
    assert config.data.batch_size % config.strategy.num_microbatches == 0
    (fault,) = config.faults.faults
    assert fault.kind == "kill"
    assert fault.step == config.trainer.max_steps // 2


def test_single_device_has_the_global_batch_of_two_pipelines_and_no_workers_to_lose() -> None:
    config, distributed = composed("strategy=single_device"), composed()
    assert config.trainer.devices == 1
    assert config.data.batch_size == 2 * distributed.data.batch_size
    assert not config.faults.faults
    assert not config.callbacks


def test_the_planner_reaches_the_strategy() -> None:
    config = composed("planner=cbc", "planner.time_limit=5.0")
    assert instantiate(config.strategy.planner) == ExactPlanner("cbc", time_limit=5.0)

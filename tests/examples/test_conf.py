"""Every option of every configuration group composes, and names classes that exist with arguments they take."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from support.sampling import sampled

from lightning_recycle.arguments import OptionGroup
from lightning_recycle.planning import ExactPlanner, Grid, Worker
from lightning_recycle.planning.grid import Positions
from lightning_recycle.session.configuration import Options

CONF = Path(__file__).parents[2] / "conf"
APPLICATIONS = {
    "train_gpt": {"gpt.GPT", "stdlib_text.StdlibText"},
    "train_vision": {"convnet.ConvNet", "digits.Digits"},
}
GROUPS = sorted(
    group.removeprefix("override ")
    for default in OmegaConf.load(CONF / "train_gpt.yaml").defaults
    if default != "_self_"
    for group in default
)
OF_ONE_APPLICATION = {"model", "data"}
OPTIONS = sorted(
    (application, f"{group}={file.stem}")
    for application in APPLICATIONS
    for group in GROUPS
    for file in (CONF / group).glob("*.yaml")
    if group not in OF_ONE_APPLICATION or file.stem.startswith("digits") == (application == "train_vision")
    if application == "train_gpt" or file.stem != "demo"
)
FAULTS = sorted(file.stem for file in (CONF / "faults").glob("*.yaml"))


def composed(*overrides: str, application: str = "train_gpt") -> DictConfig:
    with initialize_config_module("lightning_recycle.conf", version_base=None):
        return compose(application, overrides=["output_dir=somewhere", *overrides])


def targets(node: Any) -> list[dict[str, Any]]:
    """All mappings with a ``_target_`` in a resolved configuration, outer ones first."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node] if isinstance(node, dict) and "_target_" in node else []
    return own + [target for child in children for target in targets(child)]


def test_the_groups_are_those_that_are_documented():
    assert GROUPS == ["callbacks", "data", "experiment", "faults", "logger", "model", "planner", "strategy", "trainer"]


@pytest.mark.parametrize(("application", "option"), sampled(OPTIONS, 10, rest=pytest.mark.long))
def test_option_composes_and_its_targets_take_their_arguments(application, option):
    config = OmegaConf.to_container(composed(option, application=application), resolve=True, throw_on_missing=True)
    found = targets(config)
    assert {*APPLICATIONS[application], "lightning.Trainer"} <= {target["_target_"] for target in found}
    for target in found:
        arguments = {name: value for name, value in target.items() if not name.startswith("_")}
        inspect.signature(get_class(target["_target_"])).bind(**arguments)


@pytest.mark.parametrize("application", APPLICATIONS)
def test_default_is_two_pipelines_of_two_stages_that_lose_one_worker_half_way(application):
    config = composed(application=application)
    assert config.trainer.devices == 2 * config.strategy.pipeline_parallel_size
    assert config.data.batch_size % config.strategy.num_microbatches == 0
    (fault,) = config.faults.faults
    assert fault.kind == "kill"
    assert fault.step == config.trainer.max_steps // 2


@pytest.mark.parametrize("application", APPLICATIONS)
def test_single_device_has_the_global_batch_of_two_pipelines_and_no_workers_to_lose(application):
    config = composed("strategy=single_device", application=application)
    distributed = composed(application=application)
    assert config.trainer.devices == 1
    assert config.data.batch_size == 2 * distributed.data.batch_size
    assert not config.faults.faults
    assert not config.callbacks


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("faults", FAULTS)
def test_faults_fit_the_grid_and_the_length_of_the_run(faults, stages):
    config = composed(f"faults={faults}", f"strategy.pipeline_parallel_size={stages}", "trainer.max_steps=10")
    callback = instantiate(config.faults, _convert_="all")
    callback.check(Positions(Grid(4 // stages, stages, 4)))
    assert all(fault.step < 10 for fault in callback.faults)
    assert bool(callback.faults or callback.mtbf or callback.trace) == (faults != "none")


def test_the_leader_is_in_the_last_stage_and_a_node_has_neighbouring_ranks():
    def lost(faults: str, stages: int) -> list[Worker]:
        config = composed(f"faults={faults}", f"strategy.pipeline_parallel_size={stages}")
        return [Worker(fault.pipeline, fault.stage) for fault in config.faults.faults]

    assert lost("kill_leader", 3) == [Worker(0, 2)]
    assert [Grid(4, 1, 1).rank(worker) for worker in lost("node", 1)] == [2, 3]
    assert [Grid(2, 2, 1).rank(worker) for worker in lost("node", 2)] == [2, 3]


def test_faults_that_cannot_be_placed_say_what_is_missing():
    config = composed("faults=kill_leader", "strategy.pipeline_parallel_size=null")
    with pytest.raises(InterpolationResolutionError, match=r"strategy\.pipeline_parallel_size is None.*faults=none"):
        OmegaConf.to_container(config, resolve=True)
    config = composed("trainer.max_steps=-1")
    with pytest.raises(InterpolationResolutionError, match=r"trainer\.max_steps is -1.*faults=none"):
        OmegaConf.to_container(config, resolve=True)


GROUPS_OF_OPTIONS = {item.name: item.default for item in fields(Options) if isinstance(item.default, OptionGroup)}


@pytest.mark.parametrize("group", GROUPS_OF_OPTIONS)
def test_the_default_of_a_group_of_options_is_that_of_its_dataclass(group):
    default = GROUPS_OF_OPTIONS[group]
    options = OmegaConf.to_container(composed().strategy, resolve=True)[group]
    assert options.pop("_target_") == f"lightning_recycle.{type(default).__name__}"
    options |= {"planner": "heuristic"} if group == "planning" else {}
    assert list(options) == [item.name for item in fields(default)]
    assert {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()} == vars(default)


def test_options_of_the_strategy_itself_are_in_its_file():
    own = {item.name for item in fields(Options)}
    assert set(composed().strategy) - {"_target_"} == own


def test_an_option_of_a_group_is_given_on_the_command_line():
    strategy = instantiate(composed("strategy.recovery.max_restarts=3").strategy, _convert_="all")
    assert strategy.recovery.max_restarts == 3


def test_the_planner_reaches_the_strategy():
    config = composed("planner=cbc", "planner.time_limit=5.0")
    assert instantiate(config.strategy.planning.planner) == ExactPlanner("cbc", time_limit=5.0)


def test_experiments_are_changes_to_several_groups():
    demo, rejoin, spot = (composed(f"experiment={name}") for name in ("demo", "rejoin", "spot"))
    (fault,) = demo.faults.faults
    assert fault.step < demo.trainer.max_steps
    assert fault.step % demo.compare.checkpoint_every == demo.compare.checkpoint_every // 2
    assert (rejoin.strategy.recovery.max_restarts, composed().strategy.recovery.max_restarts) == (10, 0)
    assert spot.faults.trace
    assert spot.strategy.recovery.max_restarts == 100
    assert spot.strategy.recovery.on_stage_lost == "auto"
    assert spot.trainer.enable_checkpointing


def test_what_is_given_on_the_command_line_wins_over_an_experiment():
    config = composed("experiment=spot", "faults=hang", "strategy.recovery.on_stage_lost=raise")
    assert config.faults.faults[0].kind == "hang"
    assert config.strategy.recovery.on_stage_lost == "raise"

"""Options of the strategy: names, groups, defaults, checks, and the answer to a name that does not exist."""

import copy
import importlib.util
import inspect
import pickle
from dataclasses import fields
from typing import Any

import jsonargparse
import lightning as L
import pytest

import lightning_recycle
from lightning_recycle import (
    CheckpointOptions,
    ConfigurationError,
    MonitoringOptions,
    PlanningOptions,
    RayEngine,
    RecoveryOptions,
    ReCycleStrategy,
    VerificationOptions,
)
from lightning_recycle.arguments import OptionGroup
from lightning_recycle.errors import unknown
from lightning_recycle.launch.launcher import _shown_at
from lightning_recycle.session.configuration import Options

OF_LIGHTNING = {"accelerator", "checkpoint_io", "precision_plugin"}
SIGNATURE = {
    name: parameter
    for name, parameter in inspect.signature(ReCycleStrategy).parameters.items()
    if name not in OF_LIGHTNING
}
GROUPS = {name: type(p.default) for name, p in SIGNATURE.items() if isinstance(p.default, OptionGroup)}


def test_the_strategy_has_at_most_thirteen_arguments_and_two_of_them_by_position() -> None:
    assert len(SIGNATURE) <= 13
    by_position = [name for name, p in SIGNATURE.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_position == ["pipeline_parallel_size", "num_microbatches"]


def test_the_signature_is_that_of_the_options() -> None:
    assert {name: p.default for name, p in SIGNATURE.items()} == {item.name: item.default for item in fields(Options)}


def test_a_name_is_that_of_one_option() -> None:
    names = [item.name for kind in GROUPS.values() for item in fields(kind)]
    assert len(names) == len({*names, *SIGNATURE}) - len(SIGNATURE)


@pytest.mark.parametrize("kind", GROUPS.values())
def test_every_option_is_described_where_it_is_defined(kind: type[OptionGroup]) -> None:
    assert getattr(lightning_recycle, kind.__name__) is kind
    for item in fields(kind):
        assert f"\n        {item.name}: " in (kind.__doc__ or "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_restarts": 3}, r"\(max_restarts=3\): write recovery=RecoveryOptions\(max_restarts=3\)\.$"),
        ({"verify": 0.1}, r"write verification=VerificationOptions\(verify=0\.1\)"),
        ({"max_restart": 3}, r"no such option. Did you mean recovery=RecoveryOptions\(max_restarts=3\)\?$"),
        ({"num_microbatch": 3}, r"\(num_microbatch=3\): .* Did you mean num_microbatches=3\?$"),
        ({"layer": "model.blocks"}, "Did you mean layers='model.blocks'"),
        ({"num_stages": 2}, r"no such option\. Write pipeline_parallel_size=2\.$"),
        ({"pipelines": 2}, r"devices \* num_nodes = pipelines \* pipeline_parallel_size\.$"),
        ({"precision": "bf16"}, r"Give the Trainer precision='bf16'\.$"),
        ({"micro_batch_size": 2}, r"num_microbatches=N, for micro-batches of batch_size / N samples\.$"),
        ({"timeout": 5.0}, r"HeartbeatCallback\(timeout=5\.0\)"),
        ({"on_stage_los": 2}, r"no such option\. There are"),  # on_stage_lost does not take a number
        ({"zzz": 3}, "There are pipeline_parallel_size, num_microbatches, tensor_parallel_size, fsdp_size, layers, "),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_the_nearest_that_does(options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ReCycleStrategy(**options)


def test_a_group_answers_likewise() -> None:
    misspelt: Any = {"checksums_every": 3}
    with pytest.raises(ConfigurationError, match=r"VerificationOptions\(checksums_every=3\): .* checksum_every=3\?$"):
        VerificationOptions(**misspelt)


def test_a_single_choice_is_named_without_a_question() -> None:
    assert unknown("costs", "fil", ["file"]) == "unknown costs 'fil': the only one is file."
    assert unknown("costs", "fil", ["file", "unit"]).endswith("choose one of file, unit. Did you mean 'file'?")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: RecoveryOptions(max_restarts=-1),
            r"RecoveryOptions\(max_restarts=-1\): give an integer of at least 0",
        ),
        (lambda: RecoveryOptions(max_restarts=True), "max_restarts=True"),
        (lambda: RecoveryOptions(rebalance="sometimes"), "use 'auto', 'always' or 'never'.$"),  # type: ignore[arg-type]
        (lambda: RecoveryOptions(start_timeout=0), "more than 0"),
        (lambda: VerificationOptions(verify=2), "between 0 and 1"),
        (lambda: PlanningOptions(split_backward=2), "split_backward=2"),  # type: ignore[arg-type]
        (lambda: PlanningOptions(split_backward="ture"), r"or False. Did you mean True\?$"),  # type: ignore[arg-type]
        (lambda: PlanningOptions(partition=[3, 0]), r"PlanningOptions\(partition=\[3, 0\]\): use 'count', or"),
        (lambda: PlanningOptions(planner="highs2"), r"^PlanningOptions\(planner='highs2'\): .*Did you mean 'highs'\?$"),
        (lambda: VerificationOptions(on_corruption="evicted"), r"Did you mean 'evict'\?$"),  # type: ignore[arg-type]
        (lambda: RecoveryOptions(on_stage_lost="Restart"), r"Did you mean 'restart'\?$"),  # type: ignore[arg-type]
        (lambda: CheckpointOptions(gather_result="autp"), r"Did you mean 'auto'\?$"),  # type: ignore[arg-type]
        (lambda: CheckpointOptions(save_on_signal=""), r"save_on_signal=''\): use True, False or the path of a file"),
        (lambda: PlanningOptions(profile=""), r"profile=''\): give the path of a file or folder, or None"),
        (lambda: MonitoringOptions(status=99999), r"MonitoringOptions\(status=99999\): .* a port of at most 65535\.$"),
        (lambda: RayEngine({"CPU": -1}), r"RayEngine\(resources_per_worker=.*at least 0 for each"),
        (lambda: RayEngine(4), r"resources_per_worker=4\): give a mapping such as \{'CPU': 1\}"),  # type: ignore[arg-type]
        (lambda: ReCycleStrategy(seed="x"), r"ReCycleStrategy\(seed='x'\): give an integer"),  # type: ignore[arg-type]
        (lambda: ReCycleStrategy(seed=2**63), "of 64 bits, or None"),
        (lambda: ReCycleStrategy(num_microbatches=0), r"ReCycleStrategy\(num_microbatches=0\)"),
        (lambda: ReCycleStrategy(engine="kubernetes"), r"RayEngine\(...\).$"),  # type: ignore[arg-type]
        (lambda: ReCycleStrategy(engine="rey"), r"RayEngine\(...\). Did you mean 'ray'\?$"),  # type: ignore[arg-type]
        (lambda: ReCycleStrategy(recovery={}), r"give RecoveryOptions\(\.\.\.\)"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_cannot_work_is_an_error_of_its_owner(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize("kind", [Options, RayEngine, *GROUPS.values()])
def test_every_option_refuses_an_object_that_it_has_no_use_for(kind: type[OptionGroup]) -> None:
    def make(name: str) -> None:
        kind(**{name: object()})

    for item in fields(kind):
        with pytest.raises(ConfigurationError, match=item.name):
            make(item.name)


def test_a_port_of_the_status_is_a_number_or_its_digits() -> None:
    assert _shown_at(8080) == _shown_at("8080") == (("127.0.0.1", 8080), True)


def test_an_option_that_is_assigned_is_checked_as_well() -> None:
    strategy: Any = ReCycleStrategy(2)
    strategy.recovery = RecoveryOptions(max_restarts=3)
    assert strategy.options.recovery.max_restarts == 3
    with pytest.raises(ConfigurationError, match="num_microbatches=0"):
        strategy.num_microbatches = 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: RecoveryOptions(min_pipelines=4, max_pipelines=3), "(min_pipelines=4): the most are max_pipelines=3:"),
        (lambda: RecoveryOptions(num_pipelines=2, min_pipelines=3), "(min_pipelines=3): the run has 2 pipelines: give"),
        (lambda: RecoveryOptions(num_pipelines=4, max_pipelines=3), "(max_pipelines=3): the run has 4 pipelines: give"),
        (
            lambda: ReCycleStrategy(2, 4, recovery=RecoveryOptions(num_pipelines=2, max_pipelines=9)),
            "(max_pipelines=9): 2 pipelines with num_microbatches=4 have work for 8: give at most that many, or more",
        ),
        (
            lambda: ReCycleStrategy(fsdp_size=2, recovery=RecoveryOptions(max_pipelines=9)),
            "do not support RecoveryOptions(max_pipelines=...) yet. Remove it",
        ),
        (
            lambda: ReCycleStrategy(tensor_parallel_size=2, recovery=RecoveryOptions(rebalance="always")),
            "do not support RecoveryOptions(rebalance='always') yet. Remove it",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused_when_they_are_given(build: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (5, {}, "5 devices cannot be divided into pipelines of pipeline_parallel_size=2 stages. Use 4 devices"),
        (5, {"tensor_parallel_size": 2}, "5 devices cannot be divided into positions of 2 processes"),
        (6, {"recovery": RecoveryOptions(min_pipelines=4)}, "(min_pipelines=4): the run has 3 pipelines: give at most"),
        (6, {"recovery": RecoveryOptions(max_pipelines=2)}, "(max_pipelines=2): the run has 3 pipelines: give at"),
    ],
)
def test_devices_that_do_not_fit_the_grid_are_refused_by_the_trainer(
    devices: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        L.Trainer(accelerator="cpu", devices=devices, strategy=ReCycleStrategy(2, **options), logger=False)
    assert words in str(caught.value)


def test_a_strategy_is_shown_as_the_call_that_makes_it() -> None:
    shown = "ReCycleStrategy(pipeline_parallel_size=2, layers='blocks', recovery=RecoveryOptions(max_restarts=3))"
    assert repr(eval(shown)) == shown
    assert repr(ReCycleStrategy()) == "ReCycleStrategy()"


def test_options_are_copied_and_sent(tmp_path: Any) -> None:
    options = PlanningOptions(plan_library=tmp_path, memory="4 micro-batches")
    for twin in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin == options


def test_no_replacements_are_the_default_and_restarts_from_a_checkpoint_have_a_bound_of_their_own() -> None:
    assert RecoveryOptions().max_restarts == 0
    assert [RecoveryOptions(max_restarts=n).most_starts for n in (0, 2, 100)] == [10, 2, 100]


def test_options_come_from_the_command_line_of_lightning() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ReCycleStrategy, "strategy")
    given = [
        "--strategy.pipeline_parallel_size=2",
        "--strategy.recovery.max_restarts=3",
        "--strategy.planning.partition=[3, 5]",
        "--strategy.planning.memory=4 micro-batches",
        "--strategy.checkpoints.save_on_signal=true",
        "--strategy.monitoring.status=127.0.0.1:8080",
    ]
    strategy = parser.instantiate_classes(parser.parse_args(given)).strategy
    assert strategy.pipeline_parallel_size == 2
    assert strategy.recovery.max_restarts == 3
    assert strategy.planning == PlanningOptions(partition=[3, 5], memory="4 micro-batches")
    assert strategy.checkpoints == CheckpointOptions(save_on_signal=True)
    assert strategy.monitoring.status == "127.0.0.1:8080"


@pytest.mark.parametrize(
    ("module", "option", "words"),
    [
        ("mip", {"planning": {"planner": "highs"}}, r"planner 'highs' needs the package mip: pip install '\.\[milp\]'"),
        ("ray", {"engine": "ray"}, r"engine='ray'\) needs the package ray: pip install '\.\[ray\]'"),
    ],
)
def test_a_missing_extra_is_named_when_the_option_is_made(
    module: str, option: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == module else find(name, *args))
    with pytest.raises(ConfigurationError, match=words):
        ReCycleStrategy(
            **{name: PlanningOptions(**value) if name == "planning" else value for name, value in option.items()}
        )

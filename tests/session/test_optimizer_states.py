"""The order of parameters in a checkpoint is that of one device, whatever the stages have."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_recycle.session import optimizer_states

ONE_LAYER_EACH = ([["a"], ["b"]], {}, ["a", "b"])
ENDS = (  # what is outside of a chain is on the first and the last stage
    [["embed", "b0", "norm", "head"], ["b1"], ["embed", "b2", "norm", "head"]],
    {(2, "embed"): "embed", (2, "norm"): "norm", (2, "head"): "head"},
    ["embed", "b0", "b1", "b2", "norm", "head"],
)
FIRST = (  # everything outside comes before the layers
    [["embed", "head", "b0"], ["embed", "head", "b1", "b2"]],
    {(1, "embed"): "embed", (1, "head"): "head"},
    ["embed", "head", "b0", "b1", "b2"],
)
ALIAS = ([["l0", "l1"], ["l2", "l3"]], {(1, "l3"): "l0"}, ["l0", "l1", "l2"])  # a tie under another name


@pytest.mark.parametrize(("names", "copies", "expected"), [ONE_LAYER_EACH, ENDS, FIRST, ALIAS])
def test_numbers_are_those_of_one_device_and_go_back(names, copies, expected):
    grouped = [[stage] for stage in names]
    assert optimizer_states.merged_names(grouped, copies) == [expected]
    parts = []
    for stage, mine in enumerate(names):
        state = {
            i: {"step": torch.tensor(float(expected.index(copies.get((stage, n), n))))} for i, n in enumerate(mine)
        }
        parts.append({"state": state, "param_groups": [{"lr": 1.0, "params": list(range(len(mine)))}]})
    whole = optimizer_states.merge_optimizer_states(parts, grouped, copies)
    assert whole["param_groups"] == [{"lr": 1.0, "params": list(range(len(expected)))}]
    assert {number: int(state["step"]) for number, state in whole["state"].items()} == dict(
        enumerate(range(len(expected)))
    )
    for stage, part in enumerate(parts):
        assert optimizer_states.split_optimizer_state(whole, grouped, copies, stage) == part
        by_name = optimizer_states.stage_optimizer_state(part, grouped, copies, stage)
        assert by_name["param_groups"] == [{"lr": 1.0, "params": expected}]
        owned = {name: expected.index(name) for name in names[stage] if (stage, name) not in copies}
        assert {name: int(state["step"]) for name, state in by_name["state"].items()} == owned


def test_names_are_those_of_the_state_dict_where_activations_are_computed_again():
    module = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    (names,) = optimizer_states.group_names(module, torch.optim.SGD(module.parameters(), lr=1.0))
    assert names == list(module.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_worker_that_joins_makes_groups_of_parameters_whose_activations_are_computed_again():
    module = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    wanted = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    optimizer_states.load_parameter_groups(module, [optimizer], [wanted])
    assert optimizer_states.group_names(module, optimizer) == wanted

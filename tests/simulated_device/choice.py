"""The tests that run on simulated devices: those of this folder, and of the others all but a table of some."""

import os

import pytest

ON_DEVICES = "SIMULATED_DEVICES_IN_TESTS" in os.environ

_HOST = "the test's own code computes with tensors of the host, which Lightning leaves there on any accelerator"
_SHARED = "tensors that share memory do not any more once Lightning has moved them to an accelerator"
_NAME = "the test expects names of the processor: of the device, or in what Lightning logs of it"
_AUTOCAST = "the processor has its own list of operators that autocast lowers"
_FUSED = "with the costs measured there a plan may end in a BW, for whose input gradient the others wait"

UNSUITED = {
    "test_metric_places.py::test_a_metric_is_whole_wherever_it_is_kept": _HOST,
    "test_metric_places.py::test_a_share_is_refused_by_name": _HOST,
    "test_metric_places.py::test_values_of_batches_need_no_place": _HOST,
    "test_odd_places.py::test_a_replacement_has_what_hooks_have_put_into_odd_places[SharedMemory]": _SHARED,
    "test_odd_places.py::test_stages_bring_home_what_hooks_have_made[SharedMemory]": _SHARED,
    "test_self_in_hooks.py::test_a_hook_that_a_replacement_runs_alone": _HOST,
    "test_self_in_hooks.py::test_a_worker_that_dies_in_an_evaluation": _HOST,
    "test_self_in_hooks.py::test_dropout_draws_anew_in_each_call": _HOST,
    "test_self_in_hooks.py::test_every_hook_on_every_worker": _HOST,
    "test_parity_collected.py::test_what_is_made_of_collected_outputs": _HOST,
    "test_parity_precision.py::test_a_precision_computes_in_the_same_dtypes[bf16-mixed": _AUTOCAST,
    "test_sharded_hooks.py::test_a_kill_at_a_collective_of_a_hook": _HOST,
    "test_sharded_state.py::test_a_replacement_gets_its_own_shards[TP": _HOST,
    "test_shared_layers.py::test_nobody_waits_for_gradients_of_micro_batches_that_run_a_shared_layer": _FUSED,
    "test_silent_corruption.py::test_a_flipped_bit_of_a_parameter_is_found_at_the_next_check": _NAME,
}
"""Tests that fail on simulated devices, by a part of their names, and why. None fails for another reason."""


def skip_unsuited(items: list[pytest.Item]) -> None:
    for item in items:
        why = next((why for name, why in UNSUITED.items() if name in item.nodeid), None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))

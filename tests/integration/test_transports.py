"""Training whose payloads go by another transport than Gloo."""

import lightning as L
import pytest
from support.growth import AwaitReplacement, causes, rejoined
from support.models import GLOBAL_BATCH, dataset
from support.nccl_models import Joined, Prepared, Sticky, Wide, WideShared, WideTied
from support.nccl_on_trial import OnTrial
from support.sampling import sampled
from support.training import exact_fit, failures
from test_moving_layers import Move, moves

from lightning_recycle import CommunicationOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault
from lightning_recycle.errors import ConfigurationError

pytestmark = pytest.mark.long


def test_weights_equal_after_a_kill_in_the_middle_of_payloads_and_sums_by_nccl():
    faults = [Fault("kill", pipeline=1, stage=0, step=3), Fault("kill", pipeline=0, stage=1, step=5, at="reduce")]
    run = exact_fit(Wide().double(), 3, 2, faults, strategy={"bucket_cap_mb": 0.1})
    assert failures(run) == [(1, 0), (0, 1)]


def test_weights_equal_after_kills_that_find_their_connections_prepared():
    faults = [Fault("kill", pipeline=1, stage=0, step=3), Fault("kill", pipeline=0, stage=1, step=6)]
    assert failures(exact_fit(Prepared().double(), 3, 2, faults)) == [(1, 0), (0, 1)]


def test_a_replacement_gets_its_state_from_device_to_device():
    """One of the first stage, and one of the last; the second donor may have joined itself."""
    run = exact_fit(
        Joined().double(), 2, 2,
        [Fault("kill", pipeline=1, stage=0, step=3), Fault("kill", pipeline=0, stage=1, step=8)],
        dataset(GLOBAL_BATCH * 14), strategy={"max_restarts": 10}, callbacks=[AwaitReplacement([7, 12])], max_steps=14,
    )  # fmt: skip
    assert sorted(rejoined(run)) == [(0, 1), (1, 0)]


def test_weights_equal_when_tied_gradients_are_added_by_nccl():
    run = exact_fit(WideTied().double(), 2, 2, [Fault("kill", pipeline=1, stage=1, step=4, at="reduce", when="after")])
    assert failures(run) == [(1, 1)]


@pytest.mark.parametrize("at", sampled(["backward_weight", "reduce", "optimizer"], 1))
def test_weights_equal_when_gradients_of_a_shared_layer_are_added_by_nccl(at):
    faults = [Fault("kill", pipeline=1, stage=1, step=4, at=at)]
    options = {"bucket_cap_mb": 0.1, "rebalance": "never", "split_backward": True}
    run = exact_fit(WideShared().double(), 2, 2, faults, callbacks=[Move({1: (1.5, 2.5)})], strategy=options)
    assert failures(run) == [(1, 1)]
    assert moves(run) == [(0, 1.5, 4)]


def test_a_worker_whose_device_is_lost_is_lost_and_the_others_go_on():
    run = exact_fit(Sticky(rank=2, step=3).double(), 2, 2)
    assert failures(run) == [(1, 0)]
    assert "CUDA error: an illegal memory access" in causes(run)[0]


def test_nccl_that_fails_on_one_worker_costs_nothing_but_time():
    """In the generation after the kill, too, in which that worker does not try it again."""
    run = exact_fit(OnTrial().double(), 2, 2, [Fault("kill", pipeline=1, stage=0, step=3)])
    assert failures(run) == [(1, 0)]


def test_nccl_without_cuda_devices_is_an_error_that_names_the_remedy():
    with pytest.raises(ConfigurationError, match=r"transport='gloo'"):
        L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ReCycleStrategy(communication=CommunicationOptions(transport="nccl")),
            logger=False,
        )

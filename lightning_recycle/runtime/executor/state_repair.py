"""A worker whose bits are wrong takes over the parameters and the optimizer state of a peer, in a recovery."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lightning_recycle.control.client import ControlClient
from lightning_recycle.runtime.comm.communicator import Communicator
from lightning_recycle.runtime.comm.state_transfer import receive_object, send_object
from lightning_recycle.runtime.executor.executor_callbacks import ExecutorCallbacks

__all__ = ["repair_state"]

log = logging.getLogger(__name__)


def repair_state(
    heals: Mapping[int, int], client: ControlClient, communicator: Communicator, callbacks: ExecutorCallbacks
) -> None:
    """This worker's part in ``heals``: for each rank whose state is wrong, the peer that gives it its own. All of them
    hold the parameters of the same step.
    """
    rank = client.rank
    if rank in heals:
        with client.waiting("the state of a peer"):
            state = receive_object(communicator, heals[rank])
        with client.busy("taking over the state of a peer"):
            callbacks.load_stage_state(state)
        log.warning("This worker held wrong bits, and has taken over the state of rank %d.", heals[rank])
    with client.waiting("the transfer of state"):
        for wrong, donor in sorted(heals.items()):
            if donor == rank:
                send_object(communicator, callbacks.stage_state(), wrong)

"""Callbacks of the pipeline strategy."""

from lightning_recycle.callbacks.faults import Fault, FaultInjectionCallback
from lightning_recycle.callbacks.heartbeat import HeartbeatCallback

__all__ = ["Fault", "FaultInjectionCallback", "HeartbeatCallback"]

"""Callbacks of the pipeline strategy."""

from lightning_recycle.callbacks.faults import Fault
from lightning_recycle.callbacks.heartbeat_and_drift import HeartbeatCallback, PlanMonitor
from lightning_recycle.callbacks.injection import FaultInjectionCallback

__all__ = ["Fault", "FaultInjectionCallback", "HeartbeatCallback", "PlanMonitor"]

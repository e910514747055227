"""Callbacks of the pipeline strategy."""

from lightning_recycle.callbacks.faults import Fault
from lightning_recycle.callbacks.injection import FaultInjectionCallback
from lightning_recycle.callbacks.monitoring import HeartbeatCallback, PlanMonitor

__all__ = ["Fault", "FaultInjectionCallback", "HeartbeatCallback", "PlanMonitor"]

"""Wording of policies, failures, models, durations and numbers on pages and in tables.

Contract: pure functions from the dictionaries of ``result.json`` to short text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "MODELS",
    "POLICIES",
    "assumptions_text",
    "duration_text",
    "failures_text",
    "model_text",
    "number",
    "policy_text",
    "setting_text",
]

POLICIES = {
    "Recycle": "ReCycle",
    "Auto": "Auto",
    "ElasticLayers": "Elastic layers",
    "Oobleck": "Oobleck",
    "Bamboo": "Bamboo",
    "Spares": "Spares",
    "Merge": "Merge",
    "DropReplica": "Drop replica",
    "Varuna": "Varuna",
    "Restart": "Restart",
    "FaultFree": "Fault-free",
}
"""By class name, in display order."""

MODELS = {
    "gpt3_medium": "GPT-3 Medium",
    "gpt3_3_35b": "GPT-3 3.35B",
    "gpt3_6_7b": "GPT-3 6.7B",
    "megatron_18_4b": "Megatron 18.4B",
    "megatron_39_1b": "Megatron 39.1B",
    "megatron_76_1b": "Megatron 76.1B",
    "megatron_145_6b": "Megatron 145.6B",
}

_DURATIONS = frozenset(
    [
        "agreement",
        "change",
        "checkpoint_every",
        "connect",
        "detection",
        "interval",
        "lookup",
        "mtbf",
        "node_start",
        "reconfigure",
        "regroup",
        "rejoin",
        "relaunch",
        "rendezvous",
        "repair",
        "restart",
        "start",
    ]
)
_VALUES = {
    ("fault_free", "1f1b"): "1F1B first",
    ("fault_free", "planned"): "planned",
    ("schedule", "1f1b"): "1F1B",
    ("schedule", "planned"): "planned",
    ("schedule", "zero_bubble"): "zero-bubble",
}
_RATES = {"Llama 3's rate": 419 / (54 * 16384), "RSC-1's rate": 6.5 / 8000}


def duration_text(seconds: float) -> str:
    """A duration in the largest unit that gives a short number: ``30 min``, ``1.5 d``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        # Two days and more in days, but 24 h in hours, as mean times between failures are usually given.
        if seconds >= length * (2 if unit == "d" else 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def number(value: float, digits: int = 3) -> str:
    """``value`` with that many decimal places, thousands separated; a real minus sign."""
    text = f"{value:,.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text.replace(",", "")) else text.lstrip("-")


def model_text(name: str) -> str:
    """A model's name."""
    return MODELS.get(name, name)


def setting_text(name: str, value: Any) -> str:
    """A setting of a policy, e.g. ``restart 1 min``."""
    if (name, value) in _VALUES:
        return _VALUES[name, value]
    shown = str(value)
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {name.replace('_', ' ')}"
    if name in _DURATIONS and isinstance(value, (int, float)):
        shown = duration_text(value)
    elif isinstance(value, float):
        shown = f"{value:g}"
    return f"{name.replace('_', ' ')} {shown}"


def policy_text(result: Mapping[str, Any], settings: Iterable[str] | None = None, *, with_schedule: bool = True) -> str:
    """A policy with its relevant settings.

    Args:
        result: result of a training run.
        settings: names of settings to show; by default those that differ from the policy's defaults.
        with_schedule: whether to show the schedule, also where it is the default.
    """
    policy = result["policy"]
    shown = policy["changed"] if settings is None else [name for name in settings if name in policy["settings"]]
    if with_schedule and "schedule" in policy["settings"]:
        first = ["schedule"]
        if policy["settings"].get("fault_free") == "1f1b" and policy["settings"]["schedule"] == "planned":
            first.append("fault_free")
        shown = [*first, *(name for name in shown if name not in first)]
    own = policy["name"].lower()  # "Restart (1 min)", not "Restart (restart 1 min)"
    details = ", ".join(setting_text(name, policy["settings"][name]).removeprefix(f"{own} ") for name in shown)
    name = POLICIES.get(policy["name"], policy["name"])
    return f"{name} ({details})" if details else name


def failures_text(result: Mapping[str, Any]) -> str:
    """The source of a result's failures."""
    source, settings = result["failures"]["name"], result["failures"]["settings"]
    back = f", back after {duration_text(settings['repair'])}" if settings.get("repair") else ""
    if source == "Poisson":
        return f"failure every {duration_text(settings['mtbf'])}{back}"
    if source == "Regular":
        return f"one failure after each {duration_text(settings['interval'])}{back}"
    if source == "FailureRate":
        return f"{_rate(settings['rate'])}{back}"
    if source == "TraceReplay":
        return f"trace {settings['trace']}"
    if source == "FailedFraction":
        return f"{100 * settings['part']:.5g} % failed{_taken(result)}"
    if source == "Scripted":
        return f"{len(settings['outages'])} outages"
    return str(source)


def _taken(result: Mapping[str, Any]) -> str:
    """How many nodes that is, where it is known."""
    nodes, part = result.get("cluster", {}).get("nodes"), result["failures"]["settings"]["part"]
    if nodes is None:
        return ""
    count = max(round(part * nodes), int(part > 0))
    return f" ({count} of {nodes} nodes)"


def assumptions_text(result: Mapping[str, Any]) -> str:
    """What decides a result besides policy and failures: batch, utilization of the GPU, network."""
    model = result["model"]
    mfu = f"{100 * model['efficiency']:.1f} % of the peak of an {model['gpu']} while computing"
    network = f"{model['network_bandwidth'] * 8e-9:.3g} Gb/s between workers"
    again = ", activations recomputed" if model["recompute"] else ""
    return f"global batch {model['global_batch']:,}, micro-batch {model['microbatch']}; {mfu}; {network}{again}"


def _rate(rate: float) -> str:
    for name, known in _RATES.items():
        factor = rate / known
        if math.isclose(factor, round(factor, 3), rel_tol=1e-9):
            return name if math.isclose(factor, 1.0) else f"{factor:g} x {name}"
    return f"{rate:.3g} failures per GPU and day"

"""The paper's figures, shown beside the simulated ones.

Source: Gandhi et al., "ReCycle", SOSP'24 (arXiv 2405.14009): the table of throughput by failure interval on 32 A100,
and the running example of section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FAULT_FREE", "SOURCE", "THROUGHPUT", "paper_slots", "paper_throughput"]

SOURCE = "Gandhi et al., SOSP\N{RIGHT SINGLE QUOTATION MARK}24, arXiv 2405.14009"

FAULT_FREE = {"gpt3_medium": 27.58, "gpt3_3_35b": 14.87, "gpt3_6_7b": 5.33}
_INTERVALS = (21600.0, 7200.0, 1800.0)
# Samples/s; None: out of memory.
THROUGHPUT: dict[str, dict[str, tuple[float, ...] | None]] = {
    "gpt3_medium": {
        "Bamboo": (19.47, 18.98, 15.24),
        "Oobleck": (27.26, 25.37, 19.47),
        "Recycle": (27.27, 25.42, 22.27),
    },
    "gpt3_3_35b": {"Bamboo": None, "Oobleck": (14.55, 13.44, 9.78), "Recycle": (14.59, 14.17, 12.63)},
    "gpt3_6_7b": {"Bamboo": None, "Oobleck": (4.98, 4.65, 2.78), "Recycle": (5.17, 4.85, 3.53)},
}
_SLOTS = {"one_f_one_b": 27.0, "adaptive": 36.0, "decoupled": 29.0, "staggered": 27.0}


def paper_throughput(record: Mapping[str, Any]) -> float | None:
    """Samples/s of the paper for this model, policy and failure interval; 0 where it ran out of memory; None: unknown.

    A model that is calibrated differently, a ReCycle with techniques switched off, and other systems with planned
    schedules are not in the paper.
    """
    model, policy, failures = record["model"], record["policy"], record["failures"]
    if failures["name"] != "Poisson" or failures["settings"]["mtbf"] not in _INTERVALS:
        return None
    usual = FAULT_FREE.get(model["name"])
    if usual is None or abs(record["fault_free_throughput"] / usual - 1) > 0.001:
        return None
    if policy["name"] not in THROUGHPUT[model["name"]]:
        return None
    usual_schedule = "planned" if policy["name"] == "Recycle" else "1f1b"
    if policy["settings"].get("schedule", usual_schedule) != usual_schedule:
        return None
    switches = ("adaptive", "decoupled", "staggered", "normalization")
    if not all(policy["settings"].get(switch, True) for switch in switches):
        return None
    found = THROUGHPUT[model["name"]][policy["name"]]
    return 0.0 if found is None else found[_INTERVALS.index(failures["settings"]["mtbf"])]


def paper_slots(record: Mapping[str, Any]) -> Mapping[str, float]:
    """Slots of a step, by technique, where the paper has them: the running example with one failure in stage 2."""
    running = {"pipelines": 3, "stages": 4, "microbatches": 6}
    return _SLOTS if record["grid"] == running and record["failed"] == [[1, 2]] else {}

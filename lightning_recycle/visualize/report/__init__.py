"""The page that ``recycle-report`` makes from simulation results: one self-contained HTML file."""

from lightning_recycle.visualize.report.names import (
    assumptions_text,
    cost_text,
    duration_text,
    failures_text,
    policy_text,
)
from lightning_recycle.visualize.report.page import render_report
from lightning_recycle.visualize.report.records import SECTION_NAMES, Results, load_results

__all__ = [
    "SECTION_NAMES",
    "Results",
    "assumptions_text",
    "cost_text",
    "duration_text",
    "failures_text",
    "load_results",
    "policy_text",
    "render_report",
]

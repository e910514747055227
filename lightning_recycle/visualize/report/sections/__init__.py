"""The sections of the page, in their order."""

from lightning_recycle.visualize.report.sections.causes import causes_section
from lightning_recycle.visualize.report.sections.chosen_ways import choices_section
from lightning_recycle.visualize.report.sections.crossovers import layers_section, restart_section, spares_section
from lightning_recycle.visualize.report.sections.equal_schedules import same_section
from lightning_recycle.visualize.report.sections.failed_fractions import fractions_section
from lightning_recycle.visualize.report.sections.intervals import intervals_section
from lightning_recycle.visualize.report.sections.modes import modes_section
from lightning_recycle.visualize.report.sections.others import others_section, runs_section
from lightning_recycle.visualize.report.sections.planning_times import planner_section
from lightning_recycle.visualize.report.sections.section import Section
from lightning_recycle.visualize.report.sections.techniques import ablation_section
from lightning_recycle.visualize.report.sections.trace_results import traces_section

__all__ = ["SECTIONS", "Section"]

SECTIONS = (
    same_section,
    intervals_section,
    causes_section,
    traces_section,
    modes_section,
    choices_section,
    fractions_section,
    ablation_section,
    planner_section,
    spares_section,
    restart_section,
    layers_section,
    others_section,
    runs_section,
)

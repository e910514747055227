"""Pictures of schedules (Gantt charts as SVG), and the report of simulated runs. Imports no torch."""

from lightning_recycle.visualize.gantt import gantt_svg, save_gantt

__all__ = ["gantt_svg", "save_gantt"]

"""Gantt charts of schedules as SVG, and the report of simulated runs; no torch."""

from lightning_recycle.visualize.charts import gantt_svg, save_gantt

__all__ = ["gantt_svg", "save_gantt"]

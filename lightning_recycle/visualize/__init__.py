"""Pictures of schedules: Gantt charts (SVG) and traces for Perfetto. Imports no torch."""

from lightning_recycle.visualize.gantt import gantt_svg, save_gantt
from lightning_recycle.visualize.timeline import TimedOp, chrome_trace, save_trace, timed_ops

__all__ = ["TimedOp", "chrome_trace", "gantt_svg", "save_gantt", "save_trace", "timed_ops"]

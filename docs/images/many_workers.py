"""Draws many_workers.svg: how the time after a kill grows with the workers, as recorded in benchmarks/RESULTS.md."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

WORKERS = (64, 250, 500, 1000, 2000)  # without torch: benchmarks/control_plane.py
START = (0.055, 0.178, 0.537, 1.205, 3.242)
AGREE = (0.018, 0.059, 0.167, 0.437, 1.489)
GROUPS = (8, 16, 32, 64)  # real groups of Gloo on two cores, recorded on 2026-11-23
NEEDED = (0.040, 0.106, 0.364, 1.112)
ALL = (0.042, 0.127, 0.571, 3.378)


def draw(axes: plt.Axes, title: str, workers: tuple[int, ...], lines: dict[str, tuple[tuple[float, ...], str]]) -> None:
    """Seconds over workers, both logarithmic."""
    for name, (seconds, color) in lines.items():
        axes.plot(workers, seconds, marker="o", markersize=4, color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds", title=title)
    axes.set_xticks(workers, [f"{number:,}" for number in workers])
    axes.minorticks_off()
    axes.grid(axis="y", color="#e3e8ee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    plt.rcParams.update({"svg.hashsalt": "many_workers", "svg.fonttype": "none", "font.size": 10})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.2), layout="constrained")
    coordinator = {"start": (START, "#9aa5b1"), "agree on a new generation": (AGREE, "#3f51b5")}
    draw(left, "One coordinator, workers without torch", WORKERS, coordinator)
    connections = {"connect to all": (ALL, "#9aa5b1"), "connect to whom the plan needs": (NEEDED, "#3f51b5")}
    draw(right, "Real Gloo workers, two cores", GROUPS, connections)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})

"""Draws failure_cost.svg: seconds from a SIGKILL to the next committed step, as recorded in benchmarks/RESULTS.md."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

SECONDS = {  # a small GPT in four processes; torchft: two replicas of as many layers
    "lightning_recycle": 0.253,
    "torchft, all timeouts 1 s": 1.04,
    "torchft, default": 5.04,
    "restart from the newest checkpoint": 3.89,
}
NOTES = {"restart from the newest checkpoint": " (0.38 s here), 8 steps again"}  # make demo

if __name__ == "__main__":
    plt.rcParams.update({"svg.hashsalt": "failure_cost", "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8.2, 2.3), layout="constrained")
    names = list(SECONDS)[::-1]
    bars = axes.barh(names, [SECONDS[name] for name in names], height=0.62, color=["#9aa5b1"] * 3 + ["#3f51b5"])
    axes.bar_label(bars, [f"{SECONDS[name]:.2f} s{NOTES.get(name, '')}" for name in names], padding=5)
    axes.set_xlim(0, 6.6)
    axes.set_xlabel("seconds from SIGKILL to the next committed step (measured, CPU)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})

"""Draws failure_cost.svg: seconds from a SIGKILL to the next committed step, as recorded in benchmarks/RESULTS.md."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OURS = "lightning_recycle"
MEASURED = {  # small GPTs in four processes; torchft: two replicas of as many layers
    "tiny GPT in four CPU workers, torchft as two replicas; medians of ten kills": {
        OURS: 0.253,
        "torchft, all timeouts 1 s": 1.04,
        "torchft, default": 5.04,
    },
    "make demo": {OURS: 0.38, "restart from the newest checkpoint": 3.89},
}

if __name__ == "__main__":
    plt.rcParams.update({"svg.hashsalt": "failure_cost", "svg.fonttype": "none", "font.size": 11})
    sizes = [len(seconds) for seconds in MEASURED.values()]
    figure, both = plt.subplots(
        2, figsize=(8.2, 3.4), sharex=True, layout="constrained", gridspec_kw={"height_ratios": sizes}
    )
    for axes, (source, seconds) in zip(both, MEASURED.items(), strict=True):
        names = list(seconds)[::-1]
        colors = ["#3f51b5" if name == OURS else "#9aa5b1" for name in names]
        bars = axes.barh(names, [seconds[name] for name in names], height=0.62, color=colors)
        axes.bar_label(bars, [f"{seconds[name]:.2f} s" for name in names], padding=5)
        axes.set_xlim(0, 6.6)
        axes.set_title(source, loc="left", fontsize=10, color="#5f6b7a")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    both[0].spines["bottom"].set_visible(False)
    both[0].tick_params(axis="x", length=0)
    both[1].set_xlabel("seconds from SIGKILL to the next committed step (measured, CPU)")
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})

"""The tables that ``recycle-simulate`` prints. They are made from the dictionaries in the result files.

Must not know: Hydra, files, the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from lightning_recycle.visualize.report import assumptions_text, cost_text, duration_text, failures_text, policy_text

__all__ = ["line", "overview", "single"]

Result = Mapping[str, Any]
_BAR = 24  # characters


def single(result: Result) -> Group | Table:
    """Everything about one result."""
    if result["task"] == "training":
        return Group(_training(result), "", _losses(result), "", _gpu_time(result))
    table = Table("", "", show_header=False, box=None, padding=(0, 2, 0, 0))
    grid = result["grid"]
    table.add_row(
        "pipelines x stages x micro-batches", f"{grid['pipelines']} x {grid['stages']} x {grid['microbatches']}"
    )
    if result["task"] == "planner":
        table.add_row("failed", f"{result['failed_workers']} of {result['workers']} workers")
        table.add_row("planned in", f"{result['seconds']:.2f} s")
        table.add_row("period", f"{result['period']:g} slots, at most {100 * result['gap']:.2f} % above the optimum")
    else:
        table.add_row("failed", ", ".join(f"({d}, {s})" for d, s in result["failed"]) or "none")
        for name, slots in result["slots"].items():
            table.add_row(name.replace("_", " "), f"{slots:g} slots")
    return table


def line(result: Result) -> str:
    """One result on a line, for sweeps."""
    if result["task"] == "planner":
        return f"planner, {result['workers']} workers, {result['failed']:.0%} failed: {result['seconds']:.2f} s"
    if result["task"] == "techniques":
        slots = " ".join(f"{value:g}" for value in result["slots"].values())
        return f"techniques, {result['workers']} workers: {slots} slots"
    outcome = f"{result['throughput']:.2f} samples/s ({result['ratio']:.3f})"
    if result["note"]:
        outcome = str(result["note"])
    return f"{result['model']['name']}, {policy_text(result)}, {failures_text(result)}: {outcome}"


def overview(results: Sequence[Result]) -> Table:
    """The training runs of a sweep, one per line."""
    table = Table(title="Sweep", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("model", "policy", "failures"):
        table.add_column(name)
    for name in ("samples/s", "/1F1B", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in results:
        if each["task"] == "training":
            numbers = (f"{each['throughput']:.2f}", f"{each['ratio']:.3f}", f"{each['deviation']:.3f}")
            table.add_row(each["model"]["name"], policy_text(each), failures_text(each), *numbers)
    return table


def _training(result: Result) -> Table:
    model, cluster, runs = result["model"], result["cluster"], len(result["runs"])
    table = Table("", "", show_header=False, title="Simulation", title_justify="left")
    grid = f"{model['pipelines']} pipelines of {model['stages']} stages, {model['microbatches']} micro-batches each"
    spread = f" (from run to run {result['deviation'] * result['fault_free_throughput']:.2f})" if runs > 1 else ""
    ratio = f"{result['ratio']:.3f}"
    if cluster["gpus"] != model["gpus"]:
        ratio += f"; {result['ratio_per_gpu']:.3f} per GPU of the cluster"
    for name, value in (
        ("model", f"{model['name']}, {model['parameters'] / 1e9:.3g} billion parameters; {grid}"),
        ("cluster", f"{cluster['nodes']} nodes of {cluster['gpus_per_node']} {model['gpu']}"),
        ("assumed", assumptions_text(result)),
        ("policy", policy_text(result)),
        ("failures", f"{failures_text(result)}; {result['node_failures']:.1f} node failures in a run"),
        ("runs", f"{runs} of {duration_text(result['duration'])}"),
        ("throughput", f"{result['throughput']:.2f} samples/s{spread}"),
        ("throughput / 1F1B fault-free", ratio),
        ("of what live GPUs could do", f"{result['fraction_of_ideal']:.3f}"),
        ("goodput, ETTR, MFU", f"{result['goodput']:.3f}, {result['ettr']:.3f}, {result['mfu']:.3f}"),
        ("cost", cost_text(result)),
    ):
        table.add_row(name, value)
    if result["tainted"]:
        table.add_row("tainted", f"{100 * result['tainted']:.1f} % of the samples rest on wrong results")
    if result["note"]:
        table.add_row("note", f"nothing was trained: {result['note']}")
    return table


def _losses(result: Result) -> Table:
    total = result["fault_free_throughput"] * result["cluster"]["gpus"] / result["model"]["gpus"]
    table = _bars("Throughput lost, by cause", "samples/s", "of 1F1B fault-free")
    for cause, lost in sorted(result["losses"].items(), key=lambda item: -item[1]):
        table.add_row(cause, f"{lost:.3f}", f"{100 * lost / total:.1f} %", _bar(lost / total))
    lost = sum(result["losses"].values())
    table.add_row("all", f"{lost:.3f}", f"{100 * lost / total:.1f} %", _bar(lost / total), style="bold")
    return table


def _gpu_time(result: Result) -> Table:
    table = _bars("GPU time, by cause", "GPU-hours", "of all")
    for cause, part in result["fractions"].items():
        hours = result["gpu_seconds"][cause] / 3600
        table.add_row(cause, f"{hours:,.2f}", f"{100 * part:.1f} %", _bar(part))
    return table


def _bars(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", min_width=14)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    return table


def _bar(part: float) -> str:
    return "█" * round(_BAR * max(0.0, min(1.0, part)))

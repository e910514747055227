"""``recycle-report``: results of ``recycle-simulate`` as one HTML page.

    recycle-report results -o report.html

Reads every ``result.json`` below the folder. ``page.html.j2`` writes the sections one below the other, and has the
style sheet and the script; sections without results are left out. The same results give the same page
except for the date in its footer.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from lightning_recycle.arguments import command_parser, exit_without_reader
from lightning_recycle.commands import Output, bad_input_ends
from lightning_recycle.errors import counted
from lightning_recycle.files import check_ending, check_writable, refusing, write_atomically
from lightning_recycle.visualize.charts import swatch
from lightning_recycle.visualize.sections import sections_of
from lightning_recycle.visualize.simulation_results import Record, load_results


def render_report(records: Sequence[Record], title: str = "ReCycle simulation report") -> str:
    """The page of ``records`` as HTML."""
    template = resources.files("lightning_recycle.visualize").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title,
        summary=_summary(records),
        sections=sections_of(records),
        swatch=swatch,
        date=datetime.date.today().isoformat(),
    )


def _summary(records: Sequence[Record]) -> str:
    runs = sum(len(record["runs"]) for record in records)
    hours = sum(len(record["runs"]) * record["duration"] for record in records) / 3600
    models = len({record["model"]["name"] for record in records})
    policies = len({record["policy"]["name"] for record in records})
    parts = [counted(len(records), "result"), f"{counted(runs, 'simulated run')}, {hours:,.0f} hours of training"]
    parts += [counted(models, "model"), f"{policies} {'policy' if policies == 1 else 'policies'}"]
    return " \N{MIDDLE DOT} ".join(parts)


_NAME = "recycle-report"


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    parser = command_parser(
        _NAME,
        "Render the results of recycle-simulate as one HTML page.",
        "recycle-simulate -m policy=recycle,merge output=results && recycle-report results",
        "recycle-report results -o report.html",
        "recycle-report results --title 'Spot instances, July'",
        statuses={0: "the page is written"},
    )
    parser.add_argument("folder", type=Path, help="output folder of a run, or of sweeps")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="- for standard output; default: %(default)s"
    )
    parser.add_argument("--title", default="ReCycle simulation report", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    to_stdout = chosen.output == Path("-")
    with bad_input_ends(_NAME):
        if not to_stdout:
            check_ending("--output", chosen.output, ".html", "- for standard output")
            check_writable("--output", chosen.output)
        results = load_results(chosen.folder)
        page = render_report(results, chosen.title)
        if to_stdout:
            _print(page)
        else:
            with refusing(f"write {chosen.output}"):
                write_atomically(chosen.output, page)
        size = len(page.encode()) / 1e3
        where = "to standard output" if to_stdout else chosen.output
        text = f"wrote {where}: {counted(len(results), 'result')}, {size:,.0f} kB"
        Output(soft_wrap=True, stderr=to_stdout).print(text, highlight=False)


def _print(page: str) -> None:
    try:
        print(page, flush=True)
    except BrokenPipeError:
        exit_without_reader()


if __name__ == "__main__":
    main()

"""``recycle-report``: results of ``recycle-simulate`` as one HTML page.

    recycle-report results -o report.html

Reads every ``result.json`` below the folder. Sections without results are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_recycle.arguments import command_parser
from lightning_recycle.commands.application import Output, bad_input_ends
from lightning_recycle.files import refusing, write_atomically
from lightning_recycle.visualize.page import render_report
from lightning_recycle.visualize.records import load_results, missing_results

_NAME = "recycle-report"


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    parser = command_parser(
        _NAME,
        "Render the results of recycle-simulate as one HTML page.",
        "recycle-simulate experiment=quick output=results && recycle-report results",
        "recycle-report results -o report.html",
        "recycle-report results --title 'Spot instances, July'",
    )
    parser.add_argument("folder", type=Path, help="output folder of a run, a sweep or an experiment")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: %(default)s")
    parser.add_argument("--title", default="ReCycle simulation report", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    with bad_input_ends(_NAME):
        results = load_results(chosen.folder)
        missing = missing_results(chosen.folder)
        page = render_report(results, chosen.title, missing)
        with refusing(f"write {chosen.output}"):
            write_atomically(chosen.output, page)
        size = len(page.encode()) / 1e3
        count = f"{len(results)} of {len(results) + missing}" if missing else f"{len(results)}"
        noun = "result" if len(results) + missing == 1 else "results"
        Output(soft_wrap=True).print(f"wrote {chosen.output}: {count} {noun}, {size:,.0f} kB", highlight=False)


if __name__ == "__main__":
    main()

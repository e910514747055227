"""The page: one self-contained HTML file, for light and dark, for desktop and phone.

Concept: sections are functions from results to HTML; this module puts them one below the other with a table of
contents, and embeds the style sheet and the script (``page.css``, ``page.js``). A section without results
says how to make them.

Contract: the page loads nothing; the same results give the same page except for the date in its footer.

Must not know: what a section shows.
"""

from __future__ import annotations

import datetime
from importlib import resources

from lightning_recycle.visualize.report.conclusion import conclusion
from lightning_recycle.visualize.report.markup import Markup, element, join
from lightning_recycle.visualize.report.records import Results
from lightning_recycle.visualize.report.sections import SECTIONS, Section

__all__ = ["render_report"]


def render_report(results: Results, title: str = "ReCycle simulation report") -> str:
    """The page of ``results`` as HTML.

    Args:
        results: the results of a folder.
        title: title of the page.
    """
    sections = [make(results) for make in SECTIONS]
    contents = [
        element("a", each.title, href=f"#{each.key}", class_=None if each.body else "missing") for each in sections
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(_file("page.css"))),
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", title),
            element("button", "Theme: system", type="button", id="theme", title="system, light or dark"),
            element("p", _summary(results), class_="lead"),
            *((found,) if (found := conclusion(results)) else ()),
            element("nav", *contents, aria_label="Sections"),
        ),
        element("main", *map(_section, sections)),
        element("footer", f"Made by recycle-report on {datetime.date.today().isoformat()} from {results.source}."),
        element("div", id="tip", role="status", hidden=True),
        element("script", Markup(_file("page.js"))),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _file(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return "\n" + text


def _summary(results: Results) -> Markup:
    runs = sum(len(record["runs"]) for record in results.training)
    hours = sum(len(record["runs"]) * record["duration"] for record in results.training) / 3600
    models = len({record["model"]["name"] for record in results.training})
    policies = len({record["policy"]["name"] for record in results.training})
    parts = [f"{results.count:,} results"]
    if runs:
        parts.append(f"{runs:,} simulated runs, {hours:,.0f} hours of training")
        parts.append(_count(models, "model", "models"))
        parts.append(_count(policies, "policy", "policies"))
    return join(parts, " \N{MIDDLE DOT} ")


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _section(section: Section) -> Markup:
    heading = element("h2", element("a", section.title, href=f"#{section.key}"))
    if section.body is None:
        missing = element(
            "p", "The folder has no results for this section. To make some: ", element("code", section.command),
            class_="missing",
        )  # fmt: skip
        return element("section", heading, missing, id=section.key)
    return element("section", heading, element("p", section.lead, class_="lead"), section.body, id=section.key)

"""Docstrings for the API pages: what is written for reStructuredText readers, as Markdown.

A griffe extension, named in mkdocs.yml. Four things are translated: roles such as ``:class:`~package.Name```, simple
tables (columns under rows of ``=``), the double colon before an indented block, and examples after ``>>>``.
"""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^( *)>>> .*\n(?: *\S.*\n)*", re.MULTILINE)
_RULE = re.compile(r"^ *=+(?: +=+)+ *$")


def as_markdown(text: str) -> str:
    """Translate one docstring."""
    text = re.sub(r"::$", ":", _ROLE.sub(_reference, text), flags=re.MULTILINE)
    text = _EXAMPLE.sub(lambda example: f"{example[1]}```pycon\n{example[0]}{example[1]}```\n", text + "\n")
    return _with_tables(text.rstrip("\n"))


def _reference(role: re.Match[str]) -> str:
    """A link, if some page has the object; else its name."""
    path = role.group(1)
    target = path if path.startswith("lightning_recycle") else ""
    name = path.rpartition(".")[2]
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>' if target else f"`{path}`"


def _with_tables(text: str) -> str:
    lines, done = text.split("\n"), []
    while lines:
        line = lines.pop(0)
        if not _RULE.match(line):
            done.append(line)
            continue
        starts = [column.start() for column in re.finditer("=+", line)]
        indent = " " * starts[0]
        rows: list[list[str]] = []
        while lines and sum(row == [] for row in rows) < 2:
            line = lines.pop(0)
            ends = [*starts[1:], len(line)]
            cells = [line[start:end].strip().replace("|", r"\|") for start, end in zip(starts, ends, strict=True)]
            rows.append([] if _RULE.match(line) else cells)
        header, *body = [row for row in rows if row]
        table = [header, ["---"] * len(header), *body]
        done += [f"{indent}| {' | '.join(row)} |" for row in table]
    return "\n".join(done)


class AsMarkdown(griffe.Extension):
    """Translates every docstring as it is read, and shows ``option(1.0, ...)`` as the default that it is."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Attribute) and str(obj.value).startswith("option("):
            obj.value = obj.value.arguments[0]  # type: ignore[union-attr]  # of a call

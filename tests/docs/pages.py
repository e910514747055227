"""The pages of the documentation, and what can be found in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "../README.md",
    "../CONTRIBUTING.md",
    *sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")),
]
RECORDS = [
    "../SECURITY.md",
    "../CODE_OF_CONDUCT.md",
    "../CHANGELOG.md",
    *(f"../benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks").glob("*.md"))),
]

_FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    title: str | None
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(*languages: str, pages: list[str] = PAGES) -> list[Block]:
    """The blocks in one of ``languages``."""
    found = []
    for page in pages:
        content = text(page)
        for match in _FENCE.finditer(content):
            if match["language"] in languages:
                line = content.count("\n", 0, match.start()) + 1
                found.append(Block(page, line, match["language"], match["title"], match["code"]))
    return found


def without_blocks(page: str) -> str:
    return _FENCE.sub("", text(page))


def commands() -> list[tuple[str, list[str]]]:
    """(place, words) of each command in a block for the shell; settings of the environment before it are left out."""
    found = []
    for block in blocks("bash", "console"):
        for line in block.code.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            for command in line.split("&&"):
                words = [w for w in shlex.split(command, comments=True) if w != "&"]
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    found.append((block.place, words))
    return found


def table_under(page: str, header: str) -> list[list[str]]:
    """The rows of the table whose header's first cell is ``header``, as lists of cells."""
    lines = iter(text(page).splitlines())
    for line in lines:
        if line.startswith(f"| {header} |"):
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split(" |")])
            return rows
    raise AssertionError(f"{page} has no table that begins with {header!r}")


def names_in(cell: str) -> list[str]:
    """What is in back quotes."""
    return re.findall(r"`([^`]+)`", cell)

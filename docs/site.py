"""A hook of mkdocs: the repository's address, pages that lie elsewhere, pictures to enlarge, and a check that the site
loads nothing.

Named in mkdocs.yml.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_ELSEWHERE = {
    "results.md": "benchmarks/RESULTS.md",
    "methods.md": "benchmarks/METHODS.md",
    "simulated.md": "benchmarks/SIMULATED.md",
    "lightning_suite.md": "benchmarks/LIGHTNING_SUITE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "code_of_conduct.md": "CODE_OF_CONDUCT.md",
}
"""Pages of the site whose source is not in docs/, by their name in the site."""

_OPTION, _UNBROKEN = re.compile(r"(?<![\w-])--[a-z]+"), r'<span class="unbroken">\g<0></span>'
_LONG_NAME = re.compile(r"(?<=<code>)[^<]{20,}(?=</code>)")
_LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


def on_config(config: Any) -> Any:
    """Link to the repository below each page, once pyproject.toml has its address (``repo_url`` would load figures)."""
    address = re.search(r'^Repository = "(.+)"$', (_ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    if address is not None:
        link = {"icon": "fontawesome/brands/git-alt", "link": address[1], "name": "Repository"}
        config["extra"]["social"] = [link]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for name, path in _ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to those files, which work in the repository, lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    for name, path in _ELSEWHERE.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(path)}", f"]({up}{name}", markdown)
    if page.file.src_uri in _ELSEWHERE:
        markdown = markdown.replace("](docs/", "](").replace("](../docs/", "](")
        for name, path in _ELSEWHERE.items():
            markdown = markdown.replace(f"]({Path(path).name}", f"]({name}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Let each picture lead to its file, where it has its full size, and break names in tables where a reader would."""
    html = re.sub(r'(<img [^>]*?src="([^"]+)"[^>]*>)', r'<a class="enlarge" href="\2" title="Enlarge">\1</a>', html)
    return re.sub(
        r"<td.*?</td>", lambda cell: _OPTION.sub(_UNBROKEN, _LONG_NAME.sub(_breakable, cell[0])), html, flags=re.S
    )


def _breakable(name: re.Match[str]) -> str:
    return re.sub(r"(_|::|/|=|,)(?=\w)", r"\1<wbr>", name[0])


class _Loads(HTMLParser):
    """Collects what a page makes a browser load from another server."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(_LOADING.get(tag, ""), "") or ""
        if re.match("(?:[a-z]+:)?//", address) and values.get("rel") != "canonical":
            self.found.append(address)


def on_post_build(config: Any) -> None:
    """Fail if a page or a style sheet would load something from another server."""
    site = Path(config["site_dir"])
    found = {}
    for file in site.rglob("*.html"):
        page = _Loads()
        page.feed(file.read_text(encoding="utf-8"))
        found[file] = page.found
    for file in site.rglob("*.css"):
        found[file] = re.findall(r"url\(['\"]?((?:https?:)?//[^)]+)", file.read_text(encoding="utf-8"))
    lines = [f"{file.relative_to(site)} loads {', '.join(urls)}" for file, urls in found.items() if urls]
    if lines:
        raise PluginError("The site must load nothing from elsewhere.\n" + "\n".join(lines))

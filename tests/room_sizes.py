"""Files, lines and lines of code of each room: ``python tests/room_sizes.py``, at the end of ``make check``.

Lines of code are those with a token of Python that is neither a comment nor part of a docstring.
"""

import ast
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """Lines of ``path`` without blanks, comments and docstrings."""
    with tokenize.open(path) as file:
        text = file.read()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def sizes(folder: str) -> dict[str, tuple[int, int, int]]:
    """(files, lines, lines of code) of each room in ``folder``, by its name; modules beside the rooms are one, too."""
    files, lines, code = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[:2]) if len(parts) > 2 else folder
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
        code[room] += code_lines(path)
    return {room: (files[room], lines[room], code[room]) for room in files}


def main() -> None:
    """Prints a table with a row for each room of the package, and the sums of package, tests and benchmarks."""
    print(f"{'':36} {'files':>6} {'lines':>7} {'code':>7}")
    rows = sizes("lightning_recycle")
    for folder in ("lightning_recycle", "tests", "benchmarks"):
        found = rows if folder == "lightning_recycle" else sizes(folder)
        if found is rows:
            for room, values in rows.items():
                print(f"{room:36} {values[0]:6} {values[1]:7} {values[2]:7}")
        total = [sum(values) for values in zip(*found.values(), strict=True)]
        print(f"{'all of ' + folder:36} {total[0]:6} {total[1]:7} {total[2]:7}")


if __name__ == "__main__":
    main()

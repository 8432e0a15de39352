"""Fails where a function or file of the package has grown too long to be read at one go."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


def too_long(path: Path) -> Iterator[str]:
    """One line per thing in this file that is over the budget."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def main() -> None:
    """Exits with 1 and a list where anything is over the budget."""
    found = [line for path in sorted((ROOT / "ddplaunch").rglob("*.py")) for line in too_long(path)]
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()

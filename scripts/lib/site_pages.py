"""Hooks of mkdocs for the site: the pages above docs/ are part of it, and all are written for GitHub's Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
ABOVE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def slug(heading: str, _separator: str = "-") -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_config(config: Any) -> None:
    config.mdx_configs["toc"] = {"slugify": slug}


def on_files(files: Files, config: Any) -> None:
    for name in ABOVE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to pages of the site; lists and code in tables are written as Python's Markdown wants them."""
    parts = re.split(r"^(```.*?^```\n)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _prose(part) for part in parts)


def _prose(text: str) -> str:
    text = re.sub(r"\]\((?:\.\./|docs/)", "](", text)
    text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace(r"\|", "|"), text)
    return re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE)

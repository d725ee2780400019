"""The site beside what a checkout shows: README.md is its first page, and links out of docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """The pages that lie beside docs/ in the repository."""
    for name, page in PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as this site has them."""
    source = next(
        (name for name, path in PAGES.items() if path == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )

    def rewrite(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"\w+:", target):
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if place in PAGES or place.startswith("docs/"):
            place = PAGES.get(place, place.removeprefix("docs/"))
            return f"{image}[{label}]({place}{'#' if anchor else ''}{anchor})"
        if not (ROOT / place).exists():
            return match[0]  # the link check tells it
        return (
            f"[{label}]({config['repo_url'].rstrip('/')}/tree/main/{place})"
            if config["repo_url"]
            else label
        )

    blocks = _FENCED.split(markdown)  # every second one is code
    return "".join(block if i % 2 else _LINK.sub(rewrite, block) for i, block in enumerate(blocks))

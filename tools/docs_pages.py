#!/usr/bin/env python3
"""Copy the pages, and the pictures that they show, to build/pages, for mkdocs (mkdocs.yml).

Pages lie where their subject is, and mkdocs takes those of one folder. The copies keep their
places, so that links from page to page hold. A link to code becomes plain text.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"\[([^]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "docs/*.svg"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    kept = {(ROOT / name).resolve() for name in listed}
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in listed:
        source, target = ROOT / name, PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()

        def shown(link: re.Match[str], folder: Path = source.parent) -> str:
            leads_to = (folder / link[2]).resolve()
            is_code = "://" not in link[2] and leads_to.exists() and leads_to not in kept
            return link[1] if is_code else link[0]

        target.write_text(LINK.sub(shown, text) if source.suffix == ".md" else text)


if __name__ == "__main__":
    main()

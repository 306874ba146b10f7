"""What the figures of a page about reliability come from."""

from __future__ import annotations

from typing import Any


def source(document: dict[str, Any]) -> str:
    """The command of a document of results, its commit and machine, and a note if it has one."""
    about = document["machine"]
    driver = f", driver {about['driver']}" if about.get("driver") else ""
    note = f" ({document['note']})" if document.get("note") else ""
    return (
        f"`{document['command']}` at commit {document['commit'] or 'unknown'}, on "
        f"{about['cores']} cores, Linux {about['kernel']}{driver}, CRIU {about['criu']}{note}"
    )

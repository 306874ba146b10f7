"""Read the package sources of this machine in both formats that apt accepts (sources.list(5))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ETC_APT = Path("/etc/apt")


@dataclass(frozen=True)
class Source:
    """A binary package repository: where it is and which keys may sign it.

    `signed_by` is empty (apt's default keyrings), a keyring path, or an embedded key block whose
    lines are indented as deb822 wants them.
    """

    uri: str
    suite: str
    signed_by: str


def parse_one_line(text: str) -> Iterator[Source]:
    """`deb [signed-by=/path] uri suite component...`"""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)", line)
        if not found:
            continue
        options = dict(item.split("=", 1) for item in (found[1] or "").split() if "=" in item)
        yield Source(found[2], found[3], options.get("signed-by", ""))


def parse_deb822(text: str) -> Iterator[Source]:
    """Stanzas of `Types:`, `URIs:`, `Suites:`, `Signed-By:`; continuation lines are indented."""
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in " \t" and key:
                fields[key] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Source(uri, suite, fields.get("signed-by", ""))


def configured_sources(etc_apt: Path = ETC_APT) -> list[Source]:
    """Every source of the machine, in apt's order."""
    found: list[Source] = []
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file():
            continue
        if file.suffix == ".list":
            found.extend(parse_one_line(file.read_text()))
        elif file.suffix == ".sources":
            found.extend(parse_deb822(file.read_text()))
    return found

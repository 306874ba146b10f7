"""Where `make setup` looks for a newer CRIU, and what it accepts. No network is used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fetcher; `apt_sources` is reached through it."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("fetch_criu")


ONE_LINE = """\
# deb http://comment.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/keys/a.gpg] https://other.example/debian bookworm-updates main
"""

DEB822 = """\
Types: deb deb-src
# a comment in between
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBF
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Enabled: no

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm
"""


def test_one_line_sources_are_read_with_their_keyring(tools: ModuleType) -> None:
    from apt_sources import Source, parse_one_line

    assert list(parse_one_line(ONE_LINE)) == [
        Source("http://mirror.example/debian", "bookworm", ""),
        Source("https://other.example/debian", "bookworm-updates", "/keys/a.gpg"),
    ]


def test_deb822_sources_are_read_with_an_embedded_key(tools: ModuleType) -> None:
    from apt_sources import parse_deb822

    found = list(parse_deb822(DEB822))
    assert [(source.uri, source.suite) for source in found] == [
        ("http://mirror.example/debian", "bookworm"),
        ("http://mirror.example/debian", "bookworm-updates"),
        ("http://second.example/debian", "bookworm"),
        ("http://second.example/debian", "bookworm-updates"),
    ]
    lines = found[0].signed_by.splitlines()
    assert lines[1:3] == [" -----BEGIN PGP PUBLIC KEY BLOCK-----", " ."]


def test_sources_are_collected_from_every_file_that_apt_reads(
    tools: ModuleType, tmp_path: Path
) -> None:
    from apt_sources import configured_sources

    (tmp_path / "sources.list").write_text("deb http://a.example/debian bookworm main\n")
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "b.list").write_text("deb http://b.example/debian sid main\n")
    (tmp_path / "sources.list.d" / "c.sources").write_text(DEB822)
    (tmp_path / "sources.list.d" / "d.list.disabled").write_text("deb http://d.example/ x main\n")
    hosts = [source.uri.split("/")[2] for source in configured_sources(tmp_path)]
    assert list(dict.fromkeys(hosts)) == [
        "a.example",
        "b.example",
        "mirror.example",
        "second.example",
    ]


def test_only_mirrors_of_the_own_release_are_asked(
    tools: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apt_sources import Source

    sources = [
        Source("http://security.example/debian-security", "bookworm-security", ""),
        Source("http://mirror.example/debian", "bookworm", ""),
        Source("http://vendor.example/deb", "nodistro", ""),
    ]
    monkeypatch.setattr(tools, "configured_sources", lambda: sources)
    assert [source.uri for source in tools.mirrors("bookworm")] == ["http://mirror.example/debian"]
    with pytest.raises(tools.FetchError, match="no package source for trixie"):
        tools.mirrors("trixie")


NOBLE_RELEASE = """\
PRETTY_NAME="Ubuntu 24.04.3 LTS"
VERSION_ID="24.04"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
"""

NOBLE_SOURCES = """\
Types: deb
URIs: http://mirror.example/ubuntu/
Suites: noble noble-updates noble-backports
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg

Types: deb
URIs: http://security.example/ubuntu/
Suites: noble-security
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""


@pytest.fixture
def noble(tools: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ubuntu 24.04 with the sources that it is installed with; which CRIU each suite has."""
    import apt_sources

    (tmp_path / "os-release").write_text(NOBLE_RELEASE)
    (tmp_path / "apt" / "sources.list.d").mkdir(parents=True)
    (tmp_path / "apt" / "sources.list.d" / "ubuntu.sources").write_text(NOBLE_SOURCES)
    found = apt_sources.configured_sources(tmp_path / "apt")
    monkeypatch.setattr(tools, "configured_sources", lambda: found)
    kind = tools.distribution(tmp_path / "os-release")
    monkeypatch.setattr(tools, "distribution", lambda: kind)
    suites: dict[str, str] = {}

    def candidate(apt: Any, _package: str) -> str | None:
        text = (apt.folder / "suite.sources").read_text()
        suite = text.partition("Suites: ")[2].split()[0]
        assert "URIs: http://mirror.example/ubuntu/" in text
        assert "Components: main universe" in text
        assert "Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg" in text
        if suites.get(suite) == "gone":
            raise tools.FetchError("apt-get update: E: no Release file")
        return suites.get(suite)

    monkeypatch.setattr(tools.PrivateApt, "candidate", candidate)
    return suites


class Took(Exception):
    """The packages of this suite would be downloaded."""


def took(apt: Any, *_packages: str) -> Any:
    raise Took((apt.folder / "suite.sources").read_text().partition("Suites: ")[2].split()[0])


@pytest.mark.parametrize(
    ("suites", "suite"),
    [
        ({"resolute": "4.2-1", "devel": "4.3-1"}, "resolute"),
        ({"resolute": "4.1.1-1", "devel": "4.2.1-1ubuntu1"}, "devel"),
        ({"resolute": "gone", "devel": "4.2-1"}, "devel"),
    ],
)
def test_ubuntu_takes_the_first_newer_suite_of_its_own_mirror(
    tools: ModuleType,
    noble: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suites: dict[str, str],
    suite: str,
) -> None:
    noble.update(suites)
    monkeypatch.setattr(tools.PrivateApt, "download", took)
    with pytest.raises(Took, match=suite):
        tools.fetch(tmp_path / "tools" / "criu")


def test_ubuntu_without_a_new_enough_criu_says_what_to_do(
    tools: ModuleType, noble: dict[str, str], tmp_path: Path
) -> None:
    noble.update({"resolute": "4.1-1", "devel": "gone"})
    with pytest.raises(tools.FetchError) as caught:
        tools.fetch(tmp_path / "tools" / "criu")
    assert str(caught.value).splitlines() == [
        "no suite of the configured mirrors has one",
        "  resolute: criu 4.1-1",
        "  devel: apt-get update: E: no Release file",
    ]
    assert not list((tmp_path / "tools").iterdir())


def test_another_distribution_is_told_what_to_do(
    tools: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "os-release").write_text("ID=fedora\nVERSION_CODENAME=\n")
    with pytest.raises(tools.FetchError) as caught:
        tools.distribution(tmp_path / "os-release")

    def nowhere() -> None:
        raise caught.value

    monkeypatch.setattr(tools, "distribution", nowhere)
    monkeypatch.setattr(sys, "argv", ["fetch_criu", "--force", "--target", str(tmp_path / "criu")])
    assert tools.main() == 1
    assert capsys.readouterr().err.splitlines() == [
        "fetch_criu: no newer suite is known for distribution 'fedora'",
        "Install CRIU 4.2 or newer and set FLOWGPU_CRIU to the program.",
    ]


def test_unsigned_suite_is_refused(tools: ModuleType, tmp_path: Path) -> None:
    from apt_sources import Source

    mirror = tmp_path / "mirror" / "dists" / "forky"
    packages = mirror / "main" / "binary-amd64"
    packages.mkdir(parents=True)
    (packages / "Packages").write_text("Package: criu\nVersion: 9.9-1\nArchitecture: amd64\n")
    (mirror / "Release").write_text("Suite: forky\nCodename: forky\nComponents: main\n")
    source = Source(f"file:{tmp_path / 'mirror'}", "bookworm", "")
    apt = tools.PrivateApt(tmp_path / "apt", source, "forky", "main")
    with pytest.raises(tools.FetchError, match="not signed"):
        apt.candidate("criu")


def test_launcher_of_an_old_or_broken_criu_is_not_accepted(
    tools: ModuleType, tmp_path: Path
) -> None:
    program = tmp_path / "criu"
    for body, version in (
        ("echo Version: 3.17.1", (3, 17, 1)),
        ("exit 1", None),
    ):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        assert tools.version_of(program) == version
        assert not tools.works(program)


def test_debian_version_is_compared_as_numbers(tools: ModuleType) -> None:
    assert tools.as_numbers("4.10.1-2") > tools.as_numbers("4.2-1") >= tools.MINIMUM
    assert tools.as_numbers("4.1.1-1") < tools.MINIMUM


def test_print_finds_the_fetched_one_without_fetching(tools: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "criu"
    target.mkdir()
    launcher = target / "criu"
    launcher.write_text("#!/bin/sh\necho Version: 4.2.1\n")
    launcher.chmod(0o755)
    command = [sys.executable, str(TOOLS / "fetch_criu.py"), "--print", "--target", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(launcher)


def test_fetcher_names_no_host() -> None:
    for script in ("fetch_criu.py", "apt_sources.py", "setup.sh"):
        assert "://" not in (TOOLS / script).read_text()

#!/usr/bin/env bash
# Gets podman and runc for the tests, without touching the system: the packages of this machine's
# own release that are not installed are unpacked into .tools/podman.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.tools/podman

if [[ -x $target/usr/bin/podman ]] || { command -v podman && command -v runc; } >/dev/null; then
    exit 0
fi
fail() {
    echo "podman could not be fetched here: its tests are skipped" >&2
    exit 0
}
command -v apt-get >/dev/null || fail
mkdir -p .tools
scratch=$(mktemp -d "$PWD/.tools/.podman-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/archives/partial" "$scratch/tree"
options=(-y -qq --no-install-recommends --download-only -o "Dir::Cache::archives=$scratch/archives"
    -o APT::Sandbox::User=root -o Debug::NoLocking=1)
fetch() {
    DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" podman runc >/dev/null 2>&1
}
fetch || { apt-get update -qq && fetch; } || fail
for package in "$scratch"/archives/*.deb; do
    dpkg-deb -x "$package" "$scratch/tree"
done
mv "$scratch/tree" "$target"

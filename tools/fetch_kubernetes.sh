#!/usr/bin/env bash
# Gets a kube-apiserver, etcd and kubectl for the tests, without touching the system, into
# .tools/kubernetes. Nobody packages a kube-apiserver: it is built from Debian's source package with
# Debian's Go, once. That takes some ten minutes of a processor, and 3 GB while it lasts.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$PWD/.tools/kubernetes

[[ -x $target/kube-apiserver ]] && exit 0
fail() {
    echo "Kubernetes could not be had here ($1): its tests are skipped" >&2
    exit 0
}
for program in apt-get dpkg-source make python3; do
    command -v $program >/dev/null || fail "no $program"
done
mkdir -p .tools
scratch=$(mktemp -d "$PWD/.tools/.kubernetes-XXXXXX")
trap 'chmod -R u+w "$scratch"; rm -rf "$scratch"' EXIT
log=.tools/kubernetes.log
: >"$log"

# apt with a state of its own: the machine's has no sources of source packages.
mkdir -p "$scratch"/{lists/partial,archives/partial,empty,debs}
PYTHONPATH=tools python3 - >"$scratch/suites.sources" <<'END'
from apt_sources import configured_sources

for source in configured_sources():
    if "debian" in source.uri:
        print(f"Types: deb deb-src\nURIs: {source.uri}\nSuites: {source.suite}\nComponents: main")
        print(f"Signed-By: {source.signed_by}\n" if source.signed_by else "")
END
options=(-qq -o "Dir::Etc::sourcelist=$scratch/suites.sources" -o "Dir::Etc::sourceparts=$scratch/empty"
    -o "Dir::State::lists=$scratch/lists" -o "Dir::Cache::archives=$scratch/archives"
    -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o APT::Sandbox::User=root
    -o Acquire::Check-Valid-Until=false -o Acquire::Languages=none -o Acquire::Retries=3)
apt-get "${options[@]}" update >>"$log" 2>&1 || fail "see $log"
cd "$scratch/debs"
apt-get "${options[@]}" download golang-1.19-go golang-1.19-src etcd-server kubernetes-client \
    golang-github-modern-go-reflect2-dev rsync libpopt0 >>"../../../$log" 2>&1 || fail "see $log"
for package in *.deb; do
    dpkg-deb -x "$package" "$scratch/tree"
done
apt-get "${options[@]}" source --download-only kubernetes >>"../../../$log" 2>&1 || fail "see $log"
dpkg-source --no-check -x kubernetes_*.dsc "$scratch/source" >>"../../../$log" 2>&1 || fail "see $log"

cd "$scratch/source"
# The vendored one takes the tables of types as Go had them before 1.18.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$scratch/tree/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/
export GOROOT=$scratch/tree/usr/lib/go-1.19 GOCACHE=$scratch/cache GOPROXY=off CGO_ENABLED=0 HOME=$scratch
export PATH=$GOROOT/bin:$scratch/tree/usr/bin:$PATH # with the rsync that its make wants
libraries=$(echo "$scratch"/tree/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH=$libraries
nice make WHAT=cmd/kube-apiserver KUBE_GIT_VERSION=v1.20.2 GOLDFLAGS="-s -w" >>"../../../$log" 2>&1 || fail "see $log"

mkdir "$scratch/done"
cp _output/bin/kube-apiserver "$scratch/tree/usr/bin/"{etcd,kubectl} "$scratch/done/"
mv "$scratch/done" "$target"

#!/usr/bin/env bash
# Prepares a machine for building and testing: system programs, Python environment, CRIU.
#   setup.sh PYTHON VENV          create VENV with the packages of pyproject.toml
#   setup.sh PYTHON ""            use PYTHON as it is: no installer runs, missing packages are named
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=$2

# Which Debian package brings which program.
declare -A package_of=([cmake]=cmake [ninja]=ninja-build [g++]=g++ [$python]=python3)
missing=()
for program in "${!package_of[@]}"; do
    command -v "$program" >/dev/null || missing+=("${package_of[$program]}")
done
# A header that the ghost's digests are compiled from (0.8 or later, which both systems have).
[[ -e /usr/include/xxhash.h ]] || missing+=(libxxhash-dev)
if [[ -n $venv ]] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=(python3-venv)
fi
if ((${#missing[@]})); then
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "setup: install these packages first: ${missing[*]}" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

if [[ -n $venv ]]; then
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
    mapfile -t requirements < <("$venv/bin/python" tools/requirements.py)
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
    python=$venv/bin/python
    # The checkout itself is the package: `flowgpu` in the environment runs what lies here.
    cat > "$venv/bin/flowgpu" <<EOF
#!$PWD/$python
import sys
sys.path.insert(0, "$PWD")
from flowgpu.cli import main
sys.exit(main())
EOF
    chmod +x "$venv/bin/flowgpu"
else
    "$python" tools/requirements.py --check
fi

if ! "$python" tools/fetch_criu.py; then
    # Everything but CRIU's own tests works without, and a machine may be offline.
    echo "setup: go on without CRIU: checkpoints and the tests that take one will fail" >&2
fi

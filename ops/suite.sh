#!/usr/bin/env bash
# Runs one suite of tests and notes how it ended, so that what failed can be run once more.
#
#     ops/suite.sh NAME [--again] PYTEST_ARGUMENT...
#
# `--again` runs only the tests that failed the last time: nothing where the suite passed, and the whole suite where
# pytest did not end by itself. A test that fails on a busy machine and passes alone is a weakness of the test: CI
# prints its name. BIN names the folder of pytest.
set -uo pipefail
name=$1; shift
cache=.pytest_cache/$name ended=.pytest_cache/$name.exit selection=()
if [ "${1:-}" = --again ]; then
    shift
    case $(cat "$ended" 2>/dev/null) in
        0) exit 0 ;;
        1) selection=(--last-failed); echo "$name: the failed tests once more" ;;
    esac
fi
mkdir -p .pytest_cache && rm -f "$ended"
"${BIN:-.venv/bin}/pytest" -o cache_dir="$cache" "${selection[@]}" "$@"
code=$?
echo "$code" >"$ended"
exit "$code"

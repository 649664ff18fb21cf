#!/usr/bin/env bash
# Runs one suite of tests and notes how it ended, so that what failed can be run once more.
#
#     ops/suite.sh NAME [--workers N] [--again] PYTEST_ARGUMENT...
#
# `--workers` runs the files of the suite in N processes beside each other, each whole file in one of them, so that the
# fleets and servers that its tests share are started once. Most of their time these tests wait for processes.
#
# `--again` runs only the tests that failed the last time, one after another: nothing where the suite passed, and the
# whole suite where pytest did not end by itself. A test that fails on a busy machine and passes alone is a weakness of
# the test: CI prints its name. BIN names the folder of pytest.
set -uo pipefail
name=$1; shift
cache=.pytest_cache/$name ended=.pytest_cache/$name.exit selection=()
if [ "${1:-}" = --workers ]; then
    selection=(-n "$2" --dist loadfile)
    shift 2
fi
if [ "${1:-}" = --again ]; then
    shift
    case $(cat "$ended" 2>/dev/null) in
        0) exit 0 ;;
        1) selection=(--last-failed); echo "$name: the failed tests once more" ;;
    esac
fi
mkdir -p .pytest_cache && rm -f "$ended"
# Each test starts processes: these need not compile the sources again.
unset PYTHONDONTWRITEBYTECODE
TIMEFORMAT="$name: %R s, of CPU %U s and %S s in the kernel"
time "${BIN:-.venv/bin}/pytest" -o cache_dir="$cache" --durations=8 --durations-min=5 "${selection[@]}" "$@"
code=$?
echo "$code" >"$ended"
exit "$code"

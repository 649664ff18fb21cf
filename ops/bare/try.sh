#!/usr/bin/env bash
# Runs the README's two commands on a minimal Debian, so that a missing install step is noticed.
#
#     ops/bare/try.sh [--all | --only-wheel] [--keep FOLDER] [--wheel FILE]
#     ops/bare/try.sh --bootstrap --keep FOLDER
#
# Bootstraps Debian 12 with only the packages that the README names, clones the committed files into it, and runs
# `make up ONESHOT=1` and `make test` there in each combination below. Nothing of this machine is mounted but the
# package index settings (pip's configuration, the folders it names, and the certificate authorities).
#
# It also installs the wheel of these sources on the system without a compiler, and fails unless that gives the fast
# build (try_wheel.sh). `--wheel FILE` is that wheel, for Debian's Python; otherwise `make dist` builds it. With
# `--only-wheel` nothing else is tried.
# Without options two combinations run `make up`, the strictest and the richest, and the strictest also those suites of
# `make test` that find most there: the embedded engine, whole fleets, the scheduler on the packaged Postgres, and the
# router without a compiler. The wheel, the strictest and the richest are tried beside each other, and what each printed
# comes when it has ended. `--all` runs both commands in all combinations, whole, one after another.
# `--keep FOLDER` keeps the bootstrapped systems there for the next time; otherwise everything is removed at the end.
# With `--bootstrap` nothing is tried in them.
# Needs root and debootstrap. The last lines are a table of what ran, how long it took, and tokens per second.
set -euo pipefail
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ALL='' KEEP='' WHEEL='' ONLY_WHEEL='' ONLY_BOOTSTRAP=''
while [ $# -gt 0 ]; do
    case $1 in
        --all) ALL=1 ;;
        --only-wheel) ONLY_WHEEL=1 ;;
        --bootstrap) ONLY_BOOTSTRAP=1 ;;
        --keep) [ $# -ge 2 ] || usage; KEEP=$(realpath -m "$2"); shift ;;
        --wheel) [ $# -ge 2 ] || usage; WHEEL=$(realpath "$2"); shift ;;
        *) usage ;;
    esac
    shift
done
[ -z "$ONLY_BOOTSTRAP" ] || [ -n "$KEEP" ] || usage
[ "$(id -u)" = 0 ] || { echo "cannot bootstrap a system: run $0 as root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "cannot bootstrap a system: install the package debootstrap" >&2; exit 1; }
HERE=$(realpath "$(dirname "$0")/../..")
SYSTEMS=${KEEP:-$(mktemp -d /var/tmp/isochrone-bare.XXXXXX)}
WORK=$(mktemp -d /var/tmp/isochrone-try.XXXXXX)
mkdir -p "$SYSTEMS"

clean_up() {
    status=$?
    # What runs inside ends with `unshare --kill-child`.
    # shellcheck disable=SC2046
    kill $(jobs -p) 2>/dev/null || true
    wait
    for root in "$WORK"/*/root; do
        if mountpoint -q "$root"; then umount -l "$root"; fi
    done
    rm -rf --one-file-system "$WORK"
    [ -n "$KEEP" ] || rm -rf --one-file-system "$SYSTEMS"
    exit $status
}
trap clean_up EXIT

# What the README asks for, and what a system may have besides.
README_PACKAGES=git,make,python3,python3-venv,ca-certificates
declare -A PACKAGES=(
    [bare]=$README_PACKAGES
    [gcc]=$README_PACKAGES,gcc,libc6-dev,python3-dev
    [postgres]=$README_PACKAGES,postgresql
    [full]=$README_PACKAGES,gcc,libc6-dev,python3-dev,postgresql,iproute2
)
# system user root-file-system folder commands
COMBINATIONS=(
    "bare user read-only /home/user/my checkout|up test"
    "full root writable /root/isochrone|up"
)
if [ -n "$ALL" ]; then
    COMBINATIONS=()
    for system in bare gcc postgres full; do
        COMBINATIONS+=(
            "$system user read-only /home/user/my checkout|up test"
            "$system root writable /root/isochrone|up test"
        )
    done
fi

bootstrap() {  # SYSTEM: Debian with its packages, made once in $SYSTEMS; each but `bare` is `bare` and what it has besides
    local root=$SYSTEMS/$1
    [ -e "$root/.complete" ] && return
    [ "$1" = bare ] || bootstrap bare
    rm -rf --one-file-system "$root"
    echo "bootstrapping Debian 12 with ${PACKAGES[$1]}"
    if [ "$1" = bare ]; then
        debootstrap --variant=minbase --include="${PACKAGES[bare]}" bookworm "$root" &&
            chroot "$root" useradd --create-home --shell /bin/bash user
    else
        cp -a "$SYSTEMS/bare" "$root" && rm "$root/.complete" && add_packages "$root" "${PACKAGES[$1]//,/ }"
    fi >"$SYSTEMS/$1.log" 2>&1 || { tail -n 20 "$SYSTEMS/$1.log" >&2; exit 1; }
    touch "$root/.complete"
}

add_packages() {  # ROOT PACKAGES: install them there, and start none of their services
    local result=0
    printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d"
    chmod 755 "$1/usr/sbin/policy-rc.d"
    # shellcheck disable=SC2016
    ROOT=$1 ADDED=$2 unshare --mount --pid --fork --kill-child bash -euc '
        mount --make-rprivate /
        mount -t proc proc "$ROOT/proc"
        export DEBIAN_FRONTEND=noninteractive
        chroot "$ROOT" apt-get -q update
        chroot "$ROOT" apt-get -qy install --no-install-recommends $ADDED' || result=$?
    rm "$1/usr/sbin/policy-rc.d"
    return $result
}

run_in() {  # PLACE USER read-only|writable FOLDER COMMAND: run COMMAND in FOLDER of the root that was prepared at PLACE
    local home=/root
    [ "$2" = root ] || home=/home/$2
    ROOT=$1/root USER_NAME=$2 USER_HOME=$home MODE=$3 FOLDER=$4 COMMAND=$5 MOUNTS=$(cat "$WORK/mounts") \
        unshare --mount --pid --fork --kill-child bash "$HERE/ops/bare/enter.sh"
}

prepare() {  # PLACE SYSTEM USER FOLDER: an empty layer over SYSTEM, with a clone in FOLDER
    mkdir -p "$1/root" "$1/upper" "$1/work"
    mount -t overlay overlay -o "lowerdir=$SYSTEMS/$2,upperdir=$1/upper,workdir=$1/work" "$1/root"
    git clone --quiet "$HERE" "$1/root$4"
    chroot "$1/root" chown -R "$3:" "$4"
    cp "$WORK/pip.conf" "$1/root/etc/pip.conf"
}

put_away() {  # PLACE: its root is needed no longer
    umount -l "$1/root"
    rm -rf --one-file-system "$1/upper" "$1/work"
}

note() {  # PLACE SYSTEM USER FILES FOLDER COMMAND RESULT SECONDS TOKENS/S: a row of the table
    printf '%-9s %-5s %-10s %-24s %-18s %-7s %6d s  %s\n' "${@:2}" >>"$1/rows"
}

try_wheel() {  # PLACE: build the wheel, if none was given, and install it
    local began result=passed
    if [ -z "$WHEEL" ]; then
        echo "--- make dist"
        rm -f "$HERE"/dist/isochrone-*-cp311-*.whl
        (cd "$HERE" && make dist)
        WHEEL=$(ls "$HERE"/dist/isochrone-*-cp311-*.whl)
    fi
    prepare "$1" bare user /home/user/checkout
    cp "$WHEEL" "$HERE/ops/bare/try_wheel.sh" "$1/root/home/user/"
    echo "--- pip install ${WHEEL##*/}: system bare, as user"
    began=$SECONDS
    run_in "$1" user read-only /home/user "bash try_wheel.sh ${WHEEL##*/}" || result=FAILED
    note "$1" bare user read-only /home/user "pip install WHEEL" $result $((SECONDS - began)) ""
    put_away "$1"
}

# Processes of the fleet that outlive it are listed. (The pattern does not match itself.)
nothing_left=" && ! grep -ls '/[.]state/fleet' /proc/[0-9]*/cmdline"

check_demo() {  # OUTPUT: the demo came to its end
    local words
    for words in 'one replica, in ams' 'after demand grew in sin' 'all processes have stopped'; do
        grep -q "$words" "$1" || { echo "make up did not say: $words"; return 1; }
    done
}

try_commands() {  # PLACE SYSTEM USER FILES FOLDER COMMAND...: run make COMMAND there, one after another
    local place=$1 system=$2 user=$3 mode=$4 folder=$5 command make after began result speed
    prepare "$place" "$system" "$user" "$folder"
    for command in "${@:6}"; do
        make='make up ONESHOT=1' after=$nothing_left
        # As CI does: a test that fails on a busy machine is run once more.
        [ "$command" != test ] || { make="make test $suites" after=" || make test-again $suites"; }
        make=$settings$make
        echo "--- $make: system $system, as $user, $mode, in '$folder'"
        began=$SECONDS result=passed
        run_in "$place" "$user" "$mode" "$folder" "$make$after" 2>&1 | tee "$place/output" || result=FAILED
        [ "$command" = test ] || check_demo "$place/output" || result=FAILED
        # The demo prints a row for each city: TTFT, then tokens per second. The first row is the nearest replica's.
        speed=$(awk '/^ams .* ms +[0-9.]+ +[0-9]+\/[0-9]+ / && !seen {print $6; seen = 1}' "$place/output")
        note "$place" "$system" "$user" "$mode" "$folder" "make $command" $result $((SECONDS - began)) "${speed:-}"
    done
    put_away "$place"
}

python3 "$HERE/ops/bare/index_settings.py" "$WORK/pip.conf" >"$WORK/mounts"
# Without a compiler `interpreted-tests` are the router's tests as they run there.
suites="SUITES='engine-tests control-tests system-tests interpreted-tests'"
# That the router compiles is tried, not how fast it is then: the wheel's is optimised, and this one only in `--all`.
# The demo is tried by `make up`, which checks what its test does.
settings="ISOCHRONE_OPTIMISE=0 PYTEST_ADDOPTS='--deselect tests/system/test_make_up.py' "
[ -z "$ALL" ] || suites='' settings=''
[ -z "$ONLY_WHEEL" ] || COMBINATIONS=()
bootstrap bare
if [ -n "$ONLY_BOOTSTRAP" ]; then
    for combination in "${COMBINATIONS[@]}"; do bootstrap "${combination%% *}"; done
    exit 0
fi
places=() running=()
begin() {  # PLACE FUNCTION ARGUMENT...: call it with the place, beside what runs already; with --all wait for it
    places+=("$1")
    mkdir "$1"
    "$2" "$1" "${@:3}" >"$1/printed" 2>&1 &
    running+=($!)
    [ -z "$ALL" ] || wait $! || true
}
begin "$WORK/wheel" try_wheel
wait_for_demo() {  # the place that began last has tried its first command, which is `make up`
    while [ ! -s "${places[-1]}/rows" ] && kill -0 "${running[-1]}" 2>/dev/null; do sleep 1; done
}
for combination in "${COMBINATIONS[@]}"; do
    IFS='|' read -r what commands <<<"$combination"
    read -r system user mode folder <<<"$what"
    bootstrap "$system"
    # Demos have the same addresses, so one follows the other. The wheel has none.
    [ ${#places[@]} -eq 1 ] || wait_for_demo
    # shellcheck disable=SC2086
    begin "$WORK/${#places[@]}" try_commands "$system" "$user" "$mode" "$folder" $commands
done
failed=0
for number in "${!places[@]}"; do
    wait "${running[number]}" || failed=1
    cat "${places[number]}/printed"
done
printf '\n%-9s %-5s %-10s %-24s %-18s %-7s %8s  %s\n' SYSTEM USER FILES FOLDER COMMAND RESULT TIME TOKENS/S
for place in "${places[@]}"; do
    cat "$place/rows" || failed=1
    ! grep -q ' FAILED ' "$place/rows" || failed=1
done
exit $failed

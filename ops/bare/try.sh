#!/usr/bin/env bash
# Runs the README's two commands on a minimal Debian, so that a missing install step is noticed.
#
#     ops/bare/try.sh [--all | --only-wheel] [--keep FOLDER] [--wheel FILE]
#
# Bootstraps Debian 12 with only the packages that the README names, clones the committed files into it, and runs
# `make up ONESHOT=1` and `make test` there in each combination below. Nothing of this machine is mounted but the
# package index settings (pip's configuration, the folders it names, and the certificate authorities).
#
# First it installs the wheel of these sources on the system without a compiler, and fails unless that gives the fast
# build (try_wheel.sh). `--wheel FILE` is that wheel, for Debian's Python; otherwise `make dist` builds it. With
# `--only-wheel` nothing else is tried.
# Without options two combinations run `make up`, the strictest and the richest, and the strictest also `make test` but for
# its faults (chaos-tests), of which a bare system skips a part. `--all` runs both in all combinations, and whole.
# `--keep FOLDER` keeps the bootstrapped systems there for the next time; otherwise everything is removed at the end.
# Needs root and debootstrap. The last lines are a table of what ran, how long it took, and tokens per second.
set -euo pipefail
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ALL='' KEEP='' WHEEL='' ONLY_WHEEL=''
while [ $# -gt 0 ]; do
    case $1 in
        --all) ALL=1 ;;
        --only-wheel) ONLY_WHEEL=1 ;;
        --keep) [ $# -ge 2 ] || usage; KEEP=$(realpath -m "$2"); shift ;;
        --wheel) [ $# -ge 2 ] || usage; WHEEL=$(realpath "$2"); shift ;;
        *) usage ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || { echo "cannot bootstrap a system: run $0 as root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "cannot bootstrap a system: install the package debootstrap" >&2; exit 1; }
HERE=$(realpath "$(dirname "$0")/../..")
SYSTEMS=${KEEP:-$(mktemp -d /var/tmp/isochrone-bare.XXXXXX)}
WORK=$(mktemp -d /var/tmp/isochrone-try.XXXXXX)
mkdir -p "$SYSTEMS"

clean_up() {
    status=$?
    if mountpoint -q "$WORK/root"; then umount -l "$WORK/root"; fi
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

bootstrap() {  # SYSTEM: Debian with its packages, made once in $SYSTEMS
    local root=$SYSTEMS/$1
    [ -e "$root/.complete" ] && return
    rm -rf --one-file-system "$root"
    echo "bootstrapping Debian 12 with ${PACKAGES[$1]}"
    debootstrap --variant=minbase --include="${PACKAGES[$1]}" bookworm "$root" >"$SYSTEMS/$1.log" 2>&1 ||
        { tail -n 20 "$SYSTEMS/$1.log" >&2; exit 1; }
    chroot "$root" useradd --create-home --shell /bin/bash user
    touch "$root/.complete"
}

run_in() {  # USER read-only|writable FOLDER COMMAND: run COMMAND in FOLDER of the prepared root
    local home=/root
    [ "$1" = root ] || home=/home/$1
    ROOT=$WORK/root USER_NAME=$1 USER_HOME=$home MODE=$2 FOLDER=$3 COMMAND=$4 MOUNTS=$(cat "$WORK/mounts") \
        unshare --mount --pid --fork --kill-child bash "$HERE/ops/bare/enter.sh"
}

prepare() {  # SYSTEM USER FOLDER: an empty layer over SYSTEM, with a clone in FOLDER
    local layer=$WORK/layer
    if mountpoint -q "$WORK/root"; then umount -l "$WORK/root"; fi
    rm -rf --one-file-system "$layer"
    mkdir -p "$WORK/root" "$layer/upper" "$layer/work"
    mount -t overlay overlay -o "lowerdir=$SYSTEMS/$1,upperdir=$layer/upper,workdir=$layer/work" "$WORK/root"
    git clone --quiet "$HERE" "$WORK/root$3"
    chroot "$WORK/root" chown -R "$2:" "$3"
    cp "$WORK/pip.conf" "$WORK/root/etc/pip.conf"
}

python3 "$HERE/ops/bare/index_settings.py" "$WORK/pip.conf" >"$WORK/mounts"
table=() failed=0
suites="SUITES='engine-tests service-tests system-tests interpreted-tests check'"
[ -z "$ALL" ] || suites=
if [ -z "$WHEEL" ]; then
    echo "--- make dist"
    rm -f "$HERE"/dist/isochrone-*-cp311-*.whl
    (cd "$HERE" && make dist)
    WHEEL=$(ls "$HERE"/dist/isochrone-*-cp311-*.whl)
fi
bootstrap bare
prepare bare user /home/user/checkout
cp "$WHEEL" "$HERE/ops/bare/try_wheel.sh" "$WORK/root/home/user/"
echo "--- pip install ${WHEEL##*/}: system bare, as user"
began=$SECONDS result=passed
run_in user read-only /home/user "bash try_wheel.sh ${WHEEL##*/}" || result=FAILED failed=1
table+=("$(printf '%-9s %-5s %-10s %-24s %-18s %-7s %6d s' bare user read-only /home/user "pip install WHEEL" \
    "$result" $((SECONDS - began)))")
[ -z "$ONLY_WHEEL" ] || COMBINATIONS=()
for combination in "${COMBINATIONS[@]}"; do
    IFS='|' read -r what commands <<<"$combination"
    read -r system user mode folder <<<"$what"
    bootstrap "$system"
    prepare "$system" "$user" "$folder"
    for command in $commands; do
        make='make up ONESHOT=1' again=
        # As CI does: a test that fails on a busy machine is run once more.
        [ "$command" != test ] || { make="make test $suites" again=" || make test-again $suites"; }
        echo "--- $make: system $system, as $user, $mode, in '$folder'"
        began=$SECONDS result=passed
        run_in "$user" "$mode" "$folder" "$make$again" 2>&1 | tee "$WORK/output" || result=FAILED failed=1
        # The demo prints a row for each city: TTFT, then tokens per second. The first row is the nearest replica's.
        speed=$(awk '/^ams .* ms +[0-9.]+ +[0-9]+\/[0-9]+ / && !seen {print $6; seen = 1}' "$WORK/output")
        table+=("$(printf '%-9s %-5s %-10s %-24s %-18s %-7s %6d s  %s' "$system" "$user" "$mode" "$folder" "make $command" \
            "$result" $((SECONDS - began)) "${speed:-}")")
    done
done
umount -l "$WORK/root"
printf '\n%-9s %-5s %-10s %-24s %-18s %-7s %8s  %s\n' SYSTEM USER FILES FOLDER COMMAND RESULT TIME TOKENS/S
printf '%s\n' "${table[@]}"
exit $failed

#!/usr/bin/env bash
# Tests the units in a container with systemd: boots Debian, installs the committed code as the README says, with
# PgBouncer and TLS, sends a chat, and kills each service in turn. Only this test finds what a unit forbids by mistake.
# Needs root, debootstrap and systemd-container.
#
#     ops/systemd/try.sh FOLDER MODEL.gguf
#
# FOLDER keeps Debian for the next run. PIP_FIND_LINKS may name a folder with torch's CPU build, which is a tenth of
# the size of the GPU build.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
HERE=$(realpath "$(dirname "$0")") ROOT=$(realpath -m "$1")/debian MODEL=$(realpath "$2")
PACKAGES=systemd,systemd-sysv,dbus,python3-venv,postgresql,pgbouncer,openssl,ca-certificates,curl,gcc,libc6-dev,procps

[ -e "$ROOT/etc/pgbouncer" ] || debootstrap --variant=minbase --include="$PACKAGES" bookworm "$ROOT"
rm -rf "$ROOT/root/checkout" "$ROOT/var/lib/isochrone" "$ROOT/etc/isochrone" \
    "$ROOT"/etc/systemd/system/multi-user.target.wants/isochrone-*
git clone --quiet "$HERE/../.." "$ROOT/root/checkout"
install -D -m 644 "$MODEL" "$ROOT/srv/model/model.gguf"

contain=(systemd-nspawn --quiet --register=no --keep-unit --directory="$ROOT")
outside=(--bind-ro=/etc/ssl/certs/ca-certificates.crt --bind-ro=/etc/resolv.conf)
[ ! -e /etc/pip.conf ] || outside+=(--bind-ro=/etc/pip.conf)
[ -z "${PIP_FIND_LINKS:-}" ] || outside+=(--bind-ro="$PIP_FIND_LINKS:/links" --setenv=PIP_FIND_LINKS=/links)
"${contain[@]}" "${outside[@]}" bash /root/checkout/ops/systemd/walk.sh install

# From here on the container has a private network: it reaches nothing outside and uses no port of this machine.
"${contain[@]}" --private-network --boot </dev/null >"$1/boot.log" 2>&1 &
container=$!
trap 'kill $container; wait $container || true' EXIT
for _ in $(seq 60); do
    leader=$(pgrep --parent "$container" --exact systemd) && break
    sleep 0.5
done
enter() {
    nsenter --target "$leader" --mount --uts --ipc --net --pid env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
}
for _ in $(seq 60); do
    enter systemctl is-active --quiet multi-user.target && break
    sleep 1
done
enter bash /root/checkout/ops/systemd/walk.sh walk

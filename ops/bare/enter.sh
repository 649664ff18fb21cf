#!/usr/bin/env bash
# Enters the root that try.sh prepared, in its own mount and process namespace, and runs one command there.
# Reads ROOT, USER_NAME, USER_HOME, MODE (read-only or writable), FOLDER, COMMAND and MOUNTS (paths of this
# machine, one a line).
set -euo pipefail
mount --make-rprivate /

# Devices of its own: a container's usual few.
mount -t proc proc "$ROOT/proc"
mount -t sysfs -o ro sysfs "$ROOT/sys"
mount -t tmpfs -o mode=755 tmpfs "$ROOT/dev"
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    read -r name major minor <<<"$device"
    mknod -m 666 "$ROOT/dev/$name" c "$major" "$minor"
done
mkdir "$ROOT/dev/shm" "$ROOT/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$ROOT/dev/pts"
ln -s pts/ptmx "$ROOT/dev/ptmx"
ln -s /proc/self/fd "$ROOT/dev/fd"

# The package index settings of this machine, read-only.
while read -r path; do
    [ -e "$path" ] || continue
    target=$ROOT$path
    if [ -d "$path" ]; then
        mkdir -p "$target"
    else
        mkdir -p "$(dirname "$target")"
        [ -e "$target" ] || touch "$target"
    fi
    mount --bind "$path" "$target"
    mount -o remount,bind,ro "$target"
done <<<"$MOUNTS"

# Temporary folders are always writable; the rest is not where that is tried.
for folder in /tmp /var/tmp; do
    mkdir -p "$ROOT/.writable$folder"
    chmod 1777 "$ROOT/.writable$folder"
    mount --bind "$ROOT/.writable$folder" "$ROOT$folder"
done
if [ "$MODE" = read-only ]; then
    mount --bind "$ROOT$USER_HOME" "$ROOT$USER_HOME"
    mount -o remount,bind,ro "$ROOT" 2>/dev/null || mount -o remount,ro "$ROOT"
fi

exec chroot --userspec="$USER_NAME:$USER_NAME" "$ROOT" env -i HOME="$USER_HOME" USER="$USER_NAME" LANG=C.UTF-8 TERM=dumb \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c 'cd "$1" && eval "$2"' bash "$FOLDER" "$COMMAND"

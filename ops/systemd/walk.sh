#!/usr/bin/env bash
# The steps of try.sh inside its container: `install` while there is a network, `walk` once systemd has booted.
set -Eeuo pipefail
ADDRESS=127.30.0.5
export PATH=/opt/isochrone/bin:$PATH

install_all() {
    id isochrone >/dev/null 2>&1 || useradd --system --shell /usr/sbin/nologin isochrone
    [ -x /opt/isochrone/bin/pip ] || python3 -m venv /opt/isochrone
    cd /root/checkout
    TMPDIR=/root /opt/isochrone/bin/pip install --quiet --only-binary :all: --report installed.json -c constraints.txt '.[engine]'
    python3 ops/packaging/hashes.py check installed.json
    install -d -o isochrone -m 700 /etc/isochrone
    cp ops/systemd/*.service /etc/systemd/system/
}

settings() {
    cd /etc/isochrone
    openssl rand -hex 32 >admin.token
    openssl req -x509 -newkey rsa:2048 -nodes -keyout tls.key -out tls.crt -days 30 -subj /CN=isochrone \
        -addext "subjectAltName=IP:$ADDRESS" 2>/dev/null
    cat >scheduler.toml <<TOML
name = "scheduler-1"
database_url = "postgresql://isochrone:isochrone@127.0.0.1:6432/isochrone"
authority = "/var/lib/isochrone/scheduler/authority"
admin_token_file = "/etc/isochrone/admin.token"
admin_host = "$ADDRESS"
control_host = "$ADDRESS"
control_tls = true
tls_certificate = "/etc/isochrone/tls.crt"
tls_key = "/etc/isochrone/tls.key"
TOML
    cat >node.toml <<TOML
name = "ams-gpu-7"
schedulers = ["https://$ADDRESS:7001"]
state = "/var/lib/isochrone/node"
address = "https://$ADDRESS:9000"
listen_host = "$ADDRESS"
listen_tls = true
private_host = "$ADDRESS"
private_port = 9101
join_token_file = "/etc/isochrone/join.token"
keep_engines_on_stop = true
TOML
    cat >router.toml <<TOML
name = "router-ams-1"
schedulers = ["https://$ADDRESS:7001"]
state_folder = "/var/lib/isochrone/router"
host = "$ADDRESS"
port = 443
tls_certificate = "/etc/isochrone/tls.crt"
tls_key = "/etc/isochrone/tls.key"
private_host = "$ADDRESS"
private_port = 9100
processes = 0
node_tls = true
join_token_file = "/etc/isochrone/join-router.token"
TOML
}

postgres() {
    cat >/etc/pgbouncer/pgbouncer.ini <<INI
[databases]
isochrone = host=127.0.0.1
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = 6432
auth_type = scram-sha-256
auth_file = /etc/pgbouncer/userlist.txt
pool_mode = transaction
INI
    cd /
    su postgres -c "psql -q" <<SQL
DROP DATABASE IF EXISTS isochrone WITH (FORCE);
DROP ROLE IF EXISTS isochrone;
CREATE ROLE isochrone LOGIN PASSWORD 'isochrone';
CREATE DATABASE isochrone OWNER isochrone;
\t on
\o /tmp/userlist.txt
SELECT format('"%s" "%s"', usename, passwd) FROM pg_shadow WHERE usename = 'isochrone';
SQL
    install -o postgres -m 600 /tmp/userlist.txt /etc/pgbouncer/
    systemctl restart pgbouncer
}

# expect DESCRIPTION COMMAND...: retry for a minute.
expect() {
    for _ in $(seq 60); do
        if "${@:2}" >/tmp/output 2>&1; then
            echo "ok: $1"
            return
        fi
        sleep 1
    done
    cat /tmp/output >&2
    echo "failed: $1" >&2
    false
}
chat() { isochrone chat model 'Say hello.' --endpoint "https://$ADDRESS" --key "$KEY" | grep -q .; }
main_pid() { systemctl show --property MainPID --value "isochrone-$1"; }
has_new_pid() { systemctl is-active --quiet "isochrone-$1" && [ "$(main_pid "$1")" != "$2" ]; }
engine() { pgrep --full nodeagent.engine; }

walk() {
    trap "journalctl --no-pager --lines 40 --unit 'isochrone-*' >&2" ERR
    settings
    postgres
    chown isochrone /etc/isochrone/*
    chmod 600 /etc/isochrone/*
    systemctl daemon-reload
    systemctl enable --now isochrone-scheduler
    ISOCHRONE_ADMIN_TOKEN=$(cat /etc/isochrone/admin.token)
    export ISOCHRONE_ADMIN_TOKEN ISOCHRONE_ADMIN_URL=https://$ADDRESS:7000 SSL_CERT_FILE=/etc/isochrone/tls.crt
    expect "a scheduler is active, behind PgBouncer" isochrone pops add ams --city Amsterdam --country NL \
        --latitude 52.31 --longitude 4.76
    isochrone nodes join-token ams >/etc/isochrone/join.token
    isochrone nodes join-token ams --role router >/etc/isochrone/join-router.token
    chown isochrone /etc/isochrone/*.token
    systemctl enable --now isochrone-nodeagent isochrone-router
    isochrone models add model --source file:/srv/model 2>/dev/null
    isochrone deploy chat --model model --driver embedded --min 1 --keep-warm ams --wait >/dev/null
    KEY=$(isochrone keys create acme | grep -o 'iso_[A-Za-z0-9_]*' | head -1)
    expect "a chat is answered" chat

    local before running signal service
    running=$(engine)
    before=$(main_pid nodeagent)
    systemctl restart isochrone-nodeagent
    expect "the restarted agent adopts its engine" test "$(engine)" = "$running"
    expect "a chat is answered after the restart" chat
    for signal in KILL STOP; do
        for service in scheduler nodeagent router; do
            [ "$signal $service" != "STOP scheduler" ] || continue # its lease expires and another scheduler takes over
            before=$(main_pid "$service")
            kill -"$signal" "$before"
            expect "after SIG$signal systemd restarted the $service" has_new_pid "$service" "$before"
            expect "a chat is answered after SIG$signal of the $service" chat
        done
    done
    expect "the engine is still the same process" test "$(engine)" = "$running"
    systemctl stop isochrone-router isochrone-nodeagent isochrone-scheduler
    expect "a stop leaves the engine running" test "$(engine)" = "$running"
    echo "exposure by systemd-analyze, out of 10:"
    systemd-analyze security --no-pager | grep isochrone
}

case $1 in
install) install_all ;;
walk) walk ;;
esac

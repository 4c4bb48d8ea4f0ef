#!/bin/sh
# The official Python clients against the real binary on the real model.
#
#   tests/clients/run.sh [PATH-OF-THE-BINARY]
#
# Needs Python 3.10 or newer; the clients go to a virtual environment under target/clients.
set -eu
cd "$(dirname "$0")/../.."
binary=${1:-target/release/kvasir}
port=${PORT:-8321}
venv=target/clients
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet openai anthropic prometheus_client
"$binary" serve --port "$port" --api-key clients --disable-log-requests &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
for _ in $(seq 240); do
    curl --silent --fail "http://127.0.0.1:$port/health" >/dev/null && break
    kill -0 "$server" || exit 1
    sleep 0.5
done
"$venv/bin/python" tests/clients/session.py "http://127.0.0.1:$port" clients
# A drain ends well.
kill -TERM "$server"
wait "$server"
trap - EXIT
echo "ok: all clients, and the server ended well"

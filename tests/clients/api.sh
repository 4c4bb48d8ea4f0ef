#!/bin/sh
# The served API against its own description, by schemathesis: no 5xx, no answer that the description does not allow.
#
#   tests/clients/api.sh [PATH-OF-THE-BINARY] [SECONDS]
#
# 501 (a known field that is not supported) is no fault. Streams of steps have no end and are left out; the context is short, so
# that answers without a limit end soon.
set -u
here=$(cd "$(dirname "$0")" && pwd)
binary=$(realpath "${1:-$here/../../target/release/kvasir}")
seconds=${2:-300}
port=${PORT:-8322}
base=http://127.0.0.1:$port
if [ -n "${CLIENTS_DIR:-}" ]; then mkdir -p "$CLIENTS_DIR"; work=$(realpath "$CLIENTS_DIR"); else work=$(mktemp -d); fi
server=''
finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null
    [ -n "${CLIENTS_DIR:-}" ] || rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
[ -x "$work/api/bin/schemathesis" ] || { python3 -m venv "$work/api" && "$work/api/bin/pip" install --quiet schemathesis; } || {
    echo "skip: schemathesis cannot be installed here"
    exit "${REQUIRE_CLIENTS:-0}"
}
"$binary" serve --port "$port" --max-model-len 160 --disable-log-requests &
server=$!
for _ in $(seq 240); do
    curl --silent --fail "$base/health" >/dev/null && break
    kill -0 "$server" 2>/dev/null || exit 1
    sleep 0.5
done
# It keeps what it found in the folder that it runs in.
cd "$work" || exit 1
"$work/api/bin/schemathesis" --config-file "$here/schemathesis.toml" run "$base/openapi.json" --workers 4 --exclude-path /kvasir/v1/steps --max-time "$seconds" --request-timeout 60 \
    --checks not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance \
    --phases examples,coverage,fuzzing --continue-on-failure --warnings off

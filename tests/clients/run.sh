#!/bin/sh
# Public clients, unchanged, against the real binary on the real model: completions, chats, streams, tools, schemas, log
# probabilities, several choices, errors, aborts.
#
#   tests/clients/run.sh [PATH-OF-THE-BINARY]
#
# The clients are installed into a temporary folder (CLIENTS_DIR=FOLDER keeps one between runs). A client that cannot be
# installed is named as skipped; REQUIRE_CLIENTS=1 makes that a failure. PORT chooses the port, KVASIR_MODEL the model.
set -u
here=$(cd "$(dirname "$0")" && pwd)
binary=${1:-$here/../../target/release/kvasir}
port=${PORT:-8321}
base=http://127.0.0.1:$port
passed='' skipped='' failed='' server=''
if [ -n "${CLIENTS_DIR:-}" ]; then
    work=$CLIENTS_DIR
    mkdir -p "$work"
else
    work=$(mktemp -d)
fi
finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null
    [ -n "${CLIENTS_DIR:-}" ] || rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

# run NAME INSTALL COMMAND...: the session of one client. INSTALL is a function and its arguments.
run() {
    name=$1 install=$2
    shift 2
    if ! $install >"$work/install.log" 2>&1; then
        tail -n 3 "$work/install.log"
        echo "skip: $name cannot be installed here"
        skipped="$skipped $name"
        return
    fi
    echo "-- $name"
    if "$@"; then passed="$passed $name"; else
        echo "FAILED: $name"
        failed="$failed $name"
    fi
}
python_packages() {
    [ -x "$work/python/bin/python" ] || python3 -m venv "$work/python" || return
    "$work/python/bin/pip" install --quiet prometheus_client "$@"
}
npm_packages() {
    cp "$here"/*.mjs "$work/node/" || return
    (cd "$work/node" && npm install --silent --no-audit --no-fund "$@")
}
python() {
    script=$1
    shift
    "$work/python/bin/python" "$here/$script" "$base" clients "$@"
}
javascript() { (cd "$work/node" && node "$1" "$base" clients); }

mkdir -p "$work/node"
[ -f "$work/node/package.json" ] || echo '{ "private": true, "type": "module" }' >"$work/node/package.json"
"$binary" serve --port "$port" --api-key clients --disable-log-requests &
server=$!
for _ in $(seq 240); do
    curl --silent --fail "$base/health" >/dev/null && break
    kill -0 "$server" 2>/dev/null || exit 1
    sleep 0.5
done

run openai+anthropic-python 'python_packages openai anthropic' python official_session.py
run openai-npm 'npm_packages openai' javascript openai.mjs
run tritonclient 'python_packages tritonclient[http]' python triton_session.py
run ai-sdk 'npm_packages ai @ai-sdk/openai @ai-sdk/openai-compatible' javascript ai_sdk.mjs
run langchain 'python_packages langchain-openai' python langchain_session.py
run litellm 'python_packages litellm' python litellm_session.py

# SCHEMAS=1000 and CROWD=256 ask for as much as a release should pass; the defaults fit a slow machine.
run metrics 'python_packages' python metrics_session.py
run schemas 'python_packages openai jsonschema' python schema_session.py "${SCHEMAS:-50}"
run crowd 'python_packages' python crowd_session.py "$server" "${CROWD:-64}"

# A drain ends well.
kill -TERM "$server"
if wait "$server"; then passed="$passed drain"; else failed="$failed drain"; fi
server=''
echo "passed:$passed"
echo "skipped:${skipped:- none}"
echo "failed:${failed:- none}"
[ -z "$failed" ] && { [ -z "$skipped" ] || [ "${REQUIRE_CLIENTS:-}" != 1 ]; }

#!/bin/sh
# Two replicas behind public routers, on loopback: chats and streams, prefixes that stay on one replica (by the replicas' own
# hit counters), a replica that is killed while the service goes on and that is found again.
#
#   deploy/test.sh [PATH-OF-THE-BINARY]
#
# The routers are installed into a temporary folder (ROUTERS_DIR=FOLDER keeps one between runs); one that cannot be installed
# is named as skipped. Results of a run are in deploy/README.md.
set -u
here=$(cd "$(dirname "$0")" && pwd)
binary=${1:-$here/../target/release/kvasir}
key=sk-replicas one=http://127.0.0.1:8001 two=http://127.0.0.1:8002
passed='' skipped='' failed='' pids=''
export KVASIR_API_KEY=$key
if [ -n "${ROUTERS_DIR:-}" ]; then work=$ROUTERS_DIR; mkdir -p "$work"; else work=$(mktemp -d); fi
finish() {
    for pid in $pids; do kill "$pid" 2>/dev/null; done
    [ -n "${ROUTERS_DIR:-}" ] || rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

# wait_for URL [SECONDS]
wait_for() {
    for _ in $(seq $((2 * ${2:-120}))); do
        curl --silent --fail --max-time 5 -H "authorization: Bearer $key" "$1" >/dev/null && return 0
        sleep 0.5
    done
    echo "$1 does not answer"
    return 1
}
# replica PORT: starts one; its process is in $replica.
replica() {
    # vllm-router listens for an empty topic and reads maps.
    "$binary" serve --port "$1" --served-model-name kvasir --max-model-len 2048 --disable-log-requests \
        --kv-events-endpoint "tcp://127.0.0.1:$(($1 - 2400))" --kv-events-replay-endpoint "tcp://127.0.0.1:$(($1 - 2300))" \
        --kv-events-format map --kv-events-topic '' >"$work/replica$1.log" 2>&1 &
    replica=$!
    pids="$pids $replica"
    wait_for "http://127.0.0.1:$1/health"
}
python() { "$work/python/bin/python" "$here/replicas.py" "$@"; }

# run NAME SHARE PORT COMMAND...: a router on this port; equal prefixes must be found to this share.
run() {
    name=$1 share=$2 router=http://127.0.0.1:$3
    shift 3
    echo "-- $name"
    "$@" >"$work/$name.log" 2>&1 &
    process=$!
    pids="$pids $process"
    result=failed
    # Ready when a whole answer comes through.
    wait_for "$router/v1/models" && python alive "$router" "$key" && python spread "$router" "$key" "$share" $one $two && {
        kill -KILL "$second" 2>/dev/null
        echo "a replica is killed"
        python alive "$router" "$key"
    } && result=passed
    kill -0 "$second" 2>/dev/null || { replica 8002; second=$replica; }
    if [ "$result" = passed ]; then
        # The one that came back serves again: prefixes spread over both.
        python spread "$router" "$key" "$share" $one $two || result=failed
    fi
    kill "$process" 2>/dev/null
    wait "$process" 2>/dev/null
    if [ "$result" = passed ]; then passed="$passed $name"; else
        tail -n 20 "$work/$name.log"
        failed="$failed $name"
    fi
}
# install PACKAGE COMMAND
install() {
    [ -x "$work/python/bin/python" ] || python3 -m venv "$work/python"
    [ -x "$work/python/bin/$2" ] || "$work/python/bin/pip" install --quiet "$1" >"$work/install.log" 2>&1 || {
        tail -n 3 "$work/install.log"
        echo "skip: $1 cannot be installed here"
        skipped="$skipped $1"
        return 1
    }
}

replica 8001 || exit 1
replica 8002 || exit 1
second=$replica
bin=$work/python/bin

if install 'litellm[proxy]' litellm; then
    export LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_MASTER_KEY=$key
    run litellm 0 4000 "$bin/litellm" --config "$here/litellm.yaml" --port 4000
fi
if install vllm-router vllm-router; then
    run vllm-router 0.65 4001 "$bin/vllm-router" --worker-urls $one $two --policy cache_aware --api-key "$key" --port 4001 \
        --prometheus-port 4101 --health-check-interval-secs 2 --cb-timeout-duration-secs 5
fi
if install vllm-router vllm-router; then
    run vllm-router-kv-aware 0.65 4003 "$bin/vllm-router" --worker-urls $one $two --policy kv_aware --api-key "$key" --port 4003 \
        --kv-event-source $one=tcp://127.0.0.1:5601 --kv-event-source $two=tcp://127.0.0.1:5602 \
        --kv-event-replay-source $one=tcp://127.0.0.1:5701 --kv-event-replay-source $two=tcp://127.0.0.1:5702 \
        --kv-event-model kvasir --prometheus-port 4103 --health-check-interval-secs 2 --cb-timeout-duration-secs 5
fi
if install smg smg; then
    run smg 0.65 4002 "$bin/smg" launch --worker-urls $one $two --policy cache_aware --api-key "$key" --port 4002 \
        --prometheus-port 4102
fi

echo "passed:$passed"
echo "skipped:${skipped:- none}"
echo "failed:${failed:- none}"
[ -z "$failed" ]

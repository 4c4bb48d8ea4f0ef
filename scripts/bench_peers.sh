#!/usr/bin/env bash
# Kvasir beside public peers, all measured in one run on this machine, with one model and prompts of the same lengths:
# llama.cpp through node-llama-cpp (its Vulkan build on the same adapter, its CPU build), transformers on torch (CPU).
#
#   scripts/bench_peers.sh              medians of 5 rounds in which the engines take turns
#   RUNS=1 PEERS="kvasir cpu" scripts/bench_peers.sh
#
# PEERS names who takes part: kvasir vulkan cpu transformers. Peers are installed with npm and pip, as this machine has
# them set up, under PEERS_DIR (default: ~/.cache/kvasir-peers). A peer that cannot be installed or run is named with its
# reason and left out of the table. KVASIR is the binary, MODEL the GGUF file (default: the default model).
set -uo pipefail
cd "$(dirname "$0")/.."

runs=${RUNS:-5}
peers=${PEERS:-kvasir vulkan cpu transformers}
dir=${PEERS_DIR:-$HOME/.cache/kvasir-peers}
mkdir -p "$dir/results"
rm -f "$dir"/results/*.jsonl

if [ -z "${KVASIR:-}" ]; then
  cargo build --release || exit 1
  KVASIR=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')/release/kvasir
fi
if [ -z "${MODEL:-}" ]; then
  "$KVASIR" models pull default >/dev/null || exit 1
  MODEL=$("$KVASIR" models --json | python3 -c '
import json, sys
models = json.load(sys.stdin)
print(next(m["path"] for m in models if "SmolLM2-135M" in m["path"]))') || exit 1
fi

left_out() { printf '%s is left out: %s\n' "$1" "$2" >&2; peers=${peers//$1/}; }

case " $peers " in *" vulkan "* | *" cpu "*)
  if [ ! -d "$dir/node_modules/node-llama-cpp" ]; then
    (cd "$dir" && npm init -y && npm install --ignore-scripts node-llama-cpp) >"$dir/npm.log" 2>&1 ||
      { left_out vulkan "npm could not install node-llama-cpp ($dir/npm.log)"; left_out cpu "the same"; }
  fi
  cp scripts/peers/llama.mjs "$dir/"
esac
case " $peers " in *" transformers "*)
  if ! "$dir/venv/bin/python" -c 'import torch, transformers, gguf, accelerate' 2>/dev/null; then
    { python3 -m venv "$dir/venv" && "$dir/venv/bin/pip" install torch transformers gguf accelerate; } >"$dir/pip.log" 2>&1 ||
      left_out transformers "pip could not install torch and transformers ($dir/pip.log)"
  fi
esac

# Each prints one JSON object of figures.
measure() {
  case $1 in
    # A software driver counts as no GPU for llama.cpp unless it is named.
    vulkan) (cd "$dir" && GGML_VK_VISIBLE_DEVICES=${GGML_VK_VISIBLE_DEVICES:-0} node llama.mjs "$MODEL" vulkan 8) ;;
    cpu) (cd "$dir" && node llama.mjs "$MODEL" cpu 64) ;;
    transformers) "$dir/venv/bin/python" scripts/peers/transformers_cpu.py "$MODEL" ;;
    kvasir) KVASIR=$KVASIR python3 scripts/peers/kvasir.py "$MODEL" ;;
  esac
}

for round in $(seq "$runs"); do
  for peer in $peers; do
    printf 'round %d: %s\n' "$round" "$peer" >&2
    measure "$peer" >>"$dir/results/$peer.jsonl" 2>"$dir/results/$peer.log" ||
      left_out "$peer" "it failed: $(tail -n 1 "$dir/results/$peer.log")"
  done
done
python3 scripts/peers/table.py "$dir/results"

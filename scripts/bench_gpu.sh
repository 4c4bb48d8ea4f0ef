#!/usr/bin/env bash
# Correctness, tuning and speed on a real GPU in under 8 minutes, on a machine where nothing can be installed or fetched.
#
#   scripts/bench_gpu.sh pack DIR            here: the stripped binary, the kernel tests and a Vulkan loader into DIR
#   DIR/bench_gpu.sh run [REPORT]            there, with DIR and the checkout carried over: writes one report
#
# SHAPE=8b|1b|tiny picks the synthetic model (default 8b, which needs 6 GB of GPU memory and of disk). Seeded weights are
# made there. Where torch and transformers are installed, they are measured on the same shape; nothing else is needed but
# bash and Python. A software driver works too, with SHAPE=tiny: a dry run.
set -uo pipefail

pack() {
  local to=${1:?usage: bench_gpu.sh pack DIR}
  cd "$(dirname "$0")/.."
  mkdir -p "$to"
  local suite
  suite=$(cargo test --release --test suite --no-run --message-format json | python3 -c '
import json, sys
built = [json.loads(line) for line in sys.stdin]
print(next(b["executable"] for b in built if b.get("executable") and b["target"]["name"] == "suite"))') || exit 1
  cargo build --release || exit 1
  strip -o "$to/kvasir" "$(dirname "$(dirname "$suite")")/kvasir"
  strip -o "$to/suite" "$suite"
  local loader
  loader=$(ldconfig -p | awk '/libvulkan\.so\.1 .*x86-64/ { print $NF; exit }')
  cp -L "$loader" "$to/libvulkan.so.1"
  cp scripts/bench_gpu.sh scripts/peers/synthetic.py scripts/peers/torch_synthetic.py "$to/"
  du -sh "$to"
}

run() {
  cd "$(dirname "$0")"
  local report=${1:-report.txt} shape=${SHAPE:-8b} scratch
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  # The machine's own loader comes first, where it has one.
  ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' || export LD_LIBRARY_PATH=$PWD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  local icd=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json
  if [ -z "${VK_DRIVER_FILES:-}" ] && [ -f "$icd" ]; then
    export VK_DRIVER_FILES=$icd
  fi
  export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$scratch} XDG_CACHE_HOME=$scratch/cache KVASIR_FIXTURES=$scratch/none

  # step TITLE SECONDS COMMAND...: what it prints goes into the report, with its exit status.
  step() {
    local title=$1 limit=$2 started=$SECONDS status
    shift 2
    printf '\n== %s\n' "$title"
    timeout "$limit" "$@" 2>&1
    status=$?
    printf -- '-- %s: exit %d after %d s\n' "$title" "$status" $((SECONDS - started))
    [ "$status" = 0 ] || failed="$failed, $title"
  }
  local failed=
  {
    date -u +'%Y-%m-%d %H:%M UTC'
    step "adapters" 30 ./kvasir doctor
    step "kernels against their references" 150 sh -c './suite kernels:: 2>&1 | tail -n 15'
    step "kernels alone" 60 ./kvasir bench kernels --budget 100
    step "batch invariance" 40 ./kvasir bench invariance --budget 60
    step "synthetic $shape weights" 60 python3 synthetic.py "$scratch/model.gguf" --shape "$shape"
    step "one stream" 60 ./kvasir bench latency --model "$scratch/model.gguf" --input-len 512 --output-len 64 --json
    step "sixteen streams" 60 ./kvasir bench throughput --model "$scratch/model.gguf" --num-prompts 16 --concurrency 16 \
      --input-len 64 --output-len 64 --json
    if python3 -c 'import torch, transformers' 2>/dev/null; then
      step "torch and transformers" 90 python3 torch_synthetic.py --shape "$shape"
    else
      printf '\ntorch and transformers are not installed: no peer\n'
    fi
    printf '\n%s\n' "${failed:+failed: ${failed#, }}"
  } | tee "$report"
  ! grep -q '^failed: ' "$report"
}

case "${1:-}" in
  pack) pack "${2:-}" ;;
  run) run "${2:-}" ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Runs the kernel tests, each with and without shader checks and without optional features, on software drivers:
# lavapipe with subgroups of 4 to 64 lanes, and every driver that is named.
#
#   scripts/kernel_matrix.sh                                    lavapipe at each width
#   scripts/kernel_matrix.sh swiftshader=/path/vk_swiftshader_icd.json newer-mesa=/path/lvp_icd.json
#
# KERNELS=… narrows the tests (default `kernels::`). Prints a line for each run and fails if one of them did. Widths whose
# lanes the driver does not run as reported use the kernels without subgroups, and say so.
set -uo pipefail
cd "$(dirname "$0")/.."

tests=${KERNELS:-kernels::}
log=$(mktemp -d)
failed=0

# run NAME [VARIABLE=VALUE ...]
run() {
  local name=$1 started=$SECONDS result=ok
  shift
  env REQUIRE_GPU=1 "$@" cargo test --release --test suite -- "$tests" >"$log/$name.txt" 2>&1 || result=FAILED
  [ "$result" = ok ] || failed=1
  printf '%-24s %-7s %5d s  %s\n' "$name" "$result" $((SECONDS - started)) \
    "$(grep -E '^test result' "$log/$name.txt" | tail -1)"
}

cargo test --release --test suite --no-run || exit 1
for width in 128 256 512 1024 2048; do
  run "lavapipe-$((width / 32))-lanes" "LP_NATIVE_VECTOR_WIDTH=$width"
done
for driver in "$@"; do
  icd=${driver#*=}
  if [ ! -f "$icd" ]; then
    echo "no driver manifest at $icd" >&2
    failed=1
    continue
  fi
  run "${driver%%=*}" "VK_DRIVER_FILES=$icd" "VK_ICD_FILENAMES=$icd"
done
[ "$failed" = 0 ] || echo "what failed is in $log"
exit "$failed"

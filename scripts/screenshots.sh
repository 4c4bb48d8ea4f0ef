#!/usr/bin/env bash
# Takes the pictures in assets/screenshots: the real app in a virtual X display, with the demo running.
#
#   scripts/screenshots.sh [BINARY]        default: target/release/kvasir
#
# Needs Xvfb, ImageMagick's `import` and a Vulkan driver (Debian, Ubuntu: sudo apt install xvfb imagemagick
# mesa-vulkan-drivers). The default model is fetched on the first run. Nothing of the user's chats is touched.
# SECONDS_TO_WAIT (20) is how long the demo runs before the picture; OUT is where the pictures go.
set -euo pipefail
cd "$(dirname "$0")/.."

binary=${1:-target/release/kvasir}
out=${OUT:-assets/screenshots}
seconds_to_wait=${SECONDS_TO_WAIT:-20}

for tool in Xvfb import; do
    command -v "$tool" >/dev/null || { echo "error: $tool is missing; sudo apt install xvfb imagemagick" >&2; exit 1; }
done
[ -x "$binary" ] || { echo "error: $binary is missing; cargo build --release" >&2; exit 1; }

temp=$(mktemp -d)
app_pid='' xvfb_pid=''
stop() {
    [ -z "$1" ] || { kill "$1" 2>/dev/null || true; wait "$1" 2>/dev/null || true; }
}
trap 'stop "$app_pid"; stop "$xvfb_pid"; rm -rf "$temp"' EXIT
export XDG_RUNTIME_DIR="$temp/runtime"
mkdir -m 700 "$XDG_RUNTIME_DIR"
unset WAYLAND_DISPLAY

# shot NAME SIZE SECONDS ARGUMENTS...: one picture of the app started with these arguments.
shot() {
    local name=$1 size=$2 seconds=$3
    shift 3
    # Xvfb writes the number of the free display that it took.
    Xvfb -displayfd 3 -screen 0 "${size}x24" 3>"$temp/display" 2>"$temp/xvfb.log" &
    xvfb_pid=$!
    for _ in $(seq 50); do [ -s "$temp/display" ] && break; sleep 0.1; done
    export DISPLAY=":$(cat "$temp/display")"
    "$binary" app --size "$size" --data-dir "$temp/data-$name" "$@" >"$temp/$name.log" 2>&1 &
    app_pid=$!
    sleep "$seconds"
    kill -0 "$app_pid" 2>/dev/null || { echo "error: the app ended early:" >&2; cat "$temp/$name.log" >&2; exit 1; }
    import -window root "$out/$name.png"
    stop "$app_pid"; app_pid=''
    stop "$xvfb_pid"; xvfb_pid=''
    rm -f "$temp/display"
    echo "$out/$name.png"
}

mkdir -p "$out"
"$binary" models pull default >&2
for theme in dark light; do
    for size in 1440x900 960x600; do
        shot "chat-$theme-$size" "$size" "$seconds_to_wait" --demo --theme "$theme" --workspace chat
        shot "inspect-$theme-$size" "$size" "$seconds_to_wait" --demo --theme "$theme" --workspace inspect
    done
    # Without a model and without a model folder, as on a fresh machine.
    KVASIR_HOME="$temp/home-$theme" shot "first-run-$theme" 1440x900 6 --theme "$theme"
done

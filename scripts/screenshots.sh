#!/usr/bin/env bash
# Takes the pictures in assets/screenshots: the real app in a virtual X display, with the demo running.
#
#   scripts/screenshots.sh [BINARY]        default: target/release/kvasir
#
# Needs Xvfb, ImageMagick's `import`, xdotool and a Vulkan driver (Debian, Ubuntu: sudo apt install xvfb imagemagick xdotool
# mesa-vulkan-drivers). The default model is fetched on the first run. Nothing of the user's chats is touched.
# OUT is where the pictures go; PATIENCE (300) is how many seconds one picture may take.
set -euo pipefail
cd "$(dirname "$0")/.."

binary=${1:-target/release/kvasir}
out=${OUT:-assets/screenshots}
patience=${PATIENCE:-300}

for tool in Xvfb import xdotool; do
    command -v "$tool" >/dev/null || { echo "error: $tool is missing; sudo apt install xvfb imagemagick xdotool" >&2; exit 1; }
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

# shot NAME SIZE ARGUMENTS...: one picture of the app started with these arguments. With --demo it is taken when all four
# chats show text, else when the window is drawn.
shot() {
    local name=$1 size=$2
    shift 2
    # Xvfb writes the number of the free display that it took.
    Xvfb -displayfd 3 -screen 0 "${size}x24" 3>"$temp/display" 2>"$temp/xvfb.log" &
    xvfb_pid=$!
    for _ in $(seq 100); do [ -s "$temp/display" ] && break; sleep 0.1; done
    DISPLAY=":$(cat "$temp/display")"
    export DISPLAY
    # The pointer stands in the middle of the screen and would raise a tooltip.
    xdotool mousemove 1 1
    "$binary" app --size "$size" --data-dir "$temp/data-$name" "$@" >"$temp/$name.log" 2>&1 &
    app_pid=$!
    local waited=0
    until is_ready "$name" "$@"; do
        kill -0 "$app_pid" 2>/dev/null || { echo "error: the app ended early:" >&2; cat "$temp/$name.log" >&2; exit 1; }
        [ "$waited" -lt "$patience" ] || { echo "error: nothing to see after $patience s: $name" >&2; exit 1; }
        sleep 1
        waited=$((waited + 1))
    done
    # A window that came up under the pointer has not seen it leave.
    xdotool mousemove 3 3
    sleep 2
    import -window root "$out/$name.png"
    stop "$app_pid"; app_pid=''
    stop "$xvfb_pid"; xvfb_pid=''
    rm -f "$temp/display"
    echo "$out/$name.png"
}

is_ready() {
    local name=$1
    case " $* " in
        *" --demo "*) grep -qs '^demo: all four chats show text' "$temp/$name.log" ;;
        *) [ "$(import -window root -depth 8 png:- 2>/dev/null | identify -format %k - 2>/dev/null || echo 0)" -gt 20 ] ;;
    esac
}

mkdir -p "$out"
"$binary" models pull default >&2
for theme in dark light; do
    for size in 1440x900 960x600; do
        shot "chat-$theme-$size" "$size" --demo --theme "$theme" --workspace chat
        shot "inspect-$theme-$size" "$size" --demo --theme "$theme" --workspace inspect
    done
    # Without a model and without a model folder, as on a fresh machine.
    KVASIR_HOME="$temp/home-$theme" shot "first-run-$theme" 1440x900 --theme "$theme"
done

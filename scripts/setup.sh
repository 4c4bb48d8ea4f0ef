#!/usr/bin/env bash
# Installs what building, running and testing Kvasir need, and says what it cannot install.
#
#   scripts/setup.sh         what `cargo run` needs: a C compiler, a Vulkan driver, the window's libraries, fonts
#   scripts/setup.sh --dev   also a virtual screen and tools for screenshots, for the tests and scripts
#
# It may be run again at any time: with nothing to do it prints nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  gcc libc6-dev                    # SQLite and the TLS library are compiled from C
  mesa-vulkan-drivers libvulkan1   # a Vulkan driver for every machine; a maker's own driver is used where present
  libx11-6 libx11-xcb1 libxcursor1 libxi6 libxrandr2 libxkbcommon0 libxkbcommon-x11-0
  libfontconfig1 fonts-dejavu-core fonts-noto-cjk
  python3 python3-pip              # one of the ways to fetch the default model
  ca-certificates
)
dev_packages=(
  xvfb xdotool openbox imagemagick x11-utils
)

case "${1:-}" in
  "") ;;
  --dev) packages+=("${dev_packages[@]}") ;;
  *)
    echo "usage: scripts/setup.sh [--dev]" >&2
    exit 2
    ;;
esac

is_installed() {
  [ "$(dpkg-query -W -f='${Status}' "$1" 2>/dev/null)" = "install ok installed" ]
}

install_packages() {
  local missing=() package as_root=()
  for package in "${packages[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "Installing ${missing[*]}"
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "Run this as root: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
  install_packages
elif [ "$(uname -s)" = Linux ]; then
  cat >&2 <<'TXT'
This system has no apt-get. Please install with its own package manager: a C compiler, a Vulkan driver and loader
(Mesa's software driver will do), libX11 with xcb, Xcursor, Xi and Xrandr, libxkbcommon with its X11 part, fontconfig
with a font for Chinese, Japanese and Korean, Python 3 with pip; for the tests also Xvfb, xdotool, openbox, ImageMagick.
TXT
elif ! command -v cc >/dev/null && ! command -v cl >/dev/null; then
  echo "Please install a C compiler (macOS: xcode-select --install; Windows: the Visual Studio build tools)." >&2
  exit 1
fi

needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
found=$(cargo --version 2>/dev/null | awk '{print $2}' || true)
oldest=$(printf '%s\n%s\n' "$needed" "${found:-0}" | sort -V | head -n 1)
if [ "$oldest" != "$needed" ]; then
  echo "Rust $needed or newer is needed, found: ${found:-none}." >&2
  echo "Install it with rustup (https://rustup.rs) or bring it up to date with: rustup update stable" >&2
  exit 1
fi

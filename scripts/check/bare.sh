#!/usr/bin/env bash
# Runs the README's two commands in a bare Debian: the smallest system that debootstrap makes, with build-essential and Rust
# and nothing else. What it passes with is what the README may name as needed.
#
#   scripts/check/bare.sh FOLDER     makes the system in FOLDER, or takes the one that is there, and runs both commands in it
#
# Needs root, debootstrap, a mirror that apt is configured for, and the crates of Cargo.lock, which are fetched before. Rust is
# this machine's own, mounted read-only. The committed state of the repository is tested; what it builds stays in
# FOLDER/larder/target.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "bare.sh: $*" >&2; exit 1; }

[ $# = 1 ] || fail "name the folder of the system"
[ "$(id -u)" = 0 ] || fail "run it as root: it mounts and changes the root folder"
command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"

mkdir -p "$1"
root=$(cd "$1" && pwd)
if [ ! -e "$root/bin/sh" ]; then
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | head -n 1)
    debootstrap --variant=minbase --include=build-essential "$suite" "$root" "$mirror"
fi

cargo fetch --locked --quiet
mkdir -p "$root/larder" "$root/opt/rust" "$root/home/.cargo/registry"
git archive HEAD | tar -x -C "$root/larder"

# The mounts are gone with the process that made them.
export root toolchain="$(rustc --print sysroot)" registry="${CARGO_HOME:-$HOME/.cargo}/registry"
unshare --mount --propagation private bash -euo pipefail <<'INSIDE'
mount --bind "$toolchain" "$root/opt/rust"
mount -o remount,bind,ro "$root/opt/rust"
mount --bind "$registry" "$root/home/.cargo/registry"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind /sys "$root/sys"
in_bare() {
    chroot "$root" /usr/bin/env -i HOME=/home PATH=/opt/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_NET_OFFLINE=true \
        sh -ec 'cd /larder; start=$(date +%s); "$@"; echo "bare.sh: took $(($(date +%s) - start)) s: $*"' sh "$@" </dev/null
}
in_bare cargo run --release -- run -p "The old man looked at the door, and" -n 40
in_bare cargo test --release --workspace
INSIDE

#!/usr/bin/env bash
# Makes the files of a release, with the same bytes each time from one commit and one toolchain.
#
#   scripts/make/release.sh OUT [--url URL] [--homepage URL] [SYSTEM…]
#
# OUT is a new or empty folder. SYSTEMs are linux, arm, windows, macos and macos-intel (default: all), which
# scripts/check/cross.sh builds with the features edge, hub and tls. URL is where the archives will be downloaded from. Writes
#
#   larder-VERSION-TARGET.tar.gz, .zip for Windows   command, demo model, completions, manual pages, licences, README, changelog
#   larder_VERSION_ARCH.deb                          the same for Debian and Ubuntu, of the static binaries
#   larder-VERSION.cdx.json                          all crates that are built in, as CycloneDX
#   SHA256SUMS
#   packages/                                        Homebrew formula, Scoop and winget manifests, Dockerfile
#
# Everything that is tracked has to be committed. Needs what cross.sh needs, git and dpkg-deb.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "release.sh: $*" >&2; exit 1; }

url=https://example.org/larder/releases homepage=https://example.org/larder out='' systems=()
while [ $# -gt 0 ]; do
    case $1 in
        --url) url=${2?"--url needs an address"} && shift ;;
        --homepage) homepage=${2?"--homepage needs an address"} && shift ;;
        linux | arm | windows | macos | macos-intel) systems+=("$1") ;;
        *) [ -z "$out" ] || fail "unknown system $1; systems are linux, arm, windows, macos and macos-intel" && out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || fail "name a folder for the files"
[ ${#systems[@]} -gt 0 ] || systems=(linux arm windows macos macos-intel)
command -v dpkg-deb >/dev/null || fail "dpkg-deb is missing; install the package dpkg"
[ -z "$(git status --porcelain --untracked-files=no)" ] || fail "there are uncommitted changes, but the version names a commit; commit them"
mkdir -p "$out"
[ -z "$(ls -A "$out")" ] || fail "$out is not empty; name a new folder"
out=$(cd "$out" && pwd)

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
# All times in the files are the commit's.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
LARDER_COMMIT=$(git rev-parse --short=12 HEAD)
export SOURCE_DATE_EPOCH LARDER_COMMIT LC_ALL=C TZ=UTC
umask 022
features=edge,hub,tls
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

target_of() {
    case $1 in
        linux) echo x86_64-unknown-linux-musl ;;
        arm) echo aarch64-unknown-linux-musl ;;
        windows) echo x86_64-pc-windows-gnu ;;
        macos) echo aarch64-apple-darwin ;;
        macos-intel) echo x86_64-apple-darwin ;;
    esac
}

# Builds the command for a system, without symbols and without paths of this machine, and prints where it is.
build() {
    local binary
    binary=${CARGO_TARGET_DIR:-$PWD/target}/$(target_of "$1")/release/larder
    CARGO_PROFILE_RELEASE_STRIP=symbols scripts/check/cross.sh build --for "$1" --locked --features "$features" >&2
    [ "$1" != windows ] || binary+=.exe
    echo "$binary"
}

# Makes the folder of an archive.
gather() {
    local folder=$work/$1 binary=$2
    mkdir -p "$folder"
    cp "$binary" README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$folder/"
    cp -r "$work/docs/completions" "$work/docs/man" "$folder/"
    git archive HEAD models/demo | tar --extract --directory "$folder"
}

pack_tar() {
    tar --create --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --mode=go-w --owner=0 --group=0 --numeric-owner \
        --directory "$work" "$1" | gzip -9 --no-name >"$out/$1.tar.gz"
}

pack_zip() { python3 scripts/make/zip.py "$work/$1" "$out/$1.zip"; }

# The package of a static binary: the files of the archive at Debian's places.
pack_deb() {
    local folder=$work/$1 arch=$2 root=$work/deb-$2 share=$work/deb-$2/usr/share
    mkdir -p "$root/DEBIAN" "$root/usr/bin" "$share/larder" "$share/doc/larder" "$share/man/man1" \
        "$share/bash-completion/completions" "$share/zsh/vendor-completions" "$share/fish/vendor_completions.d"
    cp "$folder/larder" "$root/usr/bin/"
    cp -r "$folder/models" "$share/larder/"
    cp "$folder/README.md" "$folder/CHANGELOG.md" "$share/doc/larder/"
    cat LICENSE-MIT LICENSE-APACHE >"$share/doc/larder/copyright"
    cp "$folder"/man/*.1 "$share/man/man1/"
    gzip -9 --no-name "$share"/man/man1/*.1
    cp "$folder/completions/larder.bash" "$share/bash-completion/completions/larder"
    cp "$folder/completions/_larder" "$share/zsh/vendor-completions/"
    cp "$folder/completions/larder.fish" "$share/fish/vendor_completions.d/"
    cat >"$root/DEBIAN/control" <<CONTROL
Package: larder
Version: $version
Architecture: $arch
Maintainer: larder developers <larder@example.org>
Homepage: $homepage
Section: utils
Priority: optional
Installed-Size: $(find "$root/usr" -type f -printf '%s\n' | awk '{kib += int(($1 + 1023) / 1024)} END {print kib}')
Description: runs Mixture-of-Experts language models that are larger than memory
 The weights that every token needs stay in memory; the experts stay on the
 SSD and pass through a fixed number of slots.
CONTROL
    find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz --threads-max=1 --build "$root" "$out/larder_${version}_$arch.deb" >/dev/null
}

# Completions and manual pages are the same for all systems.
host=$(build linux)
mkdir -p "$work/docs/completions"
"$host" completions bash >"$work/docs/completions/larder.bash"
"$host" completions zsh >"$work/docs/completions/_larder"
"$host" completions fish >"$work/docs/completions/larder.fish"
"$host" completions powershell >"$work/docs/completions/larder.ps1"
"$host" man --out "$work/docs/man" >&2

for system in "${systems[@]}"; do
    binary=$(build "$system")
    folder=larder-$version-$(target_of "$system")
    gather "$folder" "$binary"
    case $system in
        windows) pack_zip "$folder" ;;
        linux) pack_tar "$folder" && pack_deb "$folder" amd64 ;;
        arm) pack_tar "$folder" && pack_deb "$folder" arm64 ;;
        *) pack_tar "$folder" ;;
    esac
done

python3 scripts/make/sbom.py --features "$features" >"$out/larder-$version.cdx.json"
(cd "$out" && find . -maxdepth 1 -type f -name 'larder*' -printf '%f\n' | sort | xargs sha256sum -- >"$work/sums" && mv "$work/sums" SHA256SUMS)
python3 scripts/make/packages.py "$out" --version "$version" --url "$url" --homepage "$homepage"
cat "$out/SHA256SUMS"

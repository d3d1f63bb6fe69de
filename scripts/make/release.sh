#!/usr/bin/env bash
# Makes the files of a release, the same bytes every time for one commit and one toolchain.
#
#   scripts/make/release.sh OUT [--url URL] [SYSTEM…]
#
# OUT is a new or empty folder. SYSTEMs are linux, arm, windows, macos and macos-intel (all unless named; see
# scripts/check/cross.sh, which builds them). URL is where the files will be downloadable; the templates of package managers are
# filled with it (default: https://example.org/larder). Made are
#
#   larder-VERSION-TARGET.tar.gz, .zip on Windows: the command, completions, manual pages, licences, README, changelog
#   larder_VERSION_ARCH.deb                        for Debian and Ubuntu, of the static binaries
#   larder-VERSION.cdx.json                        all crates that are built in, as CycloneDX
#   SHA256SUMS
#   packages/                                      Homebrew formula, Scoop and winget manifests, Dockerfile
#
# The commit must be checked out without changes. Needs what cross.sh needs, and dpkg-deb and Python.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() { echo "release.sh: $*" >&2; exit 1; }

url=https://example.org/larder out= systems=()
while [ $# -gt 0 ]; do
    case $1 in
        --url) url=${2?"--url needs an address"} && shift ;;
        linux | arm | windows | macos | macos-intel) systems+=("$1") ;;
        *) [ -z "$out" ] || fail "unknown system $1"; out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || fail "name the folder for the files"
[ ${#systems[@]} -gt 0 ] || systems=(linux arm windows macos macos-intel)
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed; the version names a commit"
mkdir -p "$out"
[ -z "$(ls -A "$out")" ] || fail "$out is not empty; name a new folder"
out=$(cd "$out" && pwd)

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
# All times in the files are that of the commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
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

# Builds for a system; prints the path of the binary. Paths of this machine are kept out of it.
build() {
    local system=$1 target binary
    target=$(target_of "$system")
    # Symbols are left out; for macOS that would need a tool of its own.
    [[ $system == macos* ]] || export CARGO_PROFILE_RELEASE_STRIP=symbols
    CARGO_ENCODED_RUSTFLAGS_EXTRA="--remap-path-prefix=$PWD=larder --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo" \
        scripts/check/cross.sh build --for "$system" --locked --features "$features" >&2
    binary=${CARGO_TARGET_DIR:-$PWD/target}/$target/release/larder
    [ -f "$binary" ] || binary=$binary.exe
    echo "$binary"
}

# Sets the times of a folder's files, and packs it with a fixed order, owner and time.
settle() { find "$1" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +; }

pack_tar() {
    settle "$work/$1"
    tar --create --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
        --directory "$work" "$1" | gzip -9 --no-name >"$out/$1.tar.gz"
}

pack_zip() { python3 scripts/make/zip.py "$work/$1" "$out/$1.zip"; }

# The package of a static binary: the files of the archive, in Debian's places.
pack_deb() {
    local folder=$1 arch=$2 root=$work/deb-$2
    mkdir -p "$root/DEBIAN" "$root/usr/bin" "$root/usr/share/doc/larder" "$root/usr/share/man/man1" \
        "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" \
        "$root/usr/share/fish/vendor_completions.d"
    cp "$work/$folder/larder" "$root/usr/bin/"
    cp "$work/$folder/README.md" "$work/$folder/CHANGELOG.md" "$root/usr/share/doc/larder/"
    cat LICENSE-MIT LICENSE-APACHE >"$root/usr/share/doc/larder/copyright"
    cp "$work/$folder"/man/*.1 "$root/usr/share/man/man1/"
    gzip -9 --no-name "$root"/usr/share/man/man1/*.1
    cp "$work/$folder/completions/larder.bash" "$root/usr/share/bash-completion/completions/larder"
    cp "$work/$folder/completions/_larder" "$root/usr/share/zsh/vendor-completions/_larder"
    cp "$work/$folder/completions/larder.fish" "$root/usr/share/fish/vendor_completions.d/larder.fish"
    cat >"$root/DEBIAN/control" <<CONTROL
Package: larder
Version: $version
Architecture: $arch
Maintainer: larder developers <larder@example.org>
Section: utils
Priority: optional
Installed-Size: $(du --summarize --block-size=1024 --apparent-size "$root/usr" | cut -f1)
Description: runs Mixture-of-Experts language models that are larger than memory
 The weights that every token needs stay in memory; the experts stay on the SSD and pass through a fixed number of slots.
CONTROL
    settle "$root"
    dpkg-deb --root-owner-group -Zxz --build "$root" "$out/larder_${version}_$arch.deb" >/dev/null
}

# The completions and manual pages come from the binary for this machine.
host=$(build linux)
mkdir -p "$work/docs/completions" "$work/docs/man"
"$host" completions bash >"$work/docs/completions/larder.bash"
"$host" completions zsh >"$work/docs/completions/_larder"
"$host" completions fish >"$work/docs/completions/larder.fish"
"$host" completions powershell >"$work/docs/completions/larder.ps1"
"$host" man "$work/docs/man"

for system in "${systems[@]}"; do
    binary=$(build "$system")
    folder=larder-$version-$(target_of "$system")
    mkdir -p "$work/$folder"
    cp "$binary" README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$work/$folder/"
    cp -r "$work/docs/completions" "$work/docs/man" "$work/$folder/"
    case $system in
        windows) pack_zip "$folder" ;;
        linux) pack_tar "$folder" && pack_deb "$folder" amd64 ;;
        arm) pack_tar "$folder" && pack_deb "$folder" arm64 ;;
        *) pack_tar "$folder" ;;
    esac
done

python3 scripts/make/sbom.py --features "$features" >"$out/larder-$version.cdx.json"
(cd "$out" && sha256sum -- *.tar.gz *.zip *.deb *.json 2>/dev/null >SHA256SUMS) || true
python3 scripts/make/packages.py "$version" "$url" "$out"
cat "$out/SHA256SUMS"

#!/usr/bin/env bash
# Builds and tests for other machines and systems on x86-64 Linux, without an NDK or an SDK.
#
#   scripts/check/cross.sh build [--for SYSTEM] [FLAGS…]  a binary of the larder command
#   scripts/check/cross.sh test [--for SYSTEM] [--cpu CPU] [FLAGS…]
#                                                         tests in an emulator, or in Wine
#   scripts/check/cross.sh e2e [--for SYSTEM] [--cpu CPU] [FILTER…]
#                                                         the integration tests of tests/it that run the command, with such a
#                                                         binary; all of them, or those whose names match a FILTER
#   scripts/check/cross.sh lint [--for SYSTEM] [FLAGS…]   clippy, which compiles code that is left out on this system
#   scripts/check/cross.sh check-android [FLAGS…]         checks that the larder command compiles for Android
#   scripts/check/cross.sh ready                          checks that everything for the tests on Arm is installed; fetches nothing
#
# SYSTEM is one of
#
#   arm          Linux and adb shell on 64-bit Arm, a static binary (default); CPU: cortex-a53, cortex-a76, max (default), …
#   linux        any x86-64 Linux, a static binary
#   windows      x86-64 Windows; tests run in Wine
#   macos        macOS on Apple silicon; only built
#   macos-intel  macOS on x86-64; only built
#
# FLAGS are cargo's, such as `-p larder-kernels`. Needs cargo and Python on x86-64 Linux, and QEMU or Wine for tests. Further
# tools are installed once to $LARDER_CROSS (default: ~/.cache/larder-cross): a linker with the systems' C libraries (Zig, from PyPI)
# and the source of the standard library. The source is taken from the toolchain if it is installed there (`rustup component
# add rust-src`), else from Debian's package of the same version, from a mirror that apt is configured for.
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=${LARDER_CROSS:-${XDG_CACHE_HOME:-$HOME/.cache}/larder-cross}
android=aarch64-linux-android

# Debian's package of the standard library's source, for exactly this version of Rust.
source_version=1.95.0
source_package="rust-src_$source_version+dfsg1-2~bpo13+1_all.deb"
source_sha256=7b76db5b880a77f9e52975d2baa6209d2f76d2c9c2789515c3088cb960e2c83b

# Programs from PyPI, as wheels for x86-64.
programs='ziglang==0.17.0 --hash=sha256:97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b
cargo-zigbuild==0.24.0 --hash=sha256:484412e39e4c6039474535ce97ee75a22bab22d58233056f8ec8a8f9034bb957'

fail() { echo "cross.sh: $*" >&2; exit 1; }

need() { command -v "$1" >/dev/null || fail "$1 is missing: $2"; }

has_sum() { echo "$2  $1" | sha256sum --check --status 2>/dev/null; }

programs_place() { echo "$cache/programs-$(sha256sum <<<"$programs" | cut -c1-8)"; }

has_own_source() { [ -d "$(rustc --print sysroot)/lib/rustlib/src/rust/library" ]; }

# Installs the linker and cargo-zigbuild, and puts them into the environment.
prepare_programs() {
    local place
    place=$(programs_place)
    if [ ! -d "$place" ]; then
        need python3 "it is needed to install the linker"
        echo "installing Zig and cargo-zigbuild to $place" >&2
        rm -rf "$place.part"
        mkdir -p "$place.part"
        echo "$programs" >"$place.part/programs.txt"
        python3 -m pip install --quiet --root-user-action ignore --no-deps --only-binary :all: --require-hashes \
            --target "$place.part" -r "$place.part/programs.txt" >&2 ||
            fail "pip could not install these versions of Zig and cargo-zigbuild"
        mv "$place.part" "$place"
    fi
    export PATH="$place/bin:$PATH" CARGO_ZIGBUILD_ZIG_PATH="$place/ziglang/zig"
}

# Prepares a toolchain with the standard library's source, because the compiled library is installed for x86-64 only.
prepare_toolchain() {
    need cargo "see https://rustup.rs"
    local sysroot place
    ! has_own_source || return 0
    sysroot=$(rustc --print sysroot)
    [[ $(rustc --version) == "rustc $source_version "* ]] ||
        fail "$(rustc --version) has no source of the standard library: run rustup component add rust-src"
    place="$cache/rust-$source_version"
    if [ ! -d "$place" ]; then
        need dpkg-deb "install it, or run rustup component add rust-src"
        fetch_source
        echo "making a toolchain with the standard library's source in $place" >&2
        rm -rf "$place.part"
        # Hard links if the file system supports them, to save space.
        cp -al "$sysroot" "$place.part" 2>/dev/null || { rm -rf "$place.part" && cp -a "$sysroot" "$place.part"; }
        dpkg-deb -x "$cache/$source_package" "$place.part/package"
        mkdir -p "$place.part/lib/rustlib/src/rust"
        mv "$place.part/package/usr/src/rustc-$source_version/library" "$place.part/lib/rustlib/src/rust/library"
        rm -rf "$place.part/package"
        mv "$place.part" "$place"
    fi
    export PATH="$place/bin:$PATH"
}

# Fetches the source package from one of the Debian mirrors that apt is configured for.
fetch_source() {
    local file="$cache/$source_package" mirror
    ! has_sum "$file" $source_sha256 || return 0
    mkdir -p "$cache"
    if command -v apt-get >/dev/null; then
        for mirror in $(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | sort -u); do
            echo "getting the standard library's source from $mirror" >&2
            /usr/lib/apt/apt-helper download-file "$mirror/pool/main/r/rustc/$source_package" "$file" \
                "SHA256:$source_sha256" >/dev/null 2>&1 || continue
            ! has_sum "$file" $source_sha256 || return 0
        done
    fi
    fail "no apt mirror has $source_package: run rustup component add rust-src, or put the file into $cache"
}

# Building the standard library needs an unstable flag of cargo; this makes a stable toolchain accept it.
export RUSTC_BOOTSTRAP=1
std=-Zbuild-std=std,panic_unwind

# Runs a command of cargo for the chosen system. Paths of this machine do not get into the binary.
for_system() {
    local command=$1 flags
    shift
    prepare_programs
    prepare_toolchain
    flags="--remap-path-prefix=$PWD=larder --remap-path-prefix=${CARGO_TARGET_DIR:-$PWD/target}=target"
    flags+=" --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo --remap-path-prefix=$(rustc --print sysroot)=rust"
    case $target in
        *-musl) flags+=" -C link-self-contained=no" ;;
        *-apple-darwin)
            # The oldest macOS that Rust supports on Apple silicon; Zig would take the newest.
            export MACOSX_DEPLOYMENT_TARGET=${MACOSX_DEPLOYMENT_TARGET:-11.0}
            # rustc strips with a program that does not find its library by itself. It signs the binary again.
            LD_LIBRARY_PATH=$(rustc --print sysroot)/lib
            export LD_LIBRARY_PATH
            ;;
    esac
    export "CARGO_TARGET_$(tr a-z- A-Z_ <<<"$target")_RUSTFLAGS=$flags"
    cargo-zigbuild "$command" $std --release --target "$target" "$@"
}

# Parses --for and --cpu; all other arguments go to `rest`.
read_system() {
    local system=arm
    cpu=max rest=()
    while [ $# -gt 0 ]; do
        case $1 in
            --for) system=${2?"--for needs a system"} && shift ;;
            --cpu) cpu=${2?"--cpu needs a processor name"} && shift ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
    case $system in
        arm) target=aarch64-unknown-linux-musl ;;
        linux) target=x86_64-unknown-linux-musl ;;
        windows) target=x86_64-pc-windows-gnu ;;
        macos) target=aarch64-apple-darwin ;;
        macos-intel) target=x86_64-apple-darwin ;;
        *) fail "unknown system $system; systems are arm, linux, windows, macos and macos-intel" ;;
    esac
}

# What runs a binary of the chosen system here.
find_runner() {
    case $target in
        aarch64-unknown-linux-musl) find_emulator && runner="$emulator -cpu $cpu" ;;
        x86_64-unknown-linux-musl) runner= ;;
        # Without randomised addresses: Wine 8 fails to start, about once in a thousand times, where one that it needs is taken.
        x86_64-pc-windows-gnu) prepare_wine && runner="setarch -R $wine" ;;
        *) fail "nothing here runs a binary for $target" ;;
    esac
}

# Finds Wine and makes it ready. Versions before 9 lack a library that Rust's standard library takes random bytes from; the
# program in its place takes them from an older interface of Windows.
prepare_wine() {
    local shim=$cache/wine-shim
    wine=$(command -v wine64 || command -v wine) || fail "wine is missing: it runs the tests (Debian: apt-get install wine64)"
    prepare_programs
    if [ ! -f "$shim/bcryptprimitives.dll" ]; then
        mkdir -p "$shim"
        "$CARGO_ZIGBUILD_ZIG_PATH" cc -target x86_64-windows-gnu -shared -O2 -o "$shim/bcryptprimitives.dll" \
            scripts/check/bcryptprimitives.c -ladvapi32
    fi
    export WINEPREFIX=${WINEPREFIX:-$cache/wine} WINEDEBUG=${WINEDEBUG:--all}
    WINEPATH="Z:$(tr / '\\' <<<"$shim")"
    export WINEPATH
    # A prefix is made at the first start, which takes half a minute.
    "$wine" cmd /c exit >/dev/null 2>&1 || fail "$wine cannot be started"
    # Without this program, which ends with the script, Wine's server would start again at the first test and keep the pipes of its
    # output open, so that this test would end after all others.
    coproc { exec "$wine" cmd /c pause >/dev/null 2>&1; }
}

find_emulator() {
    emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64) ||
        fail "qemu-aarch64 is missing: it runs the tests (Debian: apt-get install qemu-user-static)"
}

[ $# -gt 0 ] || fail "a command is required: build, test, e2e, lint, check-android or ready"
command=$1
shift
case $command in
    build)
        read_system "$@"
        for_system zigbuild -p larder "${rest[@]}"
        ;;
    check-android)
        prepare_toolchain
        cargo check $std --release --target $android -p larder "$@"
        ;;
    lint)
        read_system "$@"
        for_system clippy --all-targets "${rest[@]}" -- -D warnings
        ;;
    test)
        read_system "$@"
        find_runner
        export "CARGO_TARGET_$(tr a-z- A-Z_ <<<"$target")_RUNNER=$runner"
        # Examples in the documentation cannot be linked for another processor.
        for_system test --tests "${rest[@]}"
        ;;
    e2e)
        read_system "$@"
        find_runner
        # In a subshell: the linker's environment must not reach the tests, which are built for this machine.
        (for_system zigbuild -p larder)
        [ ${#rest[@]} -gt 0 ] || rest=(cli:: demo:: eval:: lab:: report:: streaming::)
        binary=${CARGO_TARGET_DIR:-$PWD/target}/$target/release/larder
        [ -f "$binary" ] || binary=$binary.exe
        export LARDER_UNDER_TEST="$runner $binary"
        unset RUSTC_BOOTSTRAP
        cargo test --release --workspace --test it -- "${rest[@]}"
        ;;
    ready)
        find_emulator
        [ -d "$(programs_place)" ] || fail "the linker is not installed; scripts/check/cross.sh build installs it"
        has_own_source || [ -d "$cache/rust-$source_version" ] ||
            fail "the standard library's source is not installed; scripts/check/cross.sh build installs it"
        ;;
    *) fail "unknown command $command; commands are build, test, e2e, lint, check-android and ready" ;;
esac

# Short names for the usual commands; `just` alone lists them. Everything works without just: see CONTRIBUTING.md.

default:
    @just --list

# Build the command with its default features.
build:
    cargo build --release

# Run every test of the workspace, as the README says.
test *FILTER:
    cargo test --release --workspace {{FILTER}}

# Run the unit tests of one crate, for example `just unit larder-cache`.
unit CRATE *FILTER:
    cargo test --release -p {{CRATE}} {{FILTER}}

# Format the sources.
fmt:
    cargo fmt --all

# What CI checks without running tests: formatting, lints of each build, API documentation.
lint:
    cargo fmt --all --check
    cargo clippy --release --workspace --all-targets --all-features -- -D warnings
    cargo clippy --release -p larder -- -D warnings
    cargo clippy --release -p larder --no-default-features -- -D warnings

# Build the API documentation and fail on a broken link.
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps

# Check licences, advisories, sources and duplicate versions of dependencies (needs cargo-deny).
deny:
    cargo deny check

# Everything that CI runs.
ci:
    .ci/run

# Tests of one subject on an emulated 64-bit Arm processor (needs QEMU; the script says what is missing).
arm *ARGS:
    scripts/check/cross.sh test {{ARGS}}

# Criterion benchmarks: products, rates of memory and SSD, readers.
bench *ARGS:
    cargo bench -p larder-benches {{ARGS}}

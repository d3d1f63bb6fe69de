#!/usr/bin/env bash
# Counts the instructions per generated token of the demo model on one thread, under Valgrind's callgrind, where
# tests/it/counters.rs cannot count them because the machine has no counter for them.
#
#   scripts/check/instructions.sh [LARDER]     the command to count (default: target/release/larder)
#
# Needs valgrind and Python. Prints one number: a run of 96 tokens less a run of 32, divided by 64. Valgrind knows AVX2 and no
# AVX-512, so the count is that of the AVX2 kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."
larder=${1:-target/release/larder}

count() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$larder" run -p "The old man looked at the door, and" \
        --temperature 0.7 --top-p 0.9 --min-p 0 --repetition-penalty 1 --context 128 --cache 8x --threads 1 -o reader=pread -n "$1" 2>&1 >/dev/null |
        sed -n 's/.*Collected : //p'
}

short=$(count 32)
long=$(count 96)
python3 -c "print(($long - $short) / 64)"

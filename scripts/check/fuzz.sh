#!/usr/bin/env bash
# Runs fuzz targets one after the other, beginning with the project's own small files, each for SECONDS of processor time:
#
#   scripts/check/fuzz.sh SECONDS [TARGET...]
#
# Needs a nightly toolchain and cargo-fuzz. Inputs that were found are kept in $LARDER_FUZZ (default: target/fuzz) and are where the
# next run begins. Ends with 1 if an input panics, takes over 10 seconds of processor time, or over 2 GiB of memory.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:?usage: fuzz.sh SECONDS [TARGET...]}
shift
[ $# -gt 0 ] || set -- templates tokenizers manifests requests edge_requests gguf imatrices safetensors quantised grammars calls pictures
work=$(realpath -m "${LARDER_FUZZ:-target/fuzz}")
export CARGO_TARGET_DIR=$work/build

# Copies files under names of their own into a corpus.
seed() {
    local corpus=$1 file
    shift
    mkdir -p "$corpus"
    for file in "$@"; do cp "$file" "$corpus/$(cksum <"$file" | tr ' ' -)"; done
}

seeds() {
    local corpus=$work/corpus/$1 file kind
    mkdir -p "$corpus"
    case $1 in
        templates)
            seed "$corpus" tests/golden/*/chat_template.jinja
            for file in tests/golden/*/tokenizer_config.json models/demo/tokenizer_config.json; do
                python3 -c 'import json, sys; print(json.load(sys.stdin).get("chat_template", ""))' <"$file" >"$work/template"
                seed "$corpus" "$work/template"
            done
            ;;
        pictures) seed "$corpus" tests/vision/files/* ;;
        tokenizers) seed "$corpus" tests/golden/*/tokenizer.json ;;
        manifests) seed "$corpus" tests/stores/*/larder.json models/demo/larder.json ;;
        requests) seed "$corpus" tests/fuzz/requests/*.json ;;
        imatrices) seed "$corpus" tests/fixtures/imatrix/*.gguf ;;
        gguf) seed "$corpus" tests/fixtures/gguf/*.gguf tests/hostile/gguf/* ;;
        quantised)
            # The first byte chooses the method.
            for file in tests/hostile/checkpoint/quantised*/model.safetensors; do
                for method in 0 1 2 3; do
                    { printf "\\x0$method" && cat "$file"; } >"$work/quantised"
                    seed "$corpus" "$work/quantised"
                done
            done
            ;;
        grammars)
            # The first byte chooses the notation.
            for file in tests/fuzz/grammars/*; do
                case $file in *.json) kind=0 ;; *.regex) kind=1 ;; *.lark) kind=2 ;; *) kind=3 ;; esac
                { printf "\\x0$kind" && cat "$file"; } >"$work/grammar"
                seed "$corpus" "$work/grammar"
            done
            ;;
        safetensors) seed "$corpus" tests/hostile/safetensors/* tests/stores/*/resident.safetensors ;;
    esac
}

run() {
    local target=$1 spent=0 took options=(-rss_limit_mb=2048 -timeout=600 -max_len=65536 -print_final_stats=1)
    [ "$target" = templates ] && options+=(-dict=tests/fuzz/jinja.dict -max_len=4096)
    [ "$target" = calls ] && options+=(-dict=tests/fuzz/calls.dict)
    seeds "$target"
    # Time on a clock counts other work of the machine as well, so the processor's time is added up over several runs.
    while [ "$spent" -lt "$seconds" ]; do
        TIMEFORMAT=%U
        { time cargo +nightly fuzz run --fuzz-dir tests/fuzz --sanitizer none "$target" "$work/corpus/$target" -- \
            "${options[@]}" -max_total_time=$(((seconds - spent) < 300 ? (seconds - spent) : 300)) -artifact_prefix="$work/" \
            >"$work/$target.log" 2>&1; } 2>"$work/time" || { tail -40 "$work/$target.log"; return 1; }
        took=$(tail -n 1 "$work/time")
        spent=$((spent + ${took%.*} + 1))
    done
    echo "$target: $spent s of processor time, $(ls "$work/corpus/$target" | wc -l) inputs kept"
    grep -E "number_of_executed_units|peak_rss_mb" "$work/$target.log" | tail -2
}

for target in "$@"; do run "$target"; done

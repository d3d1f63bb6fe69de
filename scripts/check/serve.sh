#!/usr/bin/env bash
# Runs the checks of the server with the official clients that are installed, each on a server of its own.
#
#   scripts/check/serve.sh                 all checks, with target/release/larder or $LARDER, and python or $PYTHON
#   scripts/check/serve.sh model DIR       only makes DIR: a tiny model with random weights and a tool template
#
# Needs: Python with the packages at the top of scripts/check/test_*.py, and for
# test_serve.mjs Node with openai and zod in node_modules of $NODE_HOME or the current folder.
# Prints the output of each check, and what was skipped because a client is not installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
larder=${LARDER:-$root/target/release/larder}
python=${PYTHON:-python3}

make_model() {
    mkdir -p "$1"
    cp "$root"/tests/golden/olmoe/{config,generation_config,tokenizer,tokenizer_config}.json "$1"
    cp "$root"/tests/golden/olmoe/model.safetensors "$1"
    cp "$root"/tests/templates/hermes.jinja "$1"/chat_template.jinja
}

if [ "${1:-}" = model ]; then
    make_model "${2:?the folder to make}"
    exit
fi

work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT

# Starts a server with the given flags; its address is $url.
start() {
    LARDER_HOT_SET=off "$larder" serve --port 0 "$@" 2>"$work/log" &
    server=$!
    for _ in $(seq 600); do
        url=$(sed -n 's/^serving .* on \(http.*\)$/\1/p' "$work/log")
        [ -z "$url" ] || return 0
        kill -0 "$server" || { cat "$work/log" >&2; exit 1; }
        sleep 0.1
    done
    echo "the server did not start" >&2
    exit 1
}

stop() {
    kill "$server"
    wait "$server" || true
    server=
}

has() { "$python" -c "import $1" 2>/dev/null; }

# check NAME MODULES SCRIPT MODEL FLAGS…
check() {
    local name=$1 modules=$2 script=$3 model=$4
    shift 4
    for module in $modules; do
        has "$module" || { echo "skipped: $name ($module is not installed)"; return 0; }
    done
    echo "== $name"
    start -m "$model" "$@"
    # shellcheck disable=SC2086 # the script may have a flag
    "$python" "$root"/scripts/check/$script --url "$url"
    stop
}

make_model "$work/tools"
demo=$root/models/demo
check "OpenAI's Python client" "openai pydantic" test_serve.py "$demo" --context 512
check "LangChain's and LiteLLM's clients" "langchain_openai litellm" test_serve_peers.py "$demo" --context 512
check "tools" "openai langchain_openai" test_tools.py "$work/tools" --context 4096
check "lm-evaluation-harness" "lm_eval" test_harness.py "$demo" --context 512 --alias demo
check "JSON Schemas" "jsonschema" schemas.py "$demo" --context 1024
check "OpenAPI" "openapi_spec_validator schemathesis" "openapi.py --seconds 60" "$demo" --context 128 --session-dir "$work/sessions"
check "Responses, Messages and Ollama" "openai anthropic ollama" test_apis.py "$demo" --context 2048
check "Responses, Messages and Ollama with tools" "openai anthropic ollama" "test_apis.py --tools" "$work/tools" --context 4096
node_home=${NODE_HOME:-$PWD}
if command -v node >/dev/null && [ -d "$node_home/node_modules/openai" ] && [ -d "$node_home/node_modules/zod" ]; then
    echo "== OpenAI's Node client"
    # Modules are looked up beside the script.
    cp "$root/scripts/check/test_serve.mjs" "$work"
    ln -s "$node_home/node_modules" "$work/node_modules"
    start -m "$demo" --context 512
    node "$work/test_serve.mjs" "$url"
    stop
    start -m "$work/tools" --context 4096
    node "$work/test_serve.mjs" "$url" --tools
    stop
else
    echo "skipped: OpenAI's Node client (no node, or no openai and zod in node_modules of \$NODE_HOME)"
fi

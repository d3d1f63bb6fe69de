#!/usr/bin/env python3
"""Prints the crates that are built into the larder command, as a CycloneDX 1.5 document.

    scripts/make/sbom.py [--features edge,hub,tls]

Name, version, licence and checksum of each come from `cargo metadata` and Cargo.lock; crates for building and testing are left out,
those for all systems are in. The document has no time and no serial number, so that it is the same every time.
"""

import argparse
import json
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def metadata(features):
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", ROOT / "crates/larder/Cargo.toml"]
    if features:
        command += ["--features", features]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def used(found, root):
    """The ids of the crates that `root` is built from, each with those that it needs."""
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    seen, rest = {}, [root]
    while rest:
        crate = rest.pop()
        if crate not in seen:
            normal = [dep["pkg"] for dep in nodes[crate]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
            seen[crate] = sorted(set(normal))
            rest += normal
    return seen


def component(package, checksums):
    name, version = package["name"], package["version"]
    entry = {
        "type": "library",
        "bom-ref": f"pkg:cargo/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:cargo/{name}@{version}",
    }
    if package["license"]:
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if checksum := checksums.get((name, version)):
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return entry


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", default="", help="features of the build, beside the default ones")
    args = parser.parse_args()
    found = metadata(args.features)
    packages = {package["id"]: package for package in found["packages"]}
    root = next(package["id"] for package in found["packages"] if package["name"] == "larder")
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(p["name"], p["version"]): p.get("checksum") for p in lock["package"]}
    ref = lambda crate: f"pkg:cargo/{packages[crate]['name']}@{packages[crate]['version']}"
    graph = used(found, root)
    others = sorted((crate for crate in graph if crate != root), key=ref)
    command = component(packages[root], checksums) | {"type": "application"}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": command},
        "components": [component(packages[crate], checksums) for crate in others],
        "dependencies": [
            {"ref": ref(crate), "dependsOn": sorted(map(ref, graph[crate]))} for crate in sorted(graph, key=ref)
        ],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

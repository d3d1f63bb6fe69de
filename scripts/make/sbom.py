#!/usr/bin/env python3
"""Prints the crates that are built into the larder command, as a CycloneDX 1.5 document.

    scripts/make/sbom.py [--features edge,hub,tls]

Name, version, licence and checksum of each come from `cargo tree`, `cargo metadata` and Cargo.lock. Crates for building and testing
alone are left out; those for one system alone are in. The document has neither time nor serial number, so that it is the same each time.
"""

import argparse
import json
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cargo(*arguments):
    command = ["cargo", *arguments, "--locked", "--manifest-path", ROOT / "crates/larder/Cargo.toml"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def built_in(features):
    """Name and version of each crate of the command, for any system. `cargo metadata` has features of all packages of the workspace."""
    tree = cargo("tree", "--edges", "normal", "--target", "all", "--features", features, "--prefix", "none", "--format", "{p}")
    return {(line.split()[0], line.split()[1].removeprefix("v")) for line in tree.splitlines() if line}


def needs(node, crates):
    """The crates among `crates` that a node of the resolved graph is built from."""
    normal = {dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])}
    return normal & crates


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
        # Old crates have a slash for OR, and some have several spaces.
        entry["licenses"] = [{"expression": " ".join(package["license"].replace("/", " OR ").split())}]
    if checksum := checksums.get((name, version)):
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return entry


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", default="", help="features of the build, beside the default ones")
    args = parser.parse_args()
    found = json.loads(cargo("metadata", "--format-version", "1", "--all-features"))
    names = built_in(args.features)
    packages = {package["id"]: package for package in found["packages"] if (package["name"], package["version"]) in names}
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(p["name"], p["version"]): p.get("checksum") for p in lock["package"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    ref = lambda crate: f"pkg:cargo/{packages[crate]['name']}@{packages[crate]['version']}"
    crates = sorted(packages, key=ref)
    root = next(crate for crate in crates if packages[crate]["name"] == "larder")
    command = component(packages[root], checksums) | {"type": "application"}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": command},
        "components": [component(packages[crate], checksums) for crate in crates if crate != root],
        "dependencies": [
            {"ref": ref(crate), "dependsOn": sorted(map(ref, needs(nodes[crate], packages.keys())))} for crate in crates
        ],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

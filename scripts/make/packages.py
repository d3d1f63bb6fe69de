#!/usr/bin/env python3
"""Fills the templates of scripts/make/packages with the files of a release: `packages.py OUT --version V --url URL --homepage URL`.

A template names a file of the release by its system, as in {linux}, and with a colon its folder inside or its checksum: {linux:folder},
{linux:sha256}, {windows:SHA256}. Files that this release does not have are named by their checksum of zeros, so that a formula with
them is refused and not installed.
"""

import argparse
import hashlib
import re
from pathlib import Path

TEMPLATES = Path(__file__).parent / "packages"
TARGETS = {
    "linux": "x86_64-unknown-linux-musl",
    "arm": "aarch64-unknown-linux-musl",
    "windows": "x86_64-pc-windows-gnu",
    "macos": "aarch64-apple-darwin",
    "macos-intel": "x86_64-apple-darwin",
}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "0" * 64


def values(out, version, url, homepage):
    """What the names of the templates stand for."""
    found = {"version": version, "url": url, "homepage": homepage}
    for system, target in TARGETS.items():
        folder = f"larder-{version}-{target}"
        archive = folder + (".zip" if system == "windows" else ".tar.gz")
        found[system] = archive
        found[system + ":folder"] = folder
        found[system + ":sha256"] = sha256(out / archive)
        found[system + ":SHA256"] = sha256(out / archive).upper()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder with the archives; its folder `packages` is written")
    parser.add_argument("--version", required=True)
    parser.add_argument("--url", required=True, help="where the archives can be downloaded")
    parser.add_argument("--homepage", required=True)
    args = parser.parse_args()
    found = values(args.out, args.version, args.url.rstrip("/"), args.homepage)
    for template in sorted(path for path in TEMPLATES.rglob("*") if path.is_file()):
        # Names of larder alone: `${TARGETARCH}` and Ruby's `#{bin}` stay.
        text = re.sub(r"(?<![$#])\{([a-zA-Z0-9:-]+)\}", lambda name: found[name[1]], template.read_text())
        target = args.out / "packages" / template.relative_to(TEMPLATES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes the small hostile files of tests/hostile, which every parser must refuse, and `expected.json` with the reasons.

Needs Python 3.10 or newer and nothing else. Run by hand:

    python scripts/make/make_hostile.py [OUT]

`expected.json` maps each file or folder to its `kind` (malformed, missing, mismatch, unsupported, or valid) and its
`reason`. The valid cases are the originals of all others; a test accepts them, which shows that a distortion is refused
for its fault. README.md in OUT is kept; everything else there is written anew.
"""

import json
import shutil
import sys
from pathlib import Path

from hostile import folders, ggufs, shards

LIMIT_BYTES = 300_000


def write(target, content):
    """Writes a file from bytes, or a folder from a dict."""
    if isinstance(content, dict):
        for name, data in content.items():
            write(target / name, data)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent.parent / "tests" / "hostile"
    readme = out / "README.md"
    kept = readme.read_bytes() if readme.exists() else None
    shutil.rmtree(out, ignore_errors=True)
    cases = shards.cases() | folders.cases() | ggufs.cases()
    for name, case in cases.items():
        write(out / name, case.content)
    expected = {name: {"kind": case.kind, "reason": case.reason} for name, case in sorted(cases.items())}
    rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in expected.items()]
    (out / "expected.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    if kept is not None:
        readme.write_bytes(kept)
    print(f"{len(cases)} cases, {size} bytes")
    if size > LIMIT_BYTES:
        sys.exit(f"the hostile files take {size} bytes, more than {LIMIT_BYTES}")


if __name__ == "__main__":
    main()

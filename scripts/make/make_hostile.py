#!/usr/bin/env python3
"""Writes the small files of tests/hostile that every reader must refuse, with `expected.json` saying why.

Needs Python 3.10 or newer and nothing else. Run by hand:

    python scripts/make/make_hostile.py [OUT]

`expected.json` maps each file or folder to its `kind` (malformed, missing, mismatch, unsupported; or valid for the ones
that the others are distortions of, so that a test can show that the distortion is what is refused) and its `reason`.
"""

import json
import shutil
import sys
from pathlib import Path

from hostile import folders, ggufs, shards

LIMIT_BYTES = 200_000


def write(target, content):
    """A file from bytes, or a folder from a dict of them."""
    if isinstance(content, dict):
        for name, data in content.items():
            write(target / name, data)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent.parent / "tests" / "hostile"
    shutil.rmtree(out, ignore_errors=True)
    cases = shards.cases() | folders.cases() | ggufs.cases()
    for name, case in cases.items():
        write(out / name, case.content)
    expected = {name: {"kind": case.kind, "reason": case.reason} for name, case in sorted(cases.items())}
    rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in expected.items()]
    (out / "expected.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    print(f"{len(cases)} cases, {size} bytes")
    if size > LIMIT_BYTES:
        sys.exit(f"the hostile files take {size} bytes, more than {LIMIT_BYTES}")


if __name__ == "__main__":
    main()

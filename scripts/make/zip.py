#!/usr/bin/env python3
"""Packs a folder into a zip file, the same bytes each time: `zip.py FOLDER OUT`. Times are SOURCE_DATE_EPOCH."""

import os
import sys
import time
import zipfile
from pathlib import Path


def main():
    folder, out = map(Path, sys.argv[1:])
    stamp = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder.parent).as_posix(), stamp)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, path.read_bytes())


if __name__ == "__main__":
    main()

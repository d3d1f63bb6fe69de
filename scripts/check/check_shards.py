#!/usr/bin/env python3
"""Opens every shard of a store with the Python package of safetensors and checks its layout.

Needs Python 3.10 or newer and, from PyPI: safetensors>=0.5 numpy.

    python scripts/check/check_shards.py STORE

Prints a summary in one line and exits with 0, or prints the first fault in one sentence and exits with 1.
"""

import json
import struct
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

MATRICES = ["gate", "up", "down"]
BIASES = ["gate_bias", "up_bias", "down_bias"]
PAD_PREFIX = "_pad"
DATA_START = 4096
PART_ALIGN = 64


class Wrong(Exception):
    """A fault of the store, as one sentence."""


def require(condition, path, what):
    if not condition:
        raise Wrong(f"{path}: {what}")


def opened(path):
    """Dtype and shape by tensor name, and the metadata, as the package reads them."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise Wrong(f"{path}: does not open: {error}") from error


def ranges(path):
    """Offset of the data, and the byte range of each tensor in the file, in order."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    start = 8 + length
    found = {n: [start + at for at in e["data_offsets"]] for n, e in header.items() if n != "__metadata__"}
    return start, dict(sorted(found.items(), key=lambda item: item[1]))


def check_expert(path):
    """The shard's length and tensor kinds."""
    tensors, metadata = opened(path)
    start, where = ranges(path)
    parts = [name for name in where if not name.startswith(PAD_PREFIX)]
    forms = [names for cut in (0, 1) for names in (MATRICES[cut:], MATRICES[cut:] + BIASES[cut:])]
    require(parts in forms, path, f"holds {parts} instead of {MATRICES}, without gate or with biases")
    require(start == DATA_START, path, f"its data begin at byte {start}, not {DATA_START}")
    for name in parts:
        begin = where[name][0]
        require(begin % PART_ALIGN == 0, path, f"'{name}' begins at byte {begin}, not a multiple of {PART_ALIGN}")
    require(metadata, path, "carries no metadata")
    matrices = [name for name in parts if name in MATRICES]
    for name in matrices:
        dtype, shape = tensors[name]
        described = dtype != "U8" or any(name in text for pair in metadata.items() for text in pair)
        require(described, path, f"'{name}' is quantised, but the metadata do not name its format")
        require(dtype == "U8" or len(shape) == 2, path, f"'{name}' has shape {shape}, which is not a matrix")
    return path.stat().st_size, "/".join(tensors[name][0] for name in matrices)


def expected_shards(store):
    """The shards required by the manifest's geometry."""
    manifest = store / "larder.json"
    require(manifest.is_file(), store, "is not a store: it has no larder.json")
    geometry = json.loads(manifest.read_text(encoding="utf-8")).get("geometry")
    require(isinstance(geometry, dict), manifest, "has no geometry")
    layers, experts = geometry["moe_layers"], geometry["experts"]
    return {f"L{layer:03}/E{expert:03}.safetensors" for layer in layers for expert in range(experts)}


def roots_of(store):
    """The store, and its second folder if it is on two drives."""
    drives = store / "drives.json"
    # An absolute folder replaces the store's.
    return [store, store / json.loads(drives.read_text(encoding="utf-8"))["folder"]] if drives.exists() else [store]


def check_set(store, name):
    """Checks the shards of a set, in all folders that hold them, and returns a summary."""
    wanted, folder = expected_shards(store), store / name
    folders = [root / name for root in roots_of(store)]
    files = [(folder, str(path.relative_to(folder))) for folder in folders for path in folder.glob("*/*")]
    found = {shard for _, shard in files}
    missing, unknown = len(wanted - found), len(found - wanted)
    require(found == wanted, folder, f"{missing} shards are missing and {unknown} files are unknown")
    sizes, kinds = {}, set()
    for folder, shard in sorted(files):
        size, kind = check_expert(folder / shard)
        layer = shard.split("/")[0]
        require(sizes.setdefault(layer, size) == size, folder / shard, f"has {size} bytes, others of its layer {sizes[layer]}")
        kinds.add(kind)
    lengths = " or ".join(str(size) for size in sorted(set(sizes.values())))
    return f"{len(wanted)} shards of {lengths} bytes ({', '.join(sorted(kinds))})"


def check(store):
    """Checks the store and returns a summary; raises Wrong at the first fault."""
    summary = check_set(store, "experts")
    if (store / "experts-small").is_dir():
        summary += ", smaller copies: " + check_set(store, "experts-small")
    resident, _ = opened(store / "resident.safetensors")
    require(resident, store / "resident.safetensors", "holds no tensor")
    tables = sorted((store / "tables").glob("*.safetensors"))
    for table in tables:
        names = set(opened(table)[0])
        require({table.stem, "_checksums"} <= names, table, f"holds {sorted(names)}")
    return f"{summary}, {len(resident)} resident tensors, {len(tables)} tables"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(check(Path(sys.argv[1])))
    except Wrong as wrong:
        sys.exit(str(wrong))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Reads a store from its specification alone (docs/store.md), without any code of larder.

Needs Python 3.10 or newer and, from PyPI: numpy; xxhash for the checksums, which are left out and reported if it is missing.

    python scripts/check/read_store.py STORE [LAYER EXPERT]

Checks every length, header, padding and checksum of a store of format 2, and prints a summary. Of a store on two drives, both copies
of a mirror are checked. With LAYER and EXPERT it also prints
the shape, the mean and the first values of each part of that expert. The first fault ends it with one sentence and exit code 1.
"""

import json
import sys
from pathlib import Path

import numpy as np

try:
    from xxhash import xxh3_128_hexdigest as checksum_of
except ImportError:
    checksum_of = None

PAGE, RECORD, ALIGN, TABLE_BLOCK = 4096, 65536, 64, 65536
BLOCKS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18),
          "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "iq4_nl": (32, 18), "mxfp4": (32, 17),
          "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "iq4_xs": (256, 136),
          "nvfp4": (64, 36), "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82), "q2_0": (64, 18),
          "tq2_0": (256, 66), "q1_0": (128, 18), "iq1_s": (256, 50), "iq1_m": (256, 56), "tq1_0": (256, 54)}
# Number and bytes of the scales at the start of a block.
SCALES = {"q8_0": (1, 2), "q4_0": (1, 2), "q4_1": (2, 2), "q5_0": (1, 2), "q5_1": (2, 2), "iq4_nl": (1, 2),
          "mxfp4": (1, 1), "nvfp4": (0, 1)}
LEVELS = {"iq4_nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
          "mxfp4": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]}
# Kinds whose matrices have an f32 of their own.
SCALED = ["nvfp4"]
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def require(condition, path, what):
    if not condition:
        sys.exit(f"{path}: {what}")


def verify(data, checksum, path, what):
    require(checksum_of is None or checksum_of(data) == checksum, path, f"{what} does not match its checksum")


def up(number, multiple):
    return -(-number // multiple) * multiple


def row_bytes(kind, cols):
    values, size = BLOCKS[kind]
    return cols // values * size


def header_of(data, path):
    """Tensors as (dtype, shape, begin, end) in the file, metadata, and the first byte of the data."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    metadata, start, end = header.pop("__metadata__", {}), 8 + length, 8 + length
    tensors = {n: (t["dtype"], t["shape"], *(start + at for at in t["data_offsets"])) for n, t in header.items()}
    for name, (_, _, begin, after) in sorted(tensors.items(), key=lambda item: item[1][2]):
        require(begin == end, path, f"'{name}' begins at {begin}, not at {end}")
        require(not name.startswith("_pad.") or not any(data[begin:after]), path, f"'{name}' is not zero")
        end = after
    require(end == len(data), path, f"its tensors end at {end}, the file at {len(data)}")
    return tensors, metadata, start


def layout_of(geometry, kinds):
    """Name, kind, rows, cols and offset of each part, the segments, and the length of the data."""
    hidden, inter = geometry["hidden"], geometry["inter"]
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    scaled = lambda *names: [(f"{name}_scale", "f32", 1, 1) for name in names if kinds.get(name) in SCALED]
    matrices = [(name, kinds[name], *shapes[name]) for name in shapes if name in kinds]
    parts = [*matrices[:-1], *scaled("gate", "up"), matrices[-1], *scaled("down")]
    if geometry["bias"]:
        parts += [(f"{name}_bias", "f32", 1, shapes[name][0]) for name in shapes if name in kinds]
    end, laid = 0, []
    for name, kind, rows, cols in parts:
        laid.append((name, kind, rows, cols, end))
        end = up(end + rows * row_bytes(kind, cols), ALIGN)
    data, cut = up(end, PAGE), next(offset for name, *_, offset in laid if name == "down")
    return laid, [(0, cut), (cut, data)], data


def rows_of(data, kind, rows, cols, order):
    """The stored bytes of each row: undoes the interleaving of rows8."""
    width = row_bytes(kind, cols)
    all_rows = np.frombuffer(data, np.uint8).reshape(rows, width).copy()
    if order == "rows8" and kind not in DTYPES:
        values, size = BLOCKS[kind]
        for first in range(0, rows - 7, 8):
            blocks = np.frombuffer(data, np.uint8)[first * width:][:8 * width].reshape(cols // values, 8 * size)
            count, scale = SCALES[kind]
            head = count * scale
            scales = blocks[:, :8 * head].reshape(len(blocks), count, 8, scale)
            scales = scales.transpose(0, 2, 1, 3).reshape(len(blocks), 8, head)
            rest = blocks[:, 8 * head:].reshape(-1, (size - head) // 4, 8, 4)
            rest = rest.transpose(0, 2, 1, 3).reshape(-1, 8, size - head)
            all_rows[first:first + 8] = np.concatenate([scales, rest], 2).transpose(1, 0, 2).reshape(8, width)
    return all_rows


def values_of(data, kind, rows, cols, order):
    """The values of a matrix, without its scale, for formats with blocks of at most 64 values; None for the others."""
    if kind not in (*DTYPES, *SCALES):
        return None
    raw = rows_of(data, kind, rows, cols, order)
    if kind in ("f32", "f16"):
        return raw.view({"f32": "<f4", "f16": "<f2"}[kind]).astype(np.float32)
    if kind == "bf16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind == "nvfp4":
        blocks = raw.reshape(rows, cols // 64, 36)
        bits, groups = blocks[..., :4].astype(np.int32), blocks[..., 4:].reshape(rows, cols // 64, 4, 8)
        exponent, mantissa = bits >> 3 & 15, bits & 7
        scales = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10)) * (bits != 0x7F) / 2
        codes = np.array(LEVELS["mxfp4"], np.float32)[np.concatenate([groups & 15, groups >> 4], 3)]
        return (scales[..., None] * codes).astype(np.float32).reshape(rows, cols)
    blocks = raw.reshape(rows, cols // 32, -1)
    head = SCALES[kind][0] * SCALES[kind][1]
    if kind == "mxfp4":
        scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)
    else:
        scales = blocks[..., :head].copy().view("<f2").astype(np.float32)
    if kind == "q8_0":
        codes = blocks[..., head:].copy().view(np.int8)
    else:
        codes = np.concatenate([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], 2)
        if kind in ("q5_0", "q5_1"):
            codes |= np.unpackbits(blocks[..., head:head + 4], axis=2, bitorder="little") << 4
        if kind in LEVELS:
            codes = np.array(LEVELS[kind], np.float32)[codes]
    codes = codes.astype(np.float32) - {"q4_0": 8, "q5_0": 16}.get(kind, 0)
    least = scales[..., 1:] if kind in ("q4_1", "q5_1") else np.float32(0)
    return (scales[..., :1] * codes + least).reshape(rows, cols)


def folders_of(store, manifest):
    """The folders that hold shards of expert 0 and of expert 1, and so of all others with even and odd numbers."""
    drives = store / "drives.json"
    if not drives.exists():
        return [store], [store]
    drives = json.loads(drives.read_text(encoding="utf-8"))
    # An absolute folder replaces the store's.
    second = store / drives["folder"]
    sets = [manifest["experts"], *([manifest["small_experts"]] if "small_experts" in manifest else [])]
    digits = "".join(digits for files in sets for layer in files["checksums"] for expert in layer for digits in expert)
    belongs_to = json.loads((second / "drive.json").read_text(encoding="utf-8"))["shards"]
    verify(digits.encode(), belongs_to, second / "drive.json", "the store that it belongs to")
    return ([store], [second]) if drives["division"] == "stripe" else ([store, second], [store, second])


def read_shard(path, manifest, files, row, expert):
    """Checks one shard; returns its data and parts."""
    geometry, chosen = manifest["geometry"], files["classes"][files["layers"][row]]
    parts, segments, data_bytes = layout_of(geometry, chosen["kinds"])
    sizes = (data_bytes, PAGE + up(data_bytes, RECORD))
    require((chosen["data_bytes"], chosen["file_bytes"]) == sizes, path, f"its class says other lengths than {sizes}")
    file = path.read_bytes()
    require(len(file) == sizes[1], path, f"is {len(file)} bytes long, expected {sizes[1]}")
    tensors, metadata, start = header_of(file, path)
    require(start == PAGE, path, f"its data begin at {start}")
    order = files["layout"] if any(kind not in DTYPES for kind in chosen["kinds"].values()) else "rows"
    named = (metadata["layer"], metadata["expert"], metadata["layout"])
    require(named == (str(geometry["moe_layers"][row]), str(expert), order), path, f"says it is {named}")
    for name, kind, rows, cols, offset in parts:
        shape = [rows, cols if kind in DTYPES else row_bytes(kind, cols)]
        want = (DTYPES.get(kind, "U8"), shape, PAGE + offset, PAGE + offset + rows * row_bytes(kind, cols))
        require(tensors.get(name) == want, path, f"'{name}' is {tensors.get(name)}, expected {want}")
        require(metadata[name] == f"{kind} {rows}x{cols}", path, f"describes '{name}' as {metadata[name]}")
    for i, (begin, end) in enumerate(segments):
        checksum = files["checksums"][row][expert][i]
        require(metadata[f"xxh3_128.{i}"] == checksum, path, f"has another checksum for segment {i} than the manifest")
        verify(file[PAGE + begin:PAGE + end], checksum, path, f"segment {i}")
    require(not any(file[PAGE + data_bytes:]), path, "its padding is not zero")
    return file[PAGE:PAGE + data_bytes], parts


def read_table(path, table):
    """Checks a row table."""
    kind, rows, cols = table["kind"], table["rows"], table["cols"]
    width, file = row_bytes(kind, cols), path.read_bytes()
    per_block, end = max(1, TABLE_BLOCK // width), PAGE + rows * width
    blocks, sums = -(-rows // per_block), PAGE + up(rows * width, ALIGN)
    require(table["block_rows"] == per_block, path, f"should have {per_block} rows per block")
    tensors, metadata, _ = header_of(file, path)
    shape = [rows, cols if kind in DTYPES else width]
    require(tensors[table["name"]] == (DTYPES.get(kind, "U8"), shape, PAGE, end), path, "its matrix lies elsewhere")
    require(tensors["_checksums"] == ("U8", [blocks, 16], sums, sums + 16 * blocks), path, "its checksums lie elsewhere")
    require(metadata == {table["name"]: f"{kind} {rows}x{cols}", "block_rows": str(per_block)}, path, "its metadata differ")
    verify(file[sums:], table["checksum"], path, "the list of checksums")
    for i in range(blocks):
        block = file[PAGE + i * per_block * width:min(end, PAGE + (i + 1) * per_block * width)]
        verify(block, file[sums + 16 * i:][:16].hex(), path, f"block {i}")


def read_resident(path, resident):
    """Checks the resident weights; returns their number."""
    file = path.read_bytes()
    require(len(file) == resident["bytes"], path, f"is {len(file)} bytes long, expected {resident['bytes']}")
    tensors, metadata, start = header_of(file, path)
    verify(file[:start], resident["header_checksum"], path, "its header")
    for name, description in metadata.items():
        _, _, begin, end = tensors[name]
        require((begin - start) % ALIGN == 0, path, f"'{name}' is not aligned")
        verify(file[begin:end], description.split()[-1], path, f"'{name}'")
    return len(metadata)


def main(store, *wanted):
    path = store / "larder.json"
    text = path.read_bytes()
    manifest = json.loads(text)
    require(manifest["format"] == 2, path, f"has format {manifest['format']}")
    key, end = b',\n  "checksum": "', b'"\n}\n'
    body, tail = text[:-len(key) - 32 - len(end)], text[-len(key) - 32 - len(end):]
    require(tail.startswith(key) and tail.endswith(end), path, "does not end in its checksum")
    checksum = tail[len(key):-len(end)].decode()
    verify(body, checksum, path, "it")
    geometry, sets = manifest["geometry"], [("experts", manifest["experts"])]
    if "small_experts" in manifest:
        sets.append(("experts-small", manifest["small_experts"]))
    shards, roots = 0, folders_of(store, manifest)
    for folder, files in sets:
        for row, layer in enumerate(geometry["moe_layers"]):
            for expert in range(geometry["experts"]):
                for root in roots[expert % 2]:
                    shard = root / folder / f"L{layer:03}" / f"E{expert:03}.safetensors"
                    data, parts = read_shard(shard, manifest, files, row, expert)
                    shards += 1
                if [layer, expert] == [int(number) for number in wanted]:
                    for name, kind, rows, cols, offset in parts:
                        part = data[offset:][:rows * row_bytes(kind, cols)]
                        values = values_of(part, kind, rows, cols, files["layout"])
                        shown = "" if values is None else f", mean {values.mean():.6g}, first {values[0, :4].tolist()}"
                        print(f"{folder} {name}: {kind} {rows}x{cols}{shown}")
    for table in manifest["tables"]:
        read_table(store / "tables" / f"{table['name']}.safetensors", table)
    for sidecar in manifest["sidecars"]:
        content = (store / sidecar["name"]).read_bytes()
        require(len(content) == sidecar["bytes"], store / sidecar["name"], f"is {len(content)} bytes long")
        verify(content, sidecar["checksum"], store / sidecar["name"], "it")
    resident = read_resident(store / "resident.safetensors", manifest["resident"])
    unchecked = "" if checksum_of else "; checksums were not compared: the package xxhash is missing"
    print(f"{shards} shards, {resident} resident tensors, {len(manifest['tables'])} tables{unchecked}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"{sys.argv[1]}: cannot be read: {error!r}")

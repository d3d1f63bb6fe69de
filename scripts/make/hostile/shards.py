"""Single safetensors files with an invalid or missing header."""

import json

from hostile.base import Case, framed


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file(header, data, length=None):
    return framed(header if isinstance(header, bytes) else json.dumps(header).encode(), data, length)


VALID = file({"__metadata__": {"format": "pt"}, "a": entry([2, 2], 0, 16), "b": entry([4], 16, 32)}, bytes(32))
SIXTEEN = bytes(16)


def cases():
    one = file({"a": entry([2, 2], 0, 16)}, SIXTEEN)
    malformed = {
        "empty": ("the file has no bytes", b""),
        "seven-bytes": ("too short for the length of a header", bytes(7)),
        "zero-header": ("the header has no bytes", file(b"", SIXTEEN)),
        "header-beyond-file": ("the header is said to be longer than the file", file(b"{}", b"", 1000)),
        "header-near-u64-max": ("the header length overflows when 8 is added", file(b"{}", b"", 2**64 - 4)),
        "header-huge": ("the header length would need 2^60 bytes of memory", file(b"{}", b"", 2**60)),
        "header-not-json": ("the header is not JSON", file(b"this is no JSON at all ", b"")),
        "header-not-utf8": ("the header is not UTF-8", file(b'{"\xff\xfe\xc3":1}', b"")),
        "header-an-array": ("the header is an array instead of an object", file(b"[1,2,3]", b"")),
        "header-deeply-nested": ("the header is nested 2000 deep", file(b'{"a":' + b"[" * 2000, b"")),
        "entry-not-an-object": ("the entry of a tensor is a number", file({"a": 5}, b"")),
        "entry-without-shape": (
            "an entry has no shape",
            file({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, SIXTEEN),
        ),
        "offsets-one-number": (
            "data_offsets has one number",
            file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}, SIXTEEN),
        ),
        "offsets-negative": ("data_offsets begins below zero", file({"a": entry([4], -16, 0)}, SIXTEEN)),
        "offsets-a-float": ("data_offsets are no whole numbers", file({"a": entry([4], 0.5, 16.5)}, SIXTEEN)),
        "overlap": ("two tensors share bytes", file({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24))),
        "same-range": (
            "two tensors are the same bytes",
            file({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}, SIXTEEN),
        ),
        "hole": ("16 bytes belong to no tensor", file({"a": entry([4], 0, 16), "b": entry([4], 32, 48)}, bytes(48))),
        "hole-at-start": ("the first tensor begins at 16", file({"a": entry([4], 16, 32)}, bytes(32))),
        "reversed": ("a tensor ends before it begins", file({"a": entry([4], 16, 0)}, SIXTEEN)),
        "beyond-file": ("a tensor ends beyond the file", file({"a": entry([1024], 0, 4096)}, SIXTEEN)),
        "offset-near-u64-max": (
            "offsets overflow when the header's length is added",
            file({"a": entry([4], 2**64 - 20, 2**64 - 4)}, SIXTEEN),
        ),
        "shape-overflow": ("the product of the shape overflows", file({"a": entry([2**33, 2**33], 0, 16)}, SIXTEEN)),
        "shape-overflow-to-zero": (
            "the product of the shape is zero only because it overflows",
            file({"a": entry([2**32, 2**32], 0, 0)}, b""),
        ),
        "dimension-absurd": ("a dimension is 2^60", file({"a": entry([2**60], 0, 16)}, SIXTEEN)),
        "dimension-negative": ("a dimension is negative", file({"a": entry([-4], 0, 16)}, SIXTEEN)),
        "shape-not-range": (
            "9 numbers of 4 bytes are said to fill 16 bytes",
            file({"a": entry([3, 3], 0, 16)}, SIXTEEN),
        ),
        "duplicate-key": (
            "one name stands for two tensors",
            file(
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
                b'"a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}',
                bytes(32),
            ),
        ),
        "duplicate-key-same-range": (
            "one name stands twice, for the same bytes",
            file(
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
                b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
                SIXTEEN,
            ),
        ),
        "trailing-bytes": ("5 bytes follow the last tensor", one + b"extra"),
        "truncated-data": ("the last tensor lacks 6 bytes", one[:-6]),
        "truncated-header": ("the file ends inside the header", one[:40]),
    }
    made = {f"safetensors/{name}.safetensors": Case("malformed", why, data) for name, (why, data) in malformed.items()}
    made["safetensors/unknown-dtype.safetensors"] = Case(
        "unsupported", "the dtype Q3_X is not known", file({"a": entry([4], 0, 16, "Q3_X")}, SIXTEEN)
    )
    made["safetensors/valid.safetensors"] = Case("valid", "nothing is wrong with it", VALID)
    return made

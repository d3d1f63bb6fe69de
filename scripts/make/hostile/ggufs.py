"""GGUF files, written field by field so that each field can be made invalid."""

import struct

from hostile.base import EXPERTS, HEADS, HIDDEN, INTER, TOP_K, VOCAB, Case, numbers

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10
TYPE_F32, TYPE_F16, TYPE_Q4_0 = 0, 1, 2
ALIGN = 32


def string(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def u32(n):
    return struct.pack("<II", U32, n)


def u64(n):
    return struct.pack("<IQ", U64, n)


def f32(x):
    return struct.pack("<If", F32, x)


def strings(values):
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(string, values))


def integers(values):
    return struct.pack("<IIQ", ARRAY, U32, len(values)) + struct.pack(f"<{len(values)}I", *values)


def metadata():
    return {
        "general.architecture": struct.pack("<I", STRING) + string("olmoe"),
        "olmoe.block_count": u32(1),
        "olmoe.context_length": u32(64),
        "olmoe.embedding_length": u32(HIDDEN),
        "olmoe.feed_forward_length": u32(INTER),
        "olmoe.attention.head_count": u32(HEADS),
        "olmoe.attention.head_count_kv": u32(HEADS),
        "olmoe.attention.layer_norm_rms_epsilon": f32(1e-5),
        "olmoe.rope.freq_base": f32(10000.0),
        "olmoe.expert_count": u32(EXPERTS),
        "olmoe.expert_used_count": u32(TOP_K),
        "tokenizer.ggml.model": struct.pack("<I", STRING) + string("gpt2"),
        "tokenizer.ggml.tokens": strings(list("abcdefg") + ["<e>"]),
        "tokenizer.ggml.token_type": integers([1] * (VOCAB - 1) + [3]),
        "tokenizer.ggml.merges": strings([]),
        "tokenizer.ggml.eos_token_id": u32(VOCAB - 1),
    }


class Tensor:
    """A name, dimensions (innermost first), a type, and bytes."""

    def __init__(self, name, dims, kind, data):
        self.name, self.dims, self.kind, self.data = name, dims, kind, data
        self.offset = None  # set for an invalid offset

    def info(self, offset):
        dims = struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        return string(self.name) + dims + struct.pack("<IQ", self.kind, offset if self.offset is None else self.offset)


def tensor_list():
    block = "blk.0"
    matrices = {
        "token_embd": [HIDDEN, VOCAB],
        "output": [HIDDEN, VOCAB],
        **{f"{block}.attn_{p}": [HIDDEN, HIDDEN] for p in ("q", "k", "v", "output")},
        f"{block}.ffn_gate_exps": [HIDDEN, INTER, EXPERTS],
        f"{block}.ffn_up_exps": [HIDDEN, INTER, EXPERTS],
        f"{block}.ffn_down_exps": [INTER, HIDDEN, EXPERTS],
    }
    vectors = ["output_norm", *(f"{block}.{n}" for n in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"))]
    made = [Tensor(f"{n}.weight", d, TYPE_F16, halves(i, d)) for i, (n, d) in enumerate(matrices.items())]
    made += [Tensor(f"{n}.weight", [HIDDEN], TYPE_F32, singles(i, [HIDDEN], 1.0)) for i, n in enumerate(vectors)]
    made.append(Tensor(f"{block}.ffn_gate_inp.weight", [HIDDEN, EXPERTS], TYPE_F32, singles(9, [HIDDEN, EXPERTS], 0.0)))
    return made


def size(dims):
    product = 1
    for d in dims:
        product *= d
    return product


def halves(seed, dims):
    return struct.pack(f"<{size(dims)}e", *numbers(seed, size(dims)))


def singles(seed, dims, around):
    return struct.pack(f"<{size(dims)}f", *(v + around for v in numbers(seed, size(dims))))


def gguf(pairs=None, tensors=None, magic=b"GGUF", version=3, tensor_count=None, pair_count=None):
    """The whole file. `pairs` is a list of (key, typed value), so that keys can repeat."""
    pairs = list(metadata().items()) if pairs is None else pairs
    tensors = tensor_list() if tensors is None else tensors
    counts = (len(tensors) if tensor_count is None else tensor_count, len(pairs) if pair_count is None else pair_count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(string(k) + v for k, v in pairs)
    data = b""
    for tensor in tensors:
        head += tensor.info(len(data))
        data += tensor.data + bytes(-len(tensor.data) % ALIGN)
    return head + bytes(-len(head) % ALIGN) + data


def with_pairs(**changes):
    """Metadata changed; a double underscore stands for a dot, None removes the key."""
    pairs = metadata() | {k.replace("__", "."): v for k, v in changes.items()}
    return gguf(pairs=[(k, v) for k, v in pairs.items() if v is not None])


def with_tensor(index, **changes):
    tensors = tensor_list()
    for field, value in changes.items():
        setattr(tensors[index], field, value)
    return gguf(tensors=tensors)


def with_first_pair(raw):
    """A file with one key, `raw`, and no tensors; it stays small, because the parser stops there."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw


def nested_arrays(depth):
    return string("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


def cases():
    valid = gguf()
    first_two_share = tensor_list()
    first_two_share[1].offset = 0
    twice = tensor_list()
    twice[1].name = twice[0].name
    expert_short = [t for t in tensor_list() if "ffn_up_exps" not in t.name]
    repeated = list(metadata().items()) + [("olmoe.block_count", u32(2))]
    made = {
        "valid": ("valid", "nothing is wrong with it", valid),
        "empty": ("malformed", "the file has no bytes", b""),
        "bad-magic": ("malformed", "the file does not begin with GGUF", gguf(magic=b"GGML")[:200]),
        "version-99": ("unsupported", "version 99 is not known", gguf(version=99)[:200]),
        "version-1": ("unsupported", "version 1 has other field widths", gguf(version=1)[:200]),
        "big-endian": ("unsupported", "the version reads 3 with its bytes swapped", gguf(version=0x03000000)[:200]),
        "tensor-count-huge": ("malformed", "2^63 tensors", gguf(tensor_count=2**63)[:200]),
        "pair-count-huge": ("malformed", "2^63 keys", gguf(pair_count=2**63)[:200]),
        "key-beyond-file": (
            "malformed", "a key is said to be 10^6 bytes long", with_first_pair(struct.pack("<Q", 10**6) + b"abc"),
        ),
        "string-near-u64-max": (
            "malformed", "a text's length overflows",
            with_first_pair(string("a") + struct.pack("<IQ", STRING, 2**64 - 2) + b"abc"),
        ),
        "array-huge": (
            "malformed", "an array of 2^60 numbers",
            with_first_pair(string("a") + struct.pack("<IIQ", ARRAY, U64, 2**60) + bytes(64)),
        ),
        "array-overflow": (
            "malformed", "the array's bytes overflow to few",
            with_first_pair(string("a") + struct.pack("<IIQ", ARRAY, U64, 2**61 + 1) + bytes(64)),
        ),
        "arrays-nested": ("malformed", "arrays are nested 100 deep", with_first_pair(nested_arrays(100))),
        "unknown-value-type": (
            "malformed", "a value of type 77", with_first_pair(string("a") + struct.pack("<II", 77, 0)),
        ),
        "key-not-utf8": ("malformed", "a key is not UTF-8", with_first_pair(string(b"\xff\xfe") + u32(1))),
        "duplicate-key": ("malformed", "olmoe.block_count stands twice", gguf(pairs=repeated)),
        "no-architecture": ("missing", "general.architecture is missing", with_pairs(general__architecture=None)),
        "architecture-a-number": (
            "malformed", "general.architecture is a number", with_pairs(general__architecture=u32(3)),
        ),
        "architecture-unknown": (
            "unsupported", "the architecture dodo is not known",
            with_pairs(general__architecture=struct.pack("<I", STRING) + string("dodo")),
        ),
        "alignment-zero": ("malformed", "general.alignment is 0", with_pairs(general__alignment=u32(0))),
        "alignment-three": ("malformed", "general.alignment is no power of two", with_pairs(general__alignment=u32(3))),
        "no-embedding-length": ("missing", "the hidden size is missing", with_pairs(olmoe__embedding_length=None)),
        "blocks-huge": ("mismatch", "10^12 layers, one is stored", with_pairs(olmoe__block_count=u64(10**12))),
        "experts-too-many": ("mismatch", "4 experts, 2 are stored", with_pairs(olmoe__expert_count=u32(4))),
        "dims-200": ("malformed", "a tensor has 200 dimensions", with_tensor(0, dims=[1] * 200)),
        "dims-zero": ("malformed", "a tensor has a dimension of 0", with_tensor(0, dims=[0, VOCAB])),
        "dims-overflow": ("malformed", "the product of the dimensions overflows", with_tensor(0, dims=[2**40, 2**40])),
        "dims-wrong": ("mismatch", "token_embd is for 4 tokens", with_tensor(0, dims=[HIDDEN, 4])),
        "offset-unaligned": ("malformed", "a tensor begins at byte 7 of the data", with_tensor(0, offset=7)),
        "offset-beyond-file": ("malformed", "a tensor begins beyond the file", with_tensor(0, offset=2**20)),
        "offset-near-u64-max": ("malformed", "a tensor's end overflows", with_tensor(0, offset=2**64 - 32)),
        "offsets-overlap": ("malformed", "two tensors share bytes", gguf(tensors=first_two_share)),
        "unknown-tensor-type": ("unsupported", "a tensor of type 999", with_tensor(0, kind=999)),
        "row-not-whole-blocks": ("malformed", "a Q4_0 tensor with rows of 4", with_tensor(0, kind=TYPE_Q4_0)),
        "duplicate-tensor": ("malformed", "token_embd.weight stands twice", gguf(tensors=twice)),
        "tensor-missing": ("missing", "there is no ffn_up_exps", gguf(tensors=expert_short)),
        "truncated-header": ("malformed", "the file ends among the keys", valid[:150]),
        "truncated-infos": (
            "malformed", "the file ends among the tensors' entries", valid[: valid.index(b"blk.0.attn_v") + 9],
        ),
        "truncated-data": ("malformed", "the data end early", valid[:-40]),
    }
    return {f"gguf/{name}.gguf": Case(*case) for name, case in made.items()}

"""The numbers of DeepSeek-V4 as it is published: experts in FP4, matrices of attention and shared experts in FP8.

`round_experts` and `round_matrices` make the weights of a model such numbers, so that transformers computes with them; `pack` then stores
them in their own formats. Scales are powers of two, a byte each: one per 32 columns of FP4, one per block of FP8.
"""

import re

import safetensors.torch as st
import torch

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FP4_COLUMNS = 32
FP8_LARGEST = 448.0
EXPERT = re.compile(r"\.experts\.(gate_up_proj|down_proj|\d+\.w[123]\.weight)$")
MATRIX = re.compile(r"(\.(q_[ab]_proj|kv_proj|o_[ab]_proj)|shared_experts\.(gate|up|down)_proj)\.weight$")
STORED_MATRIX = re.compile(r"(\.attn\.(wq_[ab]|wkv|wo_[ab])|\.indexer\.wq_b|shared_experts\.w[123])\.weight$")


def exponents(largest, most):
    """The byte of the smallest power of two with which values up to `largest` are at most `most`."""
    return (torch.log2((largest / most).clamp(min=2.0**-100)).ceil() + 127).to(torch.uint8)


def fp4(w):
    """Codes, one per value, and scales of a matrix."""
    groups = w.float().unflatten(-1, (-1, FP4_COLUMNS))
    scales = exponents(groups.abs().amax(-1), FP4.max())
    scaled = groups / torch.exp2(scales.float() - 127)[..., None]
    return (scaled[..., None] - FP4).abs().argmin(-1).flatten(-2), scales


def fp4_values(codes, scales):
    return (FP4[codes].unflatten(-1, (-1, FP4_COLUMNS)) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def spread(scales, block, shape):
    """The scale of each value."""
    factors = torch.exp2(scales.float() - 127).repeat_interleave(block, 0).repeat_interleave(block, 1)
    return factors[: shape[0], : shape[1]]


def fp8(w, block):
    """Codes and scales of a matrix."""
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w.float().abs(), (0, -cols % block, 0, -rows % block))
    scales = exponents(padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).amax((1, 3)), FP8_LARGEST)
    return (w.float() / spread(scales, block, w.shape)).to(torch.float8_e4m3fn), scales


@torch.no_grad()
def round_experts(model):
    for name, w in model.state_dict().items():
        if EXPERT.search(name):
            w.copy_(fp4_values(*fp4(w)))


@torch.no_grad()
def round_matrices(model, block):
    for name, w in model.state_dict().items():
        if MATRIX.search(name) and w.dim() == 2 and "compressor.kv_proj" not in name:
            codes, scales = fp8(w, block)
            w.copy_(codes.float() * spread(scales, block, w.shape))


def pack(folder, block=None):
    """Stores the experts of a checkpoint folder in FP4, and its matrices in FP8 if the size of their blocks is given; without
    the prefix that transformers adds."""
    file = folder / "model.safetensors"
    packed = {}
    for name, w in st.load_file(file).items():
        name = published_name(name)
        scales = f"{name.removesuffix('.weight')}.scale"
        if EXPERT.search(name):
            codes, packed[scales] = fp4(w)
            packed[name] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        elif block and STORED_MATRIX.search(name):
            packed[name], packed[scales] = fp8(w, block)
        else:
            packed[name] = w
    e8m0 = {name: w.contiguous().view(torch.float8_e8m0fnu) for name, w in packed.items() if name.endswith(".scale")}
    st.save_file({**packed, **e8m0}, file, metadata={"format": "pt"})


def published_name(name):
    name = name.removeprefix("model.")
    outer = {"embed_tokens.weight": "embed.weight", "hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base",
             "hc_head.hc_scale": "hc_head_scale"}
    return outer.get(name, re.sub(r"\.attn\.norm\.weight$", ".attn.kv_norm.weight", name))

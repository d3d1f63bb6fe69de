#!/usr/bin/env python3
"""Writes GGUF files with random weights in the shapes of real Mixture-of-Experts models, for measurements.

    make_shape.py olmoe-1b-7b --kind q4_0 --reuse 0.43 --out olmoe.gguf
    make_shape.py --tiny tests/fixtures/gguf          (the fixtures of the tests, the same bytes every time)

Requirements: Python 3.10, `pip install gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0`. llama.cpp and larder can both run the files.

Properties of the files:

* Weights. Blocks are drawn in their quantised form, so nothing is ever quantised: a random scale, and numbers that are
  symmetric about zero. Q4_0 never draws -8, Q8_0 never -128; formats with a minimum (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) have one
  of half their range; the others whose quants are not symmetric, and the IQ formats with code books, have scales of both
  signs. Uniform Q4_0 nibbles would have
  a mean of half a step, and that alone would pull all tokens in one direction. Standard deviations
  depend on the width of the input, so that hidden states keep their size through all layers and logits stay near 1 to 2.
* Formats. All matrices have the format of --kind, the output head Q6_K; with mxfp4 only the experts, the others and the
  head Q8_0; with nvfp4 the experts and the output matrices of attention, the others and the head Q8_0; with iq1_s to iq3_s, tq1_0 and tq2_0 only the experts, the others Q4_K. Rows that are not whole blocks of 256 values take a format with blocks of 32. Both as llama-quantize does,
  except that it gives some attention and down matrices more bits, too.
* Reuse: the share of a token's experts, per layer, that the previous token used too. It follows from the text before a
  token, not from its id, so it holds for any text, random ids included, and adjacent tokens share more than distant ones:
    - 32 values of the residual stream (`CONSTANT`) are equal for all tokens and are never written by a layer. The
      query and key matrices read them, so that every query and every key has a constant part, equal in all rotary pairs
      that turn between 1/3 and 1/3000 per position. After the rotation, its part of the dot product depends only on the
      distance and falls off like a power of it: each head averages the last few values.
    - A quarter of the residual stream (`slow`) is written by attention only. It therefore changes slowly from one token
      to the next, while the rest, embeddings and outputs of experts, is new with every token.
    - The router (F32) weights the slow quarter against the rest. That weight is found per layer by bisection on a forward
      pass of random ids. Without it, sharing is at chance level: top-k over experts.
  Norm weights hide the constant from the router, the experts and the output head.
* Check. While the layers are written, 128 random ids pass through them in numpy, at full width, with the very weights
  that are written: embeddings, attention, routers, norms, shared experts and the output head in every layer, experts in
  the first layer (in all layers of tiny shapes). In later layers the output of the experts is replaced by random values
  of the first layer's magnitude, because dequantising every expert would take longer than writing the file. The script
  prints the measured reuse, fails if a logit is not finite or if tokens do not differ in their experts, and only then
  renames the file to its final name. A text that repeats tokens shares more.
* glm-4.7-flash. DeepSeek's latent attention without the constant part: it is spread over all positions, so tokens far apart
  share as many experts as adjacent ones. For the reuse of a text, `larder bench --trace` with a trace of `larder lab synth`.
* gpt-oss. Sinks take about a quarter of the attention, and gate and up are larger than in the other shapes, so that some
  values reach the limit of the activation. YaRN's ramp is not rounded, as in the model's own code; llama.cpp rounds it.
* Vocabulary. Byte-level BPE of the real size: 256 bytes, pairs of letters, pairs with a leading space, words of two
  pairs, each with its merge; then the special tokens of a chat. Any text can be encoded, and is decoded unchanged.
"""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file

from shapes.formats import FALLBACK, MIXES, WHOLE
from shapes.forward import Latent, Shape
from shapes.model import Maker

SHAPES = {
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 1024, 64, 8, 50304, 4096, 1e4, 1e-5, "olmo"),
    "qwen1.5-moe-a2.7b": Shape(
        "qwen2moe", 24, 2048, 16, 16, 128, 1408, 60, 4, 151936, 8192, 1e6, 1e-6, "qwen2", shared=5632, dense=5632
    ),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 128, 8, 151936, 40960, 1e6, 1e-6, "qwen2", dense=6144),
    "mixtral-8x7b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 8, 2, 32000, 32768, 1e6, 1e-5, "gpt-2"),
    "gpt-oss-20b": Shape(
        "gpt-oss", 24, 2880, 64, 8, 64, 2880, 32, 4, 201088, 131072, 150000.0, 1e-5, "gpt-4o", window=128, yarn=32
    ),
    "glm-4.7-flash": Shape(
        "deepseek2", 47, 2048, 20, 20, 256, 1536, 64, 4, 154880, 202752, 1e6, 1e-5, "glm4", shared=1536, dense=10240,
        latent=Latent(query_rank=768, rank=512, rotated=64, value=256, dense_layers=1, scale=1.8),
    ),
    "smallthinker-21b-a3b": Shape(
        "smallthinker", 52, 2560, 28, 4, 128, 768, 64, 6, 151936, 16384, 1.5e6, 1e-6, "qwen2", early=True
    ),
    "tiny-olmoe": Shape("olmoe", 2, 96, 6, 6, 16, 32, 4, 2, 272, 256, 1e4, 1e-5, "olmo"),
    "tiny-qwen2moe": Shape("qwen2moe", 1, 96, 2, 2, 48, 32, 3, 2, 272, 256, 1e4, 1e-6, "qwen2", shared=32, dense=64),
    "tiny-qwen3moe": Shape("qwen3moe", 1, 256, 2, 1, 16, 32, 2, 1, 264, 256, 1e4, 1e-6, "qwen2", dense=64, tied=True),
    "tiny-mixtral": Shape("llama", 2, 96, 4, 2, 24, 32, 3, 2, 272, 256, 1e4, 1e-5, "gpt-2"),
    "tiny-gpt-oss-96": Shape("gpt-oss", 2, 96, 4, 2, 32, 64, 4, 2, 272, 8192, 150000.0, 1e-5, "gpt-4o", window=6, yarn=32),
    "tiny-qwen3moe-128": Shape("qwen3moe", 2, 128, 4, 2, 32, 64, 4, 2, 272, 256, 1e4, 1e-6, "qwen2", dense=64),
    "tiny-olmoe-256": Shape("olmoe", 2, 256, 8, 8, 32, 256, 16, 4, 1024, 2048, 1e4, 1e-5, "olmo"),
    "tiny-olmoe-224": Shape("olmoe", 2, 224, 7, 7, 32, 224, 16, 4, 1024, 2048, 1e4, 1e-5, "olmo"),
}
FIXTURE_TOKENS = 24
FIXTURES = [
    ("tiny-olmoe", "q4_0"),
    ("tiny-qwen2moe", "q8_0"),
    ("tiny-qwen3moe", "q4_k"),
    ("tiny-mixtral", "q4_0"),
    ("tiny-gpt-oss-96", "mxfp4"),
    ("tiny-qwen3moe-128", "nvfp4"),
    *(("tiny-qwen3moe", kind.name.lower()) for kind in WHOLE),
]
FIXTURE_FALLBACK = dict.fromkeys(FALLBACK, Q.Q8_0)  # for rows that are not whole blocks of 256

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]



def byte_letters():
    """The printable character that byte-level BPE uses for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def vocabulary(size, rng):
    """Tokens and merges; every merge yields one token."""
    tokens, merges, space = byte_letters(), [], byte_letters()[32]
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = [a + b for a in letters for b in letters]

    def merge(left, right):
        if len(tokens) < size - len(SPECIAL):
            tokens.append(left + right)
            merges.append(f"{left} {right}")

    for pair in pairs:
        merge(pair[0], pair[1])
    for pair in pairs:
        merge(space, pair)
    for word in rng.permutation(len(pairs) ** 2)[: max(0, size - len(tokens))]:
        merge(pairs[word // len(pairs)], pairs[word % len(pairs)])
    return tokens + SPECIAL, merges



def metadata(writer, name, shape, file_type, rng):
    s = shape
    writer.add_name(f"{name} (random weights)")
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(s.vocab)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.dense or s.inter)
    writer.add_head_count(s.heads)
    if s.latent:
        latent_metadata(writer, s)
    else:
        writer.add_head_count_kv(s.kv_heads)
        writer.add_key_length(s.head_dim)
        writer.add_value_length(s.head_dim)
        writer.add_rope_dimension_count(s.head_dim)
    writer.add_rope_freq_base(s.theta)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_expert_feed_forward_length(s.inter)
    if s.early:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if s.window:
        writer.add_sliding_window(s.window)
    if s.yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(s.yarn)
        writer.add_rope_scaling_orig_ctx_len(s.context // s.yarn)
    if s.shared and not s.latent:
        writer.add_expert_shared_feed_forward_length(s.shared)
    tokens, merges = vocabulary(s.vocab, rng)
    normal = len(tokens) - len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(s.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * normal + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(normal)
    writer.add_eos_token_id(normal + 2)
    writer.add_pad_token_id(normal)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def latent_metadata(writer, s):
    a = s.latent
    writer.add_head_count_kv(1)
    writer.add_key_length(a.rank + a.rotated)
    writer.add_value_length(a.rank)
    writer.add_key_length_mla(s.head_dim)
    writer.add_value_length_mla(a.value)
    writer.add_rope_dimension_count(a.rotated)
    writer.add_q_lora_rank(a.query_rank)
    writer.add_kv_lora_rank(a.rank)
    writer.add_leading_dense_block_count(a.dense_layers)
    writer.add_expert_shared_count(s.shared // s.inter)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(a.scale)


def write(name, shape, mix, seed, reuse, out):
    started = time.monotonic()
    maker = Maker(shape, mix, seed, reuse)
    part = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(part, shape.arch)
    metadata(writer, name, shape, mix.file_type, np.random.Generator(np.random.SFC64(seed + 1)))
    tensors = list(maker.tensors())
    for tensor, dims, tensor_kind in tensors:
        length, size = gguf.GGML_QUANT_SIZES[tensor_kind]
        total = int(np.prod(dims)) // length * size
        writer.add_tensor_info(tensor, dims, np.dtype(np.float32), total, raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = 0
    for (tensor, dims, tensor_kind), data in zip(tensors, maker.make(), strict=True):
        length, size = gguf.GGML_QUANT_SIZES[tensor_kind]
        assert data.nbytes == int(np.prod(dims)) // length * size, f"{tensor}: {data.nbytes} bytes for {dims}"
        writer.write_tensor_data(data)
        written += data.nbytes
        if sys.stderr.isatty():
            print(f"\r{tensor:40} {written / 1e9:6.2f} GB", end="", file=sys.stderr)
    writer.close()
    report(maker)
    os.replace(part, out)
    seconds = time.monotonic() - started
    print(f"{out}: {out.stat().st_size / 1e9:.3f} GB in {seconds:.0f} s, {written / 1e6 / seconds:.0f} MB/s")
    return maker


def write_fixture(name, kind, folder):
    """Writes a tiny shape, and beside it the logits that numpy computes in float64 from the same blocks."""
    out = folder / f"{name}-{kind}.gguf"
    mix = dataclasses.replace(MIXES[kind], fallback=FIXTURE_FALLBACK)
    maker = write(name, SHAPES[name], mix, 0, 0.43, out)
    ids = maker.ids[:FIXTURE_TOKENS].astype(np.int32)
    logits = np.ascontiguousarray(maker.logits[:FIXTURE_TOKENS], dtype=np.float32)
    save_file({"ids": ids, "full_logits": logits}, out.with_suffix(".safetensors"))


def report(maker):
    """Prints the measurements, and fails if the model would be useless."""
    s = maker.shape
    lags = np.array(maker.measured)
    chance = s.top_k / s.experts
    distinct = np.mean([len({tuple(sorted(row)) for row in ids}) / len(ids) for ids in maker.used])
    touched = np.mean([len(np.unique(ids)) / s.experts for ids in maker.used])
    exact = "all layers" if maker.tiny else "the first layer with experts"
    print(f"share of experts in common with the token 1, 4, 16 before: {' '.join(f'{v:.3f}' for v in lags.mean(0))}")
    print(f"  requested {maker.reuse:.3f}, by chance {chance:.3f}; by layer {lags[:, 0].min():.3f} to {lags[:, 0].max():.3f}")
    print(f"  over {len(maker.used[0])} random ids in numpy, all layers, experts computed in {exact}")
    print(f"distinct sets of experts: {distinct:.3f} of tokens; experts used: {touched:.3f}")
    logits = maker.logits
    print(f"logits: std {logits.std():.2f}, largest {np.abs(logits).max():.2f}")
    if not np.isfinite(logits).all():
        sys.exit("some logits are not finite; the file is useless")
    if len(np.unique(logits.argmax(-1))) < len(logits) // 4:
        sys.exit("tokens hardly differ in their logits; the file is useless")
    if s.experts > 4 and (distinct < 0.2 or touched < 0.5):
        sys.exit("tokens hardly differ in their experts; the file is useless")


def main():
    parser = argparse.ArgumentParser(description="GGUF files with random weights in the shapes of real models")
    parser.add_argument("shape", nargs="?", choices=sorted(SHAPES))
    parser.add_argument("--kind", choices=sorted(MIXES), default="q4_0")
    parser.add_argument("--layers", type=int, metavar="N", help="write only the first N layers, for a quick comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reuse", type=float, default=0.43, help="share of experts in common with the previous token (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="output file (default: SHAPE-KIND.gguf)")
    parser.add_argument("--tiny", type=Path, metavar="FOLDER", help="write the test fixtures instead")
    args = parser.parse_args()
    if args.tiny:
        args.tiny.mkdir(parents=True, exist_ok=True)
        for name, kind in FIXTURES:
            write_fixture(name, kind, args.tiny)
        return
    if not args.shape:
        parser.error("a shape or --tiny FOLDER is required")
    shape = SHAPES[args.shape]
    if args.layers is not None:
        if not 1 <= args.layers <= shape.layers:
            parser.error(f"--layers must be from 1 to {shape.layers}")
        shape = dataclasses.replace(shape, layers=args.layers)
    write(args.shape, shape, MIXES[args.kind], args.seed, args.reuse, args.out or Path(f"{args.shape}-{args.kind}.gguf"))


if __name__ == "__main__":
    main()

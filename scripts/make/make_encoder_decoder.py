#!/usr/bin/env python3
"""Writes tiny random encoder-decoder models together with the results of transformers on them.

Needs what make_golden.py needs. Run by hand; the tests only read its output.

    python scripts/make/make_encoder_decoder.py                   tests/golden/switch_transformers
    python scripts/make/make_encoder_decoder.py --variants DIR    larger ones, with other options

Folders are laid out as those of make_golden.py. The encoder reads `input_ids`; the decoder reads `full_ids`, a start token and
the greedy text, one token at a time, so that the capacity of experts never limits it. `encoder_hidden.N` and `hidden.N` are
the input of the first layer and the output of each, the last after the final norm; `router_logits.enc.N`, `topk_ids.enc.N` and
`topk_weights.enc.N` belong to layer N of the encoder, those with `dec` to the decoder. A token beyond the capacity of its
expert has the id 65535 and the weight 0.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import safetensors.torch as st
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, SwitchTransformersForConditionalGeneration

import make_golden
from golden import reference, tokens

SPECIALS = ["<pad>", "</s>", "<unk>"]
NO_EXPERT = 65535
BASE = {
    "architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers",
    "d_model": 64, "d_kv": 16, "d_ff": 48, "expert_capacity": 64, "num_layers": 4, "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_heads": 4, "num_experts": 8,
    "router_bias": False, "router_jitter_noise": 0.01, "router_dtype": "float32", "router_ignore_padding_tokens": False,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6, "router_z_loss_coef": 0.001, "router_aux_loss_coef": 0.001, "initializer_factor": 1.0,
    "feed_forward_proj": "relu", "is_encoder_decoder": True, "add_router_probs": False, "use_cache": True,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "transformers_version": "4.45.0",
}
GOLDEN = {
    "notes": "odd heads, experts that overflow, router bias, untied, more encoder than decoder layers, few buckets",
    "seed": 500_000, "vocab": 120, "prompt": 14, "generated": 12,
    "config": {"d_model": 28, "d_kv": 12, "num_heads": 3, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 2,
               "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 4,
               "router_bias": True, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9,
               "tie_word_embeddings": False},
}
VARIANTS = [
    {"notes": "as published, tied", "config": {}},
    {"notes": "untied, router bias, gelu_new, every decoder layer sparse, three heads, more decoder layers, bf16, shards",
     "dtype": "bfloat16", "shard_size": "200KB",
     "config": {"tie_word_embeddings": False, "router_bias": True, "dense_act_fn": "gelu_new", "num_heads": 3, "d_kv": 20,
                "num_layers": 3, "num_sparse_encoder_layers": 1, "num_decoder_layers": 5,
                "num_sparse_decoder_layers": 5}},
    {"notes": "capacity 1, no sparse encoder layers asked for (the reference makes one), start token 7, few buckets",
     "config": {"expert_capacity": 1, "num_sparse_encoder_layers": 0, "decoder_start_token_id": 7, "num_experts": 5,
                "relative_attention_num_buckets": 6, "relative_attention_max_distance": 8}},
    {"notes": "num_decoder_layers null, all layers sparse, silu, f16, defaults of transformers for what is not given",
     "dtype": "float16",
     "config": {"num_decoder_layers": None, "num_layers": 3, "num_sparse_encoder_layers": 3,
                "num_sparse_decoder_layers": 3, "dense_act_fn": "silu", "router_dtype": None}},
]


def train(size):
    """A tokenizer in the style of T5: pieces of words after a mark, and an end token behind every text."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False, max_piece_length=4
    )
    tok.train_from_iterator(tokens.SENTENCES, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tok.token_to_id("</s>"))]
    )
    assert tok.get_vocab_size() <= size, f"the sentences give {tok.get_vocab_size()} tokens"
    return tok


def draw(name, shape, generator):
    """Random weights that give every part an effect."""
    noise = torch.randn(shape, generator=generator)
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if part in ("layer_norm", "final_layer_norm"):
        return noise * 0.2 + 1.0
    if part in ("shared", "embed_tokens"):
        return noise * 1.5
    if part == "relative_attention_bias":
        return noise
    if part == "bias":
        return noise * 0.3
    return noise * {"q": 0.4, "lm_head": 1.7, "classifier": 2.0}.get(part, 1.0) / shape[-1] ** 0.5


class Probe:
    """Records hidden states and routing of encoder and decoder; those of several passes follow each other."""

    def __init__(self, model):
        self.rows = {}
        for name, stack, mark in [("encoder_hidden", model.encoder, "enc"), ("hidden", model.decoder, "dec")]:
            last = len(stack.block)
            stack.block[0].register_forward_pre_hook(self.keep_input(f"{name}.0"), with_kwargs=True)
            for i, block in enumerate(stack.block):
                if i + 1 < last:
                    block.register_forward_hook(self.keep_output(f"{name}.{i + 1}"))
                router = getattr(block.layer[-1].mlp, "router", None)
                if router is not None:
                    router.register_forward_hook(self.keep_router(f"{mark}.{i}"))
            stack.final_layer_norm.register_forward_hook(self.keep_output(f"{name}.{last}"))

    def add(self, name, value):
        value = value.detach().reshape(-1, value.shape[-1])
        self.rows[name] = torch.cat([self.rows[name], value]) if name in self.rows else value.clone()

    def keep_input(self, name):
        return lambda _module, args, kwargs: self.add(name, args[0] if args else kwargs["hidden_states"])

    def keep_output(self, name):
        return lambda _module, _args, out: self.add(name, out[0] if isinstance(out, tuple) else out)

    def keep_router(self, layer):
        def hook(_module, _args, out):
            chosen, weight, logits = out
            there = chosen.sum(-1, keepdim=True) > 0
            self.add(f"router_logits.{layer}", logits)
            self.add(f"topk_ids.{layer}", torch.where(there, chosen.argmax(-1, keepdim=True), NO_EXPERT).to(torch.int32))
            self.add(f"topk_weights.{layer}", torch.where(there, weight, 0.0))

        return hook

    def margin(self):
        return min(reference.gap(v, 1) for k, v in self.rows.items() if k.startswith("router_logits"))


@torch.no_grad()
def capture(model, probe, prompt, count):
    """All tensors of reference.safetensors; raises TooClose."""
    probe.rows = {}
    encoded = model.encoder(input_ids=torch.tensor([prompt]))
    ids, rows, past = [model.config.decoder_start_token_id], [], None
    while len(rows) <= count:
        out = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids[-1:]]), past_key_values=past,
                    use_cache=True)
        past, logits = out.past_key_values, out.logits[0, -1]
        top = logits.topk(2).values
        if (top[0] - top[1]).item() < reference.GREEDY_MARGIN and len(rows) < count:
            raise reference.TooClose
        rows.append(logits)
        ids.append(int(logits.argmax()))
    if probe.margin() < reference.SELECTION_MARGIN:
        raise reference.TooClose
    full = torch.stack(rows)
    named = {"input_ids": prompt, "generated_ids": ids[1 : count + 1], "full_ids": ids[: count + 1]}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in named.items()}
    tensors |= {"full_logits": full, "decode_logits": full[:count], **probe.rows}
    return {k: v.contiguous().clone() for k, v in tensors.items()}


def build(name, spec, target):
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    vocab, dtype = spec.get("vocab", 200), spec.get("dtype", "float32")
    config = {"vocab_size": vocab, **BASE, "torch_dtype": dtype, **spec["config"]}
    config = {k: v for k, v in config.items() if v is not None or k == "num_decoder_layers"}
    make_golden.write_json(target / "config.json", config)
    tok = train(vocab - 3)
    (target / "tokenizer.json").write_text(tok.to_str(pretty=False), encoding="utf-8")
    marks = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    make_golden.write_json(target / "tokenizer_config.json", {
        **marks, "clean_up_tokenization_spaces": False, "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
    starts = {"decoder_start_token_id": config["decoder_start_token_id"], "eos_token_id": 1, "pad_token_id": 0}
    make_golden.write_json(target / "generation_config.json", {"_from_model_config": True, **starts})
    tok = AutoTokenizer.from_pretrained(target)
    prompt = tok.encode(tokens.PROMPT)[: spec.get("prompt", 24) - 1] + [1]
    model = SwitchTransformersForConditionalGeneration._from_config(
        AutoConfig.from_pretrained(target), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    probe = Probe(model)
    for seed in range(spec.get("seed", 510_000), spec.get("seed", 510_000) + make_golden.TRIES):
        generator = torch.Generator().manual_seed(seed)
        state = model.state_dict()
        # Without tied embeddings all of them are tensors of their own.
        copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
        copies = copies if model.config.tie_word_embeddings else []
        with torch.no_grad():
            for key in sorted(set(state) - set(copies)):
                state[key].copy_(draw(key, state[key].shape, generator).to(make_golden.DTYPES[dtype]))
        try:
            tensors = capture(model, probe, prompt, spec.get("generated", 32))
            break
        except reference.TooClose:
            continue
    else:
        sys.exit(f"{name}: no seed keeps its margins")
    save(model, target, dtype, spec.get("shard_size", "1GB"))
    st.save_file(tensors, target / "reference.safetensors")
    again = SwitchTransformersForConditionalGeneration.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    off = (capture(again, Probe(again), prompt, spec.get("generated", 32))["full_logits"] - tensors["full_logits"]).abs()
    assert off.max().item() <= 1e-6, f"{name}: read back, the logits are {off.max().item():.1e} off"
    dropped = {k.removeprefix("topk_ids."): int((v == NO_EXPERT).sum()) for k, v in tensors.items() if "topk_ids" in k}
    report = {
        "name": name, "architecture": BASE["architectures"][0], "model_type": BASE["model_type"], "notes": spec["notes"],
        "seed": seed, "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "compute": "float32 CPU, attn eager, 1 thread", "storage_dtype": dtype, "prompt_ids": prompt,
        "generated_ids": tensors["generated_ids"].tolist(),
        "generated_text": tok.decode(tensors["generated_ids"].tolist()), "dropped_tokens": dropped,
        "tokenizer_tests": tokens.tokenizer_tests(tok), "chat_tests": [],
    }
    text = tok.decode(prompt, skip_special_tokens=True)
    assert tok.encode(text) == prompt, f"{name}: the text of the prompt has other tokens"
    report["prompt_text"] = text
    rows = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in report.items()]
    (target / "reference.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{name}: {size} bytes, seed {seed}, dropped {dropped}", flush=True)
    return size


def save(model, target, dtype, shard_size):
    """The weights under their names on the hub, and the newer config beside the older one."""
    scratch = target / "scratch"
    model.config.dtype = dtype
    model.to(make_golden.DTYPES[dtype]).save_pretrained(scratch, max_shard_size=shard_size)
    model.float()
    (scratch / "config.json").rename(target / "config.transformers5.json")
    for file in [*scratch.glob("*.safetensors"), *scratch.glob("*.index.json")]:
        file.rename(target / file.name)
    shutil.rmtree(scratch)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=Path, help="write the stress variants here instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.variants:
        for i, spec in enumerate(VARIANTS, start=1):
            name = f"switch_transformers-v{i}"
            build(name, spec, args.variants / name)
        return
    golden = Path(__file__).parent.parent.parent / "tests" / "golden"
    size = build("switch_transformers", GOLDEN, golden / "switch_transformers")
    if size > 300_000:
        sys.exit(f"it has {size} bytes, more than the 300000 that a golden model may have")


if __name__ == "__main__":
    main()

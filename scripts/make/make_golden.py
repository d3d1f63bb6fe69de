#!/usr/bin/env python3
"""Writes tiny random checkpoints together with the results of transformers on them.

Needs Python 3.11 or newer and, from PyPI: transformers==5.23.0 torch==2.15.0 safetensors==0.8.0 tokenizers==0.23.3
numpy==2.4.6. Run by hand; the tests only read its output.

    python scripts/make/make_golden.py                       the golden models of tests/golden, one per architecture
    python scripts/make/make_golden.py --variants DIR        several more per architecture, larger, for stress tests
    python scripts/make/make_golden.py --only mixtral        only names with this prefix

Each folder is laid out as on the Hugging Face hub, with `config.transformers5.json` (the same config in newer keys),
`reference.safetensors` (logits, hidden states, routing) and `reference.json` (ids, margins, tokenizer and chat cases).
All numbers are float32, CPU, eager attention and experts, computed from the weights as stored. Seeds are tried until
every choice of an expert or token has a margin larger than rounding errors.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import safetensors.torch as st
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mistral4ForCausalLM

from golden import bailing_moe, bases, glm5_next, llama_moe, patches, reference, sets, smallthinker, step3p5, tokens, weights

TRIES = 400
bailing_moe.register()
glm5_next.register()
llama_moe.register()
smallthinker.register()
step3p5.register()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Checkpoints keep these in full precision, whatever the other tensors are stored in.
STAYS_FLOAT32 = ("e_score_correction_bias", "router_bias", "expert_bias", "A_log", "gate.bias", "tid2eid")
NOTED = ("greedy_top1_top2_min", "cached_vs_full_max_abs", "fp32_vs_fp64_logits_max_abs")


def build(spec, target):
    """Writes the folder of one model."""
    target.mkdir(parents=True, exist_ok=True)
    family = tokens.family_of(spec.model_type)
    tok = tokens.train(family, spec.vocab - spec.vocab_padding)
    write_sidecars(target, family, tok, spec)
    prompt = AutoTokenizer.from_pretrained(target).encode(tokens.prompt(spec.prompt))[: spec.prompt]
    assert len(prompt) == spec.prompt, f"the prompt has only {len(prompt)} tokens"
    model = new_model(target)
    probe = reference.Probe(model)
    tensors, margins, seed, tried = find_seed(spec, model, probe, prompt)
    full_ids = tensors["full_ids"].tolist()
    margins["fp32_vs_fp64_logits_max_abs"] = reference.double_difference(model, full_ids, tensors["full_logits"])
    save_weights(model, target, spec)
    st.save_file(tensors, target / "reference.safetensors")
    write_report(target, spec, tensors, margins, seed, tried)
    verify(target, spec, full_ids, tensors["full_logits"])
    return margins, tried


def write_sidecars(target, family, tok, spec):
    marks = {"bos_token_id": family.bos, "eos_token_id": family.eos, "pad_token_id": family.pad}
    ids = {key: tok.token_to_id(mark) for key, mark in marks.items() if mark}
    config = bases.hub_config(spec.model_type, spec.vocab, ids, spec.config, spec.dtype)
    write_json(target / "config.json", config)
    (target / "tokenizer.json").write_text(tok.to_str(pretty=False), encoding="utf-8")
    write_json(target / "tokenizer_config.json", tokens.tokenizer_config(family, tok))
    if family.template_file:
        (target / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    generation = {k: v for k, v in ids.items() if k != "pad_token_id"}
    write_json(target / "generation_config.json", {"_from_model_config": True, **generation, **spec.generation})


def new_model(folder):
    return model_of(AutoConfig.from_pretrained(folder))


def model_of(config):
    """A model of the text decoder that `config` describes, without weights of its own."""
    new = Mistral4ForCausalLM._from_config if config.model_type == "mistral4" else AutoModelForCausalLM.from_config
    model = new(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    patches.apply(model)
    return model


def find_seed(spec, model, probe, prompt):
    for tried in range(TRIES):
        seed = spec.seed + tried
        weights.fill(model, seed)
        if spec.rounded:
            spec.rounded(model)
        round_to_stored(model, spec.dtype)
        try:
            tensors, margins = reference.capture(model, probe, prompt, spec.generated)
        except reference.TooClose:
            continue
        return tensors, margins, seed, tried + 1
    sys.exit(f"{spec.name}: no seed of {TRIES} keeps its margins")


def stored_dtype(name, dtype):
    return torch.float32 if name.endswith(STAYS_FLOAT32) else DTYPES[dtype]


def round_to_stored(model, dtype):
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(stored_dtype(name, dtype)))


def save_weights(model, target, spec):
    """Writes the tensors under their names on the hub, and the newer config beside the older one."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        model.config.dtype = spec.dtype
        model.save_pretrained(scratch, max_shard_size=spec.shard_size)
        shutil.copy(scratch / "config.json", target / "config.transformers5.json")
        for file in sorted(scratch.glob("*.safetensors")):
            tensors = {patches.hub_name(spec.model_type, k): v for k, v in st.load_file(file).items()}
            stored = {k: v.to(stored_dtype(k, spec.dtype)) if v.is_floating_point() else v for k, v in tensors.items()}
            st.save_file(stored, target / file.name, metadata={"format": "pt"})
        index = scratch / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text())
            listed["weight_map"] = {patches.hub_name(spec.model_type, k): f for k, f in listed["weight_map"].items()}
            write_json(target / index.name, listed)
    model.config.dtype = "float32"


def write_report(target, spec, tensors, margins, seed, tried):
    tok = AutoTokenizer.from_pretrained(target)
    prompt, generated = tensors["input_ids"].tolist(), tensors["generated_ids"].tolist()
    report = {
        "name": spec.name,
        "architecture": bases.BASES[spec.model_type][0],
        "model_type": spec.model_type,
        "notes": spec.notes,
        "seed": seed,
        "seeds_tried": tried,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "compute": "float32 CPU, attn eager, experts eager, 1 thread",
        "storage_dtype": spec.dtype,
        "prompt_text": tok.decode(prompt, skip_special_tokens=True),
        "prompt_ids": prompt,
        "generated_ids": generated,
        "generated_text": tok.decode(generated),
        "moe_layers": sorted(int(k.split(".")[1]) for k in tensors if k.startswith("topk_ids")),
        "num_layers": sum(k.startswith("hidden.") for k in tensors) - 1,
        "margins": margins,
        "tokenizer_tests": tokens.tokenizer_tests(tok),
        "chat_tests": tokens.chat_tests(tok),
    }
    if tok.encode(report["prompt_text"]) != prompt:
        report.pop("prompt_text")
    rows = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in report.items()]
    (target / "reference.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


@torch.no_grad()
def verify(target, spec, full_ids, expected):
    """Checks that the folder loads from both configs and gives the recorded logits."""
    for name in ("config.json", "config.transformers5.json"):
        with tempfile.TemporaryDirectory() as scratch:
            for file in target.iterdir():
                if file.name != "config.json":
                    (Path(scratch) / file.name).symlink_to(file.resolve())
            shutil.copy(target / name, Path(scratch) / "config.json")
            # AutoModel of 5.23.0 has mistral4 only within multimodal models.
            loader = Mistral4ForCausalLM if spec.model_type == "mistral4" else AutoModelForCausalLM
            model, info = loader.from_pretrained(
                scratch, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
                output_loading_info=True,
            )
            patches.apply(model.eval())
            wrong = {k: v for k, v in info.items() if v and k != "error_msgs"}
            off = (reference.whole(model, full_ids) - expected).abs().max().item()
            if wrong or off > 1e-6:
                sys.exit(f"{spec.name}: read back from {name} the logits are {off:.2e} off; {wrong}")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent.parent / "tests" / "golden")
    parser.add_argument("--variants", type=Path, help="write the stress variants here instead")
    parser.add_argument("--only", default="", help="only names with this prefix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    specs, out = (sets.VARIANTS, args.variants) if args.variants else (sets.GOLDEN, args.out)
    for spec in specs:
        if not spec.name.startswith(args.only):
            continue
        target = out / spec.name
        shutil.rmtree(target, ignore_errors=True)
        margins, tried = build(spec, target)
        size = sum(f.stat().st_size for f in target.iterdir())
        if not args.variants and size > 300_000:
            sys.exit(f"{spec.name} has {size} bytes, more than the 300000 that a golden model may have")
        noted = " ".join(f"{k}={margins[k]:.1e}" for k in NOTED)
        print(f"{spec.name}: {size} bytes, seed {tried}, std {margins['logits_std']:.2f}, {noted}", flush=True)


if __name__ == "__main__":
    main()

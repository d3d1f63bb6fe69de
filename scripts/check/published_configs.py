#!/usr/bin/env python3
"""Compares larder with transformers on small random checkpoints that have every flag of published configs.

    python scripts/check/published_configs.py                         every file of tests/configs
    python scripts/check/published_configs.py --only GLM-5,MiMo       names with these beginnings
    python scripts/check/published_configs.py --configs FOLDER        other configs
    python scripts/check/published_configs.py --keep FOLDER           also keep the checkpoints there

Needs larder and the Python packages of scripts/make/make_golden.py, with transformers 5.24. Run by hand.

Only sizes, counts and lists with an entry per layer shrink, and tokens become those of a small tokenizer; a nested config and the prefix of
its tensors stay. Weights are random and in float32: how published weights are quantised is a matter of other tests. Seeds are tried until
no choice of an expert, block or token is closer than rounding errors. Of each checkpoint the logits of `larder logits -o exact`, plain and as a
store, and the text of `larder run` are compared. Prints a Markdown table; fails if logits differ by more than 1e-3 or a text differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts" / "make")]
import make_golden  # noqa: E402  (before transformers, which it silences)
import safetensors.torch as st  # noqa: E402
import torch  # noqa: E402
from golden import patches, reference, sets, text_part, tokens  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_vl  # noqa: E402
from transformers.utils import logging  # noqa: E402

BOUND = 1e-3
LAYERS, VOCAB, GENERATED = 6, 288, 12
reference.SELECTION_MARGIN, reference.INDEX_MARGIN, reference.GREEDY_MARGIN = 1e-5, 2e-6, 1e-3

# Names of types for which transformers has another.
TYPES = {
    "kimi_k2": "deepseek_v3", "qwen3_8_flash_next": "qwen4_exp", "qwen3_8_flash_next_text": "qwen4_exp_text",
}
# Types without their endings, and those whose tokenizer and names they have.
FAMILIES = {
    "gemma4": "gemma4_text", "glm4v_moe": "glm4_moe", "llama4": "llama4_text", "qwen3_omni_moe": "qwen3_moe", "qwen3_vl_moe": "qwen3_moe",
}
# Types of configs around that of a text decoder whose class is not needed to read it.
NESTS = ("thinker_config", "text_config")
PREFIXES = {"kimi_k25": ("language_model.model.", "language_model."), "llama4": ("language_model.model.", "language_model.")}

WIDTHS = {
    "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 32,
    "shared_intermediate_size": 48, "share_expert_dim": 48, "dense_intermediate_size": 48, "shared_expert_dim": 48,
    "q_lora_rank": 32, "kv_lora_rank": 32, "o_lora_rank": 16, "hc_lowrank": 24, "ple_embed_dim": 32,
    "ngram_vocab_size_base": 400, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4,
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "router_hidden_size": 24,
    "sliding_window": 8, "sliding_window_size": 8, "attention_chunk_size": 16, "chunk_size": 16,
    "index_topk": 8, "indexer_budget": 16, "index_n_heads": 32, "n_groups": 2, "o_groups": 2,
    "linear_num_key_heads": 2, "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
    "ssm_state_size": 16, "mamba_head_dim": 16, "mamba_chunk_size": 16, "num_attention_groups": 2,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k", "moe_topk")
HEADS = ("num_attention_heads", "swa_num_attention_heads")
HEAD_WIDTHS = (
    "head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    "qk_head_dim", "index_head_dim", "indexer_head_dim", "linear_key_head_dim", "linear_value_head_dim", "rotary_dim",
    "linear_head_dim",
)
DROPPED = ("quantization_config", "compression_config")


def shrunk(config, full=None):
    """A config with the same flags and smaller sizes; `full` is that of the layers, if this is an object in it."""
    full = full or config
    layers, heads = full.get("num_hidden_layers"), full.get("num_attention_heads")
    return {key: small(key, value, full, layers, heads) for key, value in config.items() if key not in DROPPED}


def small(key, value, full, layers, heads):
    if key in NESTS:
        return shrunk(value)
    if key == "linear_attn_config":
        lists = {name: [n for n in value[name] if n <= LAYERS] for name in ("full_attn_layers", "kda_layers")}
        return {**value, **lists, "num_heads": 4, "head_dim": 16}
    if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
    if isinstance(value, list) and layers and len(value) >= layers:
        return value[: min(layers, LAYERS)]
    if key == "hybrid_override_pattern":
        return value[:8]  # with attention and experts
    if key in ("moe_layers", "ple_layer_ids"):
        return [layer for layer in value if layer < LAYERS]
    if not isinstance(value, int) or isinstance(value, bool) or value == 0:
        return value
    return smaller(key, value, full, layers, heads)


def smaller(key, value, full, layers, heads):
    if key == "num_hidden_layers":
        return min(value, LAYERS)
    if key in EXPERTS:
        return min(value, 16)
    if key in CHOSEN:
        return min(value, 4)
    if key in HEADS:
        return 4
    if key == "linear_num_value_heads":
        return 2 * value // full["linear_num_key_heads"]
    if key.endswith("num_key_value_heads"):
        fewest = min(n for k, n in full.items() if k.endswith("num_key_value_heads") and n)
        return 4 if value == heads else 1 if value == fewest and fewest != max_kv(full) or value == 1 else 2
    if key in HEAD_WIDTHS:
        return max(value // 8, 2)
    return WIDTHS.get(key, value)


def max_kv(full):
    return max(n for k, n in full.items() if k.endswith("num_key_value_heads") and n)


def register():
    """Lets transformers have the text part of Qwen3-VL as a model of its own."""
    config = qwen3_vl.Qwen3VLMoeTextConfig
    parts = (qwen3_vl.Qwen3VLMoePreTrainedModel, config, qwen3_vl.Qwen3VLMoeTextModel)
    AutoModelForCausalLM.register(config, text_part.for_causal_lm("Qwen3VLMoeTextForCausalLM", *parts), exist_ok=True)


def text_of(config):
    """The config of the text decoder."""
    for nest in NESTS:
        outer = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        if config.get(nest):
            config = {**config[nest], **outer, "model_type": config[nest].get("model_type", outer.get("model_type"))}
    return config


def with_tokens(config, ids):
    """The same config with the tokens of the tokenizer in its text decoder."""
    for nest in NESTS:
        if config.get(nest):
            return {**config, nest: with_tokens(config[nest], ids)}
    return {**config, **ids}


class Checkpoint:
    """A random checkpoint in a folder, and what transformers computes with it."""

    def __init__(self, name, published, folder):
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)
        plain = text_of(published)
        self.kind = TYPES.get(plain["model_type"], plain["model_type"]).removesuffix("_text")
        self.kind = FAMILIES.get(self.kind, self.kind)
        self.family = tokens.family_of(self.kind)
        self.tokenizer = tokens.train(self.family, VOCAB)
        marks = {"bos_token_id": self.family.bos, "eos_token_id": self.family.eos, "pad_token_id": self.family.pad}
        ids = {key: self.tokenizer.token_to_id(mark) if mark else None for key, mark in marks.items()}
        self.config = with_tokens(shrunk(published), ids)
        self.write_sidecars(ids)
        prompt = 160 if self.kind == "deepseek_v4" else 24
        self.prompt = self.tokenizer.encode(tokens.prompt(prompt)).ids[:prompt]
        self.compute()

    def write_sidecars(self, ids):
        write(self.folder / "config.json", self.config)
        (self.folder / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=False), encoding="utf-8")
        write(self.folder / "tokenizer_config.json", tokens.tokenizer_config(self.family, self.tokenizer))
        write(self.folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})

    def compute(self):
        spec = sets.Spec(self.name, self.kind, "", {}, generated=GENERATED, prompt=len(self.prompt))
        with tempfile.TemporaryDirectory() as scratch:
            text = text_of(self.config)
            # Read as transformers knows it, with the text decoder as a model of its own.
            own = {key: value for key, value in text.items() if key != "auto_map"}
            write(Path(scratch) / "config.json", {**own, "model_type": TYPES.get(text["model_type"], text["model_type"])})
            model = make_golden.model_of(AutoConfig.from_pretrained(scratch))
        probe = reference.Probe(model)
        self.tensors, self.margins, *_ = make_golden.find_seed(spec, model, probe, self.prompt)
        self.noise = reference.double_difference(model, self.tensors["full_ids"].tolist(), self.tensors["full_logits"])
        self.save(model, spec)

    def save(self, model, spec):
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            stored = st.load_file(Path(scratch) / "model.safetensors")
        stored = {patches.hub_name(self.kind, name): tensor for name, tensor in stored.items()}
        st.save_file({self.published_name(name): tensor for name, tensor in stored.items()}, self.folder / "model.safetensors")

    def published_name(self, name):
        """The name of a tensor in the checkpoint of a multimodal model."""
        if not any(self.config.get(nest) for nest in NESTS):
            return name
        layers, head = PREFIXES.get(self.config["model_type"], ("model.language_model.", ""))
        return layers + name.removeprefix("model.") if name.startswith("model.") else head + name


class Larder:
    """The command."""

    def __init__(self, program, scratch):
        self.program, self.scratch = program, scratch

    def run(self, *command):
        done = subprocess.run([str(self.program), *map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return done.stdout

    def logits(self, model, ids):
        listed, out = self.scratch / "ids.json", self.scratch / "logits.safetensors"
        listed.write_text(json.dumps(ids))
        flags = ["--tokens", listed, "--out", out, "--force", "-oexact", "-o", "kv=f32", "-ono-store"]
        self.run("logits", "-m", model, *flags)
        return st.load_file(out)["full_logits"]

    def text(self, model, prompt):
        flags = ["--prompt", prompt, "-n", GENERATED, "--temperature", 0, "-oexact", "-o", "kv=f32", "--ignore-eos"]
        return self.run("run", "-m", model, *flags)


def compare(larder, checkpoint):
    """The largest difference of logits, of the checkpoint and of a store of it, and whether the greedy text is the same."""
    ids, want = checkpoint.tensors["full_ids"].tolist(), checkpoint.tensors["full_logits"]
    store = larder.scratch / "store"
    larder.run("convert", checkpoint.folder, store)
    off = [(larder.logits(model, ids) - want).abs().max().item() for model in (checkpoint.folder, store)]
    prompt, generated = (checkpoint.tokenizer.decode(checkpoint.tensors[key].tolist()) for key in ("input_ids", "generated_ids"))
    return max(off), larder.text(checkpoint.folder, prompt).strip() == generated.strip()


def write(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", type=Path, default=ROOT / "target" / "release" / "larder")
    parser.add_argument("--configs", type=Path, default=ROOT / "tests" / "configs")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between them")
    parser.add_argument("--keep", type=Path, help="keep the checkpoints in this folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    register()
    files = [file for file in sorted(args.configs.glob("*.json")) if file.stem.startswith(tuple(args.only.split(",")))]
    bad = []
    print("| config | model_type | largest difference of logits | of float32 and float64 | text |\n|---|---|---:|---:|---|")
    for file in files:
        with tempfile.TemporaryDirectory() as scratch:
            scratch = Path(scratch)
            try:
                checkpoint = Checkpoint(file.stem, json.loads(file.read_text()), (args.keep or scratch) / file.stem)
                off, same = compare(Larder(args.larder, scratch), checkpoint)
            except (Exception, SystemExit) as error:
                print(f"| {file.stem} | | {type(error).__name__}: {' '.join(str(error).split())[:300]} | | |", flush=True)
                bad.append(file.stem)
                continue
        text = "same" if same else "differs"
        print(f"| {file.stem} | {checkpoint.kind} | {off:.1e} | {checkpoint.noise:.1e} | {text} |", flush=True)
        if off > BOUND or not same:
            bad.append(file.stem)
    if bad:
        sys.exit(f"differ or fail: {', '.join(bad)}")


if __name__ == "__main__":
    main()

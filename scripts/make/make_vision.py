#!/usr/bin/env python3
"""Writes tiny random checkpoints with an image tower, together with the results of transformers on drawn pictures.

Needs what make_golden.py needs, with transformers==5.24.0, and torchvision==0.29.2 pillow==13.0.0 gguf==0.19.0 xxhash==4.1.0.

    python scripts/make/make_vision.py DIR [PREFIX]      only names with this prefix
    python scripts/make/make_vision.py DIR --cases       small cases of the processor and of decoding instead

Each folder `MODEL_TYPE-a` (the pixel limits that are published) and `MODEL_TYPE-b` (small limits and models, in bfloat16) holds a
checkpoint as on the hub, `images/`, and

- `reference.safetensors`: of each picture `pixel_values.NAME`, `grid.NAME`, `tower.NAME` and `deepstack.NAME.K`; of each prompt
  `PROMPT.input_ids`, `PROMPT.position_ids` (temporal, row, column), `PROMPT.logits`, and of the greedy text after it
  `PROMPT.generated_ids` and `PROMPT.decode_logits`;
- `reference.json`: the prompts as messages and as text, with the names of their pictures, seed, margins, versions;
- `mmproj.gguf`: the tower as llama.cpp names it.

All numbers are float32, CPU, eager attention, computed from the weights as stored; pictures go through the processor's torchvision
backend. Seeds are tried until every choice of an expert or token has a margin larger than rounding errors.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import safetensors.torch as st
import torch
import torchvision
import transformers
from transformers import AutoTokenizer, Qwen2VLImageProcessor

from golden import reference, tokens
from vision import cases, mmproj, models, pictures

TRIES = 200
GENERATED = 12
GREEDY_MARGIN, SELECTION_MARGIN, INDEX_MARGIN = 3e-3, 3e-5, 2e-6
PUBLISHED = {"shortest_edge": 65536, "longest_edge": 16777216}
SMALL = {"shortest_edge": 2048, "longest_edge": 12288}
IMAGE = {"type": "image"}
LONG = " ".join(tokens.SENTENCES[:3])


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


# By name: the messages, and the names of the pictures in their order.
PROMPTS = {
    "one": ([user(IMAGE, text("What is this?"))], ["odd"]),
    "several": (
        [user(IMAGE, text(LONG), IMAGE, text("and"), IMAGE, text("Which is the oldest?"))], ["tall", "wide", "plain"],
    ),
    "later": (
        [
            {"role": "system", "content": "Be terse."},
            user(text("How many steps are there from the gate to the lighthouse?")),
            {"role": "assistant", "content": "She counted 148."},
            user(text("And here? "), IMAGE, text(" or here? "), IMAGE),
        ],
        ["dot", "odd"],
    ),
    "twice": ([user(IMAGE, text("Look again: "), IMAGE)], ["plain", "plain"]),
    "none": ([user(text("What is 2+2?"))], []),
}


class Probe:
    """The smallest margins of routers and indexers since they were last asked for."""

    def __init__(self, model):
        self.routers = self.indexers = float("inf")
        for module in model.modules():
            kind = type(module).__name__
            if kind.lower().endswith("router"):
                module.register_forward_hook(self.watch_router)
            if kind.endswith("Indexer"):
                self.watch_indexer(module)

    def watch_router(self, module, _args, out):
        logits = out[0].detach().double()
        self.routers = min(self.routers, reference.gap(logits.reshape(-1, logits.shape[-1]), out[2].shape[-1]))

    def watch_indexer(self, module):
        topk, probe = torch.Tensor.topk, self

        def watched(scores, k, dim=-1, **more):
            rows = scores.detach().movedim(dim, -1).reshape(-1, scores.shape[dim])
            rows = rows[(rows > -1e30).sum(-1) > k]
            if len(rows):
                probe.indexers = min(probe.indexers, reference.gap(rows, k))
            return topk(scores, k, dim=dim, **more)

        def begin(_module, _args):
            torch.Tensor.topk = watched

        def end(_module, _args, _out):
            torch.Tensor.topk = topk

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def take(self):
        taken = self.routers, self.indexers
        self.routers = self.indexers = float("inf")
        return taken


class Runner:
    """Runs a model on prompts with pictures."""

    def __init__(self, model, ids, tok, images):
        self.model, self.ids, self.tok, self.images = model, ids, tok, images
        self.core = model.model

    def prompt_ids(self, messages, names):
        """The ids of a chat, every placeholder repeated once per token of its picture."""
        words = self.tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids, names = [], list(names)
        for token in self.tok.encode(words, add_special_tokens=False):
            count = 1
            if token == self.ids["<|image_pad|>"]:
                _, rows, columns = self.images[names.pop(0)]["grid"].tolist()
                count = rows * columns // 4
            ids += [token] * count
        assert not names
        return words, ids

    def positions(self, ids, grids):
        ids = torch.tensor([ids])
        if grids is None:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        if hasattr(self.model, "get_rope_index"):  # the Thinker
            return self.model.get_rope_index(ids, grids, attention_mask=torch.ones_like(ids))[0].long()
        kinds = (ids == self.ids["<|image_pad|>"]).int()
        return self.core.get_rope_index(ids, kinds, image_grid_thw=grids)[0]

    def logits(self, ids, names, dtype=torch.float32):
        grids = torch.stack([self.images[name]["grid"] for name in names]) if names else None
        positions = self.positions(ids, grids)
        more = {}
        if names:
            pixels = torch.cat([self.images[name]["pixel_values"] for name in names]).to(dtype)
            more = {"pixel_values": pixels, "image_grid_thw": grids}
            kinds = (torch.tensor([ids]) == self.ids["<|image_pad|>"]).int()
            more["mm_token_type_ids"] = kinds
        out = self.model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False, **more)
        return out.logits[0], positions[:, 0]

    def generate(self, ids, names):
        rows, new = [], []
        for _ in range(GENERATED):
            row = self.logits(ids + new, names)[0][-1]
            rows.append(row)
            new.append(int(row.argmax()))
            if self.tok.decode(new[-1:]).endswith(("pad|>", "start|>")):
                return None  # a placeholder without a picture
        return new, torch.stack(rows)


@torch.no_grad()
def encode(model, processor, drawn):
    """Of each picture: what the processor and the tower make of it."""
    encoded = {}
    for name, picture in drawn.items():
        made = processor(images=[picture], return_tensors="pt")
        out = model.model.visual(made["pixel_values"], grid_thw=made["image_grid_thw"])
        deepstack = getattr(out, "deepstack_features", None) or []
        encoded[name] = {
            "pixel_values": made["pixel_values"], "grid": made["image_grid_thw"][0], "tower": out.pooler_output,
            "deepstack": list(deepstack),
        }
    return encoded


@torch.no_grad()
def capture(runner, probe):
    """The tensors of all prompts, and the margins; None if a choice is too close."""
    tensors, report, margins = {}, {}, {}
    for name, (messages, pictures_of) in sorted(PROMPTS.items(), key=lambda prompt: -len(prompt[1][1])):
        words, ids = runner.prompt_ids(messages, pictures_of)
        logits, positions = runner.logits(ids, pictures_of)
        if probe.routers < SELECTION_MARGIN or probe.indexers < INDEX_MARGIN:
            return None
        generated = runner.generate(ids, pictures_of)
        if generated is None:
            return None
        new, decode = generated
        top = decode.topk(2, dim=-1).values
        greedy, (routers, indexers) = (top[:, 0] - top[:, 1]).min().item(), probe.take()
        if greedy < GREEDY_MARGIN or routers < SELECTION_MARGIN or indexers < INDEX_MARGIN:
            return None
        margins[name] = {"greedy": greedy, "experts": routers, "indexer": None if indexers == float("inf") else indexers}
        integers = {"input_ids": torch.tensor(ids), "position_ids": positions, "generated_ids": torch.tensor(new)}
        tensors |= {f"{name}.{key}": value.to(torch.int32) for key, value in integers.items()}
        tensors |= {f"{name}.logits": logits, f"{name}.decode_logits": decode}
        report[name] = {"messages": messages, "images": pictures_of, "text": words, "continuation": runner.tok.decode(new)}
    return tensors, report, margins


@torch.no_grad()
def exactness(runner, tensors):
    """The largest differences of logits and tower outputs between float32 and float64: the noise of any engine."""
    runner.model.double()
    off = {}
    for name, (_, names) in PROMPTS.items():
        ids = tensors[f"{name}.input_ids"].tolist()
        double = runner.logits(ids, names, torch.float64)[0]
        off[name] = (double - tensors[f"{name}.logits"]).abs().max().item()
    for name, image in runner.images.items():
        out = runner.model.model.visual(image["pixel_values"].double(), grid_thw=image["grid"][None])
        off[f"tower.{name}"] = ((out.pooler_output - image["tower"]).norm() / image["tower"].norm()).item()
    runner.model.float()
    return off


def effect(runner, tensors):
    """How much another picture changes the logits of the last position, in standard deviations of these logits."""
    ids = tensors["one.input_ids"].tolist()
    before, images = tensors["one.logits"][-1], dict(runner.images)
    odd = images["odd"]
    runner.images = images | {"odd": odd | {"pixel_values": -odd["pixel_values"]}}
    after = runner.logits(ids, ["odd"])[0][-1]
    runner.images = images
    return ((after - before).std() / before.std()).item()


def save(model, model_type, folder, stored):
    """Writes the checkpoint with the names of the hub."""
    model.config.dtype = str(stored).removeprefix("torch.")
    model.save_pretrained(folder)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    # Integers are numbers of rows, which bfloats would round.
    is_whole = lambda key, value: key.endswith("A_log") or not value.is_floating_point()
    kept = {key: value if is_whole(key, value) else value.to(stored) for key, value in st.load_file(file).items()}
    kept = {key: value for key, value in kept.items() if "audio_tower" not in key}
    if model_type == "qwen3_omni_moe":
        kept = {key if key.startswith("thinker.") else f"thinker.{key}": value for key, value in kept.items()}
        config = {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": model_type, "thinker_config": config,
            "enable_audio_output": False,
        }
    st.save_file(kept, file, metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    return kept


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder):
    tok = tokens.train(models.FAMILY, models.VOCAB)
    tok.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokens.tokenizer_config(models.FAMILY, tok))
    return AutoTokenizer.from_pretrained(folder)


def new_processor(limits, patch=16, resample=3):
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if patch == 16 else {}
    return Qwen2VLImageProcessor(
        size=limits, patch_size=patch, temporal_patch_size=2, merge_size=2, resample=resample, **half
    )


def write_processor(folder, limits):
    """As published: only the keys that differ from the class."""
    write_json(folder / "preprocessor_config.json", {
        "size": limits, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
    })


def shortened(tensors):
    """What the repository keeps: every 16th row of logits and the last ones, and no pixel values."""
    kept = {}
    for name, value in tensors.items():
        if name.startswith("pixel_values."):
            continue
        if name.endswith(".logits"):
            rows = sorted({*range(0, len(value), 16), *range(len(value) - 2, len(value))})
            kept[name.replace(".logits", ".logit_rows")] = torch.tensor(rows, dtype=torch.int32)
            value = value[rows]
        kept[name] = value
    return kept


def build(model_type, small, folder):
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    limits, stored = (SMALL, torch.bfloat16) if small else (PUBLISHED, torch.float32)
    drawn = pictures.drawn()
    for name, picture in drawn.items():
        picture.save(folder / "images" / f"{name}.png", optimize=True)
    write_processor(folder, limits)
    tok = write_tokenizer(folder)
    model, ids = models.new_model(model_type, small)
    probe, processor = Probe(model), new_processor(limits)
    for seed in range(TRIES):
        models.fill(model, seed, stored)
        runner = Runner(model, ids, tok, encode(model, processor, drawn))
        probe.take()
        captured = capture(runner, probe)
        if captured:
            break
    else:
        raise SystemExit(f"{folder.name}: every seed has a choice that is too close")
    tensors, report, margins = captured
    off, changed = exactness(runner, tensors), effect(runner, tensors)
    for name, image in runner.images.items():
        tensors |= {f"{key}.{name}": image[key] for key in ("pixel_values", "tower")}
        tensors[f"grid.{name}"] = image["grid"].to(torch.int32)
        tensors |= {f"deepstack.{name}.{k}": value for k, value in enumerate(image["deepstack"])}
    tensors = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    kept = save(model, model_type, folder, stored)
    mmproj.write(folder / "mmproj.gguf", kept, model.config.vision_config, limits)
    st.save_file(tensors, folder / "reference.safetensors")
    st.save_file(shortened(tensors), folder / "reference-short.safetensors")
    write_json(folder / "reference.json", {
        "name": folder.name, "model_type": model_type, "seed": seed, "stored": str(stored),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__, "torchvision": torchvision.__version__},
        "special_ids": ids, "prompts": report, "margins": margins, "float32_against_float64": off,
        "change_of_logits_by_another_picture": changed,
    })
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    print(f"{folder.name}: seed {seed}, change {changed:.2f}, noise {max(off.values()):.1e}, {sizes}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("prefix", nargs="?", default="")
    parser.add_argument("--cases", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cases:
        return cases.write(args.out, new_processor)
    for model_type in models.KINDS:
        for small in (False, True):
            name = f"{model_type}-{'b' if small else 'a'}"
            if name.startswith(args.prefix):
                build(model_type, small, args.out / name)


if __name__ == "__main__":
    main()

"""Bits per byte of a text, the load of each expert, and a sample."""

import math

import torch
import torch.nn.functional as F

from demo.model import CONTEXT, EXPERTS, LAYERS, expert_counts

STRIDE = CONTEXT // 2  # minimum context of every token but the first ones
BATCH = 8


def windows(ids: list[int]) -> list[tuple[list[int], int]]:
    """Overlapping windows of the text after an end-of-text token, each with its number of scored tokens."""
    ids = [0, *ids]
    result, scored = [], 1
    while scored < len(ids):
        end = min(len(ids), max(scored + STRIDE, CONTEXT + 1))
        result.append((ids[max(0, end - CONTEXT - 1) : end], end - scored))
        scored = end
    return result


@torch.no_grad()
def measure(model, tokenizer, text: str) -> tuple[float, torch.Tensor]:
    """Bits per byte of UTF-8, and the number of choices of each expert in each layer: [layers, experts]."""
    model.eval()
    ids = tokenizer.encode(text).ids
    nats, counts = 0.0, torch.zeros(LAYERS, EXPERTS, dtype=torch.long)
    groups: dict[int, list] = {}
    for window in windows(ids):  # windows of equal length form batches
        groups.setdefault(len(window[0]), []).append(window)
    for group in groups.values():
        for first in range(0, len(group), BATCH):
            part = group[first : first + BATCH]
            tokens = torch.tensor([window for window, _ in part], device=model.device)  # [windows, length + 1]
            out = model.model(tokens[:, :-1], output_router_logits=True, use_cache=False)
            logits = model.lm_head(out.last_hidden_state).float()
            losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            nats += sum(row[-scored:].double().sum().item() for row, (_, scored) in zip(losses, part, strict=True))
            counts += torch.stack([expert_counts(layer) for layer in out.router_logits]).cpu()
    return nats / math.log(2) / len(text.encode()), counts


def load_report(counts: torch.Tensor) -> list[dict]:
    """Per layer, each expert's share of the choices. An even load is 1/32 per expert, with an entropy of 5 bits."""
    shares = counts.double() / counts.sum(-1, keepdim=True)
    return [
        {
            "layer": layer,
            "least": round(share.min().item(), 5),
            "most": round(share.max().item(), 5),
            "dead": int((counts[layer] == 0).sum()),
            "entropy_bits": round(-(share * share.clamp_min(1e-12).log2()).sum().item(), 3),
            "shares": [round(s, 5) for s in share.tolist()],
        }
        for layer, share in enumerate(shares)
    ]


@torch.no_grad()
def sample(model, tokenizer, prompt: str, length: int, seed: int) -> str:
    model.eval()
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True, temperature=0.8, top_k=40
    )
    return tokenizer.decode(out[0].tolist())

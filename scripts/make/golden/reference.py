"""Runs a model, records its results as reference, and measures the margin of each decision."""

import torch

from golden import patches

SELECTION_MARGIN = 4e-4
GREEDY_MARGIN = 1e-2
INDEX_MARGIN = 5e-5  # of scores of indexers, which have less noise than logits: no router is between them and their input
CUT_WEIGHT = 4.0  # the cut of phimoe's router is relative, so its margin counts this much more


class TooClose(Exception):
    """A choice of an expert or token that rounding could flip; the next seed is tried."""


class Probe:
    """Records the input of the first layer, the output of each layer and norm, and the results of every router."""

    def __init__(self, model):
        self.config = model.config
        self.hidden, self.routers, self.index_margin = {}, {}, float("inf")
        decoder = model.model
        layers = len(decoder.layers)
        names = ("embedding_norm", "norm_f", "final_layernorm", "hyper_connection_mixer", "norm")
        norm = next(getattr(decoder, name) for name in names if hasattr(decoder, name))
        decoder.layers[0].register_forward_pre_hook(self.first_input, with_kwargs=True)
        for i, layer in enumerate(decoder.layers[:-1]):
            layer.register_forward_hook(self.keep_hidden(i + 1))
        norm.register_forward_hook(self.keep_hidden(layers))
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith(("router", "moev1gate")):
                module.register_forward_hook(self.keep_router(int(name.split("layers.")[1].split(".")[0])))
            if type(module).__name__.endswith("Indexer"):
                self.watch_choices(module)

    def watch_choices(self, indexer):
        """Keeps the smallest margin of the choices that an indexer makes."""
        topk = torch.Tensor.topk

        def watched(scores, k, dim=-1, **more):
            rows = scores.detach().movedim(dim, -1).reshape(-1, scores.shape[dim])
            # What a query does not see has the least score that there is.
            rows = rows[(rows > -1e30).sum(-1) > k]
            if len(rows):
                self.index_margin = min(self.index_margin, gap(rows, k))
            return topk(scores, k, dim=dim, **more)

        def begin(_module, _args):
            torch.Tensor.topk = watched

        def end(_module, _args, _out):
            torch.Tensor.topk = topk

        indexer.register_forward_pre_hook(begin)
        indexer.register_forward_hook(end)

    def first_input(self, _module, args, kwargs):
        self.hidden[0] = rows_of(args[0] if args else kwargs["hidden_states"])

    def keep_hidden(self, i):
        def hook(_module, _args, out):
            out = out[0] if isinstance(out, tuple) else out
            self.hidden[i] = rows_of(out)

        return hook

    def keep_router(self, layer):
        def hook(module, args, out):
            # Some routers are given the bias of the choice, and do not hold it.
            object.__setattr__(module, "given_bias", args[1] if len(args) > 1 else None)
            if self.config.model_type == "llama4_text":
                scores, logits = out
                ids = logits.topk(module.top_k, dim=-1).indices
                weights = scores.gather(-1, ids)
            elif self.config.model_type == "gemma4_text":
                _, weights, ids = out
                logits = module.proj(module.norm(args[0]) * module.scale * module.scalar_root_size)
            else:
                logits, weights, ids = out[:3]
            self.routers[layer] = (module, logits.detach(), weights.detach(), ids.detach())

        return hook

    def margins(self):
        """The smallest selection margin of each layer in the last pass."""
        return {layer: selection_margin(self.config, m, logits) for layer, (m, logits, _, _) in self.routers.items()}


def rows_of(hidden):
    """One row per token, which holds all residual streams."""
    return hidden.detach().reshape(hidden.shape[0] * hidden.shape[1], -1).clone() if hidden.dim() > 2 else hidden.detach().clone()


def selection_margin(config, router, logits):
    """The distance between the last chosen and the first rejected expert, in the values that the router sorts."""
    logits = logits.double()
    if config.model_type == "phimoe":
        return sparsemixer_margin(logits, router.router_jitter_noise)
    if hasattr(router, "tid2eid"):
        return float("inf")
    values, group_rank = deciding_values(config, router, logits)
    top_k = getattr(router, "top_k", None) or config.top_k_experts
    groups = getattr(router, "num_group", None) or 1
    if groups == 1 or router.topk_group == groups or getattr(config, "topk_method", "") == "greedy":
        return gap(values, top_k)
    grouped = values.view(len(values), groups, -1)
    ranks = grouped.topk(group_rank, dim=-1).values.sum(-1)
    lost = ranks.argsort(-1, descending=True)[:, router.topk_group :]
    mask = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, lost, True)
    kept = grouped.masked_fill(mask[..., None], -torch.inf).view_as(values)
    return min(gap(ranks, router.topk_group), gap(kept, top_k))


def deciding_values(config, router, logits):
    """The values that the router sorts (or logits of equal order), and the number of experts that rank a group."""
    kind = config.model_type
    if router.given_bias is not None:
        return logits.sigmoid() + router.given_bias.double(), 1
    if kind == "deepseek_v4":
        return router.score_fn(logits) + router.e_score_correction_bias.double(), 1
    if kind == "mistral4" and router.num_group > 1:
        return logits.softmax(-1), 2
    if kind in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "dots1", "exaone_moe", "laguna",
                "solar_open", "mimo_v2_flash", "step3p5", "nemotron_h", "kimi_linear", "bailing_hybrid", "glm5_next_text",
                "minimax_m3_vl_text"):
        return logits.sigmoid() + router.e_score_correction_bias.double(), 2
    if hasattr(router, "expert_bias") and kind.startswith("bailing"):
        return logits.sigmoid() + router.expert_bias.double(), 2
    if kind == "zaya":
        return logits.softmax(-1) + router.balancing_biases.double(), 1
    if kind == "ernie4_5_moe":
        return logits.softmax(-1) + router.moe_statics.e_score_correction_bias.double(), 1
    if kind == "lfm2_moe" and router.use_expert_bias:
        return logits.sigmoid() + router.expert_bias_for_margin.double(), 1
    return logits, 1


def gap(values, k):
    if k >= values.shape[-1]:
        return float("inf")
    top = values.topk(k + 1, dim=-1).values
    return (top[:, k - 1] - top[:, k]).min().item()


def sparsemixer_margin(logits, eps):
    """The smallest gap among the best three, and the distance of every expert from the cut at 2 * eps."""
    top = logits.topk(3, dim=-1)
    margin = (top.values[:, :-1] - top.values[:, 1:]).min().item()
    for rank in (0, 1):
        best = top.values[:, rank : rank + 1]
        cut = (best - logits) / torch.maximum(logits.abs(), best) - 2 * eps
        cut = cut.masked_fill(logits == best, torch.inf)
        margin = min(margin, CUT_WEIGHT * cut.abs().min().item())
    return margin


def check(probe, logits):
    if min(probe.margins().values()) < SELECTION_MARGIN or probe.index_margin < INDEX_MARGIN:
        raise TooClose
    top = logits[-1].topk(2).values
    if (top[0] - top[1]).item() < GREEDY_MARGIN:
        raise TooClose


@torch.no_grad()
def generate(model, probe, prompt, count):
    """Greedy decoding with a KV cache: the new ids and their logits."""
    patches.fresh_rope(model)
    out = model(torch.tensor([prompt]), use_cache=True)
    rows, ids = [], []
    for step in range(count):
        logits = out.logits[0]
        check(probe, logits)
        rows.append(logits[-1])
        ids.append(int(logits[-1].argmax()))
        if step + 1 == count:
            break
        if patches.cache_is_exact(model.config):
            out = model(torch.tensor([[ids[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        else:
            out = model(torch.tensor([prompt + ids]), use_cache=False)
    return ids, torch.stack(rows)


@torch.no_grad()
def capture(model, probe, prompt, count):
    """All tensors of reference.safetensors and the margins; raises TooClose."""
    probe.index_margin = float("inf")
    generated, decode = generate(model, probe, prompt, count)
    full_ids = prompt + generated
    full = whole(model, full_ids)
    margins = probe.margins()
    if min(margins.values()) < SELECTION_MARGIN or probe.index_margin < INDEX_MARGIN:
        raise TooClose
    ids = {"input_ids": prompt, "generated_ids": generated, "full_ids": full_ids}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in ids.items()}
    tensors |= {"full_logits": full, "decode_logits": decode}
    tensors |= {f"hidden.{i}": h for i, h in probe.hidden.items()}
    for layer, (_, logits, weights, chosen) in probe.routers.items():
        tensors[f"router_logits.{layer}"] = logits
        tensors[f"topk_weights.{layer}"] = weights
        tensors[f"topk_ids.{layer}"] = chosen.to(torch.int32)
    tensors["prompt_logits"] = whole(model, prompt)
    report = summary(margins, full, decode)
    return {k: v.contiguous().clone() for k, v in tensors.items()}, report


def summary(margins, full, decode):
    top = decode.topk(2, dim=-1).values
    return {
        "greedy_top1_top2_min": (top[:, 0] - top[:, 1]).min().item(),
        "expert_selection_min_per_layer": {str(k): v for k, v in sorted(margins.items()) if v != float("inf")},
        "cached_vs_full_max_abs": (decode - full[-len(decode) - 1 : -1]).abs().max().item(),
        "logits_std": full.std().item(),
    }


@torch.no_grad()
def whole(model, ids):
    """Logits of all positions in one pass without a KV cache."""
    patches.fresh_rope(model)
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def double_difference(model, full_ids, full_logits):
    """The largest difference between float32 and float64 logits: the noise level of any engine."""
    exact = whole(model.double(), full_ids)
    model.float()
    return (exact - full_logits).abs().max().item()

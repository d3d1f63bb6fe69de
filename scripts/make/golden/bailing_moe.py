"""Ling in plain torch, since transformers 5.23 does not have it: what its published modelling code (MIT) computes in evaluation.

Version 1 has a softmax gate and may normalise the columns of its output head; version 2 has a sigmoid gate with a bias for the
choice among groups of experts, and rotates a part of each head.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from golden import smallthinker


class BailingMoeConfig(PreTrainedConfig):
    model_type = "bailing_moe"


class BailingMoeV2Config(PreTrainedConfig):
    model_type = "bailing_moe_v2"


def is_second(config):
    """Published configs of both versions have the type of the first."""
    sigmoid = getattr(config, "score_function", None) == "sigmoid"
    return config.model_type == "bailing_moe_v2" or sigmoid or "BailingMoeV2ForCausalLM" in (config.architectures or [])


class GateRouter(nn.Linear):
    """Logits of all experts, and the weights and ids of the chosen ones."""

    def __init__(self, config):
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.top_k, self.second = config.num_experts_per_tok, is_second(config)
        self.renormalises = self.second or getattr(config, "norm_topk_prob", True)
        if self.second:
            self.num_group, self.topk_group = getattr(config, "n_group", 8), getattr(config, "topk_group", 4)
            self.factor = getattr(config, "routed_scaling_factor", 1.0)
            self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x):
        logits = super().forward(x)
        scores = logits.sigmoid() if self.second else logits.softmax(-1)
        choice = self.within_groups(scores + self.expert_bias) if self.second else scores
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.renormalises and self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.second else 0.0))
        return logits, weights * self.factor if self.second else weights, ids

    def within_groups(self, choice):
        grouped = choice.view(len(choice), self.num_group, -1)
        ranks = grouped.topk(2, dim=-1).values.sum(-1)
        lost = ranks.argsort(-1, descending=True)[:, self.topk_group :]
        mask = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, lost, True)
        return grouped.masked_fill(mask[..., None], -torch.inf).view_as(choice)


class Mlp(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = GateRouter(config)
        self.experts = nn.ModuleList(Mlp(hidden, width) for _ in range(config.num_experts))
        if shared := getattr(config, "num_shared_experts", 0):
            self.shared_experts = Mlp(hidden, shared * width)

    def forward(self, x):
        _, weights, ids = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, ranks = (ids == number).nonzero(as_tuple=True)
            out[rows] += weights[rows, ranks, None] * expert(x[rows])
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        share = getattr(config, "partial_rotary_factor", 1.0) if is_second(config) else 1.0
        self.rotated = int(self.dim * share)
        self.theta = getattr(config, "rope_theta", 600000.0 if is_second(config) else 10000.0)
        rows = (self.heads + 2 * self.kv) * self.dim
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=getattr(config, "use_qkv_bias", False))
        self.dense = nn.Linear(
            self.heads * self.dim, config.hidden_size, bias=getattr(config, "use_bias", not is_second(config)))
        if is_second(config) and getattr(config, "use_qk_norm", True):
            self.query_layernorm = smallthinker.Norm(self.dim, config.rms_norm_eps)
            self.key_layernorm = smallthinker.Norm(self.dim, config.rms_norm_eps)

    def forward(self, x, past):
        tokens, seen = len(x), 0 if past is None else past[0].shape[1]
        parts = self.query_key_value(x).view(tokens, -1, self.dim).split([self.heads, self.kv, self.kv], dim=1)
        q, k, v = (part.transpose(0, 1) for part in parts)
        if hasattr(self, "query_layernorm"):
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = (self.rotate(part, seen) for part in (q, k))
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        visible = torch.arange(seen, seen + tokens)[:, None] >= torch.arange(seen + tokens)
        keys, values = (part.repeat_interleave(self.heads // self.kv, 0) for part in (k, v))
        scores = (q @ keys.transpose(1, 2) * self.dim**-0.5).masked_fill(~visible, -torch.inf)
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(tokens, -1)
        return self.dense(mixed), (k, v)

    def rotate(self, part, first):
        exponents = torch.arange(0, self.rotated, 2).float() / self.rotated
        angles = torch.arange(first, first + part.shape[1])[:, None].float() * self.theta**-exponents
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(part.dtype) for f in (torch.cos, torch.sin))
        turned, rest = part[..., : self.rotated], part[..., self.rotated :]
        left, right = turned.chunk(2, -1)
        return torch.cat((turned * cos + torch.cat((-right, left), -1) * sin, rest), -1)


class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.input_layernorm = smallthinker.Norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = smallthinker.Norm(config.hidden_size, config.rms_norm_eps)
        dense = number < getattr(config, "first_k_dense_replace", 0)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size) if dense else Experts(config)

    def forward(self, x, past):
        (x,) = x  # a batch of one
        mixed, past = self.attention(self.input_layernorm(x), past)
        x = x + mixed
        return (x + self.mlp(self.post_attention_layernorm(x)))[None], past


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = smallthinker.Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = nn.Identity()

    def embed_tokens(self, ids):
        return self.word_embeddings(ids)


class Head(nn.Linear):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.normalises = getattr(config, "norm_head", False) and not is_second(config)

    def forward(self, x):
        weight = self.weight
        if self.normalises:
            weight = weight / (weight.norm(p=2, dim=0, keepdim=True) + 1e-7)
        return nn.functional.linear(x, weight)


class BailingMoeForCausalLM(smallthinker.SmallThinkerForCausalLM):
    config_class = BailingMoeConfig
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config):
        super(smallthinker.SmallThinkerForCausalLM, self).__init__(config)
        self.model = Decoder(config)
        self.lm_head = Head(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.word_embeddings


class BailingMoeV2ForCausalLM(BailingMoeForCausalLM):
    config_class = BailingMoeV2Config


def register():
    for config, model in ((BailingMoeConfig, BailingMoeForCausalLM), (BailingMoeV2Config, BailingMoeV2ForCausalLM)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)

"""SmallThinker in plain torch, since transformers 5.23 does not have it: its config, and a model with the names of the hub.

What it computes is what llama.cpp computes for the architecture of that name: the router reads the residual stream before the
norm of the attention; the gate of an expert is a ReLU; layers rotate and have windows by two lists of the config.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class SmallThinkerConfig(PreTrainedConfig):
    model_type = "smallthinker"


class Router(nn.Linear):
    """Logits of all experts, and the weights and ids of the chosen ones."""

    def __init__(self, config):
        super().__init__(config.hidden_size, config.moe_num_primary_experts, bias=False)
        self.top_k = config.moe_num_active_primary_experts
        self.softmax = getattr(config, "moe_primary_router_apply_softmax", False)

    def forward(self, x):
        logits = super().forward(x)
        best, ids = logits.topk(self.top_k, dim=-1)
        weights = best.softmax(-1) if self.softmax else best.sigmoid() / best.sigmoid().sum(-1, keepdim=True)
        return logits, weights, ids


class Expert(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down(self.gate(x).relu() * self.up(x))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.primary_router = Router(config)
        sizes = config.hidden_size, config.moe_ffn_hidden_size
        self.experts = nn.ModuleList(Expert(*sizes) for _ in range(config.moe_num_primary_experts))

    def forward(self, x, weights, ids):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, ranks = (ids == number).nonzero(as_tuple=True)
            out[rows] += weights[rows, ranks, None] * expert(x[rows])
        return out


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.theta = getattr(config, "rope_theta", None) or 10000.0
        self.rotates = bool(getattr(config, "rope_layout", None) is None or config.rope_layout[layer])
        slides = getattr(config, "sliding_window_layout", None)
        self.window = config.sliding_window_size if slides and slides[layer] else None
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, self.kv * self.dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x, past):
        tokens, seen = len(x), 0 if past is None else past[0].shape[1]
        q, k, v = (proj(x).view(tokens, -1, self.dim).transpose(0, 1) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotates:
            q, k = (self.rotate(part, seen) for part in (q, k))
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        behind = torch.arange(seen, seen + tokens)[:, None] - torch.arange(seen + tokens)
        visible = (behind >= 0) & (behind < (self.window or seen + tokens))
        keys, values = (part.repeat_interleave(self.heads // self.kv, 0) for part in (k, v))
        scores = (q @ keys.transpose(1, 2) * self.dim**-0.5).masked_fill(~visible, -torch.inf)
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(tokens, -1)
        return self.o_proj(mixed), (k, v)

    def rotate(self, part, first):
        # The angles are those of float32 also in double precision, as in transformers.
        exponents = torch.arange(0, self.dim, 2).float() / self.dim
        angles = torch.arange(first, first + part.shape[1])[:, None].float() * self.theta**-exponents
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(part.dtype) for f in (torch.cos, torch.sin))
        left, right = part.chunk(2, -1)
        return part * cos + torch.cat((-right, left), -1) * sin


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = Experts(config)

    def forward(self, x, past):
        (x,) = x  # a batch of one
        _, weights, ids = self.block_sparse_moe.primary_router(x)
        mixed, past = self.self_attn(self.input_layernorm(x), past)
        x = x + mixed
        return (x + self.block_sparse_moe(self.post_attention_layernorm(x), weights, ids))[None], past


class Decoder(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = nn.Identity()


class SmallThinkerForCausalLM(PreTrainedModel):
    config_class = SmallThinkerConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    layer = Layer

    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config, self.layer)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        """Weights are drawn or read by the caller."""

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def forward(self, input_ids, past_key_values=None, use_cache=False, **_):
        x, kept = self.model.embed_tokens(input_ids), []
        for number, layer in enumerate(self.model.layers):
            x, past = layer(x, past_key_values[number] if past_key_values else None)
            kept.append(past)
        logits = self.lm_head(self.model.norm(x))
        return CausalLMOutputWithPast(logits=logits, past_key_values=kept if use_cache else None)


def register():
    AutoConfig.register("smallthinker", SmallThinkerConfig)
    AutoModelForCausalLM.register(SmallThinkerConfig, SmallThinkerForCausalLM)

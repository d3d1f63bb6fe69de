"""LLaMA-MoE in plain torch, since transformers 5.23 does not have it: what its published modelling code computes in evaluation.

The router has two products with a tanh between them; the experts are the top k of its logits, weighted by their softmax times a
factor per layer. All experts of a layer have the same width.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from golden import smallthinker


class LlamaMoEConfig(PreTrainedConfig):
    model_type = "llama_moe"


class SplitRouter(nn.Module):
    """Logits of all experts, and the weights and ids of the chosen ones."""

    def __init__(self, config, layer):
        super().__init__()
        hidden, experts, self.top_k = config.hidden_size, config.num_experts, config.num_selects
        first = nn.Linear(hidden, experts, bias=False)
        second = nn.Linear(experts, experts, bias=False)
        linear = getattr(config, "gate_network", "mlp") == "linear"
        self.gate_network = first if linear else nn.Sequential(first, nn.Tanh(), second)
        if getattr(config, "gate_add_noise", True):
            self.weight_noise = nn.Linear(hidden, experts, bias=False)  # of training
        factor = getattr(config, "score_scale_factor", 1.0)
        self.factor = factor[layer] if isinstance(factor, list) else factor

    def forward(self, x):
        logits = self.gate_network(x)
        best, ids = logits.topk(self.top_k, dim=-1)
        return logits, best.softmax(-1) * self.factor, ids


class SplitExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.intermediate_size // config.num_experts

        def matrices(rows, columns):
            return nn.ParameterList(torch.empty(rows, columns) for _ in range(config.num_experts))

        self.weight_gate, self.weight_up = (matrices(width, config.hidden_size) for _ in range(2))
        self.weight_down = matrices(config.hidden_size, width)

    def forward(self, x, number):
        gate, up, down = self.weight_gate[number], self.weight_up[number], self.weight_down[number]
        return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Mlp(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.gate = SplitRouter(config, layer)
        self.calculator = nn.Module()
        self.calculator.experts = SplitExperts(config)

    def forward(self, x):
        _, weights, ids = self.gate(x)
        out = torch.zeros_like(x)
        for number in ids.unique().tolist():
            rows, ranks = (ids == number).nonzero(as_tuple=True)
            out[rows] += weights[rows, ranks, None] * self.calculator.experts(x[rows], number)
        return out


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = smallthinker.Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = smallthinker.Attention(config, layer)
        self.post_attention_layernorm = smallthinker.Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config, layer)

    def forward(self, x, past):
        (x,) = x  # a batch of one
        mixed, past = self.self_attn(self.input_layernorm(x), past)
        x = x + mixed
        return (x + self.mlp(self.post_attention_layernorm(x)))[None], past


class LlamaMoEForCausalLM(smallthinker.SmallThinkerForCausalLM):
    config_class = LlamaMoEConfig
    layer = Layer


def register():
    AutoConfig.register("llama_moe", LlamaMoEConfig)
    AutoModelForCausalLM.register(LlamaMoEConfig, LlamaMoEForCausalLM)

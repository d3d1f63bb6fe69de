"""The model: OLMoE with 32 small experts in each of 8 layers, and its training loss."""

import torch
import torch.nn.functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

VOCABULARY = 4096
CONTEXT = 512  # tokens of a training sequence; longer contexts are not trained
LAYERS, EXPERTS, CHOSEN = 8, 32, 4

# Weights of the two router losses, summed over layers. With their mean over layers instead, most layers used mainly
# about a dozen of their 32 experts after 27 steps.
BALANCE, LOGIT_SIZE = 0.01, 0.0001

# One matrix product per expert over tokens sorted by expert. One thread of a Zen 3 core: 1,330 tokens/s forward and
# backward, where the loop of `eager` reaches 1,040; the losses are equal to the last digit.
EXPERTS_IMPLEMENTATION = "grouped_mm"


def build(seed: int) -> OlmoeForCausalLM:
    torch.manual_seed(seed)
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=False,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=2048,
        initializer_range=0.04,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    with torch.no_grad():
        for layer in model.model.layers:  # small initial outputs to the residual stream
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj):
                weight.mul_((2 * LAYERS) ** -0.5)
    return model


def parameters(model: OlmoeForCausalLM) -> tuple[int, int]:
    """Total parameters, and those active for one token."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total, total - experts + experts * CHOSEN // EXPERTS


def expert_counts(router_logits: torch.Tensor) -> torch.Tensor:
    chosen = router_logits.topk(CHOSEN, dim=-1).indices  # [tokens, chosen]
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)  # [experts]


def balance(router_logits: torch.Tensor) -> torch.Tensor:
    """1 when tokens are spread evenly over the experts, up to `EXPERTS / CHOSEN` when all choose the same experts.

    Computed per layer: transformers' own loss mixes all layers, so one layer could collapse as long as another
    compensates for it.
    """
    counts = expert_counts(router_logits)
    return EXPERTS * (counts / counts.sum() * router_logits.float().softmax(-1).mean(0)).sum()


def losses(model: OlmoeForCausalLM, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The training loss, the cross entropy per token in nats, and the mean balance of the layers."""
    # chunks: [sequences, context + 1]
    out = model.model(chunks[:, :-1], output_router_logits=True, use_cache=False)
    logits = model.lm_head(out.last_hidden_state)  # [sequences, context, vocabulary]
    entropy = F.cross_entropy(logits.flatten(0, 1).float(), chunks[:, 1:].flatten())
    evenness = torch.stack([balance(layer) for layer in out.router_logits])  # [layers]
    size = torch.stack([layer.float().logsumexp(-1).square().mean() for layer in out.router_logits])
    total = entropy + BALANCE * evenness.sum() + LOGIT_SIZE * size.sum()
    return total, entropy.detach(), evenness.mean().detach()

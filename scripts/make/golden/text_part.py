"""Text parts that transformers 5.23 has within multimodal models only, as models of their own."""

from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast


def for_causal_lm(name, base, config, body):
    """A class called `name`: the decoder `body` and an output head."""

    class TextForCausalLM(base, GenerationMixin):
        config_class = config
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config):
            super().__init__(config)
            self.model = body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids, **kwargs):
            out = self.model(input_ids, **kwargs)
            logits = self.lm_head(out.last_hidden_state)
            return MoeCausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    TextForCausalLM.__name__ = name
    return TextForCausalLM

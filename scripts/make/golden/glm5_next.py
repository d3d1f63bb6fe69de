"""The text part of GLM-5-Next as a model of its own: transformers 5.23 has it within the multimodal model only."""

from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    config_class = Glm5NextTextConfig
    config: Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        out = self.model(input_ids, **kwargs)
        logits = self.lm_head(out.last_hidden_state)
        return MoeCausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


def register():
    AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)

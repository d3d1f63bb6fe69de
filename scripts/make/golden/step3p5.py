"""Step-3.5, the text part of Step-3.7, as a model of its own: transformers 5.23 has it within the multimodal model only."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    config_class = Step3p7TextConfig
    config: Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        out = self.model(input_ids, **kwargs)
        logits = self.lm_head(out.last_hidden_state)
        return MoeCausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


def register():
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
    # The names of the multimodal model's checkpoints, without the prefixes of its parts.
    renames = get_checkpoint_conversion_mapping("step3p7")
    of_text = [entry for entry in renames if "^" not in "".join(entry.source_patterns)]
    register_checkpoint_conversion_mapping("step3p5", of_text, overwrite=True)

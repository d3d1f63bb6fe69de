"""The text part of GLM-5-Next as a model of its own."""

from transformers import AutoModelForCausalLM
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel

from golden.text_part import for_causal_lm

Glm5NextForCausalLM = for_causal_lm("Glm5NextForCausalLM", Glm5NextPreTrainedModel, Glm5NextTextConfig, Glm5NextTextModel)


def register():
    AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)

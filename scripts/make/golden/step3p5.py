"""Step-3.5, the text part of Step-3.7, as a model of its own."""

from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from golden.text_part import for_causal_lm

Step3p5ForCausalLM = for_causal_lm("Step3p5ForCausalLM", Step3p7PreTrainedModel, Step3p7TextConfig, Step3p7TextModel)


def register():
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
    # The names of the multimodal model's checkpoints, without the prefixes of its parts.
    renames = get_checkpoint_conversion_mapping("step3p7")
    of_text = [entry for entry in renames if "^" not in "".join(entry.source_patterns)]
    register_checkpoint_conversion_mapping("step3p5", of_text, overwrite=True)

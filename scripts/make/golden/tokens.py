"""Small byte-level BPE tokenizers with the chat templates of three families."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The baker weighs twelve loaves, wraps four of them and sells the other eight before noon.",
    "Rain fell on the harbour all night; by morning the boats were full and the gulls were quiet.",
    "How many steps are there from the gate to the lighthouse? She counted 148, then lost count.",
    "A map is not the country, but it tells you where the rivers are.",
    "def area(width, height):\n    return width * height\n",
    "Numbers such as 3.14, 1,000 and 2048 turn up in every ledger.",
    "Don't forget the key: it's under the third stone, we'll need it when they're back.",
    "Über den Fluss führt eine Brücke; le café ouvre à huit heures.",
]

PROMPT = (
    "How many loaves are there if the baker sells eight of twelve before noon, bakes four more after the rain "
    "and wraps them all for the boats in the harbour by night?"
)

CASES = [
    "The baker sells eight.",
    "  two  spaces\tand a tab\r\nnew line",
    "12,345.678 + 9",
    "naïve Ångström, 你好 🦆👩\u200d💻",
    "they'll don't I'M",
    "<|im_end|>x</s> <s>",
    "",
    " ",
]

CHATS = [
    [{"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello! "},
        {"role": "user", "content": "Tell me a story."},
    ],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}],
]

CHATML = (
    "{%- if messages[0]['role'] != 'system' -%}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate, the user first.') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
HARMONY = (
    "{%- set ns = namespace(turns=0) -%}\n"
    "{%- for m in messages -%}\n"
    "{%- set ns.turns = ns.turns + 1 -%}\n"
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# Split patterns as published with byte-level tokenizers of these families.
SPLIT_ONE_DIGIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prompt(count):
    """A text of at least `count` tokens, each of which has six bytes at most on average."""
    text = PROMPT
    while count > 32 and len(text) < 6 * count:
        text = " ".join([text, *SENTENCES])
    return text


class Family:
    """Special tokens, template and pre-tokenizer of one family."""

    def __init__(self, specials, bos, eos, pad, template, adds_bos, one_digit, template_file=False):
        self.specials, self.bos, self.eos, self.pad = specials, bos, eos, pad
        self.template, self.adds_bos, self.one_digit, self.template_file = template, adds_bos, one_digit, template_file


FAMILIES = {
    "chatml": Family(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        None, "<|im_end|>", "<|endoftext|>", CHATML, adds_bos=False, one_digit=True,
    ),
    "inst": Family(
        ["<unk>", "<s>", "</s>"], "<s>", "</s>", None, INST, adds_bos=True, one_digit=False,
    ),
    "harmony": Family(
        ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"],
        "<|startoftext|>", "<|return|>", "<|endoftext|>", HARMONY, adds_bos=False, one_digit=True, template_file=True,
    ),
}

FAMILY_OF = {
    "mixtral": "inst", "phimoe": "inst", "deepseek_v2": "inst", "deepseek_v3": "inst", "ernie4_5_moe": "inst",
    "qwen2_moe": "chatml", "qwen3_moe": "chatml", "qwen3_next": "chatml", "qwen3_5_moe": "chatml", "qwen4_exp": "chatml",
    "minimax_m2": "chatml", "hy_v3": "chatml", "glm4_moe": "chatml", "olmoe": "chatml",
    "glm4_moe_lite": "chatml", "gemma4_text": "inst", "mistral4": "inst", "dots1": "chatml", "exaone_moe": "chatml",
    "solar_open": "chatml", "smallthinker": "chatml", "llama_moe": "inst", "granitemoeshared": "chatml", "mellum": "chatml",
    "afmoe": "chatml", "laguna": "chatml", "mimo_v2_flash": "chatml", "bailing_moe": "chatml", "bailing_moe_v2": "chatml", "step3p5": "chatml",
    "flex_olmo": "chatml", "hunyuan_v1_moe": "chatml", "deepseek_v32": "inst", "minimax_m3_vl": "chatml", "glm_moe_dsa": "chatml",
    "deepseek_v4": "inst", "granitemoehybrid": "chatml", "jamba": "inst", "nemotron_h": "chatml",
    "kimi_linear": "chatml", "bailing_hybrid": "chatml", "glm5_next": "chatml", "zaya": "chatml",
    "granitemoe": "chatml", "lfm2_moe": "chatml", "gpt_oss": "harmony", "llama4_text": "harmony",
}


def family_of(model_type):
    return FAMILIES[FAMILY_OF[model_type]]


def train(family, size):
    """A tokenizer with exactly `size` tokens, the special ones last."""
    tok = Tokenizer(models.BPE())
    if family.one_digit:
        tok.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(SPLIT_ONE_DIGIT), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tok.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    else:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(family.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(SENTENCES, trainer)
    tok.add_special_tokens(family.specials)
    assert tok.get_vocab_size() == size, f"the sentences give {tok.get_vocab_size()} tokens instead of {size}"
    if family.adds_bos:
        bos = tok.token_to_id(family.bos)
        tok.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", pair=f"{family.bos} $A $B", special_tokens=[(family.bos, bos)]
        )
    return tok


def tokenizer_config(family, tok):
    """The contents of tokenizer_config.json, without the template if the family keeps it in a file."""
    added = {
        str(tok.token_to_id(s)): {
            "content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True
        }
        for s in family.specials
    }
    config = {
        "add_bos_token": family.adds_bos,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "bos_token": family.bos,
        "eos_token": family.eos,
        "pad_token": family.pad,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if not family.template_file:
        config["chat_template"] = family.template
    return config


def tokenizer_tests(tok):
    def case(text):
        ids = tok.encode(text, add_special_tokens=True)
        return {
            "text": text,
            "ids": ids,
            "ids_no_special": tok.encode(text, add_special_tokens=False),
            "decoded": tok.decode(ids, skip_special_tokens=True),
        }

    return [case(text) for text in CASES]


def chat_tests(tok):
    def case(messages, prompt):
        test = {"messages": messages, "add_generation_prompt": prompt}
        try:
            text = tok.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        except Exception as e:
            return test | {"error": str(e)}
        return test | {"text": text, "ids": tok.encode(text, add_special_tokens=False)}

    return [case(messages, prompt) for messages in CHATS for prompt in (True, False)]

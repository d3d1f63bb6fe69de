"""How the demo model writes unless told otherwise: its sampling, its chat template, its slots and its first messages."""

import json
from pathlib import Path

# Found with 6 prompts and 3 seeds each of 200 tokens, on grids of temperature, top-p or min-p and repetition penalty: among the
# settings that repeat as few pairs of words as the held-out book does (4 %), those whose text the model finds likely.
SAMPLING = {"do_sample": True, "temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2}

# A model of plain text: messages and answers follow each other as paragraphs, and the model continues them.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- message.content -}}
{%- else -%}
{{- '' if loop.first else '\\n\\n' -}}
{{- message.content | trim -}}
{%- endif -%}
{%- endfor -%}
"""

CONFIG = """\
# A quarter of the experts in memory, so that experts are read and evicted; the context is that of the training.
[run]
cache-experts = 8

[chat]
cache-experts = 8
context = {context}
max-tokens = {answer}

[serve]
cache-experts = 8
context = {context}
context-full = "drop-turns"
max-tokens = {answer}
"""

WELCOME = {
    "heading": "Begin a story, and the model continues it",
    "examples": [
        "The old man looked at the door, and",
        "It was a cold evening in November when the stranger came to the inn.",
        "\"I have something to tell you,\" said the captain,",
        "The children ran down to the river,",
    ],
}

ANSWER = 160  # tokens of an answer, so that the context holds earlier ones too


def write_sidecars(checkpoint: Path) -> None:
    """Adds sampling and template to a checkpoint that is to be converted."""
    config = checkpoint / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SAMPLING}, indent=2) + "\n")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)


def write_settings(store: Path, context: int) -> None:
    """Adds the defaults of commands and the first messages to a store."""
    (store / "larder.toml").write_text(CONFIG.format(context=context, answer=ANSWER))
    (store / "welcome.json").write_text(json.dumps(WELCOME, indent=2) + "\n")

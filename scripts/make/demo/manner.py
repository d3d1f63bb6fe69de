"""How the demo model writes unless told otherwise: its sampling, its chat template, its slots and its first messages."""

import json
from pathlib import Path

SAMPLING = {"do_sample": True, "temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2}

# A model of plain text: messages and answers follow each other as paragraphs, and the model continues them.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- message.content.rstrip() -}}
{%- else -%}
{{- '' if loop.first else '\\n\\n' -}}
{{- message.content | trim -}}
{%- endif -%}
{%- endfor -%}
"""

CONFIG = """\
# A quarter of the experts in memory, so that experts are read and evicted; the context is that of the training.
[run]
cache = "8x"

[chat]
cache = "8x"
context = {context}
max-tokens = {answer}

[serve]
cache = "8x"
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

# Rows of scripts/make/demo_sampling.py: what was chosen, and what it was compared with.
FINDINGS = """\
| sampling | repeated pairs | distinct words | nats per token |
|---|---:|---:|---:|
| the held-out book | 3.9 % | 65 % | 3.75 |
| greedy | 81.6 % | 12 % | 1.46 |
| temperature 0.7, top-p 0.9 | 15.4 % | 49 % | 2.04 |
| temperature 0.7, min-p 0.1 | 28.7 % | 38 % | 1.89 |
| temperature 0.8, top-p 0.9, repetition penalty 1.1 | 3.5 % | 66 % | 2.40 |
| temperature 0.7, top-p 0.9, repetition penalty 1.2 | 2.8 % | 69 % | 2.39 |
| temperature 0.8, min-p 0.15, repetition penalty 1.2 | 4.0 % | 68 % | 2.10 |
| **temperature 0.7, min-p 0.1, repetition penalty 1.2** | 4.6 % | 67 % | 2.03 |
| temperature 0.6, min-p 0.15, repetition penalty 1.2 | 4.6 % | 66 % | 1.95 |
"""

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

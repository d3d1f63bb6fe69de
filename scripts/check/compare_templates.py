#!/usr/bin/env python3
"""Compares larder's rendering of chat templates with transformers' (Jinja2), byte for byte.

    compare_templates.py [--larder PROGRAM] [--jobs N] FILE_OR_FOLDER...

Each template is rendered with every chat below: with and without tools, calls and their results, reasoning, several turns,
system messages in odd places, documents; with and without the beginning of an answer; with the variables that templates read.
A chat that a template refuses with a message must be refused by both, with this message. Prints a line per difference and a
summary; ends with 1 if there is any difference but this one: Python refuses some values that larder renders (docs/chat.md).

Templates of published models are in llama.cpp (models/templates; the source package of llama-cpp-python has them) and in TRL
(the wheel of trl, trl/chat_templates).

Needs Python 3.10, transformers 5.24 and jinja2 3.1 (no torch); larder.
"""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Any model: the templates see no more of it than its special tokens.
MODEL = ROOT / "tests/golden/mixtral"
LENIENT = "only Python refuses"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def user(content="What is 1 < 2 & \"3\"?\nTell me, it's urgent: naïve 🦆."):
    return {"role": "user", "content": content}


def system(content="Be brief."):
    return {"role": "system", "content": content}


def assistant(content="Four.", **fields):
    return {"role": "assistant", "content": content, **fields}


def call(name, arguments, number=0):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content="21 °C", number=0, name="weather"):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


ARGUMENTS = {
    "city": "São \"Paulo\" <b>",
    "days": 3,
    "share": 0.5,
    "large": 1e20,
    "exact": True,
    "limit": None,
    "tags": ["a", {"b": []}, []],
    "options": {"unit": "C", "text": "two\nlines\\"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.\nAny city's.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the <city>"},
                    "days": {"type": ["integer", "null"], "default": 1, "minimum": 0.5},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "default": []},
                    "options": {
                        "type": "object",
                        "properties": {"deep": {"type": "boolean", "default": False}},
                        "required": ["deep"],
                    },
                    "either": {"anyOf": [{"type": "string"}, {"type": "number"}], "nullable": True},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
            "return": {"type": "string", "description": "In words"},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "bare", "parameters": {}}},
]
ASKED = assistant("", tool_calls=[call("weather", ARGUMENTS)])
TWO_CALLS = [call("weather", {"city": "Rome"}), call("now", {}, 1)]

CHATS = {
    "user": [user()],
    "system": [system(), user()],
    "turns": [system(), user(), assistant(), user("And 3?"), assistant("  padded \n"), user("  Thanks\n\n")],
    "empty texts": [system(""), user(""), assistant(""), user("?")],
    "thinking in the text": [user(), assistant("<think>\nTwo and two.\n</think>\n\nFour."), user("And?")],
    "reasoning": [user(), assistant(reasoning_content="Two and two.\n"), user("And?")],
    "reasoning, last": [user(), assistant(reasoning="Two and two.")],
    "answer, last": [user(), assistant()],
    "call": [system(), user(), ASKED],
    "call without content": [user(), {"role": "assistant", "content": None, "tool_calls": TWO_CALLS}],
    "result": [user(), ASKED, result()],
    "result, answer": [user(), ASKED, result(), assistant(), user("And?")],
    "reasoned call": [user(), {**ASKED, "reasoning_content": "Hm."}, result(), assistant(reasoning_content="So."), user("And?")],
    "two calls": [user(), assistant("Wait.", tool_calls=TWO_CALLS), result(), result("noon", 1, "now")],
    "arguments as text": [user(), assistant("", tool_calls=[call("weather", json.dumps(ARGUMENTS))]), result()],
    "result as parts": [user(), ASKED, result(parts("21 °C", "dry"))],
    "result as an object": [user(), ASKED, result({"celsius": 21.0, "dry": True})],
    "parts": [system(parts("Be", "brief.")), user(parts("One", "two")), assistant(parts("Three")), user(parts("Four"))],
    "an image": [user([{"type": "image"}, {"type": "text", "text": "What is this?"}])],
    "system in the middle": [user(), assistant(), system("Be long."), user("And?")],
    "system at the end": [user(), assistant(), user("And?"), system("Be long.")],
    "two systems": [system(), system("Be polite."), user()],
    "developer": [{"role": "developer", "content": "Be brief."}, user()],
    "two users": [user(), user("And?")],
    "two answers": [user(), assistant(), assistant("Five."), user("And?")],
    "odd role": [user(), {"role": "critic", "content": "Hm."}],
}
VARIABLES = [
    {},
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
]
DOCUMENTS = [{"title": "A duck", "text": "Ducks quack."}, {"title": "A \"goose\"", "text": "It's\nloud."}]


def cases():
    """Pairs of a name and a chat, with whether an answer begins."""
    for (name, messages), tools, begins, extra in itertools.product(CHATS.items(), (None, TOOLS), (True, False), VARIABLES):
        # Variables only change the beginning of an answer and what is said of tools and thinking.
        if begins or not extra:
            words = [name, "tools" if tools else "", "" if begins else "whole", json.dumps(extra) if extra else ""]
            yield ", ".join(filter(None, words)), {"messages": messages, "tools": tools, "chat_template_kwargs": extra}, begins
    yield "documents", {"messages": CHATS["system"], "documents": DOCUMENTS}, True


def special_tokens():
    """The special tokens of the model, as transformers passes them."""
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    return {name: config[name] for name in SPECIAL if config.get(name) is not None}


def jinja(template, chat, begins, special):
    """The text that transformers renders, or the message of its refusal and whether the template raised it."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat["messages"]]
    try:
        [text], _ = render_jinja_template(
            [messages],
            tools=chat.get("tools"),
            documents=chat.get("documents"),
            chat_template=template,
            add_generation_prompt=begins,
            **special | chat.get("chat_template_kwargs", {}),
        )
        return text, None
    except Exception as error:  # Whatever Python raises within a template.
        return None, (str(error), type(error) is TemplateError)


def rendered(larder, template, chat, begins):
    """The text that larder renders, or its error."""
    command = [larder, "tokenize", "-m", MODEL, "--messages", "-", "--chat-template-file", template]
    command += [] if begins else ["--no-generation-prompt"]
    done = subprocess.run(command, input=json.dumps(chat), capture_output=True, text=True)
    return (json.loads(done.stdout)["text"], None) if done.returncode == 0 else (None, done.stderr.strip())


def difference(wanted, refusal, found, error):
    """What differs, in a line; None if nothing does."""
    if wanted is None and found is None:
        message, is_raised = refusal
        return None if not is_raised or message in error else f"raises {message!r}, larder: {error!r}"
    if wanted is None:
        return f"{LENIENT}: {refusal[0]!r}"
    if found is None:
        return f"only larder refuses: {error!r}"
    if wanted == found:
        return None
    at = next((i for i, (a, b) in enumerate(zip(wanted, found)) if a != b), min(len(wanted), len(found)))
    cut = slice(max(0, at - 40), at + 40)
    return f"differs at {at}: {wanted[cut]!r}, larder: {found[cut]!r}"


def compare(larder, path, special):
    """Prints the differences of a template; returns how many chats are equal, differ, and are refused by Python alone."""
    source, differences, equal = path.read_bytes().decode(), {}, 0
    for name, chat, begins in cases():
        wanted, refusal = jinja(source, chat, begins, special)
        what = difference(wanted, refusal, *rendered(larder, path, chat, begins))
        equal += what is None and wanted is not None
        if what:
            differences.setdefault(what, []).append(name)
    for what, names in differences.items():
        print(f"{path.name} [{names[0]}; {len(names)} chats]: {what}", flush=True)
    lenient = sum(len(names) for what, names in differences.items() if what.startswith(LENIENT))
    return equal, sum(map(len, differences.values())) - lenient, lenient


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", default=ROOT / "target/release/larder")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("templates", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    paths = sorted(itertools.chain(*(path.rglob("*.jinja") if path.is_dir() else [path] for path in args.templates)))
    special = special_tokens()
    with ThreadPoolExecutor(args.jobs) as pool:
        counts = list(pool.map(lambda path: compare(args.larder, path, special), paths))
    equal, differ, lenient = map(sum, zip(*counts))
    refused = len(paths) * sum(1 for _ in cases()) - equal - differ - lenient
    print(f"{len(paths)} templates: {equal} texts are equal, {refused} chats refused by both, {lenient} by Python alone; {differ} differ")
    sys.exit(differ > 0 or equal == 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Whole loops of Claude Code, Codex, opencode and aider, as their packages come, against `larder serve`.

    scripts/check/agents.py --work DIR                                a small random model, whose calls of tools are forced
    scripts/check/agents.py --work DIR -m FILE.gguf --short           a real model, of which nothing is forced

Needs Python with venv and pip, Node with npm from 11 on, git and the package registries; DIR keeps 2 GB of packages and what each agent left. Each agent starts
in an empty repository with an empty home, and reaches the server alone: this script passes its requests on, counts them, and refuses those to other hosts.
To requests to the random model it adds `tool_choice`, a seed, and to the schemas of the wanted tools the very arguments, or the very text of an answer; what
the server answers reaches the agent unchanged. Three of the agents then have a helper of theirs look too. The file that was written is compared, and no status
may be 400 or above.
To requests to a real model, such as those of `real_weights.py --keep`, nothing is added, and what it answers does not matter. Prints a row of a Markdown table per agent; exits with 1 if one fails.
"""

import argparse
import collections
import datetime
import http.client
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import signal
import string
import struct
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).parents[2]
NAME = "larder"
PROMPT = "Write the line `the larder is full` into the file note.txt."
FIRST, LAST = "the larder is empty\n", "the larder is full\n"
DONE = "It is written."
HELPER = {"description": "Look", "prompt": "Say that it is full."}


class Agent:
    """An agent: its package, command and environment, options for short prompts, and what it is made to answer, turn by turn: calls of tools, or texts.

    In all of them $URL, $PROJECT, $CONTEXT and $ANSWER stand for the server, the folder of the repository, and the tokens of context and answer."""

    def __init__(self, name, package, command, turns, short=(), environment=None):
        self.name, self.package, self.command, self.turns = name, package, command, turns
        self.short, self.environment = short, environment or {}


AGENTS = (
    Agent("Claude Code", "@anthropic-ai/claude-code", ["claude", "-p", PROMPT, "--permission-mode", "acceptEdits"], [
        ("Write", {"file_path": "$PROJECT/note.txt", "content": FIRST}),
        ("Edit", {"file_path": "$PROJECT/note.txt", "old_string": FIRST.strip(), "new_string": LAST.strip()}),
        ("Agent", HELPER),
    ], ["--tools", "Read,Write,Edit"], {
        "ANTHROPIC_BASE_URL": "$URL", "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$ANSWER",
        "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_AUTOUPDATER": "1",
    }),
    Agent("Codex", "@openai/codex", [
        "codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "-m", NAME, "-c", "model_provider=larder",
        "-c", 'model_providers.larder={name="larder",base_url="$URL/v1",wire_api="responses"}', "-c", "model_context_window=$CONTEXT", "-c", "analytics.enabled=false",
        "-c", "check_for_update_on_startup=false", PROMPT,
    ], [
        ("exec_command", {"cmd": f"echo '{LAST.strip()}' > note.txt"}),
        ("spawn_agent", {"message": HELPER["prompt"]}),
    ], ["-c", "web_search=disabled", "--disable", "multi_agent", "--disable", "goals"]),
    Agent("opencode", "opencode-ai", ["opencode", "run", PROMPT], [
        ("write", {"filePath": "$PROJECT/note.txt", "content": FIRST}),
        ("edit", {"filePath": "$PROJECT/note.txt", "oldString": FIRST.strip(), "newString": LAST.strip()}),
        ("task", HELPER | {"subagent_type": "general"}),
    ], environment={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_CONFIG_CONTENT": """{"model": "larder/larder", "provider": {"larder": {
            "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$URL/v1"}, "models": {"larder": {"limit": {"context": $CONTEXT, "output": $ANSWER}}}
        }}}""",
    }),
    Agent("aider", "aider-chat", [
        "aider", "--model", f"openai/{NAME}", "--openai-api-base", "$URL/v1", "--openai-api-key", "none", "--yes-always",
        "--analytics-disable", "--no-check-update", "--no-show-model-warnings", "--message", PROMPT,
    ], [f"note.txt\n```\n{LAST}```\n"]),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder of the packages, models and homes")
    parser.add_argument("--larder", default=ROOT / "target/release/larder")
    parser.add_argument("-m", "--model", type=pathlib.Path, help="a real model, of which nothing is forced")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--short", action="store_true", help="fewer tools and at most 512 tokens of an answer, by the agents' own options")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of each agent")
    parser.add_argument("agents", nargs="*", help="names of agents (default: all)")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    agents = [agent for agent in AGENTS if not args.agents or agent.name in args.agents]
    programs = [installed(agent, args.work) for agent in agents]
    print("| agent | version | result | requests | prompt tokens, cached | without effect | date |\n|---|---|---|---|---|---|---|")
    sys.exit(not all([check(agent, program, args) for agent, program in zip(agents, programs)]))


def installed(agent, work):
    """Installs the agent unless it is there; returns its program."""
    folder = work / "packages" / agent.name.replace(" ", "-")
    is_python = agent.package == "aider-chat"
    program = folder / ("bin" if is_python else "node_modules/.bin") / agent.command[0]
    if not program.exists() and is_python:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "-q", agent.package], check=True)
    elif not program.exists():
        # Some packages put their program in place by a script.
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", f"--allow-scripts={agent.package}", "--prefix", folder, agent.package], check=True)
    return program


def check(agent, program, args):
    """Runs an agent against a server of its own, and prints its row; returns whether all is well."""
    folder = args.work / "runs" / agent.name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "home").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", folder / "project"], check=True)
    words = {"PROJECT": str(folder / "project"), "CONTEXT": str(args.context), "ANSWER": str(answer_tokens(args))}
    turns = None if args.model else [filled(turn, words) for turn in agent.turns]
    with Server(args, folder) as server, Proxy(server.port, turns) as proxy:
        words["URL"] = proxy.url
        version = run(agent, [program, "--version"], folder, words, 60)[0]
        command = [program, *filled(agent.command[1:], words), *(agent.short if args.short else ())]
        started = time.monotonic()
        ended = run(agent, command, folder, words, args.seconds)[1]
        seconds = time.monotonic() - started
    faults = list(proxy.faults)
    if not ended:
        faults.append(f"stopped after {args.seconds:.0f} s")
    if not proxy.answers:
        faults.append("nothing was asked")
    note = folder / "project/note.txt"
    if turns is not None and (not note.exists() or note.read_text() != LAST):
        faults.append("note.txt is not as wanted")
    result = "; ".join(faults) or ("note.txt written" if turns is not None else "all answered") + f" in {seconds:.0f} s"
    counts = collections.Counter(proxy.answers)
    requests = ", ".join(f"{count} × `{path}` {status}" for (path, status), count in counts.items())
    version = re.search(r"\d+(\.\d+)+", version)[0]
    ignored = ", ".join(f"`{field}`" for field in server.ignored())
    print(f"| {agent.name} | {version} | {result} | {requests} | {server.tokens()} | {ignored} | {datetime.date.today()} |", flush=True)
    return not faults


def answer_tokens(args):
    return 512 if args.short else 8192


def filled(value, words):
    """The value with the words in place of their $NAMES, in all of its texts."""
    if isinstance(value, str):
        return string.Template(value).safe_substitute(words)
    if isinstance(value, dict):
        return {key: filled(item, words) for key, item in value.items()}
    return type(value)(filled(item, words) for item in value)


def run(agent, command, folder, words, seconds):
    """Runs a command in the agent's repository; returns what it printed, and whether it ended in time."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TERM": "dumb", "NO_PROXY": "127.0.0.1",
                   "HTTP_PROXY": words["URL"], "HTTPS_PROXY": words["URL"]}
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(command, cwd=folder / "project", env=environment | filled(agent.environment, words), stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read(), process.returncode != -signal.SIGKILL


class Server:
    """A `larder serve` of the wanted model; its log stays in the agent's folder."""

    def __init__(self, args, folder):
        model = widened(args.model, args.work, args.context) if args.model else random_model(args.work / "random", args.context)
        self.log = folder / "server.log"
        command = [args.larder, "serve", "-m", model, "--alias", NAME, "--port", "0", "--context", str(args.context),
                   "--max-tokens", str(answer_tokens(args)), "--log-level", "info"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.port = self.wait()

    def wait(self):
        while self.process.poll() is None:
            if found := re.search(r"on http://127.0.0.1:(\d+)", self.log.read_text()):
                return int(found[1])
            time.sleep(0.1)
        sys.exit(f"the server did not start:\n{self.log.read_text()}")

    def ignored(self):
        """The fields and types of tools that the log says have no effect."""
        return sorted(set(re.findall(r"'([^']+)' (?:is not known|are not offered)", self.log.read_text())))

    def tokens(self):
        """The tokens of all prompts, and how many of them came from the prefix cache."""
        text = self.log.read_text()
        return ", ".join(f"{sum(map(int, re.findall(f'{name}_tokens=([0-9]+)', text))):,}" for name in ("prompt", "cached"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def random_model(folder, context):
    """Makes a tiny model with tools and random weights, whose vocabulary is the demo model's, so that prompts have few tokens."""
    golden, demo = ROOT / "tests/golden/olmoe", ROOT / "models/demo"
    folder.mkdir(exist_ok=True)
    config = json.loads((golden / "config.json").read_text())
    rows, width = len(json.loads((demo / "tokenizer.json").read_text())["model"]["vocab"]), config["hidden_size"]
    config |= {"vocab_size": rows, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    for file in (demo / "tokenizer.json", demo / "tokenizer_config.json", ROOT / "tests/templates/glm.jinja"):
        shutil.copy(file, folder / file.name.replace("glm", "chat_template"))
    with open(golden / "model.safetensors", "rb") as file:
        header, data = json.loads(file.read(struct.unpack("<Q", file.read(8))[0])), file.read()
    generator, weights = random.Random(1), b""
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        values = data[start:end]
        if name == "model.embed_tokens.weight":
            # A bfloat16 is the upper half of a float32.
            values = b"".join(struct.pack("<f", generator.gauss(0, 0.5))[2:] for _ in range(rows * width))
            tensor["shape"][0] = rows
        tensor["data_offsets"] = [len(weights), len(weights) + len(values)]
        weights += values
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + weights)
    return folder


def widened(model, folder, context):
    """A copy of a GGUF file whose metadata allow this context, so that agents' prompts fit into it; another model as it is."""
    if model.suffix != ".gguf":
        return model
    data = bytearray(model.read_bytes())
    # The key is followed by the number of its type, a 32-bit integer.
    struct.pack_into("<I", data, re.search(rb"\.context_length\x04\0\0\0", data).end(), context)
    (folder / "wide.gguf").write_bytes(data)
    return folder / "wide.gguf"


class Proxy:
    """Passes requests on to the server at `port`, and makes those that `turns` has an answer for ask for it."""

    def __init__(self, port, turns):
        self.port, self.turns = port, turns
        self.calls = dict(turn for turn in turns or () if not isinstance(turn, str))
        self.answers, self.faults, self.lock = [], [], threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def steered(self, path, body):
        """The body with what makes the answer the next turn."""
        if b"unsupported call" in body:
            self.faults.append("a call was not understood")
        if self.turns is None or path not in APIS:
            return body
        body = json.loads(body)
        # All calls are in all requests, so that those of a conversation begin alike.
        body |= {"tools": [exactly(tool, self.calls) for tool in body["tools"]]} if body.get("tools") else {}
        more = APIS[path](self.next_turn({name for name, _ in names_of(body.get("tools") or ())}), body)
        return json.dumps(body | {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}} | more).encode()

    def next_turn(self, offered):
        """The next turn, unless it calls a tool that is not offered, as where a title is asked for."""
        with self.lock:
            if not self.turns or not (isinstance(self.turns[0], str) or self.turns[0][0] in offered):
                return DONE
            return self.turns.pop(0)

    def note(self, path, status, text):
        with self.lock:
            self.answers.append((path, status))
            if status >= 400 or re.search(rb'"type": ?"(error|response\.failed)"|^data: \{"error"', text, re.M):
                self.faults.append(f"{path} {status}: {text[-300:].decode(errors='replace').strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()


class Handler(http.server.BaseHTTPRequestHandler):
    proxy = None

    def do_POST(self):
        if not self.path.startswith("/"):
            return self.do_CONNECT()
        path = self.path.split("?")[0]
        body = self.proxy.steered(path, self.rfile.read(int(self.headers.get("content-length") or 0)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.port)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length", "connection")}
        upstream.request(self.command, self.path, body, kept)
        answer, text = upstream.getresponse(), b""
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.end_headers()
        try:
            while piece := answer.read1():
                text += piece
                self.wfile.write(piece)
        except ConnectionError:
            # An agent that ends leaves what its helpers asked for.
            pass
        self.proxy.note(path, answer.status, text)

    do_GET = do_HEAD = do_POST

    def do_CONNECT(self):
        self.send_error(403, "only the server may be asked")

    def log_message(self, *_):
        pass


def names_of(tools, space=None):
    """Names of tools, each with its namespace."""
    for tool in tools:
        yield tool.get("name") or tool.get("function", {}).get("name"), space
        yield from names_of(tool.get("tools", ()), tool.get("name"))


def exactly(tool, calls):
    """The tool with the very arguments in its schema, if it has a call."""
    if "function" in tool:
        return tool | {"function": exactly(tool["function"], calls)}
    if "tools" in tool:
        return tool | {"tools": [exactly(inner, calls) for inner in tool["tools"]]}
    if tool.get("name") not in calls:
        return tool
    constants = {name: {"const": value} for name, value in calls[tool["name"]].items()}
    schema = {"type": "object", "properties": constants, "required": list(constants), "additionalProperties": False}
    return tool | {"input_schema" if "input_schema" in tool else "parameters": schema}


def chat(turn, _):
    if isinstance(turn, str):
        return {"tool_choice": "none", "grammar": f"start: {json.dumps(turn)}"}
    return {"tool_choice": {"type": "function", "function": {"name": turn[0]}}, "parallel_tool_calls": False}


def responses(turn, body):
    if isinstance(turn, str):
        return {"tool_choice": "none", "text": {"format": {"type": "json_schema", "name": "done", "schema": {"const": turn}}}}
    choice = {"type": "function", "name": turn[0], "namespace": dict(names_of(body["tools"]))[turn[0]]}
    return {"tool_choice": choice, "parallel_tool_calls": False}


def messages(turn, _):
    if isinstance(turn, str):
        return {"tool_choice": {"type": "none"}, "output_config": {"format": {"type": "json_schema", "schema": {"const": turn}}}}
    return {"tool_choice": {"type": "tool", "name": turn[0], "disable_parallel_tool_use": True}}


APIS = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


if __name__ == "__main__":
    main()

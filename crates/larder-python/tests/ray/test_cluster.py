"""larder.ray on a local cluster of three nodes, of which one is killed at work."""

import csv
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import larder
import larder.ray
import pandas
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

PORT = int(os.environ.get("LARDER_RAY_PORT", "18421"))
SUBJECTS = ["old man", "king", "sea", "letter", "horse", "winter"]
PROMPTS = [f"Chapter {at}. The {SUBJECTS[at % len(SUBJECTS)]} was" for at in range(300)]
SAMPLING = dict(max_tokens=16, temperature=0.8, seed=11)
LOAD = dict(cache="8x", threads=1, context=256)


@pytest.fixture
def cluster():
    """Three nodes, the first of which is the head; it is not killed."""
    size = dict(num_cpus=2, object_store_memory=100 << 20)
    nodes = Cluster(initialize_head=True, head_node_args=dict(size, include_dashboard=False))
    workers = [nodes.add_node(**size) for _ in range(2)]
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 3
    yield nodes, workers
    ray.shutdown()
    nodes.shutdown()


def processes_of(node, title):
    """Worker processes of a node whose title has some text."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as command:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
                if parent == raylet and title in command.read():
                    found.append(int(entry))
        except OSError:
            continue
    return found


def busy_worker(workers, title, seconds=60):
    """A node that may be killed and has a process of this title."""
    end = time.time() + seconds
    while time.time() < end:
        for node in workers:
            if processes_of(node, title):
                return node
        time.sleep(0.2)
    raise AssertionError(f"no node has a process {title}")


def test_answers_survive_the_loss_of_a_node(cluster):
    nodes, workers = cluster
    with larder.load(larder.demo(), **LOAD) as model:
        alone = [model.generate(prompt, **SAMPLING).answer().text for prompt in PROMPTS]
    assert len(set(alone)) > 200
    dataset = ray.data.from_items([{"id": at, "prompt": prompt} for at, prompt in enumerate(PROMPTS)], override_num_blocks=60)
    spread = dict(scheduling_strategy="SPREAD")
    answered = larder.ray.generate(
        dataset, larder.demo(), load=LOAD, concurrency=3, batch_size=5, ray_remote_args=spread, **SAMPLING
    )
    found, killed = {}, None
    for batch in answered.iter_batches(batch_size=5):
        found.update(zip(batch["id"].tolist(), batch["text"].tolist()))
        if killed is None and len(found) >= 60:
            killed = busy_worker(workers, "Generator")
            at_kill = len(found)
            nodes.remove_node(killed, allow_graceful=False)
    assert killed is not None and at_kill < 240
    print(f"killed a node after {at_kill} answers")
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    assert sorted(found) == list(range(300))
    assert [found[at] for at in range(300)] == alone


def test_evaluation_is_that_of_one_machine(cluster):
    texts = [f"The old man looked at the {word}, and then he went out." for word in SUBJECTS] + ["", "a"]
    stage = larder.ray.Evaluator(larder.demo(), LOAD)
    frame = larder.ray.evaluate(ray.data.from_items([{"text": text} for text in texts]), larder.demo(), load=LOAD, concurrency=2).to_pandas()
    alone = stage({"text": pandas.Series(texts, dtype=object).to_numpy()})
    expected = {text: (tokens, nll) for text, tokens, nll in zip(texts, alone["tokens"], alone["nll"])}
    assert {text: (tokens, nll) for text, tokens, nll in zip(frame["text"], frame["tokens"], frame["nll"])} == expected
    assert (frame["perplexity"][frame["tokens"] > 4] > 1).all()


def test_sweeps_are_those_of_one_machine(cluster, tmp_path):
    nodes, workers = cluster
    text = tmp_path / "text.txt"
    text.write_text("The old man looked at the door, and then he went out into the rain. " * 12)
    flags = {"sizes": "4,8", "lambda": "0.1,0.3,0.6", "max_rank": "8", "tokens": 128, "chunk": 64, "measure_every": 4, "threads": 1}
    alone = larder.lab.eval_sweep(larder.demo(), text, **flags)
    single = tmp_path / "single.csv"
    larder.lab.command(["eval", "sweep", str(text), "--model", larder.demo(), *larder.lab.flags_of(flags), "--csv", str(single)])
    spread = tmp_path / "spread.csv"
    killer = threading.Timer(4, lambda: nodes.remove_node(workers[0], allow_graceful=False))
    killer.start()
    table = larder.ray.sweep("eval", text, model=larder.demo(), parts=5, csv_file=spread, **flags)
    killer.join()
    timed = ["tokens_per_second"]
    pandas.testing.assert_frame_equal(table.drop(columns=timed), alone.drop(columns=timed))
    assert without_rates(spread) == without_rates(single) and len(table) == 12

    traces = []
    with larder.load(larder.demo(), **LOAD) as model:
        for at, prompt in enumerate(PROMPTS[:3]):
            traces.append(str(tmp_path / f"{at}.trace"))
            model.generate(prompt, trace=True, **SAMPLING).trace.write(traces[-1])
    single, spread = tmp_path / "lab.csv", tmp_path / "lab-spread.csv"
    larder.lab.command(["lab", "sweep", *traces, "--csv", str(single)])
    larder.ray.sweep("lab", traces, csv_file=spread)
    assert spread.read_text() == single.read_text()
    with pytest.raises(larder.Error, match="of kind eval or lab"):
        larder.ray.sweep("other", traces)


def without_rates(path):
    """The rows of a CSV without the tokens per second, which are measured."""
    with open(path) as file:
        rows = list(csv.reader(file))
    column = rows[0].index("tokens_per_second")
    return [row[:column] + row[column + 1 :] for row in rows]


def request(path, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    made = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"}, method=method)
    return urllib.request.urlopen(made, timeout=60)


def answered(path, body=None, seconds=60):
    """The answer, asked for again while a replica is being replaced."""
    end = time.time() + seconds
    while True:
        try:
            return json.load(request(path, body))
        except OSError:
            if time.time() > end:
                raise
            time.sleep(0.5)


def test_a_server_survives_the_loss_of_a_node(cluster):
    nodes, workers = cluster
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    flags = dict(cache="8x", context=256, threads=1, parallel=2)
    serve.run(larder.ray.app(larder.demo(), min_replicas=3, max_replicas=3, **flags))
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 12, "temperature": 0}
    completion = {"model": "demo", "prompt": "The old man", "max_tokens": 12, "temperature": 0}

    def routes():
        models = answered("/v1/models")["data"]
        text = answered("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        events = []
        with request("/v1/chat/completions", {**chat, "stream": True}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for line in stream:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
        streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        assert streamed == text and len(events) > 6
        completed = answered("/v1/completions", completion)["choices"][0]["text"]
        embedding = answered("/v1/embeddings", {"model": "demo", "input": "a king"})["data"][0]["embedding"]
        return [model["id"] for model in models], text, completed, embedding

    before = routes()
    assert before[0]
    with larder.load(larder.demo(), cache="8x", context=256) as model:
        assert before[2] == model.generate("The old man", max_tokens=12, temperature=0).answer().text
    with pytest.raises(urllib.error.HTTPError) as refused:
        request("/v1/chat/completions", {"messages": 3})
    assert refused.value.code == 400 and "error" in json.load(refused.value)
    node = busy_worker(workers, "ServeReplica")
    servers = [pid for worker in processes_of(node, "ServeReplica") for pid in children(worker)]
    assert servers
    nodes.remove_node(node, allow_graceful=False)
    after = [routes() for _ in range(6)]
    assert all(found == before for found in after)
    end = time.time() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in servers) and time.time() < end:
        time.sleep(0.2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in servers), "a server outlived its node"
    serve.shutdown()


def children(parent):
    """Processes that a process has started."""
    with open(f"/proc/{parent}/task/{parent}/children") as listed:
        direct = listed.read().split()
    if direct:
        return [int(pid) for pid in direct]
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def test_an_application_that_cannot_start_says_why():
    code = "from larder.ray._serve import ServerProcess; import larder\ntry: ServerProcess('/nowhere/x.gguf', {})\nexcept larder.Error as e: print(e)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "the server has not started" in said and "/nowhere/x.gguf" in said

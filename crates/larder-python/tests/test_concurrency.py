"""Threads, event loops, processes, Ctrl-C and memory."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import larder
import pytest
from conftest import PROMPT

PROMPTS = [PROMPT, "It was the best of times", "My dear sir,", "Upon the hill there stood"]


def greedy(model, prompt, tokens=24):
    return model.generate(prompt, temperature=0, max_tokens=tokens).answer().text


def test_threads_share_a_model(model):
    alone = {prompt: greedy(model, prompt) for prompt in PROMPTS}
    found = []

    def work():
        for prompt in PROMPTS:
            found.append((prompt, "".join(model.generate(prompt, temperature=0, max_tokens=24))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 16 and all(alone[prompt] == text for prompt, text in found)


def test_streams_of_one_thread_do_not_block_each_other(model):
    streams = [model.generate(prompt, temperature=0, max_tokens=12) for prompt in PROMPTS]
    assert ["".join(stream) for stream in reversed(streams)] == [greedy(model, prompt, 12) for prompt in reversed(PROMPTS)]


def test_computing_releases_the_interpreter(model):
    tokens = [7] * 400
    model.logits(tokens)
    begin = time.perf_counter()
    model.logits(tokens)
    alone = time.perf_counter() - begin
    done, counts = threading.Event(), [0]

    def count():
        while not done.is_set():
            counts[0] += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    [model.logits(tokens) for _ in range(5)]
    done.set()
    counter.join()
    # With the lock held it would have counted once per call or so.
    assert counts[0] > min(50, alone * 5 * 1000 / 10), (counts, alone)


def test_event_loops(model):
    async def one(prompt):
        return "".join([piece async for piece in model.agenerate(prompt, temperature=0, max_tokens=24)])

    async def all_at_once():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.ensure_future(tick())
        texts = await asyncio.gather(*map(one, PROMPTS))
        answer = await model.achat([{"role": "user", "content": "A king"}], temperature=0, max_tokens=8).answer()
        ticking.cancel()
        return texts, answer, ticks

    texts, answer, ticks = asyncio.run(all_at_once())
    assert texts == [greedy(model, prompt) for prompt in PROMPTS]
    assert len(answer.tokens) == 8 and ticks > 10


def test_a_cancelled_task_ends_its_generation(model):
    async def begin_and_cancel():
        async def read():
            async for _ in model.agenerate(PROMPT, max_tokens=450, ignore_eos=True):
                pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begin = time.perf_counter()
    asyncio.run(begin_and_cancel())
    assert greedy(model, PROMPT, 2) and time.perf_counter() - begin < 5


INTERRUPTED = """
import sys, larder
model = larder.load(larder.demo(), cache="8x", context=512)
print("ready", flush=True)
try:
    while True:
        {work}
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("".join(model.generate("The old man", temperature=0, max_tokens=4)), flush=True)
"""


@pytest.mark.parametrize(
    "work",
    [
        "list(model.generate('The old man', max_tokens=400, ignore_eos=True))",
        "model.generate('The old man', max_tokens=400, ignore_eos=True).answer()",
        "model.logits([7] * 500)",
        "model.embed(['a long text ' * 40])",
    ],
)
def test_ctrl_c_interrupts(work):
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED.format(work=work)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    begin = time.perf_counter()
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert time.perf_counter() - begin < 2
    # Not by communicate: with a time limit it loses what the line before was read together with.
    assert child.stdout.readline().strip()
    assert child.wait(timeout=20) == 0


def test_a_forked_process_is_refused(model):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model.generate(PROMPT)
        except larder.Error as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"another process" in os.read(reading, 1000)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell the memory of a process")
def test_loading_and_freeing_leaks_nothing(demo):
    cycles = int(os.environ.get("LARDER_CYCLES", "60"))

    def cycle():
        model = larder.load(demo, cache="4x", context=256)
        stream = model.generate("A", temperature=0, max_tokens=2, trace=True)
        assert stream.answer().tokens and stream.trace.ids.shape[0] > 0
        model.logits([1, 2])
        next(model.generate("B", max_tokens=200))

    cycle()
    time.sleep(0.5)
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    sizes = []
    for _ in range(cycles):
        cycle()
        gc.collect()
        sizes.append(resident_bytes())
    third = len(sizes) // 3
    growth = max(sizes[-third:]) - max(sizes[third : 2 * third])
    print(f"{cycles} cycles: {sizes[0] / 1e6:.1f} MB after the first, at most {max(sizes[third : 2 * third]) / 1e6:.1f} in the second third, {max(sizes[-third:]) / 1e6:.1f} in the last")
    # Less than what one model takes; pages that the allocator keeps do not grow with the cycles.
    assert growth < 15_000_000, sizes
    end = time.time() + 10
    while len(os.listdir("/proc/self/task")) > tasks and time.time() < end:
        time.sleep(0.1)
    assert len(os.listdir("/proc/self/task")) <= tasks and len(os.listdir("/proc/self/fd")) <= files + 2

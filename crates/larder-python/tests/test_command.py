"""The `larder` command that the package installs."""

import signal
import subprocess
import sys
import time

import larder
import pytest
from conftest import PROMPT, command_of_package


def run(*arguments, **options):
    return subprocess.run([command_of_package(), *map(str, arguments)], capture_output=True, text=True, **options)


def test_versions_agree():
    assert run("-V").stdout.split() == ["larder", larder.__version__]
    module = subprocess.run([sys.executable, "-m", "larder", "-V"], capture_output=True, text=True)
    assert module.stdout.split() == ["larder", larder.__version__]


def test_text_is_that_of_a_build(command, demo):
    flags = ["run", "-m", demo, "-p", PROMPT, "--temperature", 0, "--max-tokens", 20]
    assert run(*flags).stdout == command(*flags).stdout


def test_a_chat_with_the_demo_model(tmp_path):
    chat = run("chat", "--temperature", "0", "--max-tokens", "12", cwd=tmp_path, input="Once upon a time\n")
    assert chat.returncode == 0 and len(chat.stdout.split()) > 3, chat


def test_exit_codes_and_errors(tmp_path):
    wrong = run("run", "--nonsense")
    assert wrong.returncode == 2 and "--nonsense" in wrong.stderr
    missing = run("run", "-m", tmp_path / "nothing.gguf", "-p", "x")
    assert missing.returncode == 1 and missing.stderr.startswith("error: ") and missing.stderr.count("\n") == 1
    with pytest.raises(larder.Error) as raised:
        larder.load(tmp_path / "nothing.gguf")
    assert missing.stderr == f"error: {raised.value}\n"


def test_ctrl_c_ends_a_run(demo):
    flags = ["-m", demo, "-p", PROMPT, "--max-tokens", "100000", "--context", "512", "--ignore-eos", "--seed", "1"]
    child = subprocess.Popen([command_of_package(), "run", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    assert child.wait(10) in (-signal.SIGINT, 0)


def test_ctrl_c_stops_an_answer_and_then_the_chat(demo):
    # Prompts on a pipe end the chat with the input, so it stays open.
    flags = ["-m", demo, "--max-tokens", "300", "--cache", "4x"]
    child = subprocess.Popen([command_of_package(), "chat", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child.stdin.write(b"Once upon a time\n")
    child.stdin.flush()
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert child.poll() is None, "the first Ctrl-C ended the chat"
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 130
    child.stdin.close()


def test_a_closed_pipe_ends_it_quietly(demo):
    line = f"{command_of_package()} run -m {demo} -p x --max-tokens 200 --ignore-eos | head -c 5"
    run_to_head = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert len(run_to_head.stdout) == 5 and "Traceback" not in run_to_head.stderr and "panic" not in run_to_head.stderr
    head = subprocess.run(["sh", "-c", f"{command_of_package()} --help | head -1"], capture_output=True, text=True)
    assert head.returncode == 0 and "Traceback" not in head.stderr

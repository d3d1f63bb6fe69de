"""The demo model, the command, and traces for the tests."""

import os
import shutil
import subprocess
import sys

import larder
import pytest

PROMPT = "The old man looked at the door, and"


def command_of_package():
    """The `larder` command that the package has installed."""
    return os.path.join(os.path.dirname(sys.executable), "larder")


@pytest.fixture(scope="session")
def command():
    """Runs the `larder` of $LARDER, of a build beside the package or of the package, in a folder without models."""
    program = os.environ.get("LARDER") or command_of_package()

    def run(*arguments, check=True, **options):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, **options)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def demo():
    """The demo model of the package."""
    return larder.demo()


@pytest.fixture(scope="session")
def model(demo):
    """The demo model with a quarter of its experts in memory."""
    with larder.load(demo, cache="8x") as loaded:
        yield loaded


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory, command, demo):
    """A trace of four sequences that the command recorded, with router logits."""
    folder = tmp_path_factory.mktemp("traces")
    files = []
    for at, prompt in enumerate([PROMPT, "It was the best of times", "My dear sir,", "Upon the hill there stood"]):
        files.append(str(folder / f"{at}.trace"))
        flags = ["--temperature", 0, "--cache", "8x", "--max-tokens", 24]
        command("run", "-m", demo, "-p", prompt, *flags, "--trace", files[-1], "--trace-logits")
    return files


def pytest_configure(config):
    """Keeps the folders of models and settings of the user out of the tests."""
    os.environ.update(LARDER_HOT_SET="off", XDG_CONFIG_HOME=config.cache.mkdir("config").as_posix())
    assert shutil.which(command_of_package()), "the package is not installed beside this Python"

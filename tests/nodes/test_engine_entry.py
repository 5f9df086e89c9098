import os
import subprocess
import sys
from pathlib import Path

import pytest

LOST = "raise ImportError('No module named vllm')"
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


def run(packages: Path, **modules: str) -> subprocess.CompletedProcess[str]:
    """The entry, in an environment where these packages hide the installed ones."""
    for name, source in modules.items():
        package, _, module = name.partition("__")
        (packages / package).mkdir(exist_ok=True)
        (packages / package / "__init__.py").touch()
        (packages / package / f"{module or '__init__'}.py").write_text(source)
    command = [sys.executable, "-m", "kvflow.nodes.engine_entry", "--model", "none"]
    env = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        (
            {"vllm": LOST},
            "vLLM is not installed; kvflow's connector needs version 0.32.x (kvflow[cpu] or kvflow[gpu]).",
        ),
        ({"vllm__version": "__version__ = '0.99.0'"}, "kvflow's connector needs vLLM 0.32.x, and 0.99.0 is installed."),
        (
            {"torchvision": BROKEN},
            "The installed torchvision does not work with the installed torch (operator torchvision::nms does not "
            "exist); remove it (pip uninstall torchvision), text models do not need it.",
        ),
    ],
)
def test_an_environment_that_cannot_work_is_one_sentence(
    tmp_path: Path, modules: dict[str, str], sentence: str
) -> None:
    ended = run(tmp_path, **modules)
    assert (ended.returncode, ended.stderr, ended.stdout) == (1, sentence + "\n", "")


def test_a_torchvision_that_works_is_no_obstacle(tmp_path: Path) -> None:
    ended = run(tmp_path, torchvision="", vllm=LOST)
    assert ended.stderr.startswith("vLLM is not installed")


def test_what_the_api_server_writes_is_sent_at_once() -> None:
    """In a process of its own, because it changes vLLM's module."""
    program = """
import socket
from kvflow.nodes.engine_entry import send_at_once
from vllm.entrypoints.launchers import launcher
send_at_once()
with launcher.create_server_socket(("127.0.0.1", 0), reuse_port=False) as listener:
    listener.listen()
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
        print(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.splitlines()[-1:] == ["1"], ended.stderr[-2000:]

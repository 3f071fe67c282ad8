"""Real vLLM servers on CPU for the tests, each in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorist.models.tiny import tiny_model, train_tokenizer
from tests.unit.rollouts.rollout_models import build

FLAGS = (
    "--dtype float32 --logprobs-mode processed_logprobs --generation-config vllm --no-enable-chunked-prefill "
    "--kv-cache-memory-bytes 33554432 --max-num-seqs 64 --enforce-eager"
).split()
OVER_TCP = Path(__file__).parent / "over_tcp"
"""A plugin of vLLM's, with which its weight transfer over NCCL runs without GPUs."""
NOWHERE = "/proc/self/cwd"
"""Each process's own folder: what stands before a path that only a process in / finds."""
TEXTS = [
    f"{name} has {n} bags of {k}." for name in ("Tom", "Mia", "Ben") for n in range(40) for k in range(9)
]


@dataclass
class Server:
    """A running server; ``log`` is what it says."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @classmethod
    def start(
        cls,
        model: Path,
        *flags: str,
        port: int | None = None,
        dev_mode: bool = True,
        unseen: bool = False,
        over_tcp: bool = False,
    ) -> Server:
        """Start one and wait until it answers; ``unseen``: it gets a path that leads nowhere outside the folder /."""
        port = port or free_port()
        log = model.parent / f"server-{port}-{time.monotonic_ns()}.log"
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        if over_tcp:
            flags = (*flags, "--weight-transfer-config", '{"backend": "nccl"}')
            environment["PYTHONPATH"] = os.pathsep.join([str(OVER_TCP), environment.get("PYTHONPATH", "")])
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            f"{NOWHERE if unseen else ''}{model}",
        ]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *address, *FLAGS, *flags],
                env=environment,
                cwd="/",
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = cls(process, f"http://127.0.0.1:{port}", log)
        server.wait()
        return server

    def wait(self) -> None:
        """Wait until it answers."""
        until = time.monotonic() + 240
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise AssertionError(self.log.read_text()[-4000:])
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (OSError, urllib.error.HTTPError):
            return False

    def kill(self) -> None:
        """End the server and its engine at once."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def syncs(self) -> int:
        """How often it was given weights."""
        return self.log.read_text().count("POST /collective_rpc HTTP/1.1")

    @property
    def asked(self) -> int:
        """How often it was asked for completions."""
        return self.log.read_text().count("POST /v1/completions HTTP/1.1")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def make_folders(folder: Path) -> None:
    """Write two models of one shape: ``varied`` with varied greedy output, ``random`` for learning."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)
    learner = tiny_model(tokenizer, hidden_size=64, heads=2, kv_heads=1, layers=2)
    for name, model in {"random": learner, "varied": like(learner.config)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def like(config: Any, **changes: Any) -> Any:
    """Return a model of this shape, with ``changes``, whose greedy output is varied."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings tie_word_embeddings"
    ).split()
    return build("qwen3", **{**{name: getattr(config, name) for name in names}, **changes})

"""A served model answers as it does in this process: a real server, the real client."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import string
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.runs.pipeline import run_recipe
from tests.conftest import Cli
from tests.warm import PYTHON

QUESTIONS = [
    "Mia has 12 pens. Mia loses 5. How many pens does Mia have now?",
    "Tom has 4 kites. Tom buys 3 more.",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run; enough SFT that its answers are more than noise."""
    folder = tmp_path_factory.mktemp("serve")
    run_recipe(
        load_recipe(
            "smoke-cpu",
            [
                f"output_dir={folder}",
                "run_name=r",
                "threads=1",
                "sft.max_steps=60",
                "sft.save_steps=60",
                "grpo.enabled=false",
                "eval.enabled=false",
            ],
        ).recipe
    )
    own = folder / "r" / "sft" / "final" / "generation_config.json"
    own.write_text(
        json.dumps({**json.loads(own.read_text()), "top_k": 1, "repetition_penalty": 3.0})
    )  # which no answer here sees
    return folder / "r"


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """The address of a server with that model, and what it says."""
    with serving(run) as it:
        yield it


@pytest.fixture
def url(server: tuple[str, Callable[[], str]]) -> str:
    return server[0]


@contextlib.contextmanager
def serving(run: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Start a server; give its address, and what reads what it said on standard error."""
    pytest.importorskip("fastapi", reason="the server needs: pip install 'transformers[serving]'")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "algorist", "serve", str(run), "--engine", "transformers", "--port", str(port)]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(
        [*command, "--device", "cpu"],
        stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        for _ in range(240):
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://localhost:{port}/health"):
                break
            time.sleep(0.5)
        yield f"http://localhost:{port}", lambda: (log.seek(0), log.read())[1]  # type: ignore[return-value]
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def test_greedy_answers_are_the_same(cli: Cli, run: Path, url: str) -> None:
    here = cli("solve", *QUESTIONS, "--model", str(run), "--json")
    there = cli("solve", *QUESTIONS, "--model", str(run), "--json", "--endpoint", url)
    by_chat = cli(
        "solve", *QUESTIONS, "--json", "--endpoint", url, "--max-new-tokens", "24", "--served-model", str(run / "sft" / "final")
    )  # fmt: skip
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout and len(json.loads(there.stdout)["answers"]) == 2
    assert by_chat.returncode == 0 and "completion" in json.loads(by_chat.stdout)["answers"][0]


def test_only_the_request_says_how_to_sample(cli: Cli, run: Path, url: str) -> None:
    """transformers' server by itself answers greedily whatever the temperature, and lists the models of the hub's cache."""

    def texts(*more: str) -> list[str]:
        done = cli("solve", *QUESTIONS[:1] * 3, "--json", "--endpoint", url, "--max-new-tokens", "24", *more)
        assert done.returncode == 0, done.stderr
        return [answer["completion"] for answer in json.loads(done.stdout)["answers"]]

    assert len(set(texts("--temperature", "2"))) == 3
    assert len(set(texts())) == 1


def test_chat_requests_are_taken_as_openai_takes_them(run: Path, url: str) -> None:
    """transformers' server by itself leaves the stop in the text, gives one choice for three, and answers 500 without messages."""

    def post(**more: object) -> tuple[int, str]:
        body = {"model": str(run / "sft" / "final"), "max_tokens": 20, "temperature": 0, **more}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    messages = [{"role": "user", "content": QUESTIONS[0]}]
    status, whole = post(messages=messages)
    stop = whole[1:3]
    assert (
        status == 200
        and stop
        and post(messages=messages, stop=[stop, "§"]) == (200, whole.partition(stop)[0])
    )
    status, said = post()
    assert status == 400 and "messages is missing" in said
    status, said = post(messages=messages, n=3)
    assert status == 400 and "send the request 3 times" in said


def test_a_reply_is_what_the_model_wrote_to_the_end_that_it_was_trained_with(
    cli: Cli, tmp_path: Path
) -> None:
    """transformers' server parses replies by the kind of model (with a raw prompt it answered with the prompt), and knows no stops."""
    stops = ["<", *string.ascii_letters, *string.digits]  # the first token of any reply
    settings = [
        "prompt.format=r1_zero",
        f"eval.stop_strings={json.dumps(stops)}",
        "sft.max_steps=2",
        "sft.max_length=2048",
    ]
    settings += [
        f"output_dir={tmp_path}",
        "run_name=r",
        "threads=1",
        "grpo.enabled=false",
        "eval.enabled=false",
    ]
    run_recipe(load_recipe("smoke-cpu", settings).recipe)
    with serving(tmp_path / "r") as (url, _):
        body = {"model": str(tmp_path / "r/sft/final"), "max_tokens": 20, "temperature": 0}
        body["messages"] = [{"role": "user", "content": QUESTIONS[0]}]
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            there = json.load(reply)["choices"][0]["message"]
    here = cli("solve", QUESTIONS[0], "--model", str(tmp_path / "r"), "--max-new-tokens", "20", "--json")
    (answer,) = json.loads(here.stdout)["answers"]
    assert there["content"].startswith(answer["completion"]) and len(there["content"]) < 20  # one token


def test_mistakes_say_the_way_out(cli: Cli, tmp_path: Path) -> None:
    nobody = cli("solve", "1 + 1?", "--endpoint", "http://localhost:9")
    assert nobody.returncode == 2 and "algorist serve RUN" in nobody.stderr
    assert "expected http://HOST:PORT" in cli("solve", "1 + 1?", "--endpoint", "localhost:9").stderr
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = cli("serve", str(tmp_path))
    assert adapter.returncode == 2 and "--merge" in adapter.stderr
    assert "Did you mean 'vllm'" in cli("serve", str(tmp_path), "--engine", "vlm").stderr


@pytest.mark.long
def test_the_example_answers_the_calls_that_a_server_does_not(
    cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """``examples/tool_loop.py`` around a real server writes what ``solve`` writes, and the server says that it answers no calls."""
    folder = tmp_path_factory.mktemp("calls")
    settings = [
        "tools={use: [calculator], format: equals}",
        "run_name=t",
        f"output_dir={folder}",
        "threads=1",
    ]
    more = ["sft.max_steps=150", "grpo.enabled=false", "eval.enabled=false", "grpo.max_completion_tokens=64"]
    run_recipe(load_recipe("smoke-cpu", [*settings, *more]).recipe)
    run = folder / "t"
    (here,) = json.loads(cli("solve", QUESTIONS[0], "--model", str(run), "--json").stdout)["answers"]
    assert here["turns"]
    with serving(run) as (url, said):
        example = Path(__file__).parents[2] / "examples" / "tool_loop.py"
        command = [PYTHON, str(example), url, str(run / "sft" / "final"), QUESTIONS[0]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        there = cli("solve", QUESTIONS[0], "--model", str(run), "--json", "--endpoint", url)
        started = said()
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == here["completion"]
    assert "answers no calls of calculator" in there.stderr and "answers no calls of calculator" in started
    limits = "without a password, and any request may ask for any length: for this machine alone, or behind a proxy"
    assert limits in started and f"warning: {limits}" not in started

"""``algorist watch``: what it says of a real run, while it is held and when it is over."""

from __future__ import annotations

import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from algorist.cli.watch_command import blocks, picture, state
from algorist.config import load_recipe
from algorist.report.build import LivePage, build_report
from algorist.runs.pipeline import run_recipe
from algorist.store.run_folder import RunFolder
from tests.conftest import Cli, Verb


def test_a_run_is_told(tmp_path: Path, call: Cli) -> None:
    run_recipe(load_recipe("smoke-cpu", [f"output_dir={tmp_path}", "run_name=r", "threads=1"]).recipe)
    folder = RunFolder.open(tmp_path / "r")
    now = state(folder)
    assert not now.running and now.stage == "grpo" and now.step == now.steps == 2
    assert {"reward", "accuracy", "tokens"} <= now.curves.keys() and len(now.curves["reward"]) == 2
    assert now.finished_stages == ["sft", "eval-sft", "grpo", "eval-grpo"]
    with folder.lock():
        assert state(folder).running
        assert json.loads(call("watch", str(tmp_path / "r"), "--json").stdout)["running"] is True
    shown = call("watch", str(tmp_path / "r"), "--once")
    assert "not running" in shown.stdout and "grpo 2/2" in shown.stdout and "accuracy" in shown.stdout


def test_a_stage_measured_in_epochs_shows_its_steps_as_far_as_they_are_known(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "run_name=r", "threads=1", "eval.enabled=false", "grpo.enabled=false"]
    words += ["sft.max_steps=null", "sft.epochs=0.25", "data.sft.params.count=160"]
    run_recipe(load_recipe("smoke-cpu", words).recipe)
    folder = RunFolder.open(tmp_path / "r")
    now = state(folder)
    assert now.stage == "sft" and now.step == now.steps == 3  # a quarter of 10 batches of 16
    assert "sft 3/3 ·" in shown(picture(now))
    for checkpoint in (tmp_path / "r" / "sft").glob("checkpoint-*"):
        checkpoint.rename(tmp_path / checkpoint.name)
    now = state(folder)
    assert now.steps is None and "sft 3 ·" in shown(picture(now)) and "?" not in shown(picture(now))


def shown(picture: RenderableType) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(picture)
    return console.export_text()


def test_blocks_follow_the_curve() -> None:
    assert blocks([0.0, 1.0]) == "▁█"
    assert blocks([3.0] * 5) == "▁▁▁▁▁"
    assert len(blocks([float(n % 7) for n in range(1000)])) == 24


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that costs seconds."""
    words = [f"output_dir={tmp_path_factory.mktemp('web')}", "run_name=r", "threads=1", "eval.enabled=false"]
    return run_recipe(load_recipe("smoke-cpu", words).recipe).folder.path


@pytest.fixture
def web(small_run: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """``algorist watch --web`` in a process of its own: (address, run folder), a copy that tests may change."""
    folder = shutil.copytree(small_run, tmp_path / "r")
    command = [sys.executable, "-m", "algorist", "watch", str(folder), "--web", "--every", "0.2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    lines = iter(server.stdout.readline, "")
    address = next(line.strip() for line in lines if line.strip().startswith("http://"))
    yield address, folder
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 130


def get(address: str, method: str = "GET", **headers: str) -> tuple[int, str, Message]:
    request = urllib.request.Request(address, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_live_page_is_the_report_and_grows_with_the_run(web: tuple[str, Path]) -> None:
    address, folder = web
    before = sorted(p.name for p in folder.rglob("*"))
    code, page, headers = get(address)
    assert code == 200 and "· algorist report</title>" in page and 'id="live"' in page
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    now = json.loads(get(f"{address}state")[1])
    assert (now["stage"], now["step"], now["running"]) == ("grpo", 2, False)
    assert f'data-version="{now["version"]}"' in page
    line = {"stage": "grpo", "step": 3, "time": time.time() + 5, "loss": 0.5, "reward": 123.25}
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\n")
    later = json.loads(get(f"{address}state")[1])
    assert later["step"] == 3 and later["version"] != now["version"]
    assert "123.25" not in page and "123.25" in get(address)[1]
    assert sorted(p.name for p in folder.rglob("*")) == before, "reading a run wrote into it"
    assert 'id="live"' not in build_report(folder).read_text(encoding="utf-8")


def test_only_this_machine_reads_the_live_page_and_only_with_its_token(web: tuple[str, Path]) -> None:
    address, _ = web
    root, token = address[:-1].rsplit("/", 1)
    assert root.startswith("http://127.0.0.1:") and len(token) >= 20
    for path in (
        "/",
        "/state",
        f"/{token[:-1]}/",
        f"/{token}",
        f"/{token}/metrics.jsonl",
        f"/{token}/../state",
        "/x" * 99,
    ):
        code, text, _ = get(root + path)
        assert (code, text) == (404, "not found\n"), path
    assert get(address, Host="evil.example:80")[0] == 404  # a name that was bound to 127.0.0.1
    assert get(address, Host=f"localhost:{root.rsplit(':', 1)[1]}")[0] == 200
    assert {get(address, method)[0] for method in ("POST", "PUT", "DELETE")} == {501}
    assert get(address, "HEAD")[:2] == (200, "")


def test_a_run_that_has_just_begun_has_a_live_page(small_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    shutil.copy2(small_run / "config.yaml", folder)
    run = RunFolder.open(folder)
    live = LivePage(run, lambda: vars(state(run)), 2.0)
    assert 'id="live"' in live.page() and json.loads(live.state())["stage"] is None
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]
    other = RunFolder.open(small_run)
    page = LivePage(other, lambda: vars(state(other)), 2.0, [run]).page()
    assert (
        "<h2>Final figures</h2>" in page
        and page.count('<th scope="row"><span class="key"') == 2
        and "newest first" in page
    )


def test_a_port_that_is_taken(small_run: Path, verb: Verb) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, errors = verb("watch", str(small_run), "--web", "--port", str(port))
    assert code == 2 and f"port {port} of 127.0.0.1 is taken; take another, --port {port + 1}" in errors

"""Uploads with the real client to a stand-in of the hub: what arrives, what happens while the hub is away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.hub_server import Commit, HubServer
from tests.warm import OWN, PYTHON

Call = Callable[..., subprocess.CompletedProcess[str]]
NAME = "me/tiny-math"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def calls(folder: Path, hub: HubServer) -> Call:
    """Return a function that runs ``algorist`` as a user of that hub."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {"COLUMNS": "300", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf")}
        return subprocess.run(
            [PYTHON, "-m", "algorist.cli.main", *arguments],
            cwd=folder,
            env={**os.environ, **own, **hub.environment(), **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return call


@pytest.fixture
def cli(tmp_path: Path, hub: HubServer) -> Call:
    return calls(tmp_path, hub)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HubServer, str]:
    """A run that uploads its checkpoints and its model; the server stays up for the tests below."""
    folder, hub = tmp_path_factory.mktemp("pushed"), HubServer()
    hub.start()
    done = calls(folder, hub)("run", "smoke-cpu", f"hub.model_id={NAME}", "hub.strategy=checkpoint")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "smoke-cpu", hub, done.stdout


def test_the_model_is_there_private_with_a_message(pushed: tuple[Path, HubServer, str]) -> None:
    run, hub, output = pushed
    repository = hub.repositories[NAME]
    assert repository.private and f"uploaded to {hub.endpoint}/{NAME}" in output
    assert repository.commits[-1].message == "GRPO of a tiny model from scratch with algorist (run smoke-cpu)"
    assert repository.lfs >= {"model.safetensors", "last-checkpoint/model.safetensors"}
    for path in (run / "grpo" / "final").iterdir():
        if path.name != "README.md":
            assert repository.files[path.name] == path.read_bytes(), path.name
    root = {name for name in repository.files if "/" not in name}
    assert root == {p.name for p in (run / "grpo" / "final").iterdir()} | {"README.md", "trainer_state.json"}
    assert root > {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    for path in (run / "grpo" / "checkpoint-2").iterdir():
        assert repository.files[f"last-checkpoint/{path.name}"] == path.read_bytes(), path.name
    assert not list(run.glob(".upload-*"))


def test_checkpoints_went_up_while_training(pushed: tuple[Path, HubServer, str]) -> None:
    messages = [commit.message for commit in pushed[1].repositories[NAME].commits]
    assert messages[0] == "sft checkpoint-1" and len(messages) >= 2


def test_the_card_says_what_was_measured(pushed: tuple[Path, HubServer, str]) -> None:
    run, hub, _ = pushed
    card = hub.repositories[NAME].files["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["tags"] == ["algorist", "math", "sft", "grpo"] and head["library_name"] == "transformers"
    metrics = json.loads((run / "eval" / "grpo.json").read_text())["metrics"]["greedy_accuracy"]
    value, low, high = (f"{100 * metrics[end]:.1f}" for end in ("value", "low", "high"))
    cell = f"{value} % [{low}, {high}]"
    (row,) = [line for line in card.splitlines() if line.startswith("| greedy accuracy |")]
    assert row.endswith(f"| {cell} |") and "95 % intervals" in card
    recipe = card.partition("```yaml\n")[2].partition("\n```")[0]
    assert yaml.safe_load(recipe) == yaml.safe_load((run / "config.yaml").read_text())
    assert f'from_pretrained("{NAME}")' in card and f"--model {NAME}" in card and "transformers 5" in card
    assert hub.token not in card and str(Path.home()) + "/" not in card


@pytest.mark.long
def test_the_real_client_reads_it_back_and_the_cards_code_runs(
    pushed: tuple[Path, HubServer, str], tmp_path: Path
) -> None:
    run, hub, _ = pushed
    card = hub.repositories[NAME].files["README.md"].decode()
    code = card.partition("```python\n")[2].partition("```")[0]
    code += f"\nfrom huggingface_hub import snapshot_download\nprint('AT', snapshot_download({NAME!r}))\n"
    environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.partition("AT ")[2].strip())
    for path in (run / "grpo" / "final").iterdir():
        if path.name != "README.md":
            assert (folder / path.name).read_bytes() == path.read_bytes()


@pytest.mark.long
def test_a_hub_that_is_away_in_the_middle_gets_the_model_at_the_end(
    hub: HubServer, cli: Call, tmp_path: Path
) -> None:
    """The socket closes after the first checkpoint and opens again when the last model is written."""
    closer = threading.Thread(target=hub.stop)

    def close_once(commit: Commit) -> None:
        hub.on_commit = lambda commit: None
        closer.start()

    def open_again() -> None:
        closer_deadline = time.monotonic() + 200
        while not (tmp_path / "runs/away/grpo/final").is_dir() and time.monotonic() < closer_deadline:
            time.sleep(0.02)
        closer.join()
        hub.start()

    hub.on_commit = close_once
    opener = threading.Thread(target=open_again)
    opener.start()
    many = ("grpo.max_steps=20", "eval.samples=0")  # long enough for a checkpoint to fail
    done = cli(
        "run", "smoke-cpu", "run_name=away", f"hub.model_id={NAME}", "hub.strategy=all_checkpoints", *many
    )
    opener.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("training continues, the upload is tried again at the end") == 1
    assert f"uploaded to {hub.endpoint}/{NAME}" in done.stdout
    repository, run = hub.repositories[NAME], tmp_path / "runs/away"
    assert (
        repository.files["model.safetensors"] == (run / "grpo" / "final" / "model.safetensors").read_bytes()
    )
    for checkpoint in run.glob("*/checkpoint-*"):
        there = repository.files[f"{checkpoint.parent.name}/{checkpoint.name}/model.safetensors"]
        assert there == (checkpoint / "model.safetensors").read_bytes()


@pytest.mark.long
def test_without_the_hub_the_run_ends_well_and_says_how_to_upload_later(
    hub: HubServer, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN, "1")
    hub.stop()
    own = ("hub.private=false", "hub.revision=trial", "hub.commit_message=Trial 7")
    done = cli("run", "smoke-cpu", "--only", "sft", "run_name=alone", f"hub.model_id={NAME}", *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/alone/eval/sft.json").is_file()
    later = f"algorist export runs/alone --push-to-hub {NAME}"
    assert done.stdout.count(later) == 1 and "the hub cannot be reached" in done.stdout
    failed = cli(*later.split()[1:])
    assert failed.returncode == 1 and "the hub cannot be reached" in failed.stderr
    hub.start()
    done = cli(*later.split()[1:])
    assert done.returncode == 0, done.stderr
    repository = hub.repositories[NAME]
    assert not repository.private  # the recipe says so
    assert repository.commits[-1].message == "Trial 7"
    assert "model.safetensors" in repository.branches["trial"] and not repository.branches["main"]
    again = cli(*later.split()[1:], "--private")
    assert again.returncode == 0 and "is public; hub.private changes new ones only" in again.stderr
    assert not repository.private and len(repository.commits) == 1  # nothing new: no empty commit
    words = (
        "run",
        "smoke-cpu",
        "--only",
        "sft",
        "run_name=next",
        f"model.name={NAME}",
        "sft.max_steps=1",
        "eval.enabled=false",
    )
    done = cli(*words, "model.revision=trial")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_offline_and_a_missing_token_are_told_before_training(
    hub: HubServer, cli: Call, tmp_path: Path
) -> None:
    refused = cli("run", "smoke-cpu", "--only", "sft", "hub.push=true", HF_TOKEN="")
    assert refused.returncode == 2 and "hf auth login" in refused.stderr
    assert not (tmp_path / "runs").exists()
    token = cli("run", "smoke-cpu", "--only", "sft", f"hub.token={hub.token}")
    assert token.returncode == 2 and "HF_TOKEN" in token.stderr and hub.token not in token.stderr
    small = ("eval.enabled=false", "sft.max_steps=1")
    done = cli("run", "smoke-cpu", "--only", "sft", "hub.push=true", *small, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("HF_HUB_OFFLINE is set") == 2
    assert "algorist export runs/smoke-cpu --push-to-hub smoke-cpu" in done.stdout
    offline = cli("export", "runs/smoke-cpu", "--push-to-hub", NAME, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and "unset it to upload" in offline.stderr
    assert hub.requests == []
    wrong = cli("export", "runs/smoke-cpu", "--push-to-hub", NAME, HF_TOKEN="hf_wrong")
    assert wrong.returncode == 1 and "the hub refused (401" in wrong.stderr

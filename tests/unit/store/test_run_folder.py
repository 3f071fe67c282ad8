"""The run folder: lock, finished stages, no path out of it, no secrets in it; untrusted text made safe."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorist.errors import CheckpointError
from algorist.store.redact import HIDDEN, RedactSecrets, redact
from algorist.store.run_folder import RunFolder, environment
from algorist.store.safe_text import one_line, printable


def test_layout_and_stages(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    assert run.rollouts.is_dir() and run.evaluations.is_dir() and run.stages() == {}
    run.finish("sft", {"loss": 1.5})
    run.finish("grpo", {})
    assert run.is_finished("sft") and not run.is_finished("eval")
    assert list(run.stages()) == ["sft", "grpo"] and run.stages()["sft"] == {"loss": 1.5}
    assert not list(run.path.glob("*.partial"))


def test_open_names_runs_nearby(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "quick")
    run.write_text("config.yaml", "name: quick\n")
    assert RunFolder.open(tmp_path / "quick").config.read_text() == "name: quick\n"
    with pytest.raises(CheckpointError, match=r"quik is not a run folder .*: quick"):
        RunFolder.open(tmp_path / "quik")


def test_create_where_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make the run folder .* output_dir=FOLDER"):
        RunFolder.create(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["../outside.json", "/tmp/outside.json", "eval/../../x"])
def test_no_path_leads_out(tmp_path: Path, name: str) -> None:
    run = RunFolder.create(tmp_path / "run")
    with pytest.raises(CheckpointError, match="leads out of the run folder"):
        run.write_text(name, "x")


def test_no_link_leads_out(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    (run.path / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="leads out"):
        run.write_text("link/x.json", "x")


def test_damaged_stages_are_named(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    for text in ("{broken", "[1]"):
        (tmp_path / "stages.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"stages.json is damaged"):
            run.stages()


@pytest.mark.slow
def test_lock_names_the_other_process_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom algorist.store.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    run = RunFolder.create(tmp_path)
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    with pytest.raises(CheckpointError, match=f"in use by process {other.pid};"), run.lock():
        pass
    other.kill()
    other.communicate()
    with run.lock():
        pass


@pytest.mark.slow
def test_store_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, algorist.store.run_folder, algorist.store.write, algorist.store.read\n"
        "algorist.store.run_folder.environment()\n"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules), 'heavy import'\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_environment_tells_versions_and_hardware() -> None:
    found = environment()
    assert found["versions"]["duckdb" if "duckdb" in found["versions"] else "torch"]
    assert found["cores"] >= 1 and found["memory_gib"] > 0 and found["command"].startswith("algorist")
    json.dumps(found)


SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdefghijklmnop1234",
    "ghp_abcdefghijklmnopqrstuvwxyz",
    "AKIAABCDEFGHIJKLMNOP",
]


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Parquet cannot be written there: said at once, not after the first stage."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    with pytest.raises(CheckpointError, match="not UTF-8; choose another with output_dir"):
        RunFolder.create(folder / "r")


@pytest.mark.parametrize("secret", SECRETS)
def test_known_shapes_are_hidden(secret: str) -> None:
    assert redact(f"a {secret}, b") == f"a {HIDDEN}, b"


@pytest.mark.parametrize(
    "text",
    [
        "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "wandb login 0123456789abcdef0123456789abcdef01234567",
        '"hub_token": "not-a-known-shape"',
        "Authorization: Bearer abcdefgh12345678",
        "https://me:s3cret-word@example.org/x",
        "password: hunter2hunter2",
    ],
)
def test_named_values_are_hidden(text: str) -> None:
    shown = redact(text)
    assert HIDDEN in shown
    for part in ("0123456789abcdef", "not-a-known", "abcdefgh12345678", "s3cret", "hunter2"):
        assert part not in shown


@pytest.mark.parametrize(
    "text",
    [
        '"git_commit": "819758b1403d6fe0efb3ddfbb3a41fcedf46ba55"',
        '"num_tokens": 1236500.0',
        "stop_token_ids: [151643, 151645]",
        "max_new_tokens=256 tokens_per_s 12345678",
        "the key idea is multiplication of 1234567 and 7654321",
        "https://huggingface.co/Qwen/Qwen2.5-0.5B",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_environment_values_are_hidden_where_text_leaves_and_kept_in_what_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-and-long-enough")
    monkeypatch.setenv("SSH_KEY_FILE", "/home/me/.ssh/id_file")
    text = "tracking: correct-horse-battery false-and-long-enough /home/me/.ssh/id_file\n"
    assert redact(text) == f"tracking: {HIDDEN} false-and-long-enough /home/me/.ssh/id_file\n"
    run = RunFolder.create(tmp_path)
    run.write_text("config.yaml", text)
    assert run.config.read_text() == text
    monkeypatch.setattr(sys, "argv", ["algorist", "run", "hub.x=correct-horse-battery"])
    run.write_environment(seed=1)
    assert "correct-horse" not in (tmp_path / "environment.json").read_text()


def test_log_records_are_redacted(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "training.log")
    handler.addFilter(RedactSecrets())
    logger = logging.getLogger("test_redaction")
    logger.propagate = False
    logger.addHandler(handler)
    logger.error("logged in with %s after %d tries", SECRETS[0], 2)
    logger.removeHandler(handler)
    handler.close()
    assert (tmp_path / "training.log").read_text() == f"logged in with {HIDDEN} after 2 tries\n"


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\x1b[31mred\x07\r\n\tend") == "a\\x1b[31mred\\x07\\x0d\n\tend"
    assert printable("x\u202egnp.exe \x9b31m \u200b") == "x\\u202egnp.exe \\x9b31m \\u200b"
    assert printable("√2 ≈ 1.41, 日本語 🙂") == "√2 ≈ 1.41, 日本語 🙂"
    assert one_line("a\r\nb\tc", 20) == "a ⏎ b c" and one_line("x" * 30, 10) == "x" * 9 + "…"


@given(st.text())
def test_printable_leaves_nothing_invisible(text: str) -> None:
    shown = printable(text)
    assert all(c in "\n\t" or c.isprintable() for c in shown)
    shown.encode("utf-8")

"""``algorist serve --engine vllm`` and its client: the same answers as in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .servers import FLAGS, Server, free_port, make_folders

pytestmark = pytest.mark.vllm
QUESTIONS = ["Tom has 3 bags of 4.", "Mia has 12 bags of 2."]


def solved(*arguments: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "algorist", "solve", "--json", *arguments],
        input="\n".join(QUESTIONS), cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # vLLM leaves out a character that is cut off at the end.
    return [row["completion"].rstrip("\ufffd") for row in json.loads(done.stdout)["answers"]]


def test_a_served_model_answers_as_in_this_process(tmp_path: Path) -> None:
    make_folders(tmp_path)
    model, port = str(tmp_path / "varied"), free_port()
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "algorist", "serve", model, "--engine", "vllm", "--host", "127.0.0.1"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--", *FLAGS], stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}, cwd="/",
        )  # fmt: skip
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait()
        served = solved("--endpoint", server.url, "--model", model, "--max-new-tokens", "24", folder=tmp_path)
    finally:
        server.kill()
    assert served == solved("--model", model, "--max-new-tokens", "24", folder=tmp_path)
    assert len(set(served)) == 2 and all(served)

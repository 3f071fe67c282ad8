"""On the CPU, what a model frees stays with the process, unless the user has set the allocator; the numbers are the same."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import first
from tests.tiny import tiny_policy

WITHOUT = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
"""Sets the allocator to what it is by default."""
FAULTS_OF_A_BLOCK = """
import ctypes, resource, sys, torch
from algorist import load_policy
from algorist.config.section import ModelSection
from algorist.models.load import make_policy

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages
device, folder = torch.device(sys.argv[1]), sys.argv[2:]
if folder:
    load_policy(folder[0], device=device)
else:
    make_policy(ModelSection(name="tiny"), device=device, seed=0, texts=["1 + 1 = 2"])
faults = []
for turn in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(225_000_000), torch.empty(225_000_000), torch.empty(225_000_000), torch.ones(50_000_000)  # freed together they are more than 2 GiB; the first is never touched
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""
PAGES = 200_000_000 // os.sysconf("SC_PAGE_SIZE")
FEW = PAGES // 50
LIBRARY, VERSION = platform.libc_ver()

pytestmark = pytest.mark.skipif(
    LIBRARY != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 36),
    reason="seen to work with glibc 2.36; earlier ones may refuse",
)


def _environment(own: dict[str, str]) -> dict[str, str]:
    left_out = ("LD_PRELOAD", "GLIBC_TUNABLES")
    clean = {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith("MALLOC_")}
    return clean | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | own


def _faults(own: dict[str, str], *arguments: str) -> int:
    """Return the fewest page faults of a later block of 200 MB: something small may lie in the hole, which the next is then too large for."""
    command = [sys.executable, "-c", FAULTS_OF_A_BLOCK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment(own))
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.slow
def test_a_freed_block_is_used_again_without_page_faults(tmp_path: Path) -> None:
    assert _faults({}, "cpu") < FEW
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    assert _faults({}, "cpu", str(tmp_path)) < FEW


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("own", first(1, [WITHOUT, {"MALLOC_ARENA_MAX": "2"}]))
def test_an_allocator_that_the_user_has_set_is_left_alone(own: dict[str, str]) -> None:
    assert _faults(own, "cpu") > PAGES / 2


@pytest.mark.long
@pytest.mark.slow
def test_the_allocator_is_left_alone_where_the_model_is_not_on_the_cpu() -> None:
    assert _faults({}, "meta") > PAGES / 2


@pytest.mark.long
@pytest.mark.slow
def test_a_run_computes_the_same_numbers_with_it_and_without(tmp_path: Path) -> None:
    found = []
    for name, own in (("with", {}), ("without", WITHOUT)):
        command = [sys.executable, "-m", "algorist", "run", "smoke-cpu", f"output_dir={tmp_path}"]
        done = subprocess.run(
            [*command, f"run_name={name}", "threads=1"], capture_output=True, text=True, env=_environment(own)
        )
        assert not done.returncode, done.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        weights = (tmp_path / name / "grpo" / "final" / "model.safetensors").read_bytes()
        numbers = [(line["stage"], line["step"], line.get("loss"), line.get("reward")) for line in lines]
        found.append((numbers, hashlib.sha256(weights).hexdigest()))
    assert found[0] == found[1]

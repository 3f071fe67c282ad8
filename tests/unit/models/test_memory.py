"""The memory that a process can still take on a CPU, and the parts of an update that follow from it."""

from __future__ import annotations

import io
import platform
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch

from algorist import system
from algorist.config import load_recipe
from algorist.config.schema import GRPOSection, SFTSection
from algorist.errors import ConfigError
from algorist.models import memory
from algorist.models.precision import Precision
from algorist.models.tiny import tiny_model, train_tokenizer
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet
from algorist.training.part_size import PART_BYTES, kept_per_token, tokens_that_fit

MB = 1 << 20
FLOAT32 = Precision(torch.float32, torch.float32)


def small_model(**shape: int) -> torch.nn.Module:
    tokenizer = train_tokenizer(["one two three"] * 4, vocab_size=300)
    return tiny_model(tokenizer, seed=0, **{"hidden_size": 64, "layers": 2, **shape})


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_limit_of_the_process_bounds_what_is_available(limit: str) -> None:
    code = (
        "import resource; from algorist import system\n"
        f"name = 'VmSize' if '{limit}' == 'RLIMIT_AS' else 'VmData'\n"
        f"resource.setrlimit(resource.{limit}, (system.status(name) + (300 << 20), resource.RLIM_INFINITY))\n"
        "before = system.available_memory(); held = bytearray(200 << 20); print(before >> 20, system.available_memory() >> 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 290 <= before <= 300 and 90 <= after <= 100


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("own_path", [True, False])
def test_control_groups_bound_what_is_available(
    version: int, own_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group itself and the one above it; a container's own group is at the top, whatever path it reads."""
    line = {1: "4:cpu,memory:/box/inner", 2: "0::/box/inner"}[version]
    top = tmp_path / "memory" if version == 1 else tmp_path
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}[version]
    groups = {"box": (900, 300), "box/inner": (10**7, 100)} if own_path else {"": (900, 300)}
    for path, (limit, used) in groups.items():
        folder = top / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{names[0]}").write_text(f"{limit * MB}\n")
        (folder / f"memory.{names[1]}").write_text(f"{used * MB}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]}inactive_file {50 * MB}\ninactive_anon 7\n")
    read = system._lines
    monkeypatch.setattr(system, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(
        system, "_lines", lambda file: [line] if file == Path("/proc/self/cgroup") else read(file)
    )
    assert system.available_memory() == 650 * MB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two processes of one run: each has its half
    assert system.available_memory() == 325 * MB
    (top / next(iter(groups)) / f"memory.{names[0]}").write_text("max\n")
    assert 0 < system.available_memory() <= psutil.virtual_memory().total


def test_a_part_on_a_cpu_is_bounded_and_smaller_where_less_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    per_token = kept_per_token(model, FLOAT32)
    assert per_token > 2 * 64 * 4 * 10
    sizes = [
        tokens_that_fit(model, section)
        for section in (GRPOSection(), SFTSection(), GRPOSection(micro_batch_tokens=500))
    ]
    assert sizes[:2] == pytest.approx([PART_BYTES / per_token] * 2, rel=0.05) and sizes[2] == 500
    monkeypatch.setattr(system, "available_memory", lambda: 100 * MB)
    fewer = tokens_that_fit(model, GRPOSection())
    assert fewer is not None and 0.5 * 100 * MB < fewer * per_token < 0.75 * 100 * MB
    assert tokens_that_fit(model, GRPOSection(gradient_checkpointing=True)) > 1.3 * fewer


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bound is Linux's")
def test_a_run_leaves_the_process_its_memory(tmp_path: Path) -> None:
    """A second run in one process has what the first one had, not 95 % of it."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    recipe = load_recipe(
        "smoke-cpu", [f"output_dir={tmp_path}", "eval.enabled=false", "grpo.enabled=false"]
    ).recipe
    run_recipe(recipe, display=Quiet())
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with system.bounded_memory(50 * MB):
        assert system.available_memory() < 51 * MB
        with pytest.raises(MemoryError):
            bytearray(200 * MB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator keeps what is freed")
def test_a_large_process_that_leaves_little_trims_its_heap_before_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose rollouts left 400 MB of holes; half a billion weights had 4 GB of them after 14 steps, beside 13 GB that were planned."""
    plugin = tmp_path / "holes.py"
    plugin.write_text(
        "import torch\nfrom algorist import extension, system\nfrom algorist.training.extension import Extension\n"
        "@extension\nclass Holes(Extension):\n    name = 'holes'\n"
        "    def seen(self, event):\n"
        "        if event.kind == 'sampled':\n"
        "            blocks = [torch.ones(1 << 18) for _ in range(400)]\n"
        "            self.last = torch.ones(1 << 18)\n"
        "            del blocks\n"
        "            self.before = system.own_memory()\n"
        "        if event.kind == 'gradient' and hasattr(self, 'before'):\n"
        "            print('MB given back', self.before - system.own_memory() >> 20)\n"
    )
    for large, little, expected in ((memory.LARGE, 1e6, False), (0, 0.0, False), (0, 1e6, True)):
        monkeypatch.setattr(memory, "LARGE", large)
        monkeypatch.setattr(memory, "LITTLE", little)
        words = [
            f"output_dir={tmp_path}",
            f"run_name=r{large}-{little:g}",
            "eval.enabled=false",
            "sft.enabled=false",
        ]
        monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
        run_recipe(
            load_recipe("smoke-cpu", [*words, f"plugins=[{plugin}]", "grpo.max_steps=2"]).recipe,
            display=Quiet(),
        )
        *_, megabytes = (int(n) for n in re.findall(r"MB given back (-?\d+)", shown.getvalue()))
        assert (megabytes > 300) is expected


def test_counting_a_token_draws_no_number_and_leaves_the_mode() -> None:
    model = small_model().train()
    state = torch.get_rng_state()
    kept_per_token(model, FLOAT32)
    assert torch.equal(state, torch.get_rng_state()) and model.training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_mb", "says"),
    [
        (400, None),
        (40, r"sft of tiny takes about 0\.0[45] GB .*completion of 64 tokens.* has 0\.04 GB .*fits with .*model\.lora\.rank=16 \("),
        (1, "No setting makes it fit: take a smaller model"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_fit_is_refused_before_it_begins_with_what_would_fit(
    left_mb: int, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four million weights; gradients and moments of all of them take 12 bytes each."""
    recipe = load_recipe(
        "smoke-cpu", [f"output_dir={tmp_path}", "run_name=r", "eval.enabled=false", "sft.max_steps=1", "grpo.enabled=false",
        "model.tiny={hidden_size: 256, layers: 4, vocab_size: 700}", "model.compute_dtype=float32", "grpo.max_completion_tokens=64"]
    ).recipe  # fmt: skip
    monkeypatch.setattr(system, "available_memory", lambda: left_mb * MB)
    monkeypatch.setattr(system, "bounded_memory", lambda more: nullcontext())
    if says is None:
        run_recipe(recipe, display=Quiet())
        assert (tmp_path / "r/sft/final").is_dir()
        return
    with pytest.raises(ConfigError, match=says):
        run_recipe(recipe, display=Quiet())
    assert not (tmp_path / "r/sft/final").exists()

"""The battery for a GPU runs in small on the CPU, so that it is whole when a GPU is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BATTERY = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BATTERY), *options], capture_output=True, text=True, timeout=900
    )


@pytest.mark.long
@pytest.mark.slow
def test_every_section_runs_and_writes_its_file_as_it_ends(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path), "--smoke", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    said = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("== ")]
    assert set(found) == set(said) and len(said) == 14
    assert all(
        not result.get("error") and result["environment"]["libraries"]["torch"] for result in found.values()
    )
    assert {name for name, result in found.items() if "skipped" in result} == {"quickstart", "learning"}
    case = found["decode"]["cases"][0]
    assert case["graph"]["tokens_per_s"] > 0 and case["decoder"]["tokens_per_s"] > 0 and case["limit_ms"] > 0
    assert len(found["update"]["cases"]) == 3 and all(
        c[way]["seconds"] > 0 for c in found["update"]["cases"] for way in ("packed", "plain")
    )
    assert 0.5 < found["memory"]["cases"][0]["packed"]["planned_over_peak"] < 2
    for name in ("adapter 16 x 1024", "float32 masters 16 x 1024"):
        assert len(found["card"][name]["rollout_s"]) == len(found["card"][name]["update_s"]) == 3
    halving, float16 = found["halving"], found["float16"]
    assert "same mathematics" in halving["said"][0] and halving["part_tokens"] < 100
    assert halving["relative_difference"] < 0.02  # products in bfloat16
    assert float16["fits"]["relative_gradient_error"] < 0.01 and float16["fits"]["moved"] > 0
    assert float16["overflows"]["moved"] == 0 and float16["overflows"]["scale"] < 1
    assert found["sharded"]["two"]["exit"] == 0 and found["sharded"]["sft_difference"] < 1e-5
    assert found["speed"]["continuous_batching_2_rows_ms_per_step"]
    assert found["step"]["tiny native"]["speed_up"]["ratio"] > 0  # stock TRL ran beside it
    assert found["kernels"]["graph_gap_max"] < 1e-3 and found["kernels"]["decoder_gap_max"] < 1e-3
    errors = found["correctness"]["relative_gradient_error"]
    assert errors["float32 alone"] == 0 and all(error < 0.1 for error in errors.values())

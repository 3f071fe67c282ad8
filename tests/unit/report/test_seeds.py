"""``algorist run … --seeds N``: one run folder per seed, then mean, spread and one page of all curves."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorist.cli.main import main
from algorist.config.load import load_recipe
from algorist.config.yaml_text import to_yaml
from algorist.errors import ConfigError
from algorist.report.build import build_overlay
from algorist.report.seeds import (
    line_of_proof,
    lines_of_seeds,
    proof,
    proof_of,
    read_seeds,
    recipes_of_seeds,
    summarise_seeds,
)
from algorist.store.run_folder import RunFolder
from algorist.store.write import MetricsWriter
from tests.unit.evaluation.test_compare import make_samples, write

RIGHT = {"base": (2, 2, 2), "grpo": (10, 12, 17)}


def make_runs(folder: Path, count: int) -> tuple[list[Path], list[str]]:
    """Write finished runs of which the evaluations are known."""
    recipe = load_recipe("smoke-cpu", [f"output_dir={folder}", "seed=5"]).recipe
    rows = make_samples(0.0, problems=20, samples=0)
    runs = []
    for number, of_seed in enumerate(recipes_of_seeds(recipe, count)):
        run = RunFolder.create(of_seed.path)
        run.write_text("config.yaml", to_yaml(of_seed))
        for stage, right in RIGHT.items():
            write(
                run.evaluations, stage, [row | {"correct": i < right[number]} for i, row in enumerate(rows)]
            )
        metrics = MetricsWriter(run.metrics)
        for step in range(1, 4):
            metrics.write("grpo", step, {"reward": step * (number + 1) / 10})
        metrics.close()
        runs.append(run.path)
    return runs, lines_of_seeds(summarise_seeds(recipe, runs))


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    runs, lines = make_runs(tmp_path, 3)
    assert [run.name for run in runs] == [f"smoke-cpu-seed-{s}" for s in (5, 6, 7)]
    found = json.loads((tmp_path / "smoke-cpu-seeds.json").read_text())
    after = found["stages"]["grpo"]["greedy_accuracy"]
    shares = np.array(RIGHT["grpo"]) / 20
    half = 4.3027 * shares.std(ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
    assert after["values"] == pytest.approx(list(shares))
    assert (after["mean"], after["sd"]) == pytest.approx((shares.mean(), shares.std(ddof=1)))
    assert (after["low"], after["high"]) == pytest.approx(
        (shares.mean() - half, shares.mean() + half), rel=1e-4
    )
    gain = found["gain"]["greedy_accuracy"]
    assert gain["values"] == pytest.approx([0.4, 0.5, 0.75])
    assert all(each["low"] < each["value"] < each["high"] for each in gain["each"])
    assert any("gain  greedy accuracy   +55.0 ± 18.0 points" in line for line in lines), lines
    (chart,) = curves_in(tmp_path / "smoke-cpu-seeds.html")
    assert [curve["label"] for curve in chart["curves"]] == [run.name for run in runs]
    assert [curve["y"][-1] for curve in chart["curves"]] == pytest.approx([0.3, 0.6, 0.9])


def curves_in(page: Path) -> list[dict[str, Any]]:
    """Return the charts that a page draws."""
    payload = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert payload is not None
    return [chart for stage in json.loads(payload[1])["stages"] for chart in stage["charts"]]


@pytest.mark.slow
def test_a_page_of_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Curves of all in each chart, final figures, differences paired to the first; ``compare`` says how to make it."""
    runs = make_runs(tmp_path, 3)[0]

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["algorist", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    code, out, _ = call("report", *map(str, runs), "--to", str(tmp_path / "all.html"))
    text = " ".join((tmp_path / "all.html").read_text().split())
    assert code == 0 and out.split() == [str(tmp_path / "all.html")]
    # seed 5 has 10 of 20 right, seed 7 has 17: the first 10 among them
    assert f"{runs[2].name}: +35.0 points [" in text and "7 right only here, 0 only there" in text
    assert (
        text.index("Settings that differ") < text.index("<code>seed</code>") < text.index("<h2>Final figures")
    )
    assert text.partition("Final figures</h2>")[0].count('<th scope="row"><code>') == 1
    assert len(curves_in(tmp_path / "all.html")[0]["curves"]) == 3
    code, out, _ = call("compare", str(runs[0]), str(runs[1]))
    assert out.splitlines()[0].startswith("seed: ")
    assert code == 0 and f"both runs in one page: algorist report {runs[0]} {runs[1]}" in out
    assert not list(tmp_path.glob("report-*.html"))  # nobody has told it to write one
    (runs[1] / "eval").rename(tmp_path / "gone")
    build_overlay(runs[:2], tmp_path / "partly.html")
    assert "cannot be compared: one of the two has no evaluation" in (tmp_path / "partly.html").read_text()
    assert "expected 2 to 8 different run folders" in call("report", str(runs[0]), str(runs[0]))[2]


def test_one_and_two_seeds_say_what_they_cannot(tmp_path: Path) -> None:
    assert any("one seed has no spread" in line for line in make_runs(tmp_path / "one", 1)[1])
    assert "two seeds say little" in make_runs(tmp_path / "two", 2)[1][-1]
    with pytest.raises(ConfigError, match="--seeds is 0"):
        recipes_of_seeds(load_recipe("smoke-cpu", []).recipe, 0)


@pytest.mark.parametrize(
    ("text", "expected"), [("3", (3, False)), ("until-sure", (8, True)), ("until-sure=5", (5, True))]
)
def test_what_seeds_takes(text: str, expected: tuple[int, bool]) -> None:
    assert read_seeds(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("many", "expected a number such as 3, until-sure or until-sure=8"),
        ("until-sure=2", "takes 3 seeds or more; expected until-sure=3"),
        ("sure=4", "--seeds is 'sure=4'"),
        ("until-sure=x", "until-sure=8"),
    ],
)
def test_other_words_for_seeds_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_seeds(text)


def test_a_gain_is_proven_over_seeds_and_over_problems(tmp_path: Path) -> None:
    """+20 points in each of three seeds on 200 problems are proven; four problems, or seeds that disagree, are not."""
    draw = np.random.default_rng(0)

    def gains(of_seeds: list[float], problems: int) -> Any:
        return [draw.permutation(np.arange(problems) < gain * problems).astype(float) for gain in of_seeds]

    assert proof_of(gains([0.2, 0.21, 0.22], 200), 8)["sure"]
    assert not proof_of(gains([0.2, 0.21], 200), 8)["sure"]
    lost = proof_of([[-gain for gain in row] for row in gains([0.2, 0.21, 0.22], 200)], 8)
    assert lost["sure"] and line_of_proof(lost, 3, 8).endswith(": a loss is proven")
    few = proof_of([[0.0, 0.0, 0.0, 1.0]] * 3, 8)
    assert not few["sure"] and few["level"] < few["p_problems"]
    alike = proof_of([[0.0] * 88 + [1.0] * 12] * 3, 8)  # problems let each seed differ by 3.2 points
    t = 0.12 / math.sqrt(0.12 * 0.88 / 100 / 3)
    assert alike["p_seeds"] == pytest.approx(1 - t / math.sqrt(2 + t**2))  # two degrees of freedom, exactly
    assert not alike["sure"] and alike["p_problems"] < alike["level"] < alike["p_seeds"]
    apart = proof_of(gains([0.05, 0.4, 0.1], 400), 8)
    assert not apart["sure"] and apart["p_problems"] < apart["level"] < apart["p_seeds"]
    seen = proof(make_runs(tmp_path, 3)[0], 3)
    assert seen["gain"] == pytest.approx(0.55)  # of 20 problems, (10 + 12 + 17 − 3 · 2) / 60
    assert line_of_proof(seen, 3, 3).startswith("3 of at most 3 seeds: +55.0 points, p = 0.034 over seeds")


@pytest.mark.slow
@pytest.mark.parametrize(("of_seeds", "of_problems"), [(0.03, 0.0), (0.0, 0.15), (0.02, 0.1)])
def test_what_gains_nothing_is_proven_in_less_than_a_twentieth(of_seeds: float, of_problems: float) -> None:
    """1,000 null experiments of up to five seeds: gains differ by seed, by problem, or both, and are nothing on average."""
    draw = np.random.default_rng(1)
    proven = 0
    for _ in range(1000):
        mean = draw.normal(0, of_seeds, (5, 1)) + draw.normal(0, of_problems, (1, 40))
        right = draw.random((2, 5, 40)) < np.stack([np.full((5, 40), 0.4), (0.4 + mean).clip(0, 1)])
        gains = right[1].astype(float) - right[0]
        proven += any(proof_of(gains[:seeds], 5)["sure"] for seeds in (3, 4, 5))
    assert proven <= 50


@pytest.mark.long
@pytest.mark.slow
def test_seeds_until_sure_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is learned in two steps: the third seed is the last, and the words say that nothing is proven."""
    words = ["run", "smoke-cpu", f"output_dir={tmp_path}", "eval.baseline=true", "--seeds", "until-sure=3"]
    monkeypatch.setattr(sys, "argv", ["algorist", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert not ended.value.code and "1 of at most 3 seeds" in told.out + told.err
    seen = json.loads((tmp_path / "smoke-cpu-seeds.json").read_text())
    assert len(seen["runs"]) == 3 and not seen["proof"]["sure"] and seen["proof"]["most"] == 3


@pytest.mark.long
@pytest.mark.slow
def test_two_seeds_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["algorist", "run", "smoke-cpu", f"output_dir={tmp_path}", "--seeds", "2"]

    def call(*more: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    code, told = call()
    assert code == 0 and "seed 43 (2 of 2)" in told and "2 seeds: mean" in told
    weights = {p.read_bytes() for p in tmp_path.glob("smoke-cpu-seed-*/grpo/final/model.safetensors")}
    assert len(weights) == 2
    times = [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("*/grpo/final/model.safetensors"))]
    code, told = call()
    assert code == 2 and "already holds a run" in told
    assert call("--resume")[0] == 0  # finished seeds are not repeated
    assert times == [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("*/grpo/final/model.safetensors"))]

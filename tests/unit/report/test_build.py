"""The report's data and page: within its size, text stays text, partial runs work, no secret in it."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorist.errors import CheckpointError
from algorist.evaluation.artifact import write_artifact
from algorist.evaluation.estimators import Interval, summarise
from algorist.report.build import build_report, clock, embedded_json, interval
from algorist.report.collect import collect
from algorist.report.curves import charts, phases, thin
from algorist.store.run_folder import RunFolder
from algorist.store.write import MetricsWriter, RolloutWriter

HOSTILE = "<script>alert(1)</script></script><img src=x onerror=alert(2)>\u2028 & \x1b[31m \u202e"


def make_run(
    path: Path, *, steps: int = 30, problems: int = 20, text: str = "3 + 4 = 7", groups: int = 2
) -> RunFolder:
    """Make a finished run: SFT and GRPO metrics, rollouts, two evaluations."""
    run = RunFolder.create(path)
    run.write_text("config.yaml", "name: test\ngrpo:\n  learning_rate: 0.001\n")
    run.write_environment(seed=1)
    with MetricsWriter(run.metrics) as writer:
        for step in range(1, steps + 1):
            writer.write("sft", step, {"loss": 1 / step, "mean_token_accuracy": 1 - 1 / step})
        for step in range(1, steps + 1):
            values = {
                "reward": step / steps,
                "rewards/correct/mean": step / steps,
                "rewards/well_formed/mean": math.nan if step == 3 else 1.0,
                "entropy": 0.5,
                "time/rollout_s": 1.0,
                "time/update_s": 2.0,
                "time/step_s": 4.0,
            }
            writer.write("grpo", step, values)
    with RolloutWriter(run.rollouts) as store:
        for step in range(steps):
            store.write([rollout(step, i, text) for i in range(4 * groups)])
    for name, right in (("sft", problems // 4), ("grpo", problems // 2)):
        samples = [sample(i, i < right, f"{name}: {text}") for i in range(problems)]
        write_artifact(
            run.evaluations, name, samples=samples, metrics=summarise(samples),
            protocol={"samples": 0}, model="tiny", dataset="test",
        )  # fmt: skip
    return run


def rollout(step: int, index: int, text: str) -> dict[str, Any]:
    return {
        "step": step,
        "group": index // 4,
        "problem_id": f"p{step}-{index // 4}",
        "prompt": f"Question {step}-{index // 4}? {text}",
        "completion": f"{text} number {index}",
        "completion_tokens": 5 + index,
        "rewards": {"correct": float(index % 2), "other": math.nan},
        "reward": float(index % 2),
        "advantage": 0.5,
        "correct": index % 2 == 1,
        "reason": "equal_number" if index % 2 else "different",
    }


def sample(index: int, correct: bool, text: str) -> dict[str, Any]:
    return {
        "problem_id": f"q{index}",
        "sample": 0,
        "greedy": True,
        "question": f"What is {index}? {text.partition(': ')[2]}",
        "gold": str(index),
        "completion": text,
        "extracted": "7",
        "correct": correct,
        "reason": "equal_number" if correct else "different",
        "well_formed": True,
        "completion_tokens": 12,
        "truncated": False,
        "subject": "algebra" if index % 2 else "number theory",
        "level": str(index % 3),
    }


class Page(html.parser.HTMLParser):
    """Collects what a browser would make of the page: elements with their attributes, and script bodies."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def page_of(run: RunFolder) -> tuple[str, Page, dict[str, Any]]:
    text = build_report(run.path).read_text(encoding="utf-8")
    page = Page(text)
    return text, page, json.loads(page.scripts[0])


@pytest.mark.slow
def test_page_holds_the_run(tmp_path: Path) -> None:
    text, _, data = page_of(make_run(tmp_path / "demo"))
    assert "<h1>demo</h1>" in text and "SFT → GRPO: +25.0 points" in text
    assert "greedy accuracy" in text and "learning_rate: 0.001" in text and "algorist run" in text
    assert [s["name"] for s in data["stages"]] == ["sft", "grpo"]
    picture = text.partition('<div class="figures">')[2].partition("</section>")[0]
    assert re.findall(r"quiet\">(\w+)</span>|<strong>([\d.]+) %", picture) == [
        ("SFT", ""),
        ("", "25.0"),
        ("GRPO", ""),
        ("", "50.0"),
    ]
    gain = text.partition('<p class="gain">')[2].partition("</p>")[0]
    assert (
        "+25.0 points" in gain and "from SFT to GRPO: 5 of 20 problems turned right, 0 turned wrong" in gain
    )
    assert (
        text.count('<th scope="row">greedy accuracy</th>') == 1
    )  # one row for both evaluations and their difference
    row = text.partition('<th scope="row">greedy accuracy</th>')[2].partition("</tr>")[0]
    assert row.count("<td") == 3 and "+25.0 points" in row
    open_charts = text.partition('data-stage="grpo"')[2].partition("<details>")[0].count("<figure>")
    assert open_charts == min(4, len(data["stages"][1]["charts"]))
    titles = [c["title"] for c in data["stages"][1]["charts"]]
    assert titles == ["Reward", "Reward components", "Entropy", "Time per step"]
    assert len(data["rollouts"]["rows"]) == 240 and len(data["pairs"]["rows"]) == 20
    assert data["pairs"]["names"] == ["sft", "grpo"]
    changed = [r["sides"][0]["correct"] != r["sides"][1]["correct"] for r in data["pairs"]["rows"]]
    assert changed == sorted(changed, reverse=True) and sum(changed) == 5
    assert "Greedy accuracy by subject" in text and "number theory" in text


def test_model_text_never_becomes_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", steps=3, problems=4, text=HOSTILE)
    text, page, data = page_of(run)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3 and "img" not in tags
    assert "alert(1)</script>" not in text and "\x1b" not in text and "\u202e" not in text
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
    shown = data["rollouts"]["rows"][0]["text"]
    assert shown.startswith("<script>alert(1)</script></script><img src=x onerror=alert(2)>")
    assert "\\x1b[31m \\u202e" in shown


def test_hostile_names_of_runs_subjects_and_models(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b onclick=x>", steps=3, problems=4)
    samples = [sample(i, True, "x: y") | {"subject": f"<i>{i}</i>"} for i in range(4)]
    for name in ("sft", "grpo"):
        write_artifact(
            run.evaluations, name, samples=samples, metrics={"<u>": Interval(0.5, 0.4, 0.6, 4)},
            protocol={"<s>": "<s>"}, model="<a href=x>", dataset="<em>",
        )  # fmt: skip
    _, page, _ = page_of(run)
    assert not {"i", "u", "s", "em", "b"} & {tag for tag, _ in page.elements}


def test_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    _, page, _ = page_of(make_run(tmp_path / "demo", steps=3, problems=4))
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    policies = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and "default-src 'none'" in str(policies[0])


@pytest.mark.slow
def test_long_runs_stay_below_three_megabytes(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "demo", steps=150, problems=400, text="π ≈ 3.14159 <b>&amp;</b> " * 150, groups=3
    )
    text, _, data = page_of(run)
    assert len(text.encode("utf-8")) < 3_000_000
    shown = {r["step"] for r in data["rollouts"]["rows"]}
    assert 0 in shown and len(shown) >= 20
    assert 20 < len(data["pairs"]["rows"]) < 400 and data["pairs"]["all"] == 400


@pytest.mark.slow
def test_very_long_completions_are_cut_and_say_so(tmp_path: Path) -> None:
    _, _, data = page_of(make_run(tmp_path / "demo", steps=2, problems=3, text="x" * 50_000))
    assert re.search(r"xxx … \(\d+ more characters in the store\)$", data["rollouts"]["rows"][0]["text"])


def test_all_chosen_steps_come_before_second_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algorist.report.collect.ROLLOUTS_SHOWN", 100)
    rows = collect(make_run(tmp_path / "demo", steps=100))["rollouts"]["rows"]
    assert len({r["step"] for r in rows}) == 40 and {r["step"] for r in rows} >= {0, 99}


@pytest.mark.slow
def test_partial_runs_have_a_report(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "early")
    with pytest.raises(CheckpointError, match=r"config.yaml is missing"):
        build_report(run.path)
    run.write_text("config.yaml", "name: early\n")
    with pytest.raises(CheckpointError, match="nothing to report yet"):
        build_report(run.path)
    with MetricsWriter(run.metrics) as writer:
        for step in (1, 2, 3):
            writer.write("sft", step, {"loss": 1.0})
    text, _, data = page_of(run)
    assert data["stages"][0]["charts"][0]["curves"][0]["y"] == [1.0, 1.0, 1.0]
    assert 'id="accuracy"' not in text and 'id="rollouts"' not in text
    samples = [sample(i, True, "x: y") for i in range(3)]
    write_artifact(
        run.evaluations,
        "sft",
        samples=samples,
        metrics=summarise(samples),
        protocol={},
        model="m",
        dataset="d",
    )
    text, _, data = page_of(run)
    assert "Held-out completions" in text and len(data["pairs"]["rows"][0]["sides"]) == 1


@pytest.mark.slow
def test_evaluations_of_other_problems_say_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", steps=2, problems=6)
    samples = [sample(i, True, "x: y") for i in range(5)]
    write_artifact(
        run.evaluations,
        "sft",
        samples=samples,
        metrics=summarise(samples),
        protocol={},
        model="m",
        dataset="d",
    )
    text, _, _ = page_of(run)
    assert "sft and grpo cannot be compared" in text and "points [" not in text


@pytest.mark.slow
def test_no_secret_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    monkeypatch.setenv("OWN_SERVICE_KEY", "quiet-words-inside")
    run = make_run(tmp_path / "demo", steps=2, problems=3, text=f"key {secret} quiet-words-inside")
    run.config.write_text(f"hub: {{token: {secret}}}\n")
    (run.path / "environment.json").write_text(
        json.dumps({"command": ["algorist", "run", f"hub.token={secret}"]})
    )
    text, _, _ = page_of(run)
    assert secret not in text and "quiet-words-inside" not in text and "[redacted]" in text


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_embedded_json_comes_back_and_cannot_end_its_script(value: Any) -> None:
    text = embedded_json({"value": value})
    assert json.loads(text) == {"value": value}
    assert not set("<>&\u2028\u2029") & set(text)


def test_thin_keeps_ends_and_means() -> None:
    assert thin([1, 2, 3], [0.1, 0.2, 0.3]) == ([1, 2, 3], [0.1, 0.2, 0.3])
    x, y = thin(list(range(1, 5001)), [float(i) for i in range(5000)], points=500)
    assert len(x) == len(y) == 500 and x[-1] == 5000 and y[0] == 4.5
    assert sum(y) / len(y) == pytest.approx(2499.5, rel=1e-4)


def test_charts_take_each_metric_once() -> None:
    lines = [
        {
            "stage": "grpo",
            "step": s,
            "reward": 1.0,
            "rewards/correct/mean": 0.5,
            "loss": None,
            "eval/pass@1": 0.1 * s,
        }
        for s in (1, 2)
    ]
    found = charts(lines, "grpo")
    assert {c["title"]: [k["label"] for k in c["curves"]] for c in found} == {
        "Held-out accuracy": ["pass@1"],
        "Reward": ["reward"],
        "Reward components": ["correct"],
    }
    assert charts(lines, "sft") == []


@pytest.mark.slow
def test_a_bar_shows_where_the_time_went(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "Where the time went" not in page_of(run)[0]
    with MetricsWriter(run.path / "metrics.jsonl") as writer:
        writer.write(
            "grpo",
            9,
            {"time/rollout_s": 6.0, "time/reward_s": 1.0, "time/update_s": 2.0, "time/step_s": 10.0},
        )
    run.write_json(
        "times.json",
        {"starting": 20.0, "sft": 10.0, "grpo": 20.0, "evaluation": 30.0, "other": 5.0, "<b>": "x"},
    )
    data = collect(run)
    seconds = {name: value for name, value, _ in data["spent"]}
    assert sum(seconds.values()) == pytest.approx(85)
    assert seconds["starting"] == 20 and seconds["evaluation"] == 30
    assert seconds["sampling"] > seconds["grading"] > 0 and seconds["update"] > 10
    page = page_of(run)[0]
    outside = 100 * (20 + seconds["other"]) / 85
    assert f"Outside sampling, grading, update and evaluation: {outside:.0f} % of 1 min 25 s." in page
    run.write_json("times.json", [1, 2])
    assert collect(run)["spent"] == []


def test_phases_tell_what_is_left() -> None:
    lines = [
        {"stage": "grpo", "step": 1, "time/rollout_s": 1.0, "time/update_s": 2.0, "time/step_s": 4.0}
    ] * 2
    assert phases(lines, "grpo") == {"rollout": 2.0, "update": 4.0, "other": 2.0}


def test_numbers_read_well() -> None:
    assert interval(Interval(0.62, 0.561, 0.675, 250), "pass@1") == "62.0 % [56.1, 67.5]"
    assert interval(Interval(41.2, 40, 42.4, 9), "mean_tokens") == "41.2 [40.0, 42.4]"
    assert interval(Interval(0.5, math.nan, math.nan, 1)) == "50.0 %" and interval(None) == "–"
    assert interval(Interval(0.1, -0.02, 0.22, 9), signed=True) == "+10.0 points [-2.0, +22.0]"
    assert [clock(s) for s in (4.2, 185, 3720)] == ["4.2 s", "3 min 05 s", "1 h 02 min"]

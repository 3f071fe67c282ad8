"""The head of a report says what was trained and what the diagnosis is; nothing on it is empty or a dump."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.report.build import build_report
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    settings = ["threads=1", "sft.enabled=false", f"output_dir={folder}", "run_name=r"]
    run_recipe(load_recipe("smoke-cpu", settings).recipe, display=Quiet())
    text = build_report(folder / "r").read_text(encoding="utf-8")
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)


def test_the_header_names_model_data_recipe_seed_and_duration(page: str) -> None:
    header = page[page.index("<header>") : page.index("</header>")]
    assert re.search(r"recipe smoke-cpu · model tiny · data arithmetic · seed 42 · training \d+:\d\d", header)


def test_a_run_that_learned_nothing_says_so_at_the_top(page: str) -> None:
    top = page[: page.index('id="accuracy"')]
    assert "32 of 32 completions have no answer that can be read" in top and re.search(
        r"algorist diagnose \S+/r</code>", top
    )


def test_the_protocol_is_told_in_words(page: str) -> None:
    assert (
        "Protocol: one greedy completion per problem and 2 sampled at temperature 1, prompt format reasoning_answer, "
        "up to 24 tokens, matcher numeric." in page
    )
    assert "fingerprint" not in page and "memory, GiB" in page
    assert '<th scope="row">devices</th>' not in page  # none on a machine without a GPU, or its name


def test_a_report_of_nothing_is_not_healthy(tmp_path: Path) -> None:
    settings = [
        "threads=1",
        "sft.enabled=false",
        "eval.enabled=false",
        f"output_dir={tmp_path}",
        "run_name=r",
    ]
    (tmp_path / "long.py").write_text("def long(completion):\n    return float(len(completion))\n")
    more = ["grpo.max_steps=1", f"rewards=[{tmp_path}/long.py:long]"]
    run_recipe(load_recipe("smoke-cpu", [*settings, *more]).recipe, display=Quiet())
    assert "Too little to judge whether it learns" in build_report(tmp_path / "r").read_text(encoding="utf-8")

"""The report in headless Chromium: it draws, its filters work, it asks for nothing, scripts in completions stay text.

Install Chromium (``apt-get install chromium``) to run these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorist.report.build import LivePage, build_overlay, build_report
from algorist.store.run_folder import RunFolder
from algorist.store.write import RolloutWriter
from tests.marks import first
from tests.slow.chromium_page import BINARY, Browser
from tests.unit.report.test_build import make_run

pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no chromium on this machine; apt-get install chromium"
)

ATTACK = "<script>window.harmed = 1</script><img src=http://example.invalid/x onerror='window.harmed = 2'>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("report") / "demo", steps=20, problems=30)
    with RolloutWriter(run.rollouts) as store:
        row: dict[str, Any] = {
            "step": 20,
            "group": 0,
            "problem_id": "evil",
            "prompt": ATTACK,
            "completion": ATTACK,
        }
        store.write(
            [row | {"reward": 9.5, "correct": False, "reason": "no_answer", "completion_tokens": 400}]
        )
    return build_report(run.path)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def page(browser: Browser, report: Path) -> Browser:
    browser.requests.clear()
    browser.problems.clear()
    browser.open(report)
    return browser


def choose(page: Browser, section: str, **values: str) -> tuple[str, list[str]]:
    """Set fields of a section's filter; return its count line and the texts shown."""
    for name, value in values.items():
        page.run(
            f"(() => {{ const field = document.querySelector('#{section} [name={name}]'); field.value = {value!r};"
            "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
    count = page.run(f"document.querySelector('#{section} .count').textContent")
    return count, page.run(f"[...document.querySelectorAll('#{section} .item')].map((i) => i.textContent)")


def test_it_draws_and_asks_for_nothing(page: Browser, report: Path) -> None:
    assert page.problems == [] and page.requests == [report.resolve().as_uri()]
    assert page.run("document.querySelectorAll('.plot').length") == 6
    inked = """[...document.querySelectorAll('.plot canvas')].map((c) =>
        c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v, i) => i % 4 === 3 && v > 0))"""
    assert page.run(inked) == [True] * 6


def test_scripts_in_completions_are_text(page: Browser) -> None:
    count, texts = choose(page, "rollouts", text="window.harmed")
    assert count == "1 of 161" and ATTACK in texts[0]
    assert page.run("window.harmed ?? 'unharmed'") == "unharmed"
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    assert len(page.requests) == 1


def test_rollout_filters(page: Browser) -> None:
    assert choose(page, "rollouts")[0] == "161 of 161"
    count, texts = choose(page, "rollouts", step="5")
    assert count == "8 of 161" and all("step 5" in t for t in texts)
    count, texts = choose(page, "rollouts", reason="different")
    assert count == "4 of 161" and all("✗ wrong" in t for t in texts)
    assert choose(page, "rollouts", step="", reason="", low="0.5", high="2")[0] == "80 of 161"
    assert choose(page, "rollouts", low="", high="", text="QUESTION 3-1?")[0] == "4 of 161"
    assert choose(page, "rollouts", text="nothing like this") == ("0 of 161", [])
    _, texts = choose(page, "rollouts", text="", sort="tokens-")
    assert "400 tokens" in texts[0]
    _, texts = choose(page, "rollouts", sort="reward-")
    assert "reward 9.5" in texts[0]


def test_lists_grow_by_pages(page: Browser) -> None:
    items = "document.querySelectorAll('#pairs .item').length"
    assert page.run(items) == 12
    page.run("document.querySelector('#pairs .more').click()")
    page.run("document.querySelector('#pairs .more').click()")
    assert page.run(items) == 30 and page.run("document.querySelector('#pairs .more').hidden") is True


def test_before_and_after_side_by_side(page: Browser) -> None:
    count, texts = choose(page, "pairs", change="gained")
    assert count == "8 of 30" and all("✗ wrong" in t and "✓ right" in t for t in texts)
    assert choose(page, "pairs", change="lost")[0] == "0 of 30"
    choose(page, "pairs", change="")
    left, right = page.run(
        "[...document.querySelectorAll('#pairs .item:first-child .side')].map((s) => s.getBoundingClientRect().top)"
    )
    assert left == right


def test_smoothing_moves_the_curve(page: Browser) -> None:
    shot = "document.querySelector('.plot canvas').toDataURL()"
    before = page.run(shot)
    page.run(
        "(() => { const s = document.getElementById('smoothing'); s.value = 0.96; s.dispatchEvent(new Event('input')); })()"
    )
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert (
        page.run(shot) != before
        and page.run("document.getElementById('smoothing-value').textContent") == "0.96"
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_several_runs_fit_the_page(browser: Browser, tmp_path: Path, width: int) -> None:
    runs = [make_run(tmp_path / f"run-{seed}", steps=20, problems=30).path for seed in (1, 2, 3)]
    browser.problems.clear()
    browser.open(build_overlay(runs, tmp_path / "runs.html"), width=width)
    assert browser.problems == [] and browser.run("document.querySelectorAll('.plot canvas').length") > 3
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert browser.run("document.querySelectorAll('#runs tr').length") == 4


@pytest.mark.parametrize(
    ("width", "dark"),
    first(
        3, [(390, False), (768, False), (1280, True), (1280, False), (768, True), (390, True)], together=True
    ),
)
def test_widths_and_themes(browser: Browser, report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    browser.run("1")
    browser.problems.clear()
    browser.open(report, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert browser.run(
        "[...document.querySelectorAll('.plot canvas, pre, .item')].every((e) => e.getBoundingClientRect().right <= innerWidth)"
    )
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert browser.problems == []
    live = tmp_path / "live.html"  # without its server: only the layout is looked at
    live.write_text(LivePage(RunFolder.open(report.parent), dict, 60.0).page(), encoding="utf-8")
    browser.open(live, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width, "the live page scrolls sideways"
    browser.call("Page.navigate", url="about:blank")  # it no longer asks for what no server answers
    browser.run("1")
    assert paper == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")


def test_print_is_light_and_without_controls(browser: Browser, report: Path) -> None:
    browser.open(report, dark=True)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 20_000
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.querySelector('#rollouts form')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")

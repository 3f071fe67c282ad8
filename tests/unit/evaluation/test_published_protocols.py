"""Reference protocols against what the originals' own code said (``benchmarks/protocols.py`` remakes the rows)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorist.config.schema import DatasetSection
from algorist.data import load_problems
from algorist.errors import DataError
from algorist.evaluation.protocols import REFERENCES, with_shots
from algorist.prompts import get_format

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data/protocol_verdicts.jsonl").open(encoding="utf-8")
]
VERDICTS = [row for row in ROWS if "original" in row]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({row["protocol"] for row in VERDICTS}))
def test_verdicts_are_those_of_the_original(name: str) -> None:
    rows = [row for row in VERDICTS if row["protocol"] == name]
    assert len(rows) >= 30 and {True, False} <= {row["original"][0] for row in rows}
    for row in rows:
        _, *ours = REFERENCES[name].score(row["completion"], row["problem"])
        assert ours[: len(row["original"])] == row.get("ours", row["original"]), row


def text_of(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[0]["content"]


def test_prompts_are_those_of_the_original(real_data: Path) -> None:
    section = DatasetSection(name="gsm8k", split="test", path=str(real_data / "gsm8k/test.jsonl"))
    problems = load_problems(section)[:3]
    form = with_shots(get_format("gsm8k_shots"), "gsm8k", section, problems)
    made = {"gsm8k": [text_of(form.render(p.question)) for p in problems]}
    for name in ("minerva_math500", "math_500", "aime_avg"):
        made[name] = [text_of(get_format(REFERENCES[name].prompt_format).render("What is 1 + 1?"))]
    for name, prompts in made.items():
        originals = [row["prompt"] for row in ROWS if row["protocol"] == name and "prompt" in row]
        assert sorted(prompts) == sorted(originals), name


def test_shots_need_the_training_split(real_data: Path, tmp_path: Path) -> None:
    alone = tmp_path / "test.jsonl"
    alone.write_bytes((real_data / "gsm8k/test.jsonl").read_bytes())
    section = DatasetSection(name="gsm8k", split="test", path=str(alone))
    with pytest.raises(DataError, match=r"Expected .*train\.jsonl"):
        with_shots(get_format("gsm8k_shots"), "gsm8k", section, load_problems(section))


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_demonstration_is_read_back_and_right(name: str) -> None:
    reference = REFERENCES[name]
    form = get_format(reference.prompt_format)
    text = form.demonstrate("3 + 4 = 7.", "7")
    assert form.parse(text).answer == "7"
    columns = {"answer": "7", "solution": "It is $\\boxed{7}$."}
    assert reference.score(text, columns)[1:] == (True, True)
    assert reference.score(text, columns | {"answer": "8", "solution": "$\\boxed{8}$"})[1:] == (False, False)

"""``algorist compare`` on files of other programs: real logs of inspect_ai 0.3.285, samples in the form of lm-eval 0.4.13, our own exports."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.imported import read_imported
from algorist.cli.main import main
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.compare import compare
from algorist.evaluation.doors import EXPORTERS
from tests.unit.evaluation.test_compare import artifact, make_samples, write

OTHERS = Path(__file__).resolve().parents[1] / "data" / "others"
A, B, ONCE = (str(OTHERS / name) for name in ("a.eval", "b.eval", "once.json"))
LM_A, LM_B = (str(next((OTHERS / f"model-{name}").glob("samples_*.jsonl"))) for name in "ab")


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["algorist", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, out + err
        return " ".join((err if code else out).split())

    return call


def test_logs_of_inspect(said: Any) -> None:
    assert "it has match, includes; choose one: --score match" in said(A, B, code=2)
    assert "the score 'matches' is unknown. Did you mean 'match'?" in said(A, B, "--score", "matches", code=2)
    result = json.loads(said(A, B, "--score", "match", "--json"))
    pass_at_1 = result["differences"]["pass@1"]  # two epochs each; B also has problem 3 right
    assert (result["n"], result["p_value"], list(result["differences"])) == (6, None, ["pass@1"])
    assert pass_at_1["value"] == pytest.approx(1 / 6) and pass_at_1["low"] < 0 < pass_at_1["high"]
    once = json.loads(said(ONCE, A, "--score", "match", "--score", "includes", "--json"))
    assert once["n"] == 4 and once["differences"]["pass@1"]["value"] == 0
    assert any("only the 4 problems" in line for line in once["warnings"])
    assert any("score is 'match' in the first and 'includes'" in line for line in once["warnings"])


def test_samples_of_lm_eval(said: Any) -> None:
    names = (
        "exact_match,strict-match, exact_match,flexible-extract; choose one: --score exact_match,strict-match"
    )
    assert names in said(LM_A, LM_B, code=2)
    assert "'exact_match' is not alone" in said(LM_A, LM_B, "--score", "exact_match", code=2)
    result = json.loads(said(LM_A, LM_B, "--score", "strict-match", "--json"))
    rows = {path: lines_of(path) for path in (LM_A, LM_B)}
    right = {
        path: {str(r["doc_id"]) for r in lines if r["filter"] == "strict-match" and r["exact_match"]}
        for path, lines in rows.items()
    }
    assert set(result["gained"]) == right[LM_B] - right[LM_A] != set()
    assert set(result["lost"]) == right[LM_A] - right[LM_B]
    assert result["n"] == 6 and "greedy_accuracy" in result["differences"]
    assert "no problem in common, neither by id nor by question" in said(
        LM_A, A, "--score", "strict-match", "--score", "match", code=2
    )


def test_an_evaluation_of_ours_is_matched_by_the_questions(tmp_path: Path, said: Any) -> None:
    questions = [line["doc"]["question"] for line in lines_of(LM_A)[:6]]
    rows = make_samples(1.0, problems=6, samples=2)
    for row in rows:  # the other way round, and with another line end
        row["question"] = questions[5 - int(row["problem_id"][1:])].replace(" ", "\n", 1)
    write(tmp_path / "eval", "grpo", rows)
    result = json.loads(said(LM_A, tmp_path / "eval" / "grpo.json", "--score", "strict-match", "--json"))
    strict = lines_of(LM_A)[:6]
    assert result["gained"] == [str(r["doc_id"]) for r in strict if not r["exact_match"]] != []
    assert "6 problems are matched by their questions, their ids differ" in result["warnings"]
    assert any("another gold answer" in line for line in result["warnings"])


@pytest.mark.parametrize("form", ["inspect", "lm-eval"])
def test_our_own_exports_compare_as_the_originals(form: str, tmp_path: Path, said: Any) -> None:
    runs, files = [], []
    for name, chance, seed in (("sft", 0.3, 1), ("grpo", 0.6, 2)):
        rows = make_samples(chance, problems=20, seed=seed)
        for row in rows:
            row |= {"lenient": row["correct"] or row["sample"] == 1, "has_reasoning": True, "reward": 0.5}
            row |= {"reasoning_characters": 7, "prompt": f"Q: {row['question']} A:"}
        write(tmp_path, name, rows)
        runs.append(read_artifact(tmp_path, name))
        files.append(EXPORTERS.get(form)(runs[-1], tmp_path / name, "sums"))
        sampled = {k: v.value for k, v in runs[-1].metrics.items() if k.startswith("pass@")}
        again = read_imported(Path(files[-1])).metrics
        assert sampled and {k: again[k].value for k in sampled} == pytest.approx(sampled)
    result, original = json.loads(said(*files, "--json")), compare(*runs)
    assert set(result["differences"]) == set(original.differences)
    for metric, interval in original.differences.items():
        same = [getattr(interval, key) for key in ("value", "low", "high", "n")]
        assert list(result["differences"][metric].values()) == pytest.approx(same), metric
    assert (result["gained"], result["lost"]) == (original.gained, original.lost)
    assert (result["p_value"], result["sampled_p_value"]) == (original.p_value, original.sampled_p_value)
    beside = json.loads(said(tmp_path / "sft.json", files[0], "--json"))  # the same evaluation
    assert beside["gained"] == beside["lost"] == beside["warnings"] == [] and beside["n"] == 20


@pytest.mark.parametrize("form", ["inspect", "lm-eval"])
def test_settings_that_differ_are_named_in_exports_too(form: str, tmp_path: Path, said: Any) -> None:
    files = []
    for name, limit, temperature in (("long", 80, 1.0), ("short", 30, 0.3)):
        settings = {"max_completion_tokens": limit, "temperature": temperature}
        made = artifact(make_samples(0.5, problems=6), name, **settings)
        files.append(EXPORTERS.get(form)(made, tmp_path / name, "sums"))
    warnings = json.loads(said(*files, "--json"))["warnings"]
    for line in (
        "max_completion_tokens is 80 in the first and 30",
        "temperature is 1.0 in the first and 0.3",
    ):
        assert any(line in warning for warning in warnings), warnings
    theirs = [json.loads(said(path, LM_A, "--score", "strict-match", "--json")) for path in (LM_A, LM_B)]
    assert not any("protocol differs: m" in line for result in theirs for line in result["warnings"])


def test_one_answer_is_compared_with_several(tmp_path: Path, said: Any) -> None:
    """A log says by its temperature whether a single answer was greedy."""

    def log(name: str, right: int, epochs: int, **config: float) -> Path:
        samples = [
            {"id": i, "epoch": e, "input": f"{i} + 1?", "target": str(i + 1), "output": {"completion": "2"},
             "scores": {"match": {"value": "C" if (i + e) % 5 < right else "I"}}}
            for i in range(20) for e in range(epochs)
        ]  # fmt: skip
        spec = {"task": "sums", "model": "openai/x"}
        whole = {
            "version": 2,
            "status": "success",
            "eval": spec,
            "plan": {"config": config},
            "samples": samples,
        }
        (tmp_path / name).write_text(json.dumps(whole))
        return tmp_path / name

    greedy, sampled, several = log("a.json", 2, 1), log("b.json", 3, 1, temperature=1.0), log("c.json", 4, 4)
    for one, other in ((greedy, several), (several, greedy), (sampled, several)):
        shown = said(one, other)
        assert "pass@1" in shown and "paired difference" in shown and "20 problems" in shown
    assert "pass@1 – " in said(greedy, several) and "McNemar" not in said(greedy, several)
    for other, metric in ((greedy, "greedy_accuracy"), (sampled, "pass@1")):
        assert metric in json.loads(said(other, other, "--json"))["differences"]
    assert "greedy_accuracy" not in json.loads(said(sampled, sampled, "--json"))["differences"]


def test_scores_between_0_and_1(tmp_path: Path, said: Any) -> None:
    for name, values in (("x", (0.25, 0.5, 1.0)), ("y", (0.5, 0.75, 1.0))):
        lines = [
            {"doc_id": n, "doc": {"q": n}, "target": "", "filter": "none", "metrics": ["chrf"], "chrf": v}
            for n, v in enumerate(values)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    result = json.loads(said(*files, "--json"))
    assert result["differences"]["score"]["value"] == pytest.approx(1 / 6)
    assert "score 0.58 [" in said(*files)


def test_files_that_cannot_be_read(tmp_path: Path, said: Any) -> None:
    def refused(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return said(A, tmp_path / name, "--score", "match", code=2)

    whole = Path(A).read_bytes()
    assert "is no log of inspect_ai, or it is damaged" in refused("torn.eval", whole[:-3000])
    assert "is damaged" in refused("bits.eval", whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    assert "is no evaluation that inspect wrote" in refused("list.json", b"[1, 2]")
    assert "has no samples (status: started)" in refused("none.json", b'{"status": "started", "eval": {}}')
    assert "no doc_id, doc, target" in refused("rows.jsonl", b'{"question": "1 + 1?"}\n')
    assert "the file holds two runs" in refused("twice.jsonl", Path(LM_A).read_bytes() * 2)
    assert "*.eval or *.json of inspect" in refused("notes.txt", b"")
    unscored = {"id": 1, "epoch": 1, "input": "?", "target": "", "messages": [], "scores": {}}
    log = {"status": "success", "eval": {"task": "t", "model": "m"}, "samples": [unscored]}
    assert "has no scores" in refused("unscored.json", json.dumps(log).encode())
    with zipfile.ZipFile(tmp_path / "bomb.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", " " * 150_000_000)
    assert "unpacks to 150000000 bytes; expected at most 134217728" in said(
        A, tmp_path / "bomb.eval", "--score", "match", code=2
    )


def test_a_file_of_a_user_reads_another_form(tmp_path: Path, said: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from algorist.evaluation.doors import Foreign, importer\n\n"
        "@importer('marks', '*.marks')\n"
        "def marks(path):\n"
        "    rows = [line.split() for line in path.read_text().splitlines()]\n"
        "    return Foreign('sums', 'me', [dict(problem_id=i, question=i, scores={'ok': float(v)}) for i, v in rows])\n"
    )
    for name, marks in (("x", "a 0\nb 1\n"), ("y", "a 1\nb 1\n")):
        (tmp_path / f"{name}.marks").write_text(marks)
    result = json.loads(
        said(tmp_path / "x.marks", tmp_path / "y.marks", "--plugin", tmp_path / "mine.py", "--json")
    )
    assert (result["gained"], result["lost"], result["n"]) == (["a"], [], 2)

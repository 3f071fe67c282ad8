"""``export --gguf``: files that llama.cpp reads as the model reads them, evaluated through llama.cpp, and mistakes in words."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.errors import ConfigError
from algorist.extensions.llama_cpp.write import SOURCE, modelfile, write_modelfile
from algorist.models.tiny import tiny_model
from algorist.prompts import get_format
from algorist.prompts.attached import Asked
from algorist.prompts.chat import attach, encode_prompt, render_prompt
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from tests.tiny import TOKENIZER, make_model

ASKED = Asked(get_format("reasoning_answer"), 8, ())
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python: pip install '.[llama-cpp]'"
)


def model_folder(folder: Path) -> Path:
    tiny_model(TOKENIZER, seed=1, layers=2, hidden_size=64).save_pretrained(folder)
    tokenizer = copy.deepcopy(TOKENIZER)
    attach(tokenizer, ASKED)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_modelfile_asks_as_in_training() -> None:
    text = modelfile("m-Q8_0.gguf", Asked(get_format("r1_zero"), 99, ("</answer>",)), TOKENIZER)
    template = text.partition('TEMPLATE """')[2].partition('{{ .Response }}"""')[0]
    assert template.replace("{{ .Prompt }}", "1+1") == render_prompt(get_format("r1_zero"), TOKENIZER, "1+1")
    assert text.startswith("FROM ./m-Q8_0.gguf\n") and 'PARAMETER stop "</answer>"\n' in text
    assert text.endswith("PARAMETER temperature 0\nPARAMETER num_predict 99\n")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is here")
def test_a_modelfile_for_another_type_is_kept(tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q4_K_M", "Q4_K_M"):
        write_modelfile(tmp_path, modelfile(f"m-{kind}.gguf", ASKED, TOKENIZER))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Modelfile", "Modelfile-Q8_0"]
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./m-Q4_K_M.gguf\n")
    assert (tmp_path / "Modelfile-Q8_0").read_text().startswith("FROM ./m-Q8_0.gguf\n")


def test_without_llama_cpp_the_command_says_how_to_get_it(verb: Any, tmp_path: Path) -> None:
    code, _, err = verb("export", str(tmp_path), "--gguf", "Q8_0")
    assert code == 2 and "pip install 'algorist[llama-cpp]'" in err and "without a C++ compiler" in err


def test_mistakes_in_the_command_are_told_before_anything_is_loaded(verb: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for words, why in (
        (("--gguf", "Q80"), "--gguf Q80 is unknown. Did you mean 'Q8_0'?"),
        (("--verify", "--to", "x"), "--verify needs GGUF files to verify: --gguf Q8_0 Q4_K_M"),
        (("Q8_0", "--to", "x"), "'Q8_0' is one model too many"),
        (("--gguf", "Q8_0", "--push-to-hub", "a/b"), "--gguf and --push-to-hub are two exports"),
    ):
        code, _, err = verb("export", folder, *words)
        assert code == 2 and why in err, err


@needs_llama
@pytest.mark.slow
def test_files_answer_as_the_model_and_the_loss_is_printed(
    verb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from algorist.extensions.llama_cpp.engine import LlamaCppEngine

    folder = model_folder(tmp_path / "m")
    data = "arithmetic,params={count: 4, seed: 3}"
    words = ("export", str(folder), "--gguf", "F32", "Q8_0", "--to", str(tmp_path / "g"))
    code, out, err = verb(*words, "--verify", "--data", data, "--limit", "4")
    assert code == 0, err
    lines = [line for line in out.splitlines() if " through llama.cpp: " in line]
    assert [line.partition(":")[0] for line in lines] == ["F32", "Q8_0"] and "4 problems" in lines[0]
    assert {p.name for p in (tmp_path / "g").iterdir()} == {"m-F32.gguf", "m-Q8_0.gguf", "Modelfile", "eval"}
    protocol = json.loads((tmp_path / "g" / "eval" / "m-F32.json").read_text())["protocol"]
    assert protocol["prompt_format"] == "reasoning_answer" and protocol["max_completion_tokens"] == 8

    prompts = [encode_prompt(ASKED.prompt_format, TOKENIZER, q) for q in ("1+1", "7*8 gives")]
    params = SamplingParams(max_new_tokens=8, seed=5)
    ours = make_engine("native", tiny_model(TOKENIZER, seed=1, layers=2, hidden_size=64).eval(), TOKENIZER)
    engine = LlamaCppEngine(tmp_path / "g" / "m-F32.gguf", TOKENIZER, context=256)
    a, b = ours.generate(prompts, 2, params), engine.generate(prompts, 2, params)
    engine.llama.close()
    for mine, theirs in zip([c for g in a for c in g], [c for g in b for c in g], strict=True):
        assert mine.token_ids == theirs.token_ids and mine.finish_reason == theirs.finish_reason
        torch.testing.assert_close(
            torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), atol=2e-3, rtol=0
        )


@needs_llama
def test_a_broken_file_a_wrong_folder_and_an_unknown_architecture_are_told(
    verb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from algorist.extensions.llama_cpp.engine import LlamaCppEngine

    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"llama.cpp cannot load .*broken.gguf"):
        LlamaCppEngine(tmp_path / "broken.gguf", TOKENIZER)
    monkeypatch.setenv(SOURCE, str(tmp_path))
    make_model().save_pretrained(tmp_path / "m")
    TOKENIZER.save_pretrained(tmp_path / "m")
    code, _, err = verb("export", str(tmp_path / "m"), "--gguf", "Q8_0", "--to", str(tmp_path / "g"))
    assert code == 2 and "there is no convert_hf_to_gguf.py; expected a checkout of llama.cpp" in err
    code, _, err = verb("export", str(tmp_path / "m"), "--gguf", "Q8_0", "--verify")
    assert code == 2 and "--verify needs problems" in err

"""vLLM's server as a teacher: its log-probs of a prompt are those of the same model in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorist.config.section import ModelSection
from algorist.errors import EngineError
from algorist.extensions.teacher import TeacherSection
from algorist.extensions.teacher.remote import load_teacher

from .servers import Server, make_folders

pytestmark = pytest.mark.vllm
TEXT = "Tom has 3 bags of 4. Mia has 12 bags of 2."
K = 24


def test_vllm_scores_as_the_model_does_here(tmp_path: Path) -> None:
    make_folders(tmp_path)
    folder = tmp_path / "varied"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    server = Server.start(folder, "--max-logprobs", str(K))
    try:
        section = TeacherSection(model=server.url, loss="top_k", top_k=K)
        teacher = load_teacher(section, model, tokenizer, like=ModelSection())
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        scores = teacher.scores([ids, ids[:5]], K)  # type: ignore[attr-defined]
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for place in range(1, len(ids)):
            rest, target, *best = teacher.numbers(scores[0][place], ids[place], K)  # type: ignore[attr-defined]
            assert target == pytest.approx(float(logs[place - 1, ids[place]]), abs=2e-3)
            assert best[K:] == pytest.approx(logs[place - 1].topk(K).values.tolist(), abs=2e-3)
            assert rest < 0
        assert len(scores[1]) == 5
        with pytest.raises(EngineError, match=r"400.*logprobs"):
            teacher.scores([ids], K + 1)  # type: ignore[attr-defined]
    finally:
        server.kill()

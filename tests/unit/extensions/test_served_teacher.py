"""A teacher behind an address says what the same model says in this process: a real server, the real client."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from algorist.config import load_recipe
from algorist.config.section import ModelSection
from algorist.errors import ConfigError, EngineError
from algorist.extensions.served_teacher.server import Scorer, make_server
from algorist.extensions.teacher import TeacherSection
from algorist.extensions.teacher.model import Teacher
from algorist.extensions.teacher.remote import load_teacher
from algorist.runs.draft import Draft
from algorist.runs.plan import make_plan
from tests.tiny import TOKENIZER, make_model
from tests.unit.extensions.test_teacher import save, taught


def listening(server: ThreadingHTTPServer) -> str:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("teacher"), 1)


@pytest.fixture(scope="module")
def url(folder: str) -> Iterator[str]:
    server = make_server(Scorer(folder, "cpu"), "127.0.0.1", 0)
    yield listening(server)
    server.shutdown()
    server.server_close()


def connect(url: str, student: Any = None, tokenizer: Any = TOKENIZER, **settings: Any) -> Teacher:
    section = TeacherSection(model=url, **settings)
    return load_teacher(section, student or make_model(), tokenizer, like=ModelSection())


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_logits_that_a_family_scales_are_scaled(tmp_path: Path, family: str) -> None:
    scaled = {
        "granite": {"logits_scaling": 8.0},
        "cohere": {"logit_scale": 0.0625},
        "gemma2": {"head_dim": 8},
    }
    small = {
        "vocab_size": len(TOKENIZER),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "eos_token_id": 0,
    }
    config = AutoConfig.for_model(
        family, num_attention_heads=4, num_key_value_heads=2, **small, **scaled[family]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (9,)).tolist()
    (choice,) = Scorer(str(tmp_path), "cpu").answer({"prompt": ids, "prompt_logprobs": 0})["choices"]
    said = [entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], ids[1:])]
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    expected = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert said == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"loss": "sampled"}, {"loss": "top_k", "top_k": 12}])
def test_a_served_teacher_teaches_what_the_same_model_teaches_here(
    tmp_path: Path, folder: str, url: str, settings: dict[str, Any]
) -> None:
    logs, weights = [], []
    for name, model in (("here", folder), ("served", url)):
        trainer, part = taught(tmp_path / name, teacher={"model": model, **settings}, max_steps=2)
        trainer.train()
        logs.append(trainer.state.log_history)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert part.teacher.line().startswith(f"teacher {folder}, served by {url}")
    for here, served in zip(*logs, strict=True):
        for name in ("teacher/reverse_kl", "teacher/agreement", "teacher/log_prob"):
            if name in here:
                assert served[name] == pytest.approx(here[name], abs=1e-4), name
    assert any("teacher/reverse_kl" in line for line in logs[0])
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    assert float((weights[0] - weights[1]).norm()) < 0.01 * float((weights[0] - start).norm())


@pytest.mark.slow
def test_the_likeliest_tokens_come_in_the_form_of_the_teacher_here(
    tmp_path: Path, folder: str, url: str
) -> None:
    trainer, part = taught(tmp_path, teacher={"model": folder, "device": "cpu"}, max_steps=1)
    trainer.train()
    here, served = (teacher.top(trainer.rollouts, trainer, 5) for teacher in (part.teacher, connect(url)))
    mask = trainer.rollouts.mask
    assert torch.equal(here[mask][:, 2:7], served[mask][:, 2:7])
    torch.testing.assert_close(here[mask], served[mask], atol=1e-4, rtol=1e-4)


def test_another_tokenizer_is_refused_in_the_words_of_both(url: str) -> None:
    plus, times = (TOKENIZER.convert_tokens_to_ids(sign) for sign in "+*")

    class Swapped:
        """The student's tokenizer, in which two signs have each other's id."""

        def get_vocab(self) -> dict[str, int]:
            return dict(TOKENIZER.get_vocab())

        def decode(self, ids: list[int]) -> str:
            swap = {plus: times, times: plus}
            return str(TOKENIZER.decode([swap.get(i, i) for i in ids]))

    with pytest.raises(ConfigError, match=r"another tokenizer: the student's '[+*]' is '[+*]' there \(2 of"):
        connect(url, tokenizer=Swapped())


@pytest.mark.parametrize(
    ("choice", "score", "message"),
    [
        ({}, None, r"no log-probs of a prompt.*--engine scores.*FILE\.gguf"),
        ({"index": "zero"}, {"logprob": -1.0}, "no log-probs of a prompt"),
        ({}, [1, 2], "gives .* as the log-probs of a token; expected an object of token ids"),
        ({}, -1.0, "as the log-probs of a token"),
        ({}, {"logprob": -1.0, "decoded_token": 5}, "as the log-probs of a token"),
        ({}, {"logprob": -1e300}, "gives -1e[+]300 as the log-prob of token"),
        ({}, {"logprob": -(10**400)}, "as the log-prob of token"),
    ],
)
def test_a_server_without_scores_is_refused_with_what_would_do(
    choice: dict[str, Any], score: Any, message: str
) -> None:
    class Plain(BaseHTTPRequestHandler):
        """What llama.cpp's server answers, a text; or scores of another form than vLLM's."""

        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "m"}]})

        def do_POST(self) -> None:
            (ids,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            scores = [None, *({str(i): score} for i in ids[1:])]
            one = {"index": 0, "text": " 4"} | ({"prompt_logprobs": scores} if score else {})
            self.reply({"choices": [one, *([one | choice] if choice else [])]})

        def reply(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    with pytest.raises(EngineError, match=message):
        connect(listening(server))
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineError, match="cannot be reached"):
        connect(f"http://127.0.0.1:{server.server_address[1]}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("loss: full", r"loss=full compares whole distributions, which no server sends.*top_k"),
        ("quantization: 4bit", r"quantization says nothing of a teacher that is served"),
        ("temperature: 0.5", r"scores at temperature 1, but it should at 0\.5"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_anything_is_loaded(settings: str, message: str) -> None:
    teacher = f"grpo.teacher={{model: 'http://localhost:1', {settings}}}"
    with pytest.raises(ConfigError, match=message):
        make_plan(Draft.of(load_recipe("smoke-cpu", [teacher]).recipe, in_folder=False))


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme of a teacher's address 'htp'.*'http'"):
        make_plan(
            Draft.of(
                load_recipe("smoke-cpu", ["grpo.teacher.model='htp://localhost:1'"]).recipe, in_folder=False
            )
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [1, 2]}, "prompt_logprobs is None"),
        ({"prompt": [1, 2], "prompt_logprobs": 10**9}, "prompt_logprobs is 1000000000"),
        ({"prompt": "1 + 1", "prompt_logprobs": 0}, "expected a prompt of token ids"),
        ({"prompt": [[1], [10**9]], "prompt_logprobs": 0}, "token ids from 0 to"),
        ({"prompt": [[True]], "prompt_logprobs": 0}, "token ids from 0 to"),
        ({"prompt": [[]], "prompt_logprobs": 0}, "lists of 1 to"),
        ([1], "expected an object"),
    ],
)
def test_a_request_that_is_none_is_answered_with_why(url: str, body: Any, message: str) -> None:
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 400 and message in json.loads(refused.value.read())["error"]
    again = json.dumps({"prompt": [1, 2], "prompt_logprobs": 0}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", data=again, timeout=10) as reply:
        first, second = json.loads(reply.read())["choices"][0]["prompt_logprobs"]
    assert first is None and set(second) == {"2"}

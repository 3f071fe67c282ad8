"""A server that scores and does nothing else: log-probs of prompts in vLLM's form, for a teacher on another machine.

``POST /v1/completions`` with ``prompt`` (a list of token ids, or several) and ``prompt_logprobs`` (k likeliest tokens beside the prompt's
own) gives ``choices[i].prompt_logprobs``; ``GET /v1/models`` lists the one model. One request is computed at a time.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from algorist.config.section import ModelSection
from algorist.models.load import make_policy, pick_device
from algorist.training.lm_head import altered_logits

MOST_BODY, MOST_TEXTS, MOST_K = 1 << 24, 256, 256
"""Limits of a request: bytes, lists of tokens, likely tokens of each."""
ELEMENTS = 1 << 26
"""Logits that are held at once."""


class Refused(ValueError):
    """A request that is not answered; the text says why."""


class Scorer:
    """Log-probs of token ids under a model."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, pick_device(device)
        self.policy = make_policy(ModelSection(name=name), device=self.device, seed=0, trained=False)
        self.model = self.policy.model.eval()
        self.rows = int(self.model.get_output_embeddings().weight.shape[0])
        self.longest = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 1 << 30))
        self.lock = threading.Lock()

    def answer(self, body: Any) -> dict[str, Any]:
        """Return the reply to a request (Refused)."""
        texts, k = body.get("prompt"), body.get("prompt_logprobs")
        if isinstance(texts, list) and texts and isinstance(texts[0], int):
            texts = [texts]
        if type(k) is not int or not 0 <= k <= min(MOST_K, self.rows):
            raise Refused(
                f"prompt_logprobs is {k!r}; expected 0 to {min(MOST_K, self.rows)}: this server scores prompts only"
            )
        if not isinstance(texts, list) or not 0 < len(texts) <= MOST_TEXTS:
            raise Refused(f"expected a prompt of token ids, or up to {MOST_TEXTS} of them")
        for ids in texts:
            if not isinstance(ids, list) or not 0 < len(ids) <= self.longest:
                raise Refused(f"expected lists of 1 to {self.longest} token ids")
            if not all(type(i) is int and 0 <= i < self.rows for i in ids):
                raise Refused(f"expected token ids from 0 to {self.rows - 1}")
        with self.lock, torch.inference_mode():
            choices = [
                {"index": i, "text": "", "prompt_logprobs": self.score(ids, k)} for i, ids in enumerate(texts)
            ]
        return {"object": "text_completion", "model": self.name, "choices": choices}

    def score(self, ids: list[int], k: int) -> list[dict[str, Any] | None]:
        """Return for each token its log-prob and those of the k likeliest, None for the first."""
        config, tokens = self.model.config.get_text_config(), torch.tensor([ids], device=self.device)
        cap, head = getattr(config, "final_logit_softcapping", None), self.model.get_output_embeddings()
        if altered_logits(config) in (None, "final_logit_softcapping"):
            hidden = self.model.base_model(tokens).last_hidden_state[0, :-1]
            hidden = hidden / getattr(config, "logits_scaling", 1.0)
        else:  # the whole at once, by the model's own rule
            hidden, cap, head = self.model(tokens).logits[0, :-1], None, torch.nn.Identity()
        scores: list[dict[str, Any] | None] = [None]
        for part, targets in zip(
            hidden.split(size := max(1, ELEMENTS // self.rows)), torch.tensor(ids[1:]).split(size)
        ):
            logits = head(part).float()
            logs = ((logits / cap).tanh() * cap if cap else logits).log_softmax(-1)
            own = logs.gather(1, targets[:, None].to(logs.device))[:, 0].tolist()
            best = [values.tolist() for values in logs.topk(k, 1)]
            for token, value, values, likely in zip(targets.tolist(), own, *best, strict=True):
                pairs = [*zip(likely, values, strict=True), (token, value)]
                scores.append(
                    {
                        str(i): {"logprob": x, "decoded_token": self.policy.tokenizer.decode([i])}
                        for i, x in pairs
                    }
                )
        return scores


def make_server(scorer: Scorer, host: str, port: int) -> ThreadingHTTPServer:
    """Return the server, which listens already."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            known = {
                "/health": {},
                "/v1/models": {"object": "list", "data": [{"id": scorer.name, "object": "model"}]},
            }
            self.reply(200 if self.path in known else 404, known.get(self.path, {"error": "no such path"}))

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            if self.path != "/v1/completions" or not 0 < size <= MOST_BODY:
                self.close_connection = True
                return self.reply(
                    404, {"error": f"expected /v1/completions with 1 to {MOST_BODY} bytes of JSON"}
                )
            try:
                body = json.loads(self.rfile.read(size))
                if not isinstance(body, dict):
                    raise Refused("expected an object")
                self.reply(200, scorer.answer(body))
            except (ValueError, RecursionError) as error:
                self.reply(400, {"error": str(error)[:300]})

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    make_server(Scorer(options.model, options.device), options.host, options.port).serve_forever()


if __name__ == "__main__":
    main()

"""vLLM as a rollout engine, in a server of its own: requests over HTTP, weights through a folder that both see, or over NCCL.

Nothing of vLLM is imported but for NCCL: the trainer's environment needs none. Tested with vLLM 0.32 on CPU (``make test-vllm``).
"""

from __future__ import annotations

import copy
import http.client
import json
import logging
import math
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from algorist.errors import EngineError
from algorist.extensions.vllm.engine import (
    VLLMRollouts,
    check_lengths,
    is_filtered,
    named_weights,
    not_finite,
    request,
)
from algorist.extensions.vllm.section import VLLMServerSection
from algorist.models.sharding import unwrap
from algorist.rollouts.base import Completion, Completions, Prompts, SamplingParams
from algorist.rollouts.model_info import ModelSetting

log = logging.getLogger("algorist.extensions.vllm.server")

START = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs "
    "--generation-config vllm"
)
AGAIN = f"Look at its log, start it again ({START}) and continue from the last checkpoint: the same command with --resume"
_NCCL = (
    'start it on GPUs of its own with --weight-transfer-config \'{"backend": "nccl"}\', with vllm in the trainer\'s environment too, or '
    "take grpo.vllm.weight_transfer=folder"
)
_STARTING_SECONDS, _ANSWER_SECONDS, _LOOK_SECONDS = 60.0, 3600.0, 10.0
_CONNECTIONS = 128
_LARGEST_GAP = 0.5  # in the mean; bfloat16 stays below 0.1
_SHARD_BYTES = 1 << 30
# What makes a model another shape; families call it by different names.
_SHAPE = (
    "model_type vocab_size hidden_size n_embd intermediate_size n_inner num_hidden_layers n_layer num_attention_heads n_head "
    "num_key_value_heads head_dim num_experts num_local_experts tie_word_embeddings"
).split()


class VLLMServerEngine(VLLMRollouts):
    """Samples groups through a running vLLM server, given the policy's weights before each generation.

    The weights go as safetensors into a folder under ``sync_folder``; vLLM reads them from there (``reload_weights`` of its
    development endpoints) and forgets what it has cached; the folder is removed. One run at a time per server.

    Args:
        model, tokenizer: See ``VLLMRollouts``.
        settings: ``grpo.vllm``; a server at http://localhost:8000 when left out.
        together: Every process of the distributed group generates at the same time; the first one alone sends the weights.

    Raises:
        EngineError: Quantised weights, which cannot be sent.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        settings: VLLMServerSection | None = None,
        together: bool = False,
    ) -> None:
        super().__init__(model, tokenizer)
        section = settings or VLLMServerSection()
        url = section.server_base_url or f"http://{section.server_host or 'localhost'}:{section.server_port}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self.sync_folder = Path(section.sync_folder).expanduser().absolute() if section.sync_folder else None
        self.together = together and torch.distributed.is_initialized()
        self._patience = section.server_timeout or _STARTING_SECONDS
        self._over_nccl = section.weight_transfer == "nccl"
        self._transfer: Any = None
        self._served: _Served | None = None
        self._compared, self._sends = False, True

    def with_present_weights(self, tokenizer: Any) -> VLLMServerEngine:
        """Give the server the policy's weights; return an engine that samples with them, whatever becomes of the policy."""
        self._server()
        self._send_weights()
        other = copy.copy(self)
        other.tokenizer, other.setting = tokenizer, ModelSetting(self.model, tokenizer)
        other._sends, other._compared = False, True
        return other

    def _sample(
        self, prompts: Prompts, count: int, params: SamplingParams, stops: Sequence[int], seed: int
    ) -> Completions:
        served = self._server()
        check_lengths(prompts, served.context, "start the server with --max-model-len")
        if self._sends:
            self._send_weights()

        def ask(index: int) -> list[Completion]:
            body = {
                **request(count, params, stops, seed + index * count),
                "model": served.name,
                "prompt": [int(i) for i in prompts[index]],
                "repetition_penalty": 1.0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "skip_special_tokens": False,
            }
            try:
                choices = self._call("/v1/completions", body)["choices"]
            except _Refused as refused:
                if "not JSON compliant" in refused.detail:
                    raise not_finite() from None
                raise
            try:
                return [_completion(choice, stops) for choice in sorted(choices, key=lambda c: c["index"])]
            except (KeyError, TypeError):
                raise self._too_old() from None

        with ThreadPoolExecutor(min(len(prompts), _CONNECTIONS)) as pool:
            groups = list(pool.map(ask, range(len(prompts))))
        if not self._compared and not is_filtered(params):
            self._compare(prompts[0], groups[0][:2], params.temperature or 1.0)
        return groups

    def _compare(self, prompt: Sequence[int], group: list[Completion], temperature: float) -> None:
        """Refuse a server whose log-probs are not the policy's, once: not every other shape is seen elsewhere (EngineError)."""
        own = self._with_own_log_probs([prompt], [group], temperature)[0]
        pairs = [pair for x, y in zip(group, own, strict=True) for pair in zip(x.log_probs, y.log_probs)]
        gap = sum(abs(a - b) for a, b in pairs) / len(pairs)
        if gap > _LARGEST_GAP:
            raise EngineError(
                f"the vLLM server at {self.url} was given the policy's weights, but its log-probs differ by {gap:.2g} per token: "
                f"it serves another model, or another run gives it weights too. Start one for this run alone, with the model of "
                f"the recipe: {START}"
            )
        self._compared = True

    # ---- the server -------------------------------------------------------------------------------------------

    def _server(self) -> _Served:
        """Return the served model, checked against the policy at the first use."""
        if self._served is None:
            self._wait()
            self._served = self._look()
        return self._served

    def _wait(self) -> None:
        """Wait for a server that is still starting (EngineError)."""
        until, warned = time.monotonic() + self._patience, False
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=_LOOK_SECONDS):
                    return
            except urllib.error.HTTPError:
                return  # something answers; _look says what is wrong with it
            except OSError as error:
                if time.monotonic() >= until:
                    raise EngineError(
                        f"no vLLM server answers at {self.url} ({_reason(error)}; waited {self._patience:g} s). Start one: "
                        f"{START}, or correct grpo.vllm.server_base_url, or take grpo.engine=native"
                    ) from None
            if not warned:
                log.info(
                    "waiting up to %g s for the vLLM server at %s (grpo.vllm.server_timeout)",
                    self._patience,
                    self.url,
                )
                warned = True
            time.sleep(min(1.0, self._patience))

    def _look(self) -> _Served:
        try:
            config = self._call("/server_info?config_format=json", None)["vllm_config"]
            served = _Served(config, str(self._call("/v1/models", None)["data"][0]["id"]))
        except _Refused as refused:
            if refused.code != 404:
                raise
            raise EngineError(
                f"{self.url} has no development endpoints, which take new weights: it is no vLLM server, or was started "
                f"without VLLM_SERVER_DEV_MODE=1. Start it like this: {START}"
            ) from None
        except (KeyError, IndexError, TypeError):
            raise self._too_old() from None
        served.check(unwrap(self.model), self._dtype, self.url)
        if self._over_nccl and served.transfer != "nccl":
            raise EngineError(f"the vLLM server at {self.url} takes no weights over NCCL; {_NCCL}")
        chunked = config.get("scheduler_config", {}).get("enable_chunked_prefill")
        if chunked and "cpu" in str(config.get("device_config")):
            # Generators of the CPU have no offset to set back when a prompt comes in parts; vLLM 0.32 dies of it.
            raise EngineError(
                f"the vLLM server at {self.url} runs on CPU and takes prompts in parts, where it cannot draw with seeds; start "
                "it with --no-enable-chunked-prefill too"
            )
        return served

    def _too_old(self) -> EngineError:
        return EngineError(
            f"the vLLM server at {self.url} does not answer as vLLM 0.32 does, with which this was tested; install a newer vLLM "
            "there"
        )

    def _send_weights(self) -> None:
        """Let the server read the policy's present weights; in a group of processes the first one does it for all."""
        if not self.together:
            return self._sync()
        from accelerate.utils import broadcast_object_list

        message: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            try:
                self._sync()
            except EngineError as error:
                message = [str(error)]
        broadcast_object_list(message)
        if message[0] is not None:
            raise EngineError(message[0])

    def _sync(self) -> None:
        if self._over_nccl:
            self._broadcast()
        else:
            self._through_a_folder()
        if not self._call("/reset_prefix_cache?reset_running_requests=true", {}).get("success", True):
            raise EngineError(
                f"the vLLM server at {self.url} cannot forget what it has cached of the old weights; does another run or "
                "client use it? Start a server for this run alone"
            )

    def _broadcast(self) -> None:
        """Send the weights as vLLM's own trainers do: this process is the first of a NCCL group, the server's workers the others."""
        try:
            from vllm.distributed.weight_transfer import base, clients, factory, nccl_engine

            if not torch.distributed.is_nccl_available():
                raise OSError("torch has no NCCL here")
            if self._transfer is None:
                place = urllib.parse.urlsplit(self.url)
                address = place.hostname, place.port or {"https": 443}.get(place.scheme, 80)
                with socket.create_connection(address) as met, socket.socket(met.family) as free:
                    free.bind((met.getsockname()[0], 0))  # by which the server finds this machine
                    group = *free.getsockname()[:2], 1 + self._server().workers
                info = nccl_engine.NCCLTrainerInitInfo(*group, packed=False, rank=0)
                client = clients.HTTPVLLMWeightSyncClient(self.url, _ANSWER_SECONDS)
                weights = SimpleNamespace(named_parameters=partial(named_weights, self.model))
                make = factory.WeightTransferTrainerFactory.trainer_init
                self._transfer = make(info, client=client, source=base.ModuleSource(weights))
            self._transfer.send_weights()
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"the weights could not go to the vLLM server at {self.url} over NCCL ({_reason(error)}); {_NCCL}"
            ) from error

    def _through_a_folder(self) -> None:
        with self._new_folder() as folder:
            write_weights(self.model, folder)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            try:
                self._call("/collective_rpc", body)
            except _Refused as refused:
                raise EngineError(
                    f"the vLLM server at {self.url} could not load the weights in {folder}: {refused.detail}. It must see "
                    "the same folder as the trainer (set grpo.vllm.sync_folder to one that both share) and serve a model "
                    f"of the policy's shape; start it again after another shape: {START}"
                ) from None

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        try:
            if self.sync_folder is not None:
                self.sync_folder.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="algorist-weights-", dir=self.sync_folder))
            if self.sync_folder is not None:  # perhaps the server is another user
                folder.chmod(0o755)
        except OSError as error:
            raise EngineError(
                f"cannot write weights for the vLLM server: {error}; set grpo.vllm.sync_folder to a writable folder"
            ) from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Send ``body`` as JSON (None: GET) and return the answer's JSON.

        Raises:
            _Refused: The server answered with an error.
            EngineError: The server is gone.
        """
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise _Refused(self.url + path, error.code, error.read(2000).decode(errors="replace")) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineError(
                f"the vLLM server at {self.url} stopped answering ({_reason(error)}). {AGAIN}"
            ) from None


class _Refused(EngineError):
    """An answer with an error code."""

    def __init__(self, url: str, code: int, text: str) -> None:
        self.code = code
        try:
            self.detail = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            self.detail = text.strip()[:500] or f"error {code}"
        super().__init__(f"{url} answered {code}: {self.detail}. {AGAIN}")


class _Served:
    """The model that a server serves."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config["model_config"], name
        self.context = int(self.config["max_model_len"])
        self.transfer = (config.get("weight_transfer_config") or {}).get("backend")
        of_group = config.get("parallel_config", {})
        self.workers = math.prod(
            int(of_group.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data")
        )

    def check(self, base: Any, dtype: torch.dtype, url: str) -> None:
        """Refuse a server whose model is not the policy's, or whose log-probs cannot be used (EngineError)."""
        theirs, ours = _shape_of(str(self.config["model"])), _shape(base.config)
        other = [
            f"{key} {theirs.get(key, 'default')} instead of {ours.get(key, 'default')}"
            for key in _SHAPE
            if theirs and theirs.get(key) != ours.get(key)
        ]
        if other:
            raise EngineError(
                f"the vLLM server at {url} serves {self.name}, another model than the policy, a {type(base).__name__}: "
                f"{', '.join(other)}. Start it with the model of the recipe: {START}"
            )
        mode = str(self.config.get("logprobs_mode"))
        if mode.rpartition(".")[2] != "processed_logprobs":
            raise EngineError(
                f"the vLLM server at {url} gives {mode}, not the log-probs at the sampling temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if str(self.config.get("dtype")).removeprefix("torch.") != str(dtype).removeprefix("torch."):
            log.warning(
                "the vLLM server computes in %s, the policy has %s: their log-probs differ; --dtype %s brings them together",
                self.config.get("dtype"),
                dtype,
                str(dtype).removeprefix("torch."),
            )


def write_weights(model: Any, folder: Path) -> None:
    """Write a policy's weights by their checkpoint names into safetensors files, active adapters merged (EngineError)."""
    shard: dict[str, Tensor] = {}
    size = count = 0
    try:
        for name, weight in named_weights(model):
            shard[name] = weight.to("cpu", copy=True).contiguous()
            size += shard[name].nbytes
            if size >= _SHARD_BYTES:
                save_file(shard, folder / f"model-{count:05}.safetensors")
                shard, size, count = {}, 0, count + 1
        if shard:
            save_file(shard, folder / f"model-{count:05}.safetensors")
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write the weights for the vLLM server into {folder}: {error}; set grpo.vllm.sync_folder to a folder "
            "with more room"
        ) from error


def _shape(config: Any) -> dict[str, Any]:
    """Return a config's entries of shape; an entry that it leaves out has the family's default."""
    values = json.loads(config.to_json_string())
    values = {**values, **values.get("text_config", {})}
    return {key: values[key] for key in _SHAPE if key in values}


def _shape_of(model: str) -> dict[str, Any]:
    """Return the shape of the model that the server was started with; nothing where it cannot be read from here."""
    from transformers import AutoConfig

    try:
        return _shape(AutoConfig.from_pretrained(model))
    except (OSError, ValueError) as error:
        log.info("cannot read the config of the vLLM server's model %s: %s", model, error)
        return {}


def _completion(choice: Mapping[str, Any], stops: Sequence[int]) -> Completion:
    ids = [int(i) for i in choice["token_ids"]]
    log_probs = [float(x) for x in choice["logprobs"]["token_logprobs"]]
    return Completion(ids, log_probs, "stop" if ids and ids[-1] in stops else "length")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error) or type(error).__name__

"""Memory of one of several GPUs that share a 7B model (FSDP2): loading, a rollout, an update and the optimizer's step, on the stub.

``python -m tests.cuda_host.sharded FOLDER`` (that of ``make test-cuda-host``) prints the peaks on 8 cards of 80 GB. One process runs;
what the others would send has no numbers. The main process reads the weights into the host's memory, which is not counted here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

RANK, MODEL = 1, "Qwen/Qwen2.5-7B-Instruct"
_LAUNCHED = {
    "RANK": str(RANK), "LOCAL_RANK": "0",
    "MASTER_ADDR": "none", "MASTER_PORT": "1", "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # fmt: skip


@contextmanager
def others(count: int) -> Iterator[None]:
    """Processes beside this one, ``count`` in all, which answer as this one does and send nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from algorist.training import distributed, grpo, order

    def same(value: Any) -> list[Any]:
        return [value] * count

    def joined(_: Any, groups: Any) -> list[Any]:
        return list(groups) * count

    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with patch.dict(os.environ, _LAUNCHED | sizes), patch.object(grpo, "join_groups", joined):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=count)
        with (
            patch.object(distributed, "of_all", same),
            patch.object(grpo, "of_all", same),
            patch.object(order, "of_all", same),
        ):
            yield
        torch.distributed.destroy_process_group()


def measure(processes: int = 8, *, trains: bool = True) -> dict[str, float]:
    """Return gigabytes: the own part of the weights, the peak while it comes, all weights for a rollout, and the peaks of a step."""
    import torch
    import transformers
    from accelerate import init_empty_weights

    from algorist.config import load_recipe
    from algorist.models.load import Policy, settle
    from algorist.models.precision import pick_precision, set_compute
    from algorist.training.distributed import shard, whole_weights
    from benchmarks.models import make_tokenizer
    from tests.cuda_host.memory import config_of, grpo

    settings = [f"model.name={MODEL}", "model.lora=null", f"grpo.processes={processes}"]
    recipe, device = load_recipe("math-grpo", settings).recipe, torch.device("cuda")
    precision, tokenizer = pick_precision(recipe.model, device), make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with init_empty_weights(include_buffers=False):  # what the main process sends of it
        model = transformers.Qwen2ForCausalLM(config_of(MODEL, **ids))
    set_compute(model.to(precision.master), precision.compute)
    with others(processes):
        shard(model, device)
        sizes = {"part": torch.cuda.memory_allocated(), "loading": torch.cuda.max_memory_allocated()}
        settle(model, recipe.model, device)
        with whole_weights(model):
            sizes["whole"] = torch.cuda.memory_allocated()
        if trains:
            with patch.multiple("algorist.preflight.trial", STEPS=2, ENOUGH_S=0.0):
                sizes |= grpo(recipe, Policy(model, tokenizer), device)[1]
    return {name: size / 1e9 for name, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--card", default="90:80", help="compute capability and memory in GB (90:80)")
    options = parser.parse_args()
    code = f"import json; from tests.cuda_host.sharded import measure; print(json.dumps(measure({options.processes})))"
    command = [options.folder.resolve() / "python", *options.card.split(":"), "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-1000:])
    sizes = json.loads(done.stdout.splitlines()[-1])
    print(f"{MODEL}, FSDP2, 1 of {options.processes} GPUs, card {options.card}, all weights trained")
    for name, size in sizes.items():
        print(f"{name:10} {size:6.2f} GB")


if __name__ == "__main__":
    main()

"""One of two gloo processes with a model that FSDP2 shards; prints what it finds as one line of JSON."""

from __future__ import annotations

import copy
import datetime
import json
import os

import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from algorist.config.schema import GRPOSection
from algorist.errors import EngineError
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.rollouts.transformers import TransformersEngine
from algorist.training import part_size
from algorist.training.batch import Batch
from algorist.training.distributed import whole_weights
from algorist.training.log_probs import packed_log_probs

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
config = hf.Qwen2Config(
    vocab_size=200, num_hidden_layers=2, max_position_embeddings=256, eos_token_id=None, **shape
)
whole = hf.Qwen2ForCausalLM(config)
model = copy.deepcopy(whole)
early = NativeEngine(model)  # as in a run: made before accelerate shards the model
for layer in model.model.layers:
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
found: dict[str, object] = {}

# Rollouts of unequal length: one process decodes 8 tokens more.
params = SamplingParams(max_new_tokens=10 + 8 * rank, seed=3 + rank)
expected = NativeEngine(whole).generate([[5, 6, 7], [8, 9]], 3, params)
with torch.no_grad(), whole_weights(model):
    sampled = early.generate([[5, 6, 7], [8, 9]], 3, params)
found["same_tokens"] = [[c.token_ids for c in g] for g in sampled] == [
    [c.token_ids for c in g] for g in expected
]

# Evaluation by the main process alone.
with whole_weights(model):
    if rank == 0:
        early.generate([[5, 6, 7]], 1, SamplingParams(max_new_tokens=5, temperature=0))
    dist.barrier()

# What would call the model's forward for every token is refused.
refused = []
for engine in (lambda: NativeEngine(model, tier="module"), lambda: TransformersEngine(model)):
    try:
        engine().generate([[5, 6]], 1, SamplingParams(max_new_tokens=2))
    except EngineError as error:
        refused.append(str(error))
found["refused"] = refused

# The packed update: each process takes half of the rows; FSDP averages the gradients. The backward pass recomputes layers.
torch.manual_seed(5)
completions = [torch.randint(2, 200, (size,)).tolist() for size in (4, 9, 6, 2)]
mask = torch.arange(9) < torch.tensor([[4], [9], [6], [2]])
batch = Batch([[3, 4, 5], [6, 7]], completions, [0, 0, 1, 1], torch.ones(4), mask)


def update(policy: torch.nn.Module, rows: list[int]) -> torch.Tensor:
    log_probs, _ = packed_log_probs(policy, batch.take(rows))
    log_probs.sum().backward()
    return log_probs.detach()


model.train()
model.gradient_checkpointing_enable()
mine = update(model, [2 * rank, 2 * rank + 1])
both = update(whole, [0, 1, 2, 3])
found["log_probs"] = float((mine - both[2 * rank : 2 * rank + 2, : mine.shape[1]]).abs().max())
worst = 0.0
for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
    assert ours.grad is not None and theirs.grad is not None
    exact = theirs.grad / 2
    worst = max(worst, float((ours.grad.full_tensor() - exact).norm() / exact.norm().clamp(min=1e-9)))
found["gradients"] = worst
# What fits is counted on this process's part of weights, gradients and moments (12 bytes per weight here; 20 are free).
for each in (whole, model):
    each.zero_grad(set_to_none=True)  # what is there already is not left
part_size.on_gpu = lambda device: True
part_size.memory_left = lambda device: 20 * sum(p.numel() for p in whole.parameters()) // 2
found["tokens"] = [part_size.tokens_that_fit(m, GRPOSection()) for m in (whole, model)]
print(json.dumps(found), flush=True)
dist.destroy_process_group()

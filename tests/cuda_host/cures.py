"""Which tests notice that a cure of CUDA's host code is missing: one is taken out at a time.

``python -m tests.cuda_host.cures FOLDER [NAME …]`` prints one JSON line per cure, FOLDER being that of ``make test-cuda-host``; exit 1
where one goes unnoticed. The tests of ``tests/cuda_host`` run on the stub of a card, the others on the CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.slow.mutations import caught_by

TIER, WEIGHTS, PREFIX, PACKED, PRECISION = (
    "rollouts/native/graph_tier.py",
    "rollouts/native/weights.py",
    "training/shared_prefix.py",
    "training/packed.py",
    "models/precision.py",
)
_KEPT = "        self._tensors[turn], self._addresses[turn] = tensor, _address(tensor)\n"
_HOST, _NUMBERS, _UPDATE, _ROLLOUT, _GRAPH = (
    "tests/cuda_host/test_host.py::",
    "tests/cuda_host/test_numbers.py::",
    "tests/cuda/test_update_on_gpu.py::",
    "tests/cuda/test_rollout_on_gpu.py::",
    "tests/cuda/test_graph_tier.py::",
)
CURES: dict[str, tuple[tuple[str, str, str], str, int]] = {
    "queries and keys in the values' type": (
        (PREFIX, "(t.to(dtype) for t in (query, key, value))", "(t for t in (query, key, value))"),
        _UPDATE + "test_the_cpus_log_probs_and_gradients",
        0,
    ),
    "the class behind FSDP2": (
        ("models/sharding.py", 'return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else kind', "return kind"),
        "tests/cuda/test_sharded.py",
        0,
    ),
    "the allocator's unused bytes": (
        (PRECISION, "[0]) + unused", "[0])"),
        _ROLLOUT + "test_the_budget_counts_what_the_allocator_holds_unused",
        0,
    ),
    "scores in float32": (
        ("rollouts/native/decoder.py", "torch.bmm(query, key, out_dtype=torch.float32)", "torch.bmm(query, key).float()"),
        _ROLLOUT + "test_large_key_biases_do_not_part_sampler_and_trainer",
        0,
    ),
    "adapters stay factors": (
        (WEIGHTS, "(dtype == torch.float32 and not exact) or not adapted", "True"),
        _ROLLOUT + "test_small_changes_of_an_adapter_reach_the_sampler",
        0,
    ),
    "one copy per step for stop strings": (
        ("rollouts/row_state.py", "zip(*state.tolist(), strict=True)", "zip(*(t.tolist() for t in state), strict=True)"),
        _ROLLOUT + "test_stop_strings_cost_one_wait_per_token_more",
        0,
    ),
    "moved weights void graphs": (
        (WEIGHTS, _KEPT + "        self.moved = True\n", _KEPT),
        _HOST + "test_a_step_may_be_captured",
        90,
    ),
    "copies keep their address": (
        (WEIGHTS, "return old.copy_(tensor)", "self._tensors[turn] = tensor\n            return tensor"),
        _GRAPH + "test_new_weights_come_to_the_old_addresses",
        0,
    ),
    "no wait inside a step": (
        (TIER, "sample(logits_SV, uniform_S, params, may_wait=False, ids", "sample(logits_SV, uniform_S, params, ids"),
        _HOST + "test_a_step_may_be_captured",
        90,
    ),
    "the head in tiles": (
        ("training/lm_head.py", 'device != "cpu" and not', 'device not in ("cpu", "pretend") and not'),
        "tests/cuda/test_head_on_gpu.py::test_the_matrix_is_read_in_a_few_products",
        0,
    ),
    "recomputed layers see the row": (
        (PREFIX, "setattr(module, RECOMPUTE, _inside(config, row, run, module if sparing else None))", "pass"),
        _UPDATE + "test_checkpointed_layers_give_the_cpus_gradients_too",
        0,
    ),
    "inputs come back from the host": (
        (PACKED, "else stored[0].to(device, non_blocking=True)", "else stored[0]"),
        _HOST + "test_a_pass_that_fails_leaves_nothing_on_the_card",
        90,
    ),
    "the layout in one copy": (
        (PACKED, '    packed = torch.cat([t.reshape(-1)', '    return [t.to(device) for t in tensors]\n    packed = torch.cat([t.reshape(-1)'),
        _UPDATE + "test_a_part_waits_for_its_layout_only",
        0,
    ),
    "a capture beside other threads": (
        (TIER, ', capture_error_mode="thread_local"', ""),
        _HOST + "test_how_a_step_is_captured",
        90,
    ),
    "a direct run before the capture": (
        (TIER, "self._capture and self._warm and self._graph is None", "self._capture and self._graph is None"),
        _HOST + "test_how_a_step_is_captured",
        90,
    ),
    "one pool for all graphs": ((TIER, "pool=self._pool, ", ""), _HOST + "test_how_a_step_is_captured", 90),
    "a look is recorded": ((TIER, "            arrived.record()\n", ""), _HOST + "test_how_a_step_is_captured", 90),
    "a T4 takes blocks": (
        ("training/attention_kernels.py", " and has_tensor_cores_for(torch.bfloat16, device):", ":"),
        _NUMBERS + "test_an_update",
        75,
    ),
    "bfloat16 on a T4 is refused": (
        (PRECISION, "compute == torch.bfloat16 and on_gpu(device) and not", "False and not"),
        "tests/unit/models/test_precision.py::test_bfloat16_is_refused_where_it_is_emulated",
        0,
    ),
}  # fmt: skip
"""By name: file, text and what takes its place; the test; the card's compute capability, 0 without a card."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {'; '.join(CURES)}")
    options = parser.parse_args()
    changes = {name: change for name, (change, _, _) in CURES.items()}
    unnoticed = 0
    for name in options.names or CURES:
        _, test, capability = CURES[name]
        card = [str(options.folder.resolve() / "python"), str(capability), "16"]
        noticed = caught_by(name, [test], changes, *([card] if capability else []))
        unnoticed += not noticed
        print(json.dumps({"cure taken out": name, "noticed by": noticed or None}), flush=True)
    raise SystemExit(1 if unnoticed else 0)


if __name__ == "__main__":
    main()

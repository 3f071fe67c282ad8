"""The graph tier on a GPU: the eager decoder's rollouts; between the replays next to nothing is launched or waited for."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from algorist.errors import EngineError
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.engines import auto_engine
from algorist.rollouts.native import graph_tier
from algorist.rollouts.native.engine import NativeEngine
from algorist.rollouts.native.weights import WeightPool, read_weights
from tests.cuda.pretend import Log, pretend_gpu, to_device
from tests.cuda.test_rollout_on_gpu import PROMPTS, adapted, compare, model
from tests.marks import first
from tests.unit.rollouts.test_conformance import Echo, decode


@contextmanager
def counted(log: Log) -> Iterator[dict[str, int]]:
    """Count replays, and take what the direct call of a step launches out of the log: a graph has it inside."""
    counts = {"replays": 0, "inside": 0, "waits inside": 0}
    run = graph_tier.Step.run

    def replay(step: graph_tier.Step) -> None:
        before = sum(log.launches.values()), sum(log.syncs.values())
        run(step)
        counts["replays"] += 1
        counts["inside"] += sum(log.launches.values()) - before[0]
        counts["waits inside"] += sum(log.syncs.values()) - before[1]

    with patch.object(graph_tier.Step, "run", replay):
        yield counts


def cost(
    tokens: int, dtype: torch.dtype = torch.bfloat16, turns: Echo | None = None, **changes: Any
) -> tuple[int, int, dict[str, int]]:
    """Return launches outside the graphs, waits, and the counts of one rollout of ``tokens`` tokens per row."""
    with pretend_gpu() as log, counted(log) as counts:
        policy = to_device(model(1, eos_token_id=None, vocab_size=512).to(dtype))
        engine = NativeEngine(policy, lambda ids: " ".join(map(str, ids)))
        log.reset()
        engine.generate(PROMPTS, 4, SamplingParams(max_new_tokens=tokens, seed=3, **changes), turns)
        assert engine.tier_for(100).name == "graph", "what a GPU takes when nothing is asked for"
        launches = sum(log.launches.values()) - counts["inside"] + counts["replays"]
        return launches, sum(log.syncs.values()), counts


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        *first(0, [{"top_p": 0.9, "temperature": 0.7, "min_new_tokens": 3}, {"top_k": 5, "min_p": 0.1}]),
        *first(0, [{"stop_strings": ("nowhere 1",)}, {"turns": Echo("nowhere 1")}]),
    ],
    ids=lambda c: "-".join(c),
)
def test_launches_outside_the_graphs_and_waits(changes: dict[str, Any]) -> None:
    short, long = cost(9, **changes), cost(33, **changes)
    assert long[2]["waits inside"] == 0, "a wait inside the step could not be captured"
    assert long[2]["replays"] == 32 and long[2]["inside"] > 40 * 32
    assert (long[0] - short[0]) / 24 <= 20
    assert (long[1] - short[1]) / 24 <= 1 / 8


@pytest.mark.parametrize("budget", first(1, [110, None]), ids=["refilled", "one wave"])
def test_same_tokens_and_log_probs_as_on_the_cpu(budget: int | None) -> None:
    params = SamplingParams(max_new_tokens=20, seed=3)
    policy = model(1, vocab_size=512)
    expected = NativeEngine(policy, tier="decoder").generate(PROMPTS, 4, params)
    with pretend_gpu():
        engine = NativeEngine(to_device(copy.deepcopy(policy)), tier="graph", token_budget=budget)
        compare(engine.generate(PROMPTS, 4, params), expected, 1e-5)
        compare(engine.generate(PROMPTS, 4, params), expected, 1e-5)  # on the buffers of the first call


def test_calls_set_rows_back_and_are_answered_as_on_the_cpu() -> None:
    """Replies lie ready on the device: graphs are replayed on, and what a row sampled beyond its call is sampled again."""
    params = SamplingParams(max_new_tokens=20, seed=3)
    policy = model(1, vocab_size=512)
    plain = NativeEngine(policy, tier="decoder").generate(PROMPTS, 4, params)
    call = decode([plain[1][0].token_ids[2]])
    expected = NativeEngine(policy, decode, tier="decoder").generate(PROMPTS, 4, params, Echo(call))
    with pretend_gpu() as log, counted(log) as counts:
        engine = NativeEngine(to_device(copy.deepcopy(policy)), decode)
        found = engine.generate(PROMPTS, 4, params, Echo(call))
        assert counts["replays"] > 19 and counts["waits inside"] == 0
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    assert any(there.turns for _, there in pairs)
    for here, there in pairs:
        assert (here.token_ids, here.sampled, here.turns) == (there.token_ids, there.sampled, there.turns)


def test_older_gpus_decode_eagerly() -> None:
    with pretend_gpu(capability=(7, 5)):
        assert NativeEngine(to_device(model())).tier_for(100).name == "decoder"


def tensors(engine: NativeEngine) -> list[torch.Tensor]:
    assert engine._graph is not None
    return list(engine._graph._pool._tensors)


def test_new_weights_come_to_the_old_addresses() -> None:
    """Graphs read addresses: float32 masters with bfloat16 products are copied, and the copies must not move."""
    from algorist.models.precision import set_compute

    policy = model(1)
    set_compute(policy, torch.bfloat16)
    params = SamplingParams(max_new_tokens=12, seed=3)
    with pretend_gpu():
        policy = to_device(policy)
        engine = NativeEngine(policy, tier="graph")
        first = engine.generate(PROMPTS, 4, params)
        before, steps = tensors(engine), dict(engine._graph._steps)  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.3)
        second = engine.generate(PROMPTS, 4, params)
        assert second != first
        assert all(a is b for a, b in zip(tensors(engine), before, strict=True))
        assert engine._graph._steps == steps, "graphs are kept"  # type: ignore[union-attr]
        assert NativeEngine(policy, tier="graph").generate(PROMPTS, 4, params) == second


@pytest.mark.slow
def test_adapters_stay_factors_and_are_followed() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    with pretend_gpu():
        policy = to_device(adapted(torch.bfloat16, 0.05))
        engine = NativeEngine(policy, tier="graph")
        found = [engine.generate(PROMPTS, 1, params)]
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-1.0)
        found.append(engine.generate(PROMPTS, 1, params))
        assert not engine._graph._pool.moved  # type: ignore[union-attr]
        with policy.disable_adapter():
            found.append(engine.generate(PROMPTS, 1, params))
            assert engine._graph._pool.moved, "other tensors: the graphs are void"  # type: ignore[union-attr]
            plain = NativeEngine(policy, tier="decoder").generate(PROMPTS, 1, params)
    compare(found[2], plain, 0.05)
    assert found[0] != found[1] != found[2]


def test_weights_that_moved_void_the_graphs() -> None:
    policy, pool = model().bfloat16(), WeightPool()
    read_weights(policy, 4, pool)
    assert pool.moved
    read_weights(policy, 4, pool)
    assert not pool.moved
    policy.lm_head.weight.data = policy.lm_head.weight.data.clone()
    read_weights(policy, 4, pool)
    assert pool.moved
    # As FSDP2 does between rollouts: one storage, freed and taken again somewhere else.
    storage = policy.lm_head.weight.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    storage.resize_(0)
    taken = torch.empty(size, dtype=torch.uint8)
    storage.resize_(size)
    read_weights(policy, 4, pool)
    assert pool.moved == (storage.data_ptr() != address)
    del taken


def test_a_forgotten_engine_takes_its_memory_along() -> None:
    """An evaluation makes an engine; in a circle its cache would stay until a full collection."""
    engine = NativeEngine(model(1, vocab_size=512), tier="graph")
    engine.generate(PROMPTS, 4, SamplingParams(max_new_tokens=8, seed=3))
    cache = weakref.ref(engine._graph._buffers)  # type: ignore[union-attr]
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong", ["alive for ever", "zeros"])
def test_numbers_that_are_wrong_end_the_rollout(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that never calls a row finished would be asked for ever; one that writes nothing calls rows without a token finished."""
    looks = []
    read = graph_tier._Look.read

    def other(look: Any) -> list[list[int]]:
        looks.append(look)
        assert len(looks) < 50, "asked for ever"
        alive, ends = read(look)
        return [[1] * len(alive), ends] if wrong == "alive for ever" else [[0] * len(alive)] * 2

    monkeypatch.setattr(graph_tier._Look, "read", other)
    with pytest.raises(EngineError, match="12 rows have had all their steps, and the GPU still calls them"):
        NativeEngine(model(1, vocab_size=512), tier="graph").generate(
            PROMPTS, 4, SamplingParams(max_new_tokens=8, seed=3)
        )


@pytest.mark.long
@pytest.mark.slow
def test_the_memory_goes_back_where_the_update_would_miss_it() -> None:
    params = SamplingParams(max_new_tokens=8, seed=3)
    for free, kept in ((8 << 30, True), (1 << 18, False)):
        with pretend_gpu(free=free):
            engine = NativeEngine(to_device(model()), tier="graph")
            first = engine.generate(PROMPTS, 4, params)
            assert (engine._graph.nbytes > 0) == kept  # type: ignore[union-attr]
            assert engine.generate(PROMPTS, 4, params) == first


@pytest.mark.parametrize(
    ("installed", "rows", "capability", "engine", "why"),
    [
        (False, 64, (9, 0), "auto", "CUDA graphs, attention in torch; not vLLM: it is not installed"),
        (True, 64, (9, 0), "vllm", "is installed and pays for 64 rows"),
        (True, 16, (9, 0), "auto", "it pays from 32 rows at a time or 3 billion weights, these are 16 and"),
        (
            True,
            64,
            (7, 5),
            "auto",
            "one kernel at a time (CUDA graphs take compute capability 8.0); not vLLM",
        ),
    ],
)
def test_auto_says_in_one_line_what_it_takes_and_why(
    installed: bool,
    rows: int,
    capability: tuple[int, int],
    engine: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if installed:
        (tmp_path / "vllm.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    assert auto_engine("auto", model(1), rows) == ("auto", ""), "nothing to choose on the CPU"
    with pretend_gpu(capability=capability):
        policy = to_device(model(1))
        chosen, line = auto_engine("auto", policy, rows)
        assert chosen == engine and why in line and "\n" not in line, line
        assert auto_engine("native", policy, rows) == ("native", "")

"""Triton's decode attention equals a float64 softmax over each row's own keys, and so does its plain twin.

Without a GPU the kernels run in Triton's interpreter: the same source, one program after another.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton", reason="Triton is not installed here (Linux: pip install -e '.[dev]')")

from algorist.rollouts.native.decode_attention import PlainAttention, StepState  # noqa: E402
from algorist.rollouts.native.triton_attention import PIECE, TritonAttention  # noqa: E402
from tests.marks import first  # noqa: E402

POSITIONS = 900


def a_state(
    groups: list[int],
    prompts: list[int],
    lengths: list[int],
    *,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    idle: int = 0,
) -> StepState:
    """A cache of random numbers: ``groups[p]`` rows continue the prompt at place p, which has ``prompts[p]`` tokens.

    ``lengths`` are the rows' stored tokens, taken in turns; the last ``idle`` slots are empty.
    """
    torch.manual_seed(0)
    slots, places = sum(groups) + idle, len(groups)
    times, size, most = max(lengths) + 5, max(max(prompts), 1) + 3, max(max(groups), 1)
    member = torch.full((places, most), -1)
    place, member_of = torch.full((slots,), -1), torch.zeros(slots, dtype=torch.int64)
    order = torch.randperm(slots)[: sum(groups)].tolist()  # the rows of a group need not be neighbours
    for group, count in enumerate(groups):
        for i in range(count):
            slot = order.pop()
            member[group, i], place[slot], member_of[slot] = slot, group, group * most + i
    length = torch.tensor([lengths[s % len(lengths)] for s in range(slots)]) * (place >= 0)
    prompt_length = torch.tensor(prompts)
    angle = torch.rand(POSITIONS, dim // 2) * 6

    def cache(count: int, room: int) -> Tensor:
        return torch.randn(count, kv_heads, room, dim).to(dtype)

    made: dict[str, Any] = {
        "keys": [cache(slots, times)],
        "values": [cache(slots, times)],
        "prompt_keys": [cache(places, size)],
        "prompt_values": [cache(places, size)],
        "position": (prompt_length[place.clamp(min=0)] + length) * (place >= 0),
        "length": length,
        "place": place,
        "prompt_length": prompt_length,
        "member": member,
        "member_of": member_of,
        "rotation": [torch.stack([angle.cos(), angle.sin()], -1)],
    }
    for name, value in made.items():
        made[name] = [t.to(DEVICE) for t in value] if isinstance(value, list) else value.to(DEVICE)
    return StepState(**made, window=[window], query_scale=0.3, eps=1e-6)


def reference(state: StepState, qkv: Tensor, norm: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """One row after another in float64: (out, rotated keys)."""
    kv_heads = state.keys[0].shape[1]
    x = qkv.double()
    qk = x[:, : heads + kv_heads]
    if norm is not None:
        qk = qk / (qk.pow(2).mean(-1, keepdim=True) + state.eps).sqrt() * norm.double()
    turn = torch.view_as_complex(state.rotation[0].double()[state.position]).unsqueeze(1)
    qk = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
    dtype = state.keys[0].dtype  # queries and keys are rounded to it, scores are not
    q, k = (t.to(dtype).double() for t in (qk[:, :heads] * state.query_scale, qk[:, heads:]))
    v = x[:, heads + kv_heads :]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for slot in range(len(q)):
        place, n = int(state.place[slot]), int(state.length[slot])
        for head in range(heads):
            kv = head // (heads // kv_heads)
            keys, values = state.keys[0][slot, kv, :n].double(), state.values[0][slot, kv, :n].double()
            if place >= 0:
                size = int(state.prompt_length[place])
                keys = torch.cat([state.prompt_keys[0][place, kv, :size].double(), keys])
                values = torch.cat([state.prompt_values[0][place, kv, :size].double(), values])
            keys, values = torch.cat([keys, k[slot, kv, None]]), torch.cat([values, v[slot, kv, None]])
            keys, values = (t[-state.window[0] :] for t in (keys, values))
            out[slot, head] = (keys @ q[slot, head]).softmax(-1) @ values
    return out.flatten(1), k


def check(state: StepState, heads: int, within: float, norm: bool = False) -> None:
    slots, kv_heads, _, dim = state.keys[0].shape
    qkv = torch.randn(slots, heads + 2 * kv_heads, dim, device=DEVICE).to(state.keys[0].dtype)
    weights = torch.rand(heads + kv_heads, dim, device=DEVICE) + 0.5 if norm else None
    expected, new_keys = reference(state, qkv, weights, heads)
    for kind in (TritonAttention, PlainAttention):
        mine = deepcopy(state)
        found = kind(mine, heads).step(0, qkv, weights).double()
        assert found.isfinite().all(), f"{kind.name}: an idle slot must not spread NaN"
        live = state.place >= 0
        torch.testing.assert_close(found[live], expected[live], atol=within, rtol=within)
        at = torch.arange(slots, device=DEVICE), slice(None), mine.length
        torch.testing.assert_close(mine.keys[0][at].double(), new_keys, atol=within, rtol=within)
        torch.testing.assert_close(mine.values[0][at], qkv[:, heads + kv_heads :], atol=0, rtol=0)
        mine.keys[0][at], mine.values[0][at] = state.keys[0][at], state.values[0][at]
        assert torch.equal(mine.keys[0], state.keys[0]) and torch.equal(mine.values[0], state.values[0])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "heads"), first(2, [(1, 2), (16, 2), (64, 1)], together=True))
def test_a_prompt_shared_by_rows_of_any_length(rows: int, heads: int) -> None:
    check(a_state([rows], [37], [0, 1, 63, 64, 65, 20], kv_heads=1), heads, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "heads", "dim"), first(1, [(1, 7, 16), (2, 6, 24), (2, 2, 64)], together=True)
)
def test_grouped_heads_and_head_dimensions(kv_heads: int, heads: int, dim: int) -> None:
    check(a_state([3, 1, 2], [9, 70, 1], [0, 3, 30], kv_heads=kv_heads, dim=dim), heads, 1e-5)


@pytest.mark.slow
def test_empty_slots_and_empty_places() -> None:
    check(a_state([2, 0, 1], [5, 0, 11], [4, 0, 9], idle=3), 4, 1e-5)
    check(a_state([0, 0], [0, 6], [0], idle=2), 4, 1e-5)


@pytest.mark.slow
def test_sequences_longer_than_one_piece() -> None:
    check(a_state([2, 1], [PIECE + 40, PIECE], [2 * PIECE + 3, PIECE - 1, PIECE], kv_heads=1), 2, 1e-5)


@pytest.mark.slow
def test_norms_of_queries_and_keys() -> None:
    check(a_state([3, 2], [9, 4], [0, 3, 12]), 4, 1e-5, norm=True)


@pytest.mark.slow
@pytest.mark.parametrize("window", first(2, [5, PIECE + 3, 1, 12]))
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    """In completions and in prompts, within a piece and whole pieces; the rows of a group are of different lengths."""
    lengths = [0, 3, 2, 30, PIECE + 70, window]
    check(a_state([4, 2], [2 * PIECE + 9, 4], lengths, kv_heads=1, window=window), 2, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_caches_have_float32_scores(dtype: torch.dtype) -> None:
    """Keys with a common offset of 100, as Qwen2.5's: scores in bfloat16 would be off by 14 %."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers; this one needs a GPU")
    state = a_state([4], [30], [0, 9, 33], dtype=dtype)
    for keys in (*state.keys, *state.prompt_keys):
        keys += 100.0
    check(state, 4, 0.03 if dtype == torch.bfloat16 else 0.005)

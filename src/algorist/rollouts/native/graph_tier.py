"""The graph tier: one decode step is one CUDA graph, replayed without asking the host.

Launching a step's kernels one by one takes a server's processor 4 to 9 ms, the memory of an H100 needs 0.3 to 0.9 ms for it.
A captured step has no launches: lengths, positions, sampling and the stop rules stay on the device, and the host looks every
``READ_EVERY`` steps which rows are finished, one look late, while the device computes. A row that called a tool meanwhile is set
back to the end of its call, and its reply lies ready on the device: what it had sampled beyond is sampled again. There is one
graph per number of slots (a ladder of sizes); graphs, cache and weights keep their addresses from call to call, and new weights
are copied into place.
Without CUDA the same step runs by direct calls, which is how tests cover it; ``DecoderTier`` is the eager twin.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from algorist.errors import EngineError, is_out_of_memory
from algorist.models.precision import on_gpu, unused_gpu_bytes
from algorist.models.products import why_no_triton
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.decode_attention import DecodeAttention, PlainAttention, StepState
from algorist.rollouts.native.decoder import Decoder
from algorist.rollouts.native.decoder_tier import SlotSchedule, plan_room
from algorist.rollouts.native.graph_buffers import FIELDS, Buffers, Room, slots_for
from algorist.rollouts.native.weights import WeightPool, read_weights
from algorist.rollouts.row_state import Rows
from algorist.rollouts.sampling import sample, sample_longer

log = logging.getLogger("algorist.rollouts.native.graph_tier")
READ_EVERY = 8
_POSITION, _LENGTH, _NEXT, _TOKEN, _ALIVE = range(5)
KEPT_SHARE = 4
_MOST_LOOKS = 3
"""Looks after the last step of every row: an older one may still be on its way, and one may be needed to see the end."""


def attention_kind(device: torch.device) -> type[Any]:
    """Return the Triton kernels where they run, else their twin in torch."""
    if device.type != "cuda":
        return PlainAttention
    if (reason := why_no_triton()) is not None:
        _say_once(reason)
        return PlainAttention
    from algorist.rollouts.native.triton_attention import TritonAttention

    return TritonAttention


@cache
def _say_once(reason: str) -> None:
    log.warning("the decode kernels do not run here, torch's own operations take their place: %s", reason)


class _Attempt:
    """An attention whose kernels may ask for more than the card has (shared memory): then its twin in torch, with one line."""

    def __init__(self, attention: DecodeAttention, state: StepState, heads: int) -> None:
        self.attention, self.name, self._started = attention, attention.name, False
        self._twin = partial(PlainAttention, state, heads)

    def step(self, index: int, qkv_SND: Tensor, norm_ND: Tensor | None) -> Tensor:
        """Attend; see ``DecodeAttention``."""
        try:
            out = self.attention.step(index, qkv_SND, norm_ND)
        except Exception as error:  # of a compiler, as each likes
            if self._started or is_out_of_memory(error) or isinstance(self.attention, PlainAttention):
                raise
            _say_once((str(error).strip().splitlines() or [type(error).__name__])[0])
            self.attention = self._twin()
            self.name = self.attention.name
            out = self.attention.step(index, qkv_SND, norm_ND)
        self._started = True
        return out


class Step:
    """One decode step for a number of slots: run directly the first time, then captured and replayed."""

    def __init__(self, body: Callable[[], None], pool: Any, capture: bool) -> None:
        self.body, self._pool, self._capture = body, pool, capture
        self._graph: Any = None
        self._warm = False

    def run(self) -> None:
        if self._capture and self._warm and self._graph is None:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self.body()  # also compiles the kernels and sets up cuBLAS, which a capture must not do
            self._warm = True

    def _record(self) -> None:
        graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
        state = torch.cuda.default_generators[device].clone_state()
        try:
            # Other threads (grading, tracking) may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.body()
            self._graph = graph
        except RuntimeError as error:
            # torch 2.11 leaves generator and allocator as they are within a capture.
            torch.cuda.default_generators[device].graphsafe_set_state(state)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
            if is_out_of_memory(error):
                raise
            self._capture = False
            log.warning("no CUDA graph, decoding without: %s", str(error).partition("\n")[0])


@dataclass(frozen=True, slots=True)
class _Look:
    """Snapshot of the device at some step: a copy on its way to the host, and the rows in the slots."""

    numbers: Tensor
    arrived: Any
    rows: list[int | None]

    def read(self) -> list[list[int]]:
        """Wait for the copy; return alive, next and the newest tokens, each by slot."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.tolist()


class GraphTier:
    """Keeps graphs, cache and weights between requests; ``run`` fills the rows of one."""

    name = "graph"

    def __init__(self, model: Any) -> None:
        self.model = model
        self._pool = WeightPool()
        self._buffers: Buffers | None = None
        self._steps: dict[Any, Step] = {}
        self._memory: Any = None
        self.turns = False
        self.decoder: Decoder

    def run(
        self, prompts: Sequence[Sequence[int]], rows: Rows, group_size: int, token_budget: int | None
    ) -> None:
        longest, new = max(len(p) for p in prompts), rows.params.max_new_tokens
        slots, places = plan_room(len(prompts), longest, group_size, new, token_budget)
        slots = _on_the_ladder(slots, token_budget, places * longest, new)
        need = Room(slots, places, group_size, longest, new, rows.count * new)
        buffers = self._prepare(need, rows)
        _GraphSchedule(self, buffers, prompts, rows, group_size, slots, places).run()
        rows.tables["token"].copy_(buffers.token[: rows.count * new + 1])
        rows.tables["log_prob"].copy_(buffers.log_prob[: rows.count * new + 1])
        self._release_if_large()

    def _prepare(self, need: Room, rows: Rows) -> Buffers:
        weights = read_weights(self.model, need.slots, self._pool)
        fits = self._buffers is not None and self._buffers.room.covers(need)
        if self._pool.moved or not fits:
            self._steps.clear()
            self._memory = None
        if not fits:
            self._buffers = None  # frees the old one first
        room = need.rounded() if self._buffers is None else self._buffers.room
        self.decoder = Decoder(weights, room.prompt + room.times + 1)
        if self._buffers is None:
            self._buffers = Buffers(room, self.decoder, rows.tables["is_stop"].shape[0], rows.device)
        buffers = self._buffers
        self.decoder.cache = buffers  # type: ignore[assignment]
        buffers.rotations.copy_(torch.view_as_real(torch.stack(self.decoder.rotations)).squeeze(2))
        for name in ("uniform", "is_stop"):
            table = rows.tables[name]
            getattr(buffers, name)[: table.shape[0]].copy_(table)
        buffers.reply.fill_(-1)
        buffers.ids = rows.ids
        self.turns = rows.turns is not None
        buffers.idle(range(room.slots))
        return buffers

    def step(self, slots: int, params: SamplingParams) -> Step:
        """Return the step for a number of slots, the way of sampling, with replies or without."""
        ways = params.temperature, params.top_k, params.top_p, params.min_p, params.min_new_tokens
        key = (slots, self.turns, *ways)
        if key not in self._steps:
            assert self._buffers is not None
            buffers, captured = self._buffers, self._buffers.device.type == "cuda"
            if captured and self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            state = buffers.view(slots, self.decoder)
            attention = attention_kind(buffers.device)(state, self.decoder.w.heads)
            body = _Body(self, slots, params, _Attempt(attention, state, self.decoder.w.heads))
            self._steps[key] = Step(body, self._memory, captured)
        return self._steps[key]

    @property
    def nbytes(self) -> int:
        """Memory that is kept between requests."""
        return self._pool.own_bytes + (self._buffers.nbytes if self._buffers is not None else 0)

    def release(self) -> None:
        """Give the memory of graphs, cache and copied weights back."""
        self._steps.clear()
        self._buffers, self._memory, self._pool = None, None, WeightPool()
        if hasattr(self, "decoder"):
            del self.decoder

    def _release_if_large(self) -> None:
        """Keep the memory for the next request only where the update does not miss it."""
        assert self._buffers is not None
        device, size = self._buffers.device, self.nbytes
        if on_gpu(device) and size > (unused_gpu_bytes(device) + size) // KEPT_SHARE:
            log.debug("the graph tier gives %.1f GB back for the update", size / 1e9)
            self.release()


def _on_the_ladder(slots: int, budget: int | None, prompt_tokens: int, new: int) -> int:
    """Return a number of slots with a graph: more than needed where the budget allows, else fewer."""
    size = slots_for(slots)
    if budget is None or size * new + prompt_tokens <= budget:
        return size
    return max(n for n in (1, *map(slots_for, range(1, slots + 1))) if n <= slots)


class _Body:
    """The operations of one step; no shape and no branch depends on numbers of the device."""

    def __init__(
        self, tier: GraphTier, slots: int, params: SamplingParams, attention: DecodeAttention
    ) -> None:
        # The tier keeps the steps, they must not keep it: its cache would outlive a forgotten engine.
        self.tier, self.params, self.attention = weakref.proxy(tier), params, attention
        assert tier._buffers is not None
        self.buffers = tier._buffers
        self.state = self.buffers.state[:, :slots]
        self.turns = tier.turns
        self._kernels: Any = None
        if attention is not None and attention.name == "Triton":
            from algorist.rollouts.native.triton_step import TritonTake

            self._kernels = (
                TritonTake(self.buffers, params, self.turns) if TritonTake.covers(params) else None
            )

    def __call__(self) -> None:
        decoder = self.tier.decoder
        x = decoder._embed(self.state[_TOKEN])
        for index, layer in enumerate(decoder.w.layers):
            qkv = layer.qkv(decoder._normed(x, layer.attention_norm))
            x = decoder._rest(layer, x, self.attention.step(index, qkv, layer.qk_norm_ND))
        self._take(decoder._logits(x))

    def _take(self, logits_SV: Tensor) -> None:
        """Sample, store, and let rows that are finished stand still; idle rows write to the spare place."""
        if self._kernels is not None:
            return self._kernels(logits_SV, self.state)  # type: ignore[no-any-return]
        buffers, params, state = self.buffers, self.params, dict(zip(FIELDS, self.state, strict=True))
        alive_S, next_S = state["alive"], state["next"]
        at_S = next_S.masked_fill(alive_S == 0, buffers.spare)
        uniform_S = buffers.uniform.index_select(0, at_S)
        if params.min_new_tokens:
            early_S = next_S - state["begin"] < params.min_new_tokens
            token_S, log_prob_S = sample_longer(
                logits_SV, uniform_S, params, early_S, buffers.is_stop, may_wait=False, ids=buffers.ids
            )
        else:
            token_S, log_prob_S = sample(logits_SV, uniform_S, params, may_wait=False, ids=buffers.ids)
        if self.turns:
            reply_S = buffers.reply.index_select(0, at_S)
            own_S = reply_S < 0
            token_S = torch.where(own_S, token_S, reply_S)
        buffers.token.index_copy_(0, at_S, token_S)
        buffers.log_prob.index_copy_(0, at_S, log_prob_S)
        state["token"].copy_(token_S)
        self.state[: _NEXT + 1] += alive_S  # position, length, next
        done_S = buffers.is_stop.index_select(0, token_S)
        done_S = done_S.logical_and_(own_S) if self.turns else done_S
        alive_S.masked_fill_(done_S.logical_or_(next_S >= state["end"]), 0)


class _GraphSchedule(SlotSchedule):
    """Row schedule that keeps the state of running rows on the device."""

    size_for = staticmethod(slots_for)

    def __init__(
        self,
        tier: GraphTier,
        buffers: Buffers,
        prompts: Sequence[Sequence[int]],
        rows: Rows,
        group_size: int,
        slots: int,
        places: int,
    ) -> None:
        super().__init__(prompts, rows, group_size, tier.decoder, slots, places)
        self.tier, self.buffers = tier, buffers
        self.left: dict[int, int] = {}  # per running row, the most steps until its end
        self.seen: dict[int, int] = {}  # per running row, tokens whose text was looked at
        self.looks: list[_Look] = []
        self.looked = 0  # since the last step
        self.followed = rows.has_strings or tier.turns
        self.stops = set(rows.tables["is_stop"].nonzero().view(-1).tolist()) if tier.turns else set()

    def run(self) -> None:
        while self._admit():
            self.rows.check_time()
            steps = min(READ_EVERY, max(self.left.values()))
            self.rows.tokens += steps * self.running
            self.looked = 0 if steps else self.looked + 1
            if self.looked > _MOST_LOOKS:
                raise EngineError(
                    f"{self.running} rows have had all their steps, and the GPU still calls them unfinished: its memory holds "
                    "wrong numbers. Start again; if it happens twice, take grpo.engine=transformers and report it"
                )
            step = self.tier.step(len(self.row_of), self.rows.params)
            for _ in range(steps):
                step.run()
            for row in self.left:
                self.left[row] = max(0, self.left[row] - steps)
            if steps or not self.looks:
                self.looks.append(self._look())
            # One look late, so that the device does not wait for the host; at once where nothing is left to compute.
            if len(self.looks) > 1 or not any(self.left.values()):
                self._read(self.looks.pop(0))

    def _look(self) -> _Look:
        state = self.buffers.state[:, : len(self.row_of)]
        parts = [state[_ALIVE : _ALIVE + 1], state[_NEXT : _NEXT + 1]]
        if self.followed:
            # With the token that a row starts with.
            back = torch.arange(-READ_EVERY - 1, 0, device=self.device).unsqueeze(-1)
            parts.append(self.buffers.token[(state[_NEXT] + back).clamp_(min=0)])
        numbers, arrived = torch.cat(parts), None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            numbers = host
        return _Look(numbers, arrived, list(self.row_of))

    def _read(self, look: _Look) -> None:
        """Finish the rows that were finished when the device was looked at, and let others continue from their replies."""
        alive, ends, *tokens = look.read()
        slot_of = {row: slot for slot, row in enumerate(self.row_of)}
        lengths: dict[int, int] = {}
        calls: dict[int, tuple[int, int]] = {}
        for slot, row in enumerate(look.rows):
            if row is None or row not in slot_of:
                continue
            length = ends[slot] - self.rows.span(row)[0]
            if self.followed and (cut := self._cut(row, length, [column[slot] for column in tokens])):
                count, last = cut
                if last is None:
                    lengths[row] = count
                else:
                    calls[row] = count, last
            elif not alive[slot] and length > 0:  # a row begins with a token
                lengths[row] = length
        if calls:
            self._set_back(calls, slot_of)
        if lengths:
            self._finish(lengths, [slot_of[row] for row in lengths])

    def _cut(self, row: int, length: int, newest: list[int]) -> tuple[int, int | None] | None:
        """Follow the row's text to ``length``; return where it was ended, or replied to: then with the last token before the reply."""
        turns, (begin, end) = self.rows.turns, self.rows.span(row)
        for count in range(self.seen[row] + 1, length + 1):
            token, early = newest[count - length - 1], count <= self.rows.params.min_new_tokens
            ended = self.rows.has_strings and self.rows.ends_string(row, token, not early)
            if turns is not None:
                ended = turns.sampled(row, token, ended or token in self.stops, begin + count < end)
            if ended:
                return count, None
            if turns is not None and turns.replies_to(row):
                return count, token
        self.seen[row] = max(self.seen[row], length)
        return None

    def _set_back(self, calls: dict[int, tuple[int, int]], slot_of: dict[int | None, int]) -> None:
        """Let rows continue from where they were replied to; all calls have begun before the first reply is waited for."""
        states: list[tuple[int, ...]] = []
        reply: dict[int, int] = {}
        for row, (length, last) in calls.items():
            begin, end = self.rows.span(row)
            tokens = self.rows.reply_to(row, end - begin - length)
            reply.update(enumerate(tokens, begin + length))
            prompt = len(self.prompts[row // self.group_size])
            states.append((slot_of[row], prompt + length - 1, length - 1, begin + length, last, 1))
            self.left[row], self.seen[row] = end - begin - length, length + len(tokens)
            for look in self.looks:  # on their way, with what the row sampled beyond
                look.rows[:] = [None if other == row else other for other in look.rows]
        self.buffers.set_back(list(zip(*states, strict=True)), reply)

    def _finish(self, lengths: dict[int, int], slots: list[int]) -> None:
        self.rows.record(lengths)
        self.buffers.idle(slots)
        for row, slot in zip(lengths, slots, strict=True):
            self.row_of[slot] = None
            del self.left[row]
        if not self.waiting:
            self._shrink()

    def _move(self, movers: list[int], holes: list[int]) -> None:
        if movers:
            self.buffers.move(movers, holes)

    def _extend(self, slots: int) -> None:
        size = max(len(self.row_of), self.size_for(slots))
        added = list(range(len(self.row_of), size))
        if added:
            self.buffers.idle(added)
            self.row_of += [None] * len(added)

    def _begin(self, slots: list[int], rows: list[int]) -> None:
        """Sample the first tokens of the rows that have just got a slot."""
        spans = [self.rows.span(row) for row in rows]
        prompts = [row // self.group_size for row in rows]
        fields = {
            "position": [len(self.prompts[p]) - 1 for p in prompts],
            "length": [-1] * len(rows),  # the first token is sampled, not stored yet
            "next": [begin for begin, _ in spans],
            "alive": [1] * len(rows),
            "begin": [begin for begin, _ in spans],
            "end": [end for _, end in spans],
            "place": [self.place_of[p] for p in prompts],
        }
        self.looked = 0
        self.buffers.put(slots, [fields.get(name, [0] * len(rows)) for name in FIELDS])
        for slot, row, (begin, end) in zip(slots, rows, spans, strict=True):
            self.row_of[slot], self.left[row], self.seen[row] = row, end - begin - 1, 0
        logits = self._first_logits(rows)
        at = torch.tensor(slots, device=self.device)
        first = _Body(self.tier, len(self.row_of), self.rows.params, None)  # type: ignore[arg-type]
        first.state = self.buffers.state[:, at]
        first._take(logits)
        self.buffers.state[:, at] = first.state
        self.groups = None

    def _arrange(self) -> None:
        """Tell the device which slots continue which prompt."""
        room = self.buffers.room
        member = torch.full((room.places, room.group), -1)
        length, counts = torch.zeros(room.places, dtype=torch.int64), [0] * room.places
        member_of = torch.zeros(len(self.row_of), dtype=torch.int64)
        for slot, row in enumerate(self.row_of):
            if row is None:
                continue
            prompt = row // self.group_size
            place = self.place_of[prompt]
            member[place, counts[place]] = slot
            member_of[slot] = place * room.group + counts[place]
            length[place], counts[place] = len(self.prompts[prompt]), counts[place] + 1
        self.buffers.member.copy_(member)
        self.buffers.prompt_length.copy_(length)
        self.buffers.state[FIELDS.index("member_of"), : len(self.row_of)] = member_of.to(self.device)
        self.groups = ()  # type: ignore[assignment]

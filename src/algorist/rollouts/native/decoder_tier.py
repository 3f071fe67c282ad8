"""Row schedule of the hand-written decoder.

Rows take slots as long as the budget allows. A finished row's slot idles until the batch can shrink to the next smaller
size, or until waiting rows refill it; prompts are computed when their first row starts and forgotten with the last.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.errors import EngineError
from algorist.models.precision import HALF, weight_dtype
from algorist.models.products import WIDE, bucket
from algorist.rollouts.base import Prompts, SamplingParams
from algorist.rollouts.model_info import ModelSetting
from algorist.rollouts.native.decoder import Decoder, GroupMap
from algorist.rollouts.native.weights import read_weights
from algorist.rollouts.row_state import Rows
from algorist.rollouts.sampling import too_small

_FIRST_TIMES = 64
PREFILL_TOKENS = 8192
_COMPARED = (5, 3)
_GAP, _GAP_IN_16_BIT = 1e-3, 0.3
"""Accepted mean difference of log-probs between the decoder and the model's own forward."""
_PREFIX_SAVES = 256
"""Tokens saved from which a prefix gets its own pass: a pass of few tokens costs as much as one of a hundred."""
ROWS_AT_A_TIME = 64
"""Rows of a wide model that a CPU decodes together; those that wait take the place of those that end. 128 were 1.05 and 1.1 times as fast
(0.5B and 135M in bfloat16, one core of an Intel Xeon with AMX) and took twice the cache."""


class DecoderTier:
    """Runs all rows of a request through a ``Decoder`` made from the model's present weights."""

    name = "decoder"

    def __init__(self, model: Any, *, exact: bool = False) -> None:
        self.model, self._exact = model, exact

    def run(self, prompts: Prompts, rows: Rows, group_size: int, token_budget: int | None) -> None:
        """Fill ``rows``."""
        longest, new = max(len(p) for p in prompts), rows.params.max_new_tokens
        width = self.model.config.get_text_config(decoder=True).hidden_size
        most = rows_at_a_time(width, rows.device, len(prompts) * group_size)
        slots, places = plan_room(len(prompts), longest, group_size, new, token_budget, most)
        decoder = Decoder(read_weights(self.model, bucket(slots), exact=self._exact), longest + new + 1)
        SlotSchedule(prompts, rows, group_size, decoder, slots, places).run()


def rows_at_a_time(width: int, device: torch.device, rows: int) -> int:
    """Return how many of a request's rows a model of this width decodes together."""
    return min(rows, ROWS_AT_A_TIME) if device.type == "cpu" and width >= WIDE else rows


@torch.no_grad()
def disagreement(model: Any, setting: ModelSetting) -> str | None:
    """Compare the decoder with the model's own forward on two short rows, in the weights' type; return by how much they differ, if by too much."""
    params = SamplingParams(temperature=0.0, max_new_tokens=_COMPARED[-1], seed=0)
    prompts = [[7 * i % setting.vocabulary for i in range(1, 1 + size)] for size in _COMPARED]
    gaps = []
    with setting.generating(by_hand=True):
        rows = setting.new_rows(prompts, 1, params)
        DecoderTier(model, exact=True).run(prompts, rows, 1, None)
        for prompt, (completion,) in zip(prompts, rows.completions(), strict=True):
            ids = torch.tensor([prompt + completion.token_ids], device=setting.device)
            try:
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            except ImportError:  # an attention kernel that is not installed: nothing to compare with
                return None
            expected = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            gaps.append((torch.tensor(completion.log_probs) - expected.cpu()).abs())
    gap, half = torch.cat(gaps), weight_dtype(model) in HALF
    if float(gap.mean()) <= (_GAP_IN_16_BIT if half else _GAP):
        return None
    return f"the decoder's log-probs are {float(gap.mean()):.1e} from its own forward's"


def plan_room(
    prompts: int,
    longest: int,
    group_size: int,
    max_new_tokens: int,
    token_budget: int | None,
    most_rows: int | None = None,
) -> tuple[int, int]:
    """Return the numbers of rows and of prompts that the cache may hold at a time.

    Raises:
        EngineError: One row alone is over the budget.
    """
    slots = most_rows or prompts * group_size
    while slots > 0:
        places = min(prompts, -(-slots // group_size) + (slots > 1))
        if token_budget is None or slots * max_new_tokens + places * longest <= token_budget:
            return slots, places
        slots = slots - max(1, slots // 16)
    raise EngineError(too_small(token_budget or 0, longest, max_new_tokens))


def common_prefix(prompts: Prompts) -> int:
    """Return the length of the prefix of all prompts, each having one more; 0 where a pass for it would save little."""
    known = {tuple(p) for p in prompts}
    low, high = min(known), max(known)  # of all in this order, these two have the least in common
    size = min(map(len, known)) - 1
    common = next((i for i, (a, b) in enumerate(zip(low[:size], high[:size], strict=True)) if a != b), size)
    return common if common * (len(known) - 1) >= _PREFIX_SAVES else 0


class SlotSchedule:
    """The state of one request."""

    size_for = staticmethod(bucket)
    """Rows → slots of the batch that runs them."""

    def __init__(
        self, prompts: Prompts, rows: Rows, group_size: int, decoder: Decoder, slots: int, places: int
    ) -> None:
        self.prompts, self.rows, self.group_size, self.decoder = prompts, rows, group_size, decoder
        self.most_slots, self.most_places = slots, places
        self.device = rows.device
        order = list(range(len(prompts)))
        if slots < len(prompts) * group_size:  # several waves: equal lengths together waste less padding
            order = sorted(order, key=lambda p: -len(prompts[p]))
        self.waiting = deque(p * group_size + g for p in order for g in range(group_size))
        self.row_of: list[int | None] = []  # per slot, None when idle
        self.place_of: dict[int, int] = {}  # per prompt in the cache
        self.logits_of: dict[int, Tensor] = {}  # per prompt with rows that have not started
        self.common = common_prefix(prompts)
        self._prefix: list[tuple[Tensor, Tensor]] = []
        self.now = 0  # the time that is written next
        self.start_S = self.position_S = self.token_S = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.groups: GroupMap | None = None
        self.first = 0
        self.same_start = True

    @property
    def running(self) -> int:
        """Rows that run."""
        return sum(row is not None for row in self.row_of)

    def _admit(self) -> bool:
        """Start waiting rows as far as that is worth it, and lay out those that run; False when every row is finished."""
        while self.waiting and (self._worth_refilling() or not self.running) and self._refill():
            pass  # a first token may already have ended a row
        if not self.running:
            assert not self.waiting, "waiting rows, no running row, and no place in the cache"
            return False
        if self.groups is None:
            self._arrange()
        return True

    def run(self) -> None:
        """Decode until every row is finished."""
        while self._admit():
            assert self.groups is not None
            self._make_time()
            logits = self.decoder.step(
                self.token_S, self.position_S, self.first, self.now, self.groups, self._start_mask()
            )
            self.now += 1
            self.position_S += self.rows.alive_S
            self.token_S, done_S = self.rows.take(logits)
            self._leave(done_S)

    def _leave(self, done_S: Tensor) -> None:
        slots = done_S.nonzero().view(-1)
        if slots.shape[0] == 0:
            return
        self.rows.finish(slots)
        for slot in slots.tolist():
            self.row_of[slot] = None
        if not self.waiting:
            self._shrink()

    # ---- shrinking ------------------------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Go to a smaller batch when that saves something: survivors of the tail move into the holes."""
        size = self.size_for(self.running)
        if size >= len(self.row_of) or not self.running:
            return
        holes = [s for s in range(size) if self.row_of[s] is None]
        movers = [s for s in range(size, len(self.row_of)) if self.row_of[s] is not None]
        holes = holes[: len(movers)]
        for hole, mover in zip(holes, movers, strict=True):
            self.row_of[hole] = self.row_of[mover]
        del self.row_of[size:]
        self._move(movers, holes)
        self.groups = None

    def _move(self, movers: list[int], holes: list[int]) -> None:
        """Move rows of the batch, which is then as large as ``row_of``."""
        index, target, source = (
            torch.tensor(t, device=self.device) for t in (range(len(self.row_of)), holes, movers)
        )
        if movers:
            self.decoder.cache.move_rows(source, target)
            index[target] = source
        self.rows.keep(index)
        self.start_S, self.position_S, self.token_S = (
            t[index] for t in (self.start_S, self.position_S, self.token_S)
        )
        self.decoder.cache.set_slots(len(self.row_of))
        live = [p for p in self.place_of if any(self._prompt(r) == p for r in self.row_of)]
        if len(live) < len(self.place_of):
            places = torch.tensor([self.place_of[p] for p in live], device=self.device)
            self.decoder.cache.keep_prompts(places)
            self.place_of = {p: i for i, p in enumerate(live)}

    def _prompt(self, row: int | None) -> int | None:
        return None if row is None else row // self.group_size

    # ---- admission ------------------------------------------------------------------------------------------------

    def _worth_refilling(self) -> bool:
        free = self.most_slots - self.running
        return free >= max(1, self.most_slots // 8)

    def _refill(self) -> bool:
        """Start waiting rows in the free slots, as far as their prompts find a place in the cache; say if any did."""
        live = {self._prompt(r) for r in self.row_of} | self.logits_of.keys()
        for prompt in [p for p in self.place_of if p not in live]:
            del self.place_of[prompt]
        free_places = deque(i for i in range(self.most_places) if i not in self.place_of.values())
        free_slots = deque(s for s, r in enumerate(self.row_of) if r is None)
        free_slots.extend(range(len(self.row_of), self.most_slots))
        slots, rows, new = [], [], []
        while self.waiting and free_slots:
            prompt = self.waiting[0] // self.group_size
            if prompt not in self.place_of:
                if not free_places:
                    break
                self.place_of[prompt] = free_places.popleft()
                new.append(prompt)
            rows.append(self.waiting.popleft())
            slots.append(free_slots.popleft())
        if rows:
            self._extend(max(slots) + 1)
            self._prefill(new)
            self._begin(slots, rows)
        return bool(rows)

    def _extend(self, slots: int) -> None:
        size = max(len(self.row_of), self.size_for(slots))
        added = size - len(self.row_of)
        self.row_of += [None] * added
        self.rows.set_slots(size)
        self.start_S, self.position_S, self.token_S = (
            F.pad(t, (0, added)) for t in (self.start_S, self.position_S, self.token_S)
        )
        self.decoder.cache.set_slots(size)
        lengths = [len(self.prompts[p]) for p in self.place_of]
        self.decoder.cache.set_prompts(max(self.place_of.values()) + 1, max(lengths))

    def _prefill(self, new: list[int]) -> None:
        """Compute prompts; what all of the request begin with (a system prompt, worked examples) only once."""
        begin = self.common
        if begin and not self._prefix:
            self._prefix = self.decoder.prefix(torch.tensor(list(self.prompts[0][:begin])).to(self.device))
        order = deque(sorted(new, key=lambda p: -len(self.prompts[p])))
        while order:
            size = len(self.prompts[order[0]])
            chunk = [order.popleft() for _ in range(min(len(order), max(1, PREFILL_TOKENS // size)))]
            ids = torch.zeros(len(chunk), size - begin, dtype=torch.int64)
            for i, prompt in enumerate(chunk):
                rest = list(self.prompts[prompt][begin:])
                ids[i, : len(rest)] = torch.tensor(rest)
            lengths = torch.tensor([len(self.prompts[p]) - begin for p in chunk], device=self.device)
            places = torch.tensor([self.place_of[p] for p in chunk], device=self.device)
            logits = self.decoder.prefill(ids.to(self.device), lengths, places, self._prefix)
            self.logits_of.update(zip(chunk, logits, strict=True))

    def _begin(self, slots: list[int], rows: list[int]) -> None:
        """Sample the first tokens of the rows that have just got a slot."""
        at = torch.tensor(slots, device=self.device)
        for slot, row in zip(slots, rows, strict=True):
            self.row_of[slot] = row
        self.rows.start(at, rows)
        lengths = [len(self.prompts[row // self.group_size]) for row in rows]
        self.start_S[at] = self.now
        self.position_S[at] = torch.tensor(lengths, device=self.device)
        token, done = self.rows.take_at(at, self._first_logits(rows))
        self.token_S[at] = token
        whole = torch.zeros(len(self.row_of), dtype=torch.bool, device=self.device)
        whole[at] = done
        self.groups = None
        self._leave(whole)

    def _first_logits(self, rows: list[int]) -> Tensor:
        """Return the logits of the prompts of rows (R, V); those that no waiting row needs are forgotten."""
        logits = torch.stack([self.logits_of[row // self.group_size] for row in rows])
        to_start = {row // self.group_size for row in self.waiting}
        self.logits_of = {p: logits for p, logits in self.logits_of.items() if p in to_start}
        return logits

    # ---- layout ---------------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Compute the grouped layout and the window of times for the present slots."""
        starts = [s for s, r in zip(self.start_S.tolist(), self.row_of, strict=True) if r is not None]
        self.first, self.same_start = min(starts), min(starts) == max(starts)
        places = max(self.place_of.values()) + 1
        members: list[list[int]] = [[] for _ in range(places)]
        for slot, row in enumerate(self.row_of):
            if row is not None:
                members[self.place_of[row // self.group_size]].append(slot)
        self.groups = self._group_map(members)

    def _group_map(self, members: list[list[int]]) -> GroupMap:
        decoder = self.decoder
        heads, queries = decoder.w.kv_heads, decoder.queries
        size = max(len(m) for m in members)
        slot_PG = torch.tensor([m + [0] * (size - len(m)) for m in members])
        head_K, query_Q = torch.arange(heads).view(-1, 1, 1), torch.arange(queries)
        slot = slot_PG.view(-1, 1, size, 1)
        slot_query = slot * decoder.width + head_K * queries + query_Q
        slot_score = (slot * heads + head_K) * queries + query_Q
        place_S = torch.zeros(len(self.row_of), dtype=torch.int64)
        group_S = torch.zeros(len(self.row_of), dtype=torch.int64)
        for group, slots in enumerate(members):
            for i, slot_index in enumerate(slots):
                group_S[slot_index], place_S[slot_index] = group, i
        head = group_S.view(-1, 1, 1) * heads + torch.arange(heads).view(-1, 1)
        place = (head * size + place_S.view(-1, 1, 1)) * queries + query_Q
        return GroupMap(
            slot_query.reshape(-1).to(self.device),
            slot_score.reshape(-1).to(self.device),
            place.reshape(-1).to(self.device),
            size,
            self._prompt_mask(len(members)),
        )

    def _prompt_mask(self, places: int) -> Tensor | None:
        length = torch.zeros(places, dtype=torch.int64)
        for prompt, place in self.place_of.items():
            length[place] = len(self.prompts[prompt])
        size = int(length.max())
        self.decoder.cache.set_prompts(places, size)
        # A place without a prompt keeps one visible token: a row of nothing but -inf would be NaN.
        hidden = torch.arange(size) >= length.clamp(min=1).unsqueeze(-1)
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(places, 1, size).masked_fill_(hidden.unsqueeze(1), float("-inf"))
        mask = mask.repeat_interleave(self.decoder.w.kv_heads, 0)
        return mask.to(self.device)

    def _make_time(self) -> None:
        """Make room for time ``now``: forget the past before the oldest row, else take more memory."""
        cache = self.decoder.cache
        if self.now < cache.times:
            return
        if self.first > cache.times // 4:
            cache.shift_times(self.first, self.now)
            self.now -= self.first
            self.start_S -= self.first
            self.first = 0
        else:
            most = self.rows.params.max_new_tokens
            most = most if self.same_start and not self.waiting else most + max(16, most // 2)
            room = max(_FIRST_TIMES, 2 * cache.times)
            cache.grow_times(min(room, most) if most > self.now else room)

    def _start_mask(self) -> Tensor | None:
        if self.same_start:
            return None
        time = torch.arange(self.first, self.now + 1, device=self.device)
        hidden = time < self.start_S.unsqueeze(-1)
        hidden[:, -1] = False  # idle slots see at least their own token
        mask = torch.zeros(hidden.shape, device=self.device)
        mask = mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)
        return mask.repeat_interleave(self.decoder.w.kv_heads, 0)

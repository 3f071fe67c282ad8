"""Problems and completions of a step, and their split over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from algorist.config.schema import GRPOSection
from algorist.training.distributed import of_all
from algorist.types import Group, Problem


@dataclass(frozen=True)
class Schedule:
    """Completions on one process, and steps.

        rollout batch   |  share 0  |  share 1  |    rows = 2 shares
        share           | micro | micro | micro |    what one optimizer step learns from
        iterations      the shares are gone through num_iterations times: steps = shares · iterations

    Attributes:
        rows: Completions of a rollout batch on one process.
        shares: Optimizer steps among which they are dealt.
        iterations: How often each share is used.
        micro_batch: Completions of a micro-batch.
        group_size: Completions of a problem.
    """

    rows: int
    shares: int
    iterations: int
    micro_batch: int
    group_size: int

    @classmethod
    def from_section(cls, section: GRPOSection) -> Schedule:
        """Return the schedule of a recipe's ``grpo`` section."""
        return cls(
            rows=section.rows,
            shares=section.rows // (section.batch_size * section.gradient_accumulation_steps),
            iterations=section.num_iterations,
            micro_batch=section.batch_size,
            group_size=section.group_size,
        )

    @property
    def steps(self) -> int:
        """Optimizer steps that a rollout batch feeds."""
        return self.shares * self.iterations

    def problems(self, processes: int) -> int:
        """Return the problems of a rollout batch of all processes."""
        return self.rows * processes // self.group_size

    def share(self, problems: int, rank: int, processes: int) -> list[tuple[int, int]]:
        """Return (problem, completions) of one process: as equal numbers of completions as can be, so a group may be on two."""
        rows = problems * self.group_size
        first, last = rank * rows // processes, (rank + 1) * rows // processes
        if first == last:
            return []
        parts = []
        for problem in range(first // self.group_size, (last - 1) // self.group_size + 1):
            start, stop = problem * self.group_size, (problem + 1) * self.group_size
            parts.append((problem, min(stop, last) - max(start, first)))
        return parts

    def rows_of(self, places: Sequence[int], rank: int) -> list[int]:
        """Return the rows of one process's completions in the groups at ``places`` of the rollout batch."""
        among, first = set(places), rank * self.rows
        return [row for row in range(self.rows) if (first + row) // self.group_size in among]


class Reserve:
    """Problems beyond those of the data loader: permutations of all of them, one after another, by the seed alone.

    ``position`` counts the problems drawn or passed over so far: all that a checkpoint needs.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self.problems, self.seed, self.position = list(problems), seed, 0
        self._order: tuple[int, list[int]] = (-1, [])

    def draw(self, number: int, without: set[str]) -> list[Problem]:
        """Return up to ``number`` different problems whose ids are not in ``without``; fewer where there are no more."""
        drawn: list[Problem] = []
        ids = set(without)
        for _ in range(2 * len(self.problems)):
            if len(drawn) == number:
                break
            problem = self.problems[self._index(self.position)]
            self.position += 1
            if problem.id not in ids:
                ids.add(problem.id)
                drawn.append(problem)
        return drawn

    def _index(self, position: int) -> int:
        turn, place = divmod(position, len(self.problems))
        if self._order[0] != turn:
            # The first permutation of the data loader has the seed itself.
            generator = torch.Generator().manual_seed(self.seed + 7919 * (turn + 1))
            self._order = (turn, torch.randperm(len(self.problems), generator=generator).tolist())
        return self._order[1][place]


class ProblemOrder(Sampler[list[int]]):
    """The problems of each step: a permutation for each epoch, from seed and epoch alone; the same order as TRL's.

    Args:
        count: Problems in all.
        size: Problems of a rollout batch; those that fill no batch are left out of an epoch.
        repeats: Steps that a rollout batch feeds.
        seed: Seed of the permutations.
    """

    def __init__(self, count: int, size: int, repeats: int, seed: int) -> None:
        self.count, self.size, self.repeats, self.seed, self.epoch = count, size, repeats, seed, 0

    @classmethod
    def loader(cls, problems: Sequence[Problem], size: int, repeats: int, seed: int) -> DataLoader[Any]:
        """Return a loader whose items are lists of problems, one for each optimizer step."""
        return step_loader(problems, cls(len(problems), size, repeats, seed))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epoch + 1):
            order = torch.randperm(self.count, generator=generator).tolist()
        for start in range(0, self.count - self.size + 1, self.size):
            for _ in range(self.repeats):
                yield order[start : start + self.size]

    def __len__(self) -> int:
        return self.count // self.size * self.repeats


def step_loader(items: Sequence[Any], order: Sampler[list[int]]) -> DataLoader[Any]:
    """Return a loader whose items are lists of ``items``, one for each optimizer step."""
    return _Loader(list(items), batch_sampler=order, collate_fn=list)  # type: ignore[arg-type]


class _Loader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on; transformers calls it at the start of each."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def join_groups(share: Sequence[tuple[int, int]], groups: list[Group]) -> list[Group]:
    """Return the groups of all processes in the order of the problems; parts of a group are put together (``parts_of`` cuts).

    ``seconds`` is the slowest process's. Every process must call this.
    """
    own = [(place, group) for (place, _), group in zip(share, groups, strict=True)]
    gathered = [pair for pairs in of_all(own) for pair in pairs]
    seconds = max(group.seconds for _, group in gathered)
    whole: dict[int, Group] = {}
    for place, group in gathered:
        before = whole[place].rollouts if place in whole else []
        whole[place] = replace(group, rollouts=[*before, *group.rollouts], seconds=seconds)
    return [whole[place] for place in sorted(whole)]


def parts_of(groups: Sequence[Group], schedule: Schedule, rank: int, processes: int) -> list[Group]:
    """Return one process's share of ``groups``; the groups at its ends are cut."""
    size = schedule.group_size
    first = rank * len(groups) * size // processes
    parts = []
    for place, count in schedule.share(len(groups), rank, processes):
        start = max(0, first - place * size)
        parts.append(replace(groups[place], rollouts=groups[place].rollouts[start : start + count]))
    return parts

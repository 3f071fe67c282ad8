"""Checkpoints that are whole or not there, and hold everything that makes a resumed run the same run.

A checkpoint is written into ``.saving/``, listed with hashes in ``manifest.json``, synced, and renamed into place. Beyond what
the Hugging Face trainer keeps (weights, optimizer, scheduler, RNG states, trainer state) it holds ``algorist_state.pt``:
the rollout batch in use and the position in it, the seed counters, token counts, and the state of extensions and of rewards that have one.
Everything is read with ``weights_only``.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import TrainerCallback
from transformers.utils import SAFE_WEIGHTS_NAME

from algorist.errors import (
    DAMAGED,
    AlgoristError,
    CheckpointError,
    ConfigError,
    is_disk_full,
    is_out_of_memory,
)
from algorist.store.safe_text import first_line
from algorist.store.stages import checkpoints, step_of
from algorist.system import sync_folder
from algorist.training import loop_seam
from algorist.training.distributed import ShardedTraining

if TYPE_CHECKING:
    from algorist.training.processes import Processes

log = logging.getLogger("algorist.training.checkpoint")

MANIFEST = "manifest.json"
STATE = "algorist_state.pt"
_STAGING = ".saving"
# transformers 5.17 reads the optimizer of several CPU processes to "cpu:0", a place unknown to torch.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, place: storage if place == "cpu:0" else None
)
LAYOUT = 2
"""Layout of ``algorist_state.pt``; checkpoints of another one are refused."""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, step: int) -> None:
    """Sync every file of a checkpoint and list it with size and sha256."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    target = folder / MANIFEST
    with target.open("w", encoding="utf-8") as file:
        json.dump({"version": 1, "step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def damage(folder: Path) -> str:
    """Describe the damage to a checkpoint, or return an empty string."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        steps = {int(manifest["step"])}
    except OSError:
        return f"{MANIFEST} is missing"
    except DAMAGED:
        return f"{MANIFEST} cannot be read"
    for name, (size, sha256) in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{MANIFEST} names {name}, which lies outside"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}"
        if _sha256(path) != sha256:
            return f"{name} has changed (its hash differs)"
    if TRAINER_STATE_NAME in files:
        try:
            steps.add(
                int(json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"])
            )
        except DAMAGED:
            return f"{TRAINER_STATE_NAME} cannot be read"
    if steps != {step_of(folder)}:
        return f"its files are of step {' and '.join(map(str, sorted(steps)))}, its name is of another"
    return ""


def newest_checkpoint(
    folder: Path, last_step: Callable[[], int] = lambda: 0
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, and one line for each newer one that is not.

    One that ended a stage has no optimizer's state: a stage that now ends at a later ``last_step`` takes the one before.

    Raises:
        CheckpointError: There are checkpoints and every one is damaged.
    """
    refused: list[str] = []
    for candidate in checkpoints(folder):
        wrong = damage(candidate)
        if wrong:
            refused.append(f"{candidate.name} is damaged and left out: {wrong}")
        elif not any(candidate.glob("rng_state*")) and step_of(candidate) < last_step():
            refused.append(f"{candidate.name} ended the stage and is left out: it has no optimizer state")
        else:
            return candidate, refused
    if refused:
        raise CheckpointError(
            f"no checkpoint under {folder} can be used:\n  "
            + "\n  ".join(refused)
            + f"\nTo start this stage anew, move them away: mv {folder} {folder}-damaged"
        )
    return None, refused


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name; a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def processes_of(checkpoint: Path) -> int:
    """Count the processes that wrote a checkpoint; each one left its state."""
    return max(1, len(list(checkpoint.glob(f"{STATE}*"))))


def other_count(stage: str, checkpoint: Path, processes: int) -> str:
    """Return that a checkpoint was made by another number of processes, or an empty text."""
    made_by = processes_of(checkpoint)
    if made_by == processes:
        return ""
    return f"{stage}: {checkpoint.name} was made by {made_by} process(es), this run has {processes}: it continues, not bit for bit"


def _rotate(folder: Path, limit: int | None, best: str) -> None:
    """Keep the newest ``limit`` checkpoints, and the one called ``best``."""
    if limit is None or limit <= 0:
        return
    for old in [old for old in checkpoints(folder)[limit:] if old.name != best]:
        doomed = old.with_name(f".deleting-{old.name}")
        old.rename(doomed)  # gone at once, also when killed in between
        shutil.rmtree(doomed, ignore_errors=True)


def _finish_deleting(folder: Path) -> None:
    """Delete the remains of rotated checkpoints after a kill."""
    for left in folder.glob(".deleting-*"):
        shutil.rmtree(left, ignore_errors=True)


def train_from(trainer: Any, checkpoint: Path | None) -> None:
    """Train from a checkpoint (None: from the start) to the last step.

    When the checkpoint is of the last step already (the process ended before the stage was closed) only its weights are
    loaded: transformers' loop would do one step too many.
    """
    if trainer.args.should_save:
        _finish_deleting(Path(trainer.args.output_dir))
    if checkpoint is not None and step_of(checkpoint) >= last_step(trainer):
        with trainer.loading(checkpoint):
            load_weights(trainer, checkpoint)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def load_weights(trainer: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, or of a folder that ``save_model`` wrote, into the trainer's model."""
    check_weights(trainer.model, checkpoint)
    trainer.written = 0, []
    with _quiet_about_ties():
        loop_seam.load_weights(trainer, checkpoint)


def save_final(trainer: Any, final: Path, processes: Processes) -> None:
    """Save the model as ``final``, whole or not at all."""
    unfinished = final.with_name("final.unfinished")
    processes.from_main(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    trainer.save_model(str(unfinished))
    processes.wait()
    if processes.main:
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
    processes.wait()


def last_step(trainer: Any) -> int:
    """Return the number of the step that ends a trainer's stage."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    return int(trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1])


def check_weights(model: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint that lacks weights of ``model``; a head that is tied to a weight that is there is not missing.

    Raises:
        CheckpointError: Weights are missing.
    """
    path = checkpoint / SAFE_WEIGHTS_NAME
    if not path.is_file() or hasattr(model, "peft_config"):  # in shards, or an adapter, which PEFT checks
        return
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
    state = model.state_dict(keep_vars=True)
    loaded = {id(weight) for name, weight in state.items() if name in stored}
    lacking = sorted(name for name, weight in state.items() if id(weight) not in loaded)
    if lacking:
        raise CheckpointError(
            f"the checkpoint {checkpoint.name} lacks {len(lacking)} weights of the model: {', '.join(lacking[:5])}. It is of "
            "another model, or its model.safetensors was changed; move it away, and --resume takes the one before"
        )
    if unexpected := sorted(stored - set(state)):
        log.warning("the checkpoint contains weights that the model does not have: %s", unexpected)


@contextmanager
def _quiet_about_ties() -> Iterator[None]:
    """Leave out transformers' line on a tied head that is not in the file: ``check_weights`` has looked already."""

    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(keep := lambda record: not record.getMessage().startswith("There were missing keys"))
    try:
        yield
    finally:
        logger.removeFilter(keep)


class _FirstStep(TrainerCallback):
    """Gives the first step the rate of the schedule as it is now, whose length may have changed, and knows whether it has begun."""

    begun = False

    def __init__(self, changed: Sequence[str]) -> None:
        self.changed = changed

    def on_step_begin(
        self, args: Any, state: Any, *_: Any, optimizer: Any, lr_scheduler: Any, **__: Any
    ) -> None:
        plain = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate's has it within
        was = optimizer.param_groups[0]["lr"]
        rates = () if self.begun else getattr(plain, "lr_lambdas", ())
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = group["initial_lr"] * rate(plain.last_epoch)
            plain._last_lr = [one["lr"] for one in optimizer.param_groups]  # what is logged
        if self.changed and not self.begun:
            now, step, keys = optimizer.param_groups[0]["lr"], state.global_step + 1, ", ".join(self.changed)
            log.warning(
                "%s: the learning rate of step %d is %.3g; without the change it would be %.3g",
                keys,
                step,
                now,
                was,
            )
        self.begun = True


def _try_states(state: dict[str, Any]) -> None:
    """Write and read the state of each extension and reward, before the first checkpoint.

    Raises:
        ConfigError: One cannot be written, or not be read as data alone.
    """
    for kind in ("extensions", "rewards"):
        for name, value in state.get(kind, {}).items():
            try:
                torch.save(value, file := io.BytesIO())
                torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            except Exception as error:
                other = isinstance(error, UnpicklingError)
                reason = "an object of another kind" if other else first_line(error)
                raise ConfigError(
                    f"{kind[:-1]} '{name}': what state_dict() returned cannot be kept in a checkpoint ({reason}); expected tensors, "
                    "numbers, texts, and lists and dictionaries of them"
                ) from None


class ExactCheckpoints(ShardedTraining, loop_seam.SavesCheckpoints):
    """Mixin for Hugging Face trainers: atomic checkpoints with all the state that an exact continuation needs."""

    state: Any
    model: Any
    ends_for_good = False
    """The last step is never followed by more: its checkpoint needs no optimizer state."""
    written: tuple[int, list[str]] = (0, [])
    """The step whose weights the newest checkpoint has, and the names of its model's files."""
    changed: Sequence[str] = ()
    """Keys of the stage's length that are not as they were, each with both values."""
    _tried = False

    def best_checkpoint(self) -> str:
        """Return the name of the checkpoint that is kept however old it is; set by who knows it."""
        return ""

    def extra_state(self) -> dict[str, Any]:
        """Return the state beyond the Hugging Face trainer's; tensors, numbers, strings, containers."""
        return {"layout": LAYOUT}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state that ``extra_state`` returned."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the library does, after the state of a checkpoint has been restored; True takes the newest whole one."""
        if (checkpoint := resume_from_checkpoint) is True:
            checkpoint, refused = newest_checkpoint(Path(self.args.output_dir))
            for line in refused:
                log.warning("%s", line)
            if checkpoint is None:
                raise CheckpointError(f"there is no checkpoint under {self.args.output_dir} to continue from")
        with self.loading(checkpoint), _quiet_about_ties():
            if checkpoint:
                check_weights(self.model, Path(checkpoint))
                self._restore(Path(checkpoint))
            return super().train(str(checkpoint) if checkpoint else None, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def loading(self, checkpoint: Any) -> Iterator[None]:
        """Name in one sentence the part of a checkpoint that cannot be loaded, up to the first step; its manifest may be in order.

        Raises:
            CheckpointError: A file is not what it should be. torch's own message would advise to run what it holds.
        """
        first = _FirstStep(self.changed)
        self.add_callback(first)  # type: ignore[attr-defined]
        try:
            yield
        except Exception as error:
            if not checkpoint or first.begun or isinstance(error, AlgoristError) or is_out_of_memory(error):
                raise
            reason = (
                "more than numbers and texts" if isinstance(error, UnpicklingError) else first_line(error)
            )
            raise CheckpointError(
                f"{checkpoint} cannot be loaded: a file of it holds what it should not ({type(error).__name__}: {reason}). Move the "
                f"folder away, and --resume takes the one before: mv {checkpoint} {checkpoint}-damaged"
            ) from None
        finally:
            self.remove_callback(first)  # type: ignore[attr-defined]

    def _restore(self, checkpoint: Path) -> None:
        rank = self.args.process_index
        same = processes_of(checkpoint) == self.args.world_size
        path = checkpoint / (STATE if rank == 0 or not same else f"{STATE}.{rank}")
        if not path.is_file():
            log.warning("%s is missing: the run continues, but not bit for bit", path)
            return
        state = torch.load(path, weights_only=True, map_location="cpu")
        if state.get("layout") != LAYOUT:
            raise CheckpointError(
                f"{checkpoint} was written by a former version of algorist (layout {state.get('layout', 1)}, this version reads "
                f"{LAYOUT}). Continue with that version, or start this stage anew: mv {checkpoint.parent} "
                f"{checkpoint.parent}-former"
            )
        if not same and "rollouts" in state:  # one process's share of a batch; it is sampled again
            state["rollouts"], state["position"] = None, 0
        self.load_extra_state(state)

    def save_whole(self, write: Callable[[], None]) -> None:
        """Write a checkpoint into ``.saving/``, add our state and the manifest, and move it into place."""
        folder, limit = Path(self.args.output_dir), self.args.save_total_limit
        staging, name = folder / _STAGING, f"checkpoint-{self.state.global_step}"
        main = self.args.should_save
        if main:
            shutil.rmtree(staging, ignore_errors=True)
            _finish_deleting(folder)
        self.accelerator.wait_for_everyone()
        self.args.output_dir, self.args.save_total_limit = str(staging), None
        self.args.save_only_model = self.ends_for_good and self.state.global_step >= self.state.max_steps
        try:
            write()
            rank, state = self.args.process_index, self.extra_state()
            if not self._tried:
                _try_states(state)
                self._tried = True
            torch.save(state, staging / name / (STATE if rank == 0 else f"{STATE}.{rank}"))
            self.accelerator.wait_for_everyone()
            if main:
                write_manifest(staging / name, self.state.global_step)
                shutil.rmtree(folder / name, ignore_errors=True)  # saved twice: Ctrl-C at a save step
                (staging / name).rename(folder / name)
                sync_folder(folder)
                shutil.rmtree(staging, ignore_errors=True)
                _rotate(folder, limit, self.best_checkpoint())
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_disk_full(error):
                raise
            shutil.rmtree(staging, ignore_errors=True)
            newest = next(iter(checkpoints(folder)), None)
            raise CheckpointError(
                f"cannot write {folder / name}: {error}. "
                + (f"{newest.name} is still there; " if newest else "")
                + "make room or rights in the run folder and continue with --resume"
            ) from error
        finally:
            self.args.output_dir, self.args.save_total_limit = str(folder), limit
            self.args.save_only_model = False
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save as the library does, without files that nobody reads; of weights that a checkpoint has, its files once more."""
        folder = Path(output_dir or self.args.output_dir)
        step, names = self.written
        newest = Path(self.args.output_dir) / f"checkpoint-{step}"
        if self.ends_for_good and names and step == self.state.global_step and newest.is_dir():
            folder.mkdir()
            for name in names:
                link_file(newest / name, folder / name)
            return
        with self.saving():
            super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]
        if not self.args.should_save:
            return
        # A pickle: the settings are in config.yaml, and no file of ours can run code.
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        # PEFT saves the frozen reference adapter too; it is made again when the stage is loaded.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        if (folder / "adapter_config.json").is_file():
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form
        if folder.name == f"checkpoint-{self.state.global_step}" and self.args.world_size == 1:
            self.written = self.state.global_step, [path.name for path in folder.iterdir() if path.is_file()]

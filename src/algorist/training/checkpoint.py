"""Checkpoints that are whole or not there, and hold everything that makes a resumed run the same run.

A checkpoint is written into ``.saving/``, listed with hashes in ``manifest.json``, synced, and renamed into place. Beyond what
the Hugging Face trainer keeps (weights, optimizer, scheduler, RNG states, trainer state) it holds ``algorist_state.pt``:
the buffered rollouts and the position in them, the seed counters, token counts and the state of rewards that have one.
Everything is read with ``weights_only``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.trainer import TRAINING_ARGS_NAME

from algorist.errors import CheckpointError
from algorist.store.atomic import sync_folder

log = logging.getLogger("algorist.training.checkpoint")

MANIFEST = "manifest.json"
STATE = "algorist_state.pt"
_STAGING = ".saving"


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, step: int) -> None:
    """Sync every file of a checkpoint and list it with size and sha256."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _hash(path)}
    target = folder / MANIFEST
    with target.open("w", encoding="utf-8") as file:
        json.dump({"version": 1, "step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def damage(folder: Path) -> str:
    """Return what is wrong with a checkpoint, or an empty string."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except OSError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, told in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{MANIFEST} names {name}, which lies outside"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != told.get("bytes"):
            return f"{name} has {path.stat().st_size} bytes, expected {told.get('bytes')}"
        if _hash(path) != told.get("sha256"):
            return f"{name} has changed (its hash differs)"
    return ""


def checkpoints(folder: Path) -> list[Path]:
    """Return the ``checkpoint-N`` folders of a stage, newest first, damaged ones included."""
    found = [p for p in folder.glob("checkpoint-*") if p.is_dir() and p.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps that a checkpoint was made after."""
    return int(checkpoint.name.rpartition("-")[2])


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, and one line for each newer one that is not.

    Raises:
        CheckpointError: There are checkpoints and every one is damaged.
    """
    refused: list[str] = []
    for candidate in checkpoints(folder):
        wrong = damage(candidate)
        if not wrong:
            return candidate, refused
        refused.append(f"{candidate.name} is damaged and left out: {wrong}")
    if refused:
        raise CheckpointError(
            f"no checkpoint under {folder} can be used:\n  "
            + "\n  ".join(refused)
            + f"\nTo start this stage anew, move them away: mv {folder} {folder}-damaged"
        )
    return None, refused


def processes_of(checkpoint: Path) -> int:
    """Return how many processes made a checkpoint; each one left its state."""
    return max(1, len(list(checkpoint.glob(f"{STATE}*"))))


def _rotate(folder: Path, limit: int | None) -> None:
    """Keep the newest ``limit`` checkpoints."""
    if limit is None or limit <= 0:
        return
    for old in checkpoints(folder)[limit:]:
        doomed = old.with_name(f".deleting-{old.name}")
        old.rename(doomed)  # gone at once, also when killed in between
        shutil.rmtree(doomed, ignore_errors=True)


def train_from(trainer: Any, checkpoint: Path | None) -> None:
    """Train from a checkpoint (None: from the start) to the last step.

    When the checkpoint is of the last step already (the process ended before the stage was closed) only its weights are
    loaded: transformers' loop would do one step too many.
    """
    if checkpoint is not None and step_of(checkpoint) >= _last_step(trainer):
        trainer._load_from_checkpoint(str(checkpoint))
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _last_step(trainer: Any) -> int:
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    return int(trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1])


class ExactCheckpoints:
    """Mixin for Hugging Face trainers: atomic checkpoints with all the state that an exact continuation needs."""

    args: Any
    state: Any
    model: Any
    accelerator: Any
    _total_train_tokens: int = 0
    _saving_into: Path | None = None

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beyond the Hugging Face trainer's; tensors, numbers, strings, containers."""
        return {"total_train_tokens": self._total_train_tokens}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what ``extra_state`` returned."""
        self._total_train_tokens = state["total_train_tokens"]

    def _get_output_dir(self, trial: Any) -> str:
        if self._saving_into is not None:
            return str(self._saving_into)
        return super()._get_output_dir(trial)  # type: ignore[misc, no-any-return]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        staging, name = folder / _STAGING, f"checkpoint-{self.state.global_step}"
        main = self.args.should_save
        if main:
            shutil.rmtree(staging, ignore_errors=True)
            for left in folder.glob(".deleting-*"):
                shutil.rmtree(left, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._saving_into = staging
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            rank = self.args.process_index
            torch.save(self.extra_state(), staging / name / (STATE if rank == 0 else f"{STATE}.{rank}"))
            self.accelerator.wait_for_everyone()
            if main:
                write_manifest(staging / name, self.state.global_step)
                self._into_place(staging / name, folder / name)
                _rotate(folder, limit)
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
                raise  # not torch.save's
            shutil.rmtree(staging, ignore_errors=True)
            kept = next(iter(checkpoints(folder)), None)
            raise CheckpointError(
                f"cannot write {folder / name}: {error}. "
                + (f"{kept.name} is still there; " if kept else "")
                + "make room or rights in the run folder and continue with --resume"
            ) from error
        finally:
            self._saving_into = None
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        # A pickle that nobody reads: the settings stand in config.yaml, and no file of ours can run code.
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        # PEFT saves TRL's frozen copy of the starting adapter too; it is made again when the stage is loaded.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        if (folder / "adapter_config.json").is_file():
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that lacks weights; a weight that is tied to one that was loaded (the head) is none."""
        state = self.model.state_dict(keep_vars=True)
        lacking = set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in state.items() if name not in lacking}
        lacking = {name for name in lacking if name not in state or id(state[name]) not in loaded}
        if lacking:
            raise CheckpointError(
                f"the checkpoint lacks {len(lacking)} weights of the model: {', '.join(sorted(lacking)[:5])}. It is of another "
                "model, or its model.safetensors was changed; move it away, and --resume takes the one before"
            )
        if load_result.unexpected_keys:
            log.warning("the checkpoint has weights that the model has not: %s", load_result.unexpected_keys)

    @staticmethod
    def _into_place(made: Path, target: Path) -> None:
        if target.exists():  # the same step saved twice (Ctrl-C at a save step)
            shutil.rmtree(target)
        made.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(made.parent, ignore_errors=True)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        rank = self.args.process_index
        same = processes_of(Path(checkpoint)) == self.args.world_size
        path = Path(checkpoint) / (STATE if rank == 0 or not same else f"{STATE}.{rank}")
        if path.is_file():
            state = torch.load(path, weights_only=True, map_location="cpu")
            if not same and "buffered_inputs" in state:
                state["buffered_inputs"] = None  # one process's share of a batch; it is sampled again
            self.load_extra_state(state)
        else:
            log.warning("%s is missing: the run continues, but not bit for bit", path)

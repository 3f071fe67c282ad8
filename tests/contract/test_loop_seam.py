"""The private names of transformers that algorist touches: few, in one file, and as we know them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trl.trainer.utils import RepeatSampler

import algorist
from algorist.training import loop_seam
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.grpo import AlgoristGRPOTrainer
from algorist.training.order import ProblemOrder
from algorist.training.sft import AlgoristSFTTrainer
from algorist.training.trainer import AlgoristTrainer

SOURCE = Path(algorist.__file__).parent


def private_names_of_theirs() -> set[str]:
    """Return every private attribute of transformers' trainer: methods, and what its constructor sets."""
    names = set(dir(transformers.Trainer))
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(transformers.Trainer)))):  # type: ignore[arg-type]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return {n for n in names if n.startswith("_") and not n.startswith("__")}


def test_three_private_names_at_most_and_one_file() -> None:
    assert len(loop_seam.PRIVATE_NAMES) <= 3
    theirs = private_names_of_theirs()
    assert set(loop_seam.PRIVATE_NAMES) - {loop_seam.RECOMPUTE} <= theirs
    trainers = (AlgoristTrainer, AlgoristGRPOTrainer, AlgoristSFTTrainer, ExactCheckpoints)
    mine = {n for cls in trainers for n in vars(cls) if n.startswith("_") and not n.startswith("__")}
    for path in sorted((SOURCE / "training").glob("*.py")):
        used = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and node.attr in theirs
        }
        if path.name == "loop_seam.py":
            assert used <= set(loop_seam.PRIVATE_NAMES)
        else:
            assert used <= mine, f"{path.name} uses {sorted(used - mine)}"
    overridden = {n for n in mine if callable(getattr(transformers.Trainer, n, None))}
    assert overridden <= set(loop_seam.PRIVATE_NAMES), overridden


@pytest.mark.slow
def test_trl_is_no_part_of_the_product() -> None:
    """Tests and benchmarks compare with it; a user need not have it."""
    folders = [SOURCE, *Path(algorist.__file__).parents[2].glob("packages/*/src")]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in names} & {"trl"}, path


@pytest.mark.slow
def test_no_class_is_swapped_and_no_module_function_patched() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                assert not (isinstance(target, ast.Attribute) and target.attr == "__class__"), path


def test_our_order_is_trls() -> None:
    """The same problems in the same steps as stock TRL, epoch after epoch."""
    theirs = RepeatSampler(range(11), mini_repeat_count=1, batch_size=3, repeat_count=2, shuffle=True, seed=5)
    ours = ProblemOrder(11, 3, 2, 5)
    for epoch in range(3):
        ours.set_epoch(epoch)
        assert [index for item in ours for index in item] == list(theirs)
    assert len(list(ours)) == len(ours) == 6


def test_rollouts_reach_stock_trl_group_by_group() -> None:
    """``rollout_func`` gets each prompt once per completion, the completions of a problem next to each other."""
    sampler = RepeatSampler(range(4), mini_repeat_count=3, batch_size=2, repeat_count=2, shuffle=False)
    assert list(sampler) == [0, 0, 0, 1, 1, 1] * 2 + [2, 2, 2, 3, 3, 3] * 2


def test_a_checkpoint_of_a_former_layout_is_refused(tmp_path: Any) -> None:
    import pytest

    from algorist.errors import CheckpointError
    from algorist.training.checkpoint import STATE
    from tests.tiny import make_trainer

    trainer = make_trainer(tmp_path, max_steps=1, save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    torch.save({"step": 1, "buffered_inputs": None, "total_train_tokens": 3}, checkpoint / STATE)
    with pytest.raises(CheckpointError, match=r"layout 1, this version reads 2.*start this stage anew: mv "):
        make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(checkpoint))

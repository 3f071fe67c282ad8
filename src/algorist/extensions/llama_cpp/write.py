"""GGUF files of a trained model, for llama.cpp and Ollama: converted by llama.cpp itself, with template and stop tokens.

llama.cpp's own converter (``convert_hf_to_gguf.py``) is kept for every architecture by those who write the format; the source
package of ``llama-cpp-python`` carries it, and its bindings quantise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError, MissingExtraError, check_known
from algorist.prompts.attached import Asked
from algorist.prompts.chat import render_prompt

WHOLE = ("F32", "F16", "BF16")
KINDS = (*WHOLE, *"Q8_0 Q6_K Q5_K_M Q5_K_S Q5_0 Q4_K_M Q4_K_S Q4_0 Q4_1 IQ4_NL Q3_K_M Q3_K_S Q2_K".split())
SOURCE = "ALGORIST_LLAMA_CPP"
_PLACE = "ALGORISTQUESTION"
_TEXTS = ("What is 12 * 345?", " x  =\n\n-7/8, don't 10%: (a+b)^2\t<b>é 你好</b>")


def check_kinds(kinds: Sequence[str]) -> list[str]:
    """Return the names of types in their usual writing.

    Raises:
        ConfigError: A type is unknown.
        MissingExtraError: llama-cpp-python is not installed.
    """
    names = [kind.upper() for text in kinds for kind in text.split(",") if kind]
    for kind in names:
        check_known(kind, KINDS, f"--gguf {kind} is unknown", "Expected some of {}")
    bindings()
    return list(dict.fromkeys(names))


def bindings() -> Any:
    """Return the module ``llama_cpp``.

    Raises:
        MissingExtraError: It is not installed, or its library does not load.
    """
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingExtraError(  # also those that its converter could write: each file is read by llama.cpp before it is given out
            f"GGUF files need llama-cpp-python ({' '.join(str(error).split())[:150]}); pip install 'algorist[llama-cpp]'. It is "
            "compiled on installation: without a C++ compiler first apt install g++ cmake (or xcode-select --install)"
        ) from None
    return llama_cpp


def converter() -> Path:
    """Return a folder with llama.cpp's converter: ``ALGORIST_LLAMA_CPP``, or the source of the installed bindings.

    Raises:
        ConfigError: The folder has no converter, or the source package cannot be had.
    """
    named = os.environ.get(SOURCE)
    if named:
        folder = Path(named).expanduser()
        if not (folder / "convert_hf_to_gguf.py").is_file():
            raise ConfigError(
                f"{SOURCE} is {folder}, where there is no convert_hf_to_gguf.py; expected a checkout of llama.cpp"
            )
        return folder
    version = bindings().__version__
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "algorist"
    folder = cache / f"llama.cpp-of-llama-cpp-python-{version}"
    if not (folder / "convert_hf_to_gguf.py").is_file():
        print(f"fetching llama.cpp's converter (source of llama-cpp-python {version}) …", flush=True)
        _fetch(version, folder)
    return folder


def _fetch(version: str, folder: Path) -> None:
    """Unpack the converter of the source package of llama-cpp-python into ``folder``."""
    needed = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/")
    with tempfile.TemporaryDirectory(prefix="algorist-gguf-") as temporary:
        download = "-m pip download -q --no-deps --no-binary llama-cpp-python -d".split()
        done = subprocess.run(
            [sys.executable, *download, temporary, f"llama-cpp-python=={version}"],
            capture_output=True,
            text=True,
        )
        archive = next(Path(temporary).glob("*.tar.gz"), None)
        if done.returncode or archive is None:
            said = (done.stderr.strip().splitlines() or ["no package"])[-1][:200]
            raise ConfigError(
                f"llama.cpp's converter cannot be fetched ({said}); get llama.cpp elsewhere and name its folder: "
                f"{SOURCE}=/path/to/llama.cpp algorist export …"
            )
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                _, mark, inside = member.name.partition("/vendor/llama.cpp/")
                if mark and member.isfile() and inside.startswith(needed):
                    member.name = inside
                    source.extract(member, partial, filter="data")
        partial.rename(folder)


def write_gguf(
    folder: Path, target: Path, name: str, kinds: Sequence[str], form: Asked, tokenizer: Any
) -> list[Path]:
    """Write one GGUF file per type and a Modelfile for Ollama.

    Args:
        folder: A whole model (adapters merged).
        target: Gets ``NAME-TYPE.gguf`` and ``Modelfile``, which names the last type; an earlier one is kept.
        name: Name of the model.
        kinds: Names of ``KINDS``.
        form: How the model is asked; the Modelfile's prompt is that of its training, to the character.
        tokenizer: The model's.

    Raises:
        ConfigError: llama.cpp knows neither the architecture nor the tokenizer, or would read texts differently.
    """
    source = converter()
    target.mkdir(parents=True, exist_ok=True)
    first = next((kind for kind in kinds if kind in WHOLE), _own_type(folder))
    files = {kind: target / f"{name}-{kind}.gguf" for kind in kinds}
    with tempfile.TemporaryDirectory(dir=target, prefix=".gguf-") as temporary:
        whole = Path(temporary) / f"{first}.gguf"
        _child("convert", source, folder, whole, first.lower(), what=f"convert {folder}")
        _same_tokens(whole, tokenizer, form)
        for kind, file in files.items():
            if kind == first:
                continue
            made = Path(temporary) / f"{kind}.gguf"
            if kind in WHOLE:
                _child("convert", source, folder, made, kind.lower(), what=f"convert {folder}")
            else:
                _child("quantize", whole, made, kind, what=f"quantise to {kind}")
            made.replace(file)
        if first in files:
            whole.replace(files[first])
    write_modelfile(target, modelfile(files[kinds[-1]].name, form, tokenizer))
    return list(files.values())


def write_modelfile(target: Path, text: str) -> None:
    """Write the Modelfile; one for another file becomes ``Modelfile-`` and the name of its type."""
    path = target / "Modelfile"
    former = path.read_text(encoding="utf-8").splitlines()[:1] if path.is_file() else []
    if former and former != text.splitlines()[:1]:
        path.rename(target / f"Modelfile-{Path(former[0]).stem.rpartition('-')[2]}")
    path.write_text(text, encoding="utf-8")


def _own_type(folder: Path) -> str:
    """Return the 16-bit type of the weights, else F32: what is quantised from."""
    text = (folder / "config.json").read_text(encoding="utf-8")
    return "BF16" if '"bfloat16"' in text else "F16" if '"float16"' in text else "F32"


def _child(verb: str, *words: Any, what: str) -> None:
    command = [sys.executable, "-m", "algorist.extensions.llama_cpp.child", verb, *map(str, words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        telling = (
            [line for line in said if "rror" in line or "not supported" in line] or said or ["no message"]
        )
        raise ConfigError(
            f"llama.cpp cannot {what}: {telling[-1][:300]}\nIt may not know this architecture or tokenizer; a newer llama.cpp: "
            f"pip install -U llama-cpp-python, or {SOURCE}=FOLDER of a checkout"
        )


def _same_tokens(file: Path, tokenizer: Any, form: Asked) -> None:
    """Refuse a file whose tokenizer in llama.cpp reads a prompt differently from the model's."""
    with closing(bindings().Llama(model_path=str(file), vocab_only=True, verbose=False)) as llama:
        _compare_tokens(llama, tokenizer, form)


def _compare_tokens(llama: Any, tokenizer: Any, form: Asked) -> None:
    for text in (*(render_prompt(form.prompt_format, tokenizer, q) for q in _TEXTS), *_TEXTS[:1]):
        ours = list(tokenizer(text)["input_ids"])
        start = bool(ours) and ours[0] == tokenizer.bos_token_id
        theirs = llama.tokenize(text.encode(), add_bos=start, special=True)
        if ours != theirs:
            place = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs))
            )
            raise ConfigError(
                f"llama.cpp would read prompts of this model as other tokens, the first at {place}: {theirs[place : place + 4]}, "
                f"its own tokenizer {ours[place : place + 4]}; the GGUF file would answer worse, so none is written. Its way of "
                "splitting text is not known to llama.cpp"
            )


def modelfile(file: str, form: Asked, tokenizer: Any) -> str:
    """Return Ollama's Modelfile: the trained prompt to the character, where an answer ends, greedy as evaluated."""
    prompt = render_prompt(form.prompt_format, tokenizer, _PLACE)
    prompt = prompt.replace("{{", '{{ "{{" }}').replace(_PLACE, "{{ .Prompt }}")
    stops = dict.fromkeys(filter(None, (tokenizer.eos_token, *form.stop_strings)))
    lines = [f"FROM ./{file}", f'TEMPLATE """{prompt}{{{{ .Response }}}}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    return (
        "\n".join([*lines, "PARAMETER temperature 0", f"PARAMETER num_predict {form.max_completion_tokens}"])
        + "\n"
    )

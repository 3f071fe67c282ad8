"""Runs that were trained once and are read again: without their checkpoints, with one tensor of their weights.

What a tiny model learns depends on the processor, so a test that trains and then looks may fail on another one; a recording is the
same everywhere, and takes no time. ``ALGORIST_RECORD=1 pytest -m long tests/runs/test_causes.py tests/runs/test_diagnosis.py`` makes
them anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from safetensors.torch import load_file, save_file
from torch import Tensor

from algorist.store.trust import sign

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "tests/data/runs"
FOLDER = "@FOLDER@"
"""Stands in texts for the folder that the runs are in; paths of the repository are relative to it."""
TEXTS = {".yaml", ".json", ".jsonl", ".log"}
LEFT_OUT = ("checkpoint-", ".lock", ".origin", "report.html", "__pycache__")
TAUGHT = {"start", "careful"}
"""Runs whose models others begin with; these are kept whole."""
AGAIN = "record it again (tests/runs/recorded.py says how)"


def record(folder: Path, name: str, overrides: Sequence[str], start: Path) -> None:
    """Write the run ``name`` of a folder as a zip file; its weights are compared with those of ``start``."""
    run = folder / name
    files = [
        path
        for path in sorted(run.rglob("*"))
        if path.is_file() and not any(word in str(path.relative_to(run)) for word in LEFT_OUT)
    ]
    PLACE.mkdir(exist_ok=True)
    with ZipFile(PLACE / f"{name}.zip", "w", ZIP_DEFLATED) as pack:
        pack.writestr("overrides.json", json.dumps(overrides).replace(str(folder), FOLDER))
        for path in files:
            within = str(path.relative_to(run))
            if path.suffix in TEXTS:
                text = path.read_text(encoding="utf-8").replace(str(folder), FOLDER)
                pack.writestr(within, text.replace(f"{ROOT}/", "").replace(str(ROOT), "."))
            elif path.suffix == ".safetensors" and name not in TAUGHT:
                save_file(_one_tensor(path, start), small := folder / "one.safetensors", {"format": "pt"})
                pack.write(small, within)
            else:
                pack.write(path, within)


def _one_tensor(path: Path, start: Path) -> dict[str, Tensor]:
    """Choose the smallest of the tensors that changed most since ``start``; of an adapter the factor that begins as zeros."""
    end, before = load_file(path), load_file(start / "model.safetensors")

    def changed(name: str) -> float:
        if name not in before:
            return float("lora_B" in name)
        return float((end[name] != before[name].to(end[name])).float().mean())

    name = max(end, key=lambda name: (changed(name), -end[name].numel()))
    return {name: end[name]}


def replay(folder: Path, name: str, overrides: Sequence[str]) -> bool:
    """Put a recorded run into a folder; return False where there is none.

    Raises:
        AssertionError: It was recorded with other settings or other files.
    """
    file, run = PLACE / f"{name}.zip", folder / name
    if not file.exists():
        return False
    with ZipFile(file) as pack:
        then = json.loads(pack.read("overrides.json").decode().replace(FOLDER, str(folder)))
        assert then == [*overrides], f"{name} was recorded with {then}, the test has {overrides}: {AGAIN}"
        pack.extractall(run)
    for path in run.rglob("*"):
        if path.suffix in TEXTS:
            path.write_text(path.read_text(encoding="utf-8").replace(FOLDER, str(folder)), encoding="utf-8")
    for key, entry in json.loads((run / "inputs.json").read_text(encoding="utf-8")).items():
        now = Path(entry["path"])
        same = not now.is_relative_to(folder) or sha256(now.read_bytes()).hexdigest() == entry["sha256"]
        assert same, f"{key} of {name} was another file when it was recorded: {AGAIN}"
    sign(run)
    return True

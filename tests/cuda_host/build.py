"""Builds the environment of ``make test-cuda-host``: torch's CUDA build over a CUDA runtime without a GPU.

``python -m tests.cuda_host.build FOLDER`` puts into FOLDER: ``site`` with PyPI's CUDA builds of torch and triton
(0.75 GB of wheels; none of NVIDIA's libraries), CUDA's ``headers``, ``lib`` with the stub under the names of those libraries, and
``python``, which starts this interpreter on both: ``FOLDER/python 90 80 …`` is a card of compute capability 9.0 with 80 GB.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from sysconfig import get_paths

HERE = Path(__file__).parent
TRITON = {"2.13.0": "3.7.1", "2.11.0": "3.6.0"}
"""The triton that a torch release asks for; it brings ptxas along."""
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
"""Of the CUDA that both are built for; triton's own headers may be of an older one."""
NVIDIA = re.compile(
    r"(__cuda|cu[A-Z]|cuda|cublas|cudnn|nccl|cusparse|cusolver|cufft|curand|cupti|nvrtc|nvshmem|nvtx|nvml)\w+"
)
LIBRARY = re.compile(r"\[(lib(?:cu|nccl|nvrtc|nvshmem_host)[^]]*\.so\.\d+)\]")
_START = """#!/bin/sh
# CAPABILITY (90, 89, 75 …) GIGABYTES ARGUMENTS…: Python with torch's CUDA build on the stub
export STUB_CC="$1" STUB_CARD_GB="$2" LD_LIBRARY_PATH={lib} TRITON_LIBCUDA_PATH={lib} TRITON_CACHE_DIR={folder}/triton
export TRITON_INTERPRET="${{TRITON_INTERPRET:-0}}" OMP_NUM_THREADS=1 PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}}
shift 2
exec {python} "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="2.13.0", choices=sorted(TRITON))
    options = parser.parse_args()
    folder = options.folder.resolve()
    site, lib, headers = folder / "site", folder / "lib", folder / "headers"
    for path in (lib, folder / "triton"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    install(site, f"torch==={options.torch}", f"triton=={TRITON[options.torch]}")
    install(headers, *HEADERS)
    objects = [*(site / "torch/lib").glob("*.so"), *(site / "torch").glob("_C*.so")]
    objects += Path(get_paths()["purelib"]).glob("bitsandbytes/*_cuda130.so")
    by_name = (site / "torch/lib/libc10_cuda.so").read_bytes()  # what it asks the driver for while it runs
    by_name += (site / "triton/backends/nvidia/driver.c").read_bytes()
    wanted = imported(objects) | {
        name.decode() for name in re.findall(rb"\b(?:cu[A-Z]|nvml[A-Z])\w{3,}", by_name)
    }
    build(wanted, headers / "nvidia/cu13/include", lib / "libstub.so")
    for name in {*needed(objects), "libcuda.so.1", "libnvidia-ml.so.1"}:
        (lib / name).unlink(missing_ok=True)
        (lib / name).symlink_to("libstub.so")
    names = {"lib": lib, "folder": folder, "site": site, "python": sys.executable}
    start = folder / "python"
    start.write_text(_START.format(**{name: shlex.quote(str(path)) for name, path in names.items()}))
    start.chmod(0o755)
    check = "import torch; print(torch.__version__, torch.cuda.get_device_properties(0))"
    subprocess.run([start, "90", "80", "-W", "ignore", "-c", check], check=True)


def install(folder: Path, *wheels: str) -> None:
    """Install wheels into a new ``folder``; ``===`` takes PyPI's torch, which is CUDA's, where others are preferred."""
    if folder.is_dir():
        return
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
    ]
    partial = folder.with_suffix(".partial")
    subprocess.run([*pip, partial, *wheels], check=True)
    partial.replace(folder)


def imported(objects: list[Path]) -> set[str]:
    """Return the functions of NVIDIA's libraries that ``objects`` call."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *objects], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    return {name for name in names if NVIDIA.fullmatch(name)}


def needed(objects: list[Path]) -> set[str]:
    """Return the names under which ``objects`` look for those libraries."""
    shown = subprocess.run(["readelf", "-d", *objects], capture_output=True, text=True, check=True)
    return set(LIBRARY.findall(shown.stdout))


def build(wanted: set[str], include: Path, library: Path) -> None:
    """Compile the stub; functions that it does not know answer 0, which is success everywhere."""
    rest = library.with_name("rest.cpp")
    compiler = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{include}", "-Wl,-soname,libstub.so"]
    compiler += ["-o", library, HERE / "runtime.cpp", HERE / "driver.cpp"]
    subprocess.run([*compiler, "-ldl"], check=True)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    known = {line.split()[-1] for line in listed.stdout.splitlines()}
    lines = [f"long {name}(...) {{ return 0; }}" for name in sorted(wanted - known)]
    rest.write_text('extern "C" {\n' + "\n".join(lines) + "\n}\n")
    subprocess.run([*compiler, rest, "-ldl"], check=True)


if __name__ == "__main__":
    main()

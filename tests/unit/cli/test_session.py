"""What the heavy imports leave on the terminal: nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from algorist.cli.session import import_quietly
import_quietly("algorist.runs.pipeline")
import gc, triton
print(gc.get_freeze_count() > 100_000)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_imported_triton_ends_without_a_word() -> None:
    """Triton's binding lists what the last collection did not see: that was all of it, frozen."""
    pytest.importorskip("triton", reason="Triton is not installed here (Linux: pip install -e '.[dev]')")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


UNCOMPILED = """
import os
os.environ.pop("TORCHDYNAMO_DISABLE", None)
from algorist.cli.session import import_quietly
import_quietly("algorist.runs.pipeline")
import sys
print("bitsandbytes" in sys.modules, "torch._inductor.compile_fx" in sys.modules, "TORCHDYNAMO_DISABLE" in os.environ)
"""


@pytest.mark.long
@pytest.mark.slow
def test_importing_does_not_load_torchs_compiler_which_stays_as_it_was() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed here (pip install -e '.[dev]')")
    done = subprocess.run([sys.executable, "-c", UNCOMPILED], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True False False", done.stderr

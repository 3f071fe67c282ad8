"""With this folder on ``PYTHONPATH``, every Python process that is started computes numbers for its kernels (``emulate``), in all its threads."""

import sys

if "algorist_grader.child_main" not in sys.orig_argv:  # grading workers, without torch
    import atexit
    import threading
    from pathlib import Path
    from typing import Any

    sys.path.append(str(Path(__file__).parents[3]))
    from algorist.models import products

    products.why_no_triton = lambda: "no kernel writes numbers here"  # type: ignore[assignment]  # before others take it
    from algorist.rollouts.native.graph_tier import Step
    from tests.cuda_host.emulate import Emulate, numbers_of_a_replay

    missing: dict[str, str] = {}
    run_thread = threading.Thread.run

    def run(thread: Any) -> None:
        with Emulate(missing):
            run_thread(thread)

    Step.run = numbers_of_a_replay(Step.run)  # type: ignore[method-assign]
    threading.Thread.run = run  # type: ignore[method-assign]
    Emulate(missing).__enter__()
    atexit.register(lambda: missing and print("without numbers:", missing, file=sys.stderr))

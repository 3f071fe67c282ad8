"""Process of a verb: quiet imports of the heavy libraries, and the message when Ctrl-C ends it."""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from algorist.cli.arguments import read_recipe
from algorist.cli.terminal import Result
from algorist.errors import CheckpointError, ConfigError, MissingExtraError, check_known
from algorist.store.stages import STAGES, STOP_FILE, checkpoints

if TYPE_CHECKING:
    from algorist.store.run_folder import RunFolder

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


def import_quietly(module: str, say: Callable[[str], None] | None = None) -> None:
    """Import a verb's module, and keep the libraries' notes out of the live display; their errors still show.

    What imports make lives to the end of the process: it is kept out of garbage collections, during the imports and after.

    Args:
        module: What to import.
        say: Is told of the seconds that importing takes, so that a pipe, too, hears something at once.
    """
    _check_environment(say)
    if say and "torch" not in sys.modules:
        say("loading torch and transformers …")
        sys.stdout.flush()
    for name in ("transformers", "datasets", "accelerate", "torch.distributed.elastic", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if module not in sys.modules:
        # PEFT imports bitsandbytes, which compiles functions at once: that would load torch's compiler, two seconds or more.
        unset = _NO_COMPILER not in os.environ
        os.environ.setdefault(_NO_COMPILER, "1")
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            gc.enable()
            if unset:
                del os.environ[_NO_COMPILER]
        gc.freeze()
        atexit.register(_unfreeze)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _check_environment(say: Callable[[str], None] | None) -> None:
    """Refuse variables that torch and accelerate would fail over later; say where they make this process wait for others.

    Raises:
        ConfigError: The variable, its value, and how to take it away.
    """
    values = os.environ
    wrong = [name for name in _NUMBERS if not values.get(name, "0").isdecimal()]
    wrong += [name for name in (_PRECISION,) if values.get(name, "no") not in ("no", "fp16", "bf16", "fp8")]
    if not wrong and int(values.get("RANK", "0")) >= max(1, int(values.get("WORLD_SIZE", "1"))):
        wrong = ["RANK"]
    if wrong:
        expected = "no, fp16, bf16 or fp8" if wrong[0] == _PRECISION else "a number (RANK below WORLD_SIZE)"
        raise ConfigError(
            f"the environment has {wrong[0]}={values[wrong[0]]!r}; expected {expected}. A launcher or a cluster may have left it: "
            f"unset {' '.join(name for name in (*_NUMBERS, _PRECISION) if name in values)}"
        )
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), which transformers reads: unset PYTHONOPTIMIZE"
        )
    if (
        say
        and int(values.get("WORLD_SIZE", "1")) > 1
        and not {"TORCHELASTIC_RUN_ID", STOP_FILE} & set(values)
    ):
        say(
            f"process {values.get('RANK', '0')} of {values['WORLD_SIZE']} (RANK, WORLD_SIZE): waits until all have met at "
            f"{values.get('MASTER_ADDR', 'localhost')}:{values.get('MASTER_PORT', '29500')}. If a cluster has left these variables: "
            f"unset {' '.join(name for name in _NUMBERS if name in values)}"
        )


def _unfreeze() -> None:
    """Let the last collection see everything where Triton needs it: its binding prints what was not collected, page by page."""
    if "triton" in sys.modules:
        gc.unfreeze()


class Stopped(Exception):
    """Ctrl-C ended a verb: exit code 130; the message, if any, says what is kept and how to go on."""


def command_again(*, resume: bool) -> str:
    """Return the command of this process, with ``--resume`` (before a ``--``) or without it, for ``say``."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if resume:
        place = words.index("--") if "--" in words else len(words)
        words.insert(place, "--resume")
    return f"algorist {shlex.join(words)}"


def stopped_at_once(run: Path | None) -> str:
    """Return one line for a run that ended in the middle of something: what ``run`` keeps and how to go on.

    None is a run that this command has not touched.
    """
    from algorist.store.run_folder import RunFolder

    folder = RunFolder(run) if run else None
    if folder is not None and os.environ.get("RANK", "0") == "0" and folder.is_running():
        return f"stopped before anything was done; {run} is in use by another process, which continues"
    if folder is None or not folder.config.is_file() or not folder.has_begun():
        only = f" ({run} holds only its settings)" if folder and folder.config.is_file() else ""
        return f"stopped before the first training step: nothing was trained{only}. Start again: " + (
            command_again(resume="--resume" in sys.argv)
        )
    saved = _saved(folder)
    if not saved:
        return (
            f"stopped before the first checkpoint: nothing that was trained is kept in {run}. "
            f"Begin again there: {command_again(resume=True)}"
        )
    return (
        f"stopped at once; {run} keeps {', '.join(saved)}, what came after is done again. "
        f"Continue: {command_again(resume=True)}"
    )


def _saved(folder: RunFolder) -> list[str]:
    """Return the finished stages, and the newest checkpoint of each stage that is not finished."""
    try:
        finished = list(folder.stages())
    except CheckpointError:
        finished = []
    names = [f"finished {stage}" for stage in finished]
    for stage in STAGES:
        newest = next(iter(checkpoints(folder.path / stage)), None)
        if newest is not None and stage not in finished:
            names.append(f"{stage}/{newest.name}")
    return names


# ---- ``algorist run -n 2 RECIPE [key=value …] [-- accelerate flags]``: a run in several processes

CONFIGS = ("ddp", "fsdp2", "zero2", "zero3")
_COMMAND = "ALGORIST_LAUNCH_COMMAND"
# accelerate's own entry point, which would answer a failed worker with a long traceback and always with 1.
_ACCELERATE = """
import logging, subprocess, sys
from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
api.logger.setLevel(logging.CRITICAL)  # the process itself has said it
try:
    main()
except ChildFailedError as error:
    codes = [failure.exitcode for failure in error.failures.values()]
    if killed := [-code for code in codes if code < 0 and code != -15]:  # 15 is the launcher's own
        print(f"error: signal {killed[0]} ended a process (9: often for want of memory)", file=sys.stderr)
        sys.exit(128 + killed[0])
    sys.exit(max(codes) if max(codes) > 0 else 128 + 15)
except subprocess.CalledProcessError as error:
    sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
"""


def launch(
    recipe: str,
    settings: list[str],
    flags: list[str],
    processes: int | None,
    config: str,
    options: list[str],
    stages: Sequence[str],
) -> int:
    """Start ``run`` in several processes, by default one per GPU, and return the exit code.

    Args:
        recipe: Name or file.
        settings: ``key=value`` each.
        flags: accelerate's, which win.
        processes: How many, in all.
        config: One of ``CONFIGS`` or a file.
        options: Those of ``run`` that its workers need.
        stages: Which training stages to do.

    Raises:
        Stopped: Ctrl-C or SIGTERM ended it.
    """
    try:
        count = _count_in(flags) or processes or _devices(_on_cpu("auto", flags))
        loaded = read_recipe(recipe, [*settings, f"grpo.processes={count}"])
        on_cpu = _on_cpu(loaded.device, flags)
        if on_cpu and count > 1 and not (processes or _count_in(flags)):
            count = 1
            loaded = read_recipe(recipe, [*settings, f"grpo.processes={count}"])
        from algorist.runs.draft import Draft

        Draft.of(loaded, stages=stages, resume="--resume" in options)  # a mistake is said once
    except KeyboardInterrupt:
        raise Stopped("stopped before a process was started: nothing was trained") from None
    flags = [flag for flag in flags if flag != "--cpu"]  # with it accelerate starts one process only
    command = [
        *(sys.executable, "-c", _ACCELERATE),
        *_accelerate_flags(config, count, flags),
        *flags,
        *("-m", "algorist.cli.main", "run", "--worker", recipe, *settings, f"grpo.processes={count}"),
        *options,
    ]
    code = _call(command, _environment(on_cpu, count, config))
    if code == 130:
        raise Stopped  # the worker has said it
    return code


def config_file(name: str) -> Path:
    """Return the accelerate configuration that ``--launch`` names.

    Raises:
        ConfigError: It is unknown, or needs a package that is not there.
    """
    if name not in CONFIGS:
        if Path(name).is_file():
            return Path(name)
        expected = "Expected one of {}, or a file that `accelerate config` wrote"
        check_known(name, CONFIGS, f"--launch {name}: no such configuration or file", expected)
    if name.startswith("zero") and find_spec("deepspeed") is None:
        raise MissingExtraError(
            f"--launch {name} needs DeepSpeed, which is not installed: pip install deepspeed; or take --launch fsdp2, "
            "which needs nothing more"
        )
    return Path(str(files("algorist").joinpath("launch", f"{name}.yaml")))


def _accelerate_flags(config: str, count: int, flags: list[str]) -> list[str]:
    """Return our flags for accelerate; the user's, after ``--``, come later and win."""
    file = config_file(config)
    ours = ["--num_processes", str(count)]
    if not (count == 1 and config == "ddp"):
        ours = ["--config_file", str(file), *ours]
    theirs = {flag.partition("=")[0].replace("-", "_").lstrip("_") for flag in flags if flag.startswith("--")}
    if not theirs & {"num_machines", "main_process_port", "rdzv_backend"} and config in CONFIGS:
        ours += ["--main_process_port", "0"]  # a free one: two runs on a machine do not meet
    return ours


def _count_in(flags: list[str]) -> int | None:
    """Return the number that accelerate's own flag after ``--`` gives, the last one; it wins over ours."""
    words = [word for flag in flags for word in flag.replace("-", "_").split("=", 1)]
    pairs = itertools.pairwise(words)
    counts = [int(value) for name, value in pairs if name == "__num_processes" and value.isdigit()]
    return counts[-1] if counts else None


def _on_cpu(device: str, flags: list[str]) -> bool:
    if device == "cpu" or "--cpu" in flags:
        return True
    import torch

    return not torch.cuda.is_available()


def _devices(on_cpu: bool) -> int:
    if on_cpu:
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _environment(on_cpu: bool, count: int, config: str) -> dict[str, str]:
    environment = {**os.environ, _COMMAND: shlex.join(sys.argv[1:])}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's hints about its own speed
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if on_cpu and config.startswith("zero"):
        # accelerate takes DeepSpeed only where ACCELERATE_USE_CPU is not set
        environment["DS_ACCELERATOR"] = "cpu"
    elif on_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def _call(command: list[str], environment: dict[str, str]) -> int:
    """Run accelerate and return its exit code, or 130 when Ctrl-C or SIGTERM stopped the run.

    torchrun gives its workers 30 seconds after a signal. So the first one is not passed on: it makes a file that the workers
    look for after every step. The second one ends them at once.
    """
    with tempfile.TemporaryDirectory(prefix="algorist-launch-") as folder:
        stop = Path(folder) / "stop"
        process = subprocess.Popen(command, env=environment | {STOP_FILE: str(stop)}, start_new_session=True)

        def end(*_: object) -> None:
            if stop.exists():
                print(
                    f"stopped at once; what was saved before is kept. Continue: {command_again(resume=True)}",
                    file=sys.stderr,
                )
                process.terminate()
            else:
                stop.touch()
                print("stopping after this step; Ctrl-C again: stop at once", file=sys.stderr)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 130 if stop.exists() else code if code >= 0 else 128 - code


def work(
    recipe: str, settings: list[str], resume: bool, stages: tuple[str, ...], run: Callable[[], Result | None]
) -> Result | int:
    """Do one process's part; the main process runs with ``run``, which also shows it, and returns what it has to show."""
    sys.argv[1:] = shlex.split(os.environ.get(_COMMAND, shlex.join(sys.argv[1:])))
    result, code = None, 0
    try:
        if os.environ.get("RANK", "0") == "0":
            try:
                result = run()
            except Stopped as stopped:
                print(stopped, flush=True, file=sys.stderr if "--json" in sys.argv else sys.stdout)
                code = 130
        else:
            import_quietly("algorist.training.grpo_setup")
            from algorist.runs.pipeline import run_recipe

            state = run_recipe(read_recipe(recipe, settings), resume=resume, stages=stages)
            code = 130 if state.stopped else 0
    finally:
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    stop = os.environ.get(STOP_FILE)
    if stop and Path(stop).exists():
        return result or 0  # the launcher knows; torchrun would show a failure
    if code == 130:
        raise Stopped
    return result or code

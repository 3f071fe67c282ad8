"""The command line: one file per verb, imported only when the verb runs, so that ``--help`` answers at once."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import platform
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from algorist import __version__
from algorist.cli.verbs import COMPLETE, VERBS, app_of

INTERRUPTED = 130
"""Exit code after Ctrl-C; typer returns it in place of the exception."""
_AFTER_CTRL_C = {
    "resume": " before anything was done; give the command again",
    "again": "; give the same command again to continue",
}
"""Ending of the message after Ctrl-C, for a verb that has such an option."""


def main() -> None:
    """Entry point: exit 2 for a user's mistake (one screen, no traceback unless --debug), 1 for a failure."""
    if COMPLETE in os.environ:
        from algorist.cli.completion_command import complete

        return complete()
    arguments, rest = sys.argv[1:], []
    if "--" in arguments:  # what follows is text
        arguments, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") :]
    for word in ("--debug", "--trust"):  # for the processes that it starts too
        if word in arguments:
            os.environ[f"ALGORIST_{word[2:].upper()}"] = "1"
    arguments = [a for a in arguments if a not in ("--debug", "--trust")] + rest
    if arguments[:1] == ["help"] or arguments[1:] == ["-h"]:
        arguments = [*(word for word in arguments if word not in ("help", "-h")), "--help"]
    if arguments in ([], ["--help"], ["-h"]):
        print(_help())
        sys.exit(0)
    if arguments == ["--version"]:
        print(f"algorist {__version__}")
        sys.exit(0)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # for what Apple's GPU has no kernel
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin keep others from working
    _let_gpu_memory_grow()
    from algorist.cli.safe_stream import SafeStream

    _end_like_ctrl_c(launched="--worker" in arguments)
    safe: Any = (SafeStream(sys.stdout), SafeStream(sys.stderr))
    try:
        with contextlib.redirect_stdout(safe[0]), contextlib.redirect_stderr(safe[1]):
            code = _call(arguments, os.environ.get("ALGORIST_DEBUG") == "1")
    except KeyboardInterrupt:  # again, while the first was answered
        code = INTERRUPTED
    with contextlib.suppress(ValueError):  # the end itself is not interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _let_gpu_memory_grow() -> None:
    """Keep torch from holding a GPU's memory in pieces that fit nothing else; vLLM's sleep (before 0.32) and WSL do not bear it."""
    unfit = importlib.util.find_spec("vllm") is not None or "microsoft" in platform.release()
    if not unfit and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _end_like_ctrl_c(*, launched: bool) -> None:
    """Let SIGTERM stop a verb as Ctrl-C does, with its word, and a terminal that goes away (SIGHUP) as SIGTERM does.

    What is ignored (under nohup) stays ignored. A process that a launcher started ends at once, as the launcher expects.
    """

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
        raise KeyboardInterrupt

    from algorist_grader.system import HANGUP

    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not launched:
            signal.signal(signal.SIGTERM, stop)
        if HANGUP is None or signal.getsignal(HANGUP) is not signal.SIG_DFL:
            return
        terminals = [handle for handle in (0, 1, 2) if os.isatty(handle)]

        def pass_on(*_: Any) -> None:
            for handle in terminals:  # what is said from here on has no reader, and must not fail
                os.dup2(os.open(os.devnull, os.O_RDWR), handle)
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(HANGUP, pass_on)
    except ValueError:  # not in the main thread: the caller handles signals
        return


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    return (
        "Usage: algorist VERB [ARGUMENTS]\n\n"
        "Turn a small language model into a mathematical reasoner.\n\n"
        f"{verbs}\n\n"
        "Example: algorist run quickstart\n"
        "Help of a verb: algorist VERB --help · version: algorist --version\n"
        "--debug: show tracebacks · --trust: run the code that a run folder from\n"
        "elsewhere names (own rewards, trust_remote_code)"
    )


def _call(arguments: list[str], debug: bool) -> int:
    from typer import Abort

    from algorist.cli.session import Stopped
    from algorist.errors import nearest

    verb = arguments[0]
    if verb not in VERBS:
        known = f"Verbs: {', '.join(VERBS)}. Help: algorist --help"
        print(f"error: no verb '{verb}'.{nearest(verb, VERBS)} {known}", file=sys.stderr)
        return 2
    from algorist.cli.terminal import as_typed, program, say

    takes: set[str] = set()
    try:
        app = app_of(verb)
        if len(app.registered_commands) == 1:
            takes = {*inspect.signature(app.registered_commands[0].callback).parameters}
        for help_of in (app.info, *app.registered_commands):
            help_of.epilog = as_typed(help_of.epilog or "").replace(" · ", "\n\n")  # a line each
        result = app(arguments[1:], prog_name=f"{program()} {verb}", standalone_mode=False)
        if result == INTERRUPTED:
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, Abort):
        after = next((text for name, text in _AFTER_CTRL_C.items() if name in takes), "")
        say(f"stopped{after}", stderr=True)
        return INTERRUPTED
    except Stopped as stopped:
        if str(stopped):
            say(str(stopped), stderr="--json" in arguments)
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except SystemExit as error:
        if not _line_of_user(error):
            raise
        return _tell(error)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error of the command line
            ours = _ours_for(arguments, error) if takes >= {"recipe", "overrides"} else ""
            if hasattr(error, "message"):
                error.message = _shown(str(error.message))
            if ours:
                vars(error)["possibilities"] = None
            error.show()
            if ours:
                say(f"Settings are key=value, without dashes.{ours}", stderr=True)
            return 2
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)  # the main process says what all of them met, and its launcher ends the others
        if debug:
            traceback.print_exc()
            return 1
        return _tell(error)


def _ours_for(arguments: list[str], error: Any) -> str:
    """Return the setting that another program's option means; of SFT where the recipe has no GRPO."""
    from algorist.config.load import load_recipe
    from algorist.config.other_names import ours_for
    from algorist.config.schema import SFTSection

    sft_only = ["--only", "sft"] in [arguments[i : i + 2] for i in range(len(arguments))]
    with contextlib.suppress(Exception):
        sft_only = sft_only or not load_recipe(arguments[1]).recipe.grpo.enabled
    where = ("sft", SFTSection.model_fields) if sft_only else ("", ())
    name = str(getattr(error, "option_name", ""))
    written = next((a.lstrip("-") for a in arguments if a.startswith(name) and "." in name), "")
    return f" Write {written}" if written else ours_for(name, *where)


def _line_of_user(error: BaseException) -> str:
    """Return the last line of a user's own file that an error came through, as ``mine.py:12``, or nothing."""
    own = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("algorist_user_")
    ]
    return own[-1] if own else ""


def _tell(error: BaseException) -> int:
    """Print the error, and how to report it where it is none of ours; return the exit code."""
    from algorist.cli.terminal import say
    from algorist.errors import AlgoristError, is_disk_full, is_out_of_memory

    text, code = str(error), error.exit_code if isinstance(error, AlgoristError) else None
    network = isinstance(error, (ConnectionError, TimeoutError))
    package, mark, missing = str(getattr(error, "name", "")).partition("algorist.extensions.")
    if isinstance(error, ModuleNotFoundError) and mark and not package:
        text = (
            f"this installation is without the extension '{missing.partition('.')[0]}', which this verb needs"
        )
        code = 2
    if isinstance(error, OSError) and error.strerror and not network:  # said where it happened
        text, code = f"{error.filename or 'a file'}: {error.strerror}", 2
    elif is_disk_full(error):
        text, code = f"weights cannot be written; is the disk full? ({text.splitlines()[0][:200]})", 2
    elif code is None and is_out_of_memory(error):  # asks torch, which a mistake need not wait for
        text = f"out of memory ({text[:300] or 'no room'}); algorist preflight RECIPE says what fits, and what to make smaller"
        code = 1
    if code is None and (line := _line_of_user(error)):
        code = 2
        text = f"{line} raised {type(error).__name__}: {text or 'no message'} (the traceback: add --debug)"
    if code is not None:
        say(f"error: {_shown(text)}", stderr=True)
        return code
    say(
        f"failed: {type(error).__name__}: {_shown(text)}\n"
        "The traceback: add --debug. If this is our fault, please report it with that traceback.",
        stderr=True,
    )
    return 1


def _shown(text: str) -> str:
    """Return an error's text without secrets and invisible characters, and not longer than a screen or two."""
    from algorist.store.safe_text import printable

    cut = text if len(text) <= 8000 else f"{text[:8000]} … ({len(text) - 8000} more characters)"
    return printable(cut)


if __name__ == "__main__":
    main()

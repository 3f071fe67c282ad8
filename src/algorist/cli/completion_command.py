"""``algorist completion bash | zsh | fish``: a script that knows the verbs, their options, the recipes and the runs."""

from __future__ import annotations

import importlib
import re
import shlex
from typing import Annotated, Any

import typer

from algorist.errors import ConfigError, nearest

app = typer.Typer(add_completion=False)
SHELLS = ("bash", "zsh", "fish")
_BASH = """_algorist() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words=
  if [ "$COMP_CWORD" -eq 1 ]; then words="{verbs}"; else
    case "$verb" in
{cases}
    esac
    case "$word" in -*) ;; *) words="$words $(ls -d runs/* 2>/dev/null)" ;; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o nospace -F _algorist algorist"""


@app.command(epilog="Example: algorist completion bash")
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print a completion script. In the shell's start file: source <(algorist completion bash), in fish with a pipe to source."""
    if shell not in SHELLS:
        raise ConfigError(
            f"no completion for '{shell}'.{nearest(shell, SHELLS)} Expected: {', '.join(SHELLS)}"
        )
    print(script(shell))


def script(shell: str) -> str:
    from algorist.cli.main import VERBS

    words = {verb: words_of(verb) for verb in VERBS}
    if shell == "fish":
        lines = [
            f"complete -c algorist -n __fish_use_subcommand -a {verb} -d {shlex.quote(text)}"
            for verb, text in VERBS.items()
        ]
        lines += [
            f"complete -c algorist -n '__fish_seen_subcommand_from {verb}' -a '{' '.join(given)}'"
            for verb, given in words.items()
        ]
        return "\n".join(lines)
    cases = "\n".join(f'      {verb}) words="{" ".join(given)}" ;;' for verb, given in words.items())
    text = _BASH.format(verbs=" ".join(VERBS), cases=cases)
    return text if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{text}"


def words_of(verb: str) -> list[str]:
    """Return what may follow a verb: its parts, its options, and the recipes where it takes one."""
    from algorist.cli.main import WITH_RECIPE
    from algorist.config.load import recipe_names

    command: Any = typer.main.get_command(importlib.import_module(f"algorist.cli.{verb}_command").app)
    parts = getattr(command, "commands", {})
    found = [*parts]
    for one in [command, *parts.values()]:
        found += [o for p in one.params for o in p.opts if o.startswith("--")]
    found += recipe_names() if verb in (*WITH_RECIPE, "recipes") else []
    return list(dict.fromkeys(word for word in found if re.fullmatch(r"[\w.-]+", word)))

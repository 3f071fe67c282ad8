"""A chat template is a program from elsewhere: it is tried once in a process of its own, with limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import lru_cache
from typing import Any

from algorist.errors import ConfigError

LIMIT_S, LIMIT_MB, LIMIT_CHARACTERS = 5.0, 256, 1_000_000


def check_template(template: str, where: str) -> None:
    """Refuse a template that is not Jinja, or that does not render a short chat within limits of time, memory and size.

    Raises:
        ConfigError: One sentence.
    """
    if reason := _fault_of(template):
        raise ConfigError(
            f"the chat template of {where} cannot be used: {reason}. Correct it, or give another: model.chat_template=FILE"
        )


@lru_cache(maxsize=32)
def _fault_of(template: str) -> str:
    """Return a template's fault, or an empty text; a run loads the same one from several folders."""
    from algorist_grader.child_process import Child

    with closing(Child("algorist.models.templates:prepare", memory_mb=LIMIT_MB)) as child:
        reply = child.ask(template.encode("utf-8", errors="surrogatepass"), LIMIT_S)
    reasons = {
        "timeout": f"it does not render a short chat within {LIMIT_S:g} s",
        "memory": f"it needs more than {LIMIT_MB} MiB for a short chat",
    }
    return reasons.get(reply.error, reply.detail.partition("\n")[0]) if reply.error else reply.value or ""


def prepare() -> tuple[Callable[[bytes], str | None], None]:
    """Return a function that renders a template as transformers does and returns its fault, or None."""
    import json

    import jinja2
    import jinja2.ext
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def answer(request: bytes) -> str | None:
        extensions: list[Any] = [jinja2.ext.loopcontrols, _generation_extension()]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "1 Jan 2026"}
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
        names: dict[str, Any] = dict.fromkeys(("tools", "documents"))
        names |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "", "unk_token": ""}
        chat = [{"role": "user", "content": "1 + 1"}]
        try:
            template = environment.from_string(request.decode("utf-8", errors="surrogatepass"))
            text = template.render(messages=chat, add_generation_prompt=True, **names)
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
        except TemplateError:
            return None  # it refuses this chat, or needs what only the tokenizer knows; that is told with a real one
        if len(text) > LIMIT_CHARACTERS:
            return f"it makes {len(text)} characters of a short chat"
        return None if chat[0]["content"] in text else "it leaves the question out"

    return answer, None


def _generation_extension() -> Any:
    """Return an extension for ``{% generation %}``, which transformers knows beside Jinja's own tags."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation

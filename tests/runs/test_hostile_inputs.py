"""Files, settings and replies from elsewhere: each ends in one sentence, within limits of size, depth and time."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import http.server
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from algorist.cli.session import import_quietly
from algorist.config.load import load_recipe, load_run_recipe
from algorist.config.yaml_text import read_yaml
from algorist.data.files import read_rows
from algorist.errors import AlgoristError, CheckpointError, ConfigError, DataError, EngineError
from algorist.extensions.openai_server.client import Endpoint
from algorist.prompts import get_format
from algorist.store.atomic import replace_file
from algorist.store.read import metrics
from algorist.store.run_folder import RunFolder
from tests.conftest import Verb
from tests.marks import but, first

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)
MERGE = "a: &a {k: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n"
    for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)
YAML = {
    "anchor bomb": (BOMB, "aliases grow"),
    "merge bomb": (MERGE, "aliases grow"),
    "holds itself": ("a: &a [*a]", "holds itself"),
    "no such day": ("a: 2001-99-99", "not valid YAML: month must be"),
    "huge number": (f"a: {'9' * 5000}", "a number of 5000 characters"),
    "base 60": (f"a: {'1:' * 200_000}1", "characters; expected at most"),
    "depth": ("[" * 5000, "nested too deeply"),
    "depth of maps": ("".join(f"{' ' * n}a:\n" for n in range(200)), "nested too deeply"),
    "control character": ("a: \x07", "not valid YAML"),
    "a tag of Python": ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
    "no mapping": ("[1, 2]", "expected keys and values"),
    "unhashable": ("? [1]\n: 2", "not valid YAML"),
    "large": ("a: " + "x" * 2_000_000, "at most"),
    "minutes": ("seed: 1:30", "1:30 is a number to the base 60 or 8"),
    "octal": ("seed: 010", "010 is a number to the base 60 or 8"),
    "a set": ("report_to: !!set {wandb, mlflow}", "a !!set has no order"),
}


@pytest.mark.parametrize("case", but(YAML, "depth"))
def test_yaml_has_limits(case: str, tmp_path: Path) -> None:
    text, message = YAML[case]
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as found:
        load_recipe(str(tmp_path / "recipe.yaml"))
    assert len(str(found.value)) < 800
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises((CheckpointError, ConfigError)):
        load_run_recipe(tmp_path)


@pytest.mark.parametrize(
    "value", ["*a", "&a [*a]", "9" * 5000, "[" * 3000, "2001-99-99", "!!python/name:os.system"]
)
def test_overrides_have_the_same_limits(value: str) -> None:
    with pytest.raises(ConfigError, match="override 'description="):
        load_recipe("smoke-cpu", [f"description={value}"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        *((f"seed={value}", "seed: ") for value in (-1, 2**32)),
        *((f"threads={value}", "threads: ") for value in (0, 5000, 10**20)),
        *(
            (f"{key}={10**20}", f"{key}: expected a number of at most 1e.12")
            for key in (
                "sft.batch_size",
                "sft.max_length",
                "grpo.max_completion_tokens",
                "eval.max_completion_tokens",
            )
        ),
        *(
            (f"model.tiny.{key}={10**18}", f"model.tiny.{key}: ")
            for key in ("hidden_size", "vocab_size", "layers")
        ),
        ("sft.learning_rate=.inf", "sft.learning_rate: expected"),
        ("rewards=[{name: correct, weight: .nan}]", "rewards.0.weight: expected"),
        ('output_dir="\\0"', "output_dir: holds a NUL character"),
        ('rewards=[{name: "\\0.py:f"}]', "rewards.0.name: holds a NUL character"),
    ],
)
def test_numbers_have_bounds_and_names_no_nul(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("smoke-cpu", [setting])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc'; expected a number.* unset WORLD_SIZE"),
        ({"RANK": "3"}, "RANK='3'; expected .*below WORLD_SIZE"),
        ({"ACCELERATE_MIXED_PRECISION": "nope"}, "'nope'; expected no, fp16, bf16 or fp8"),
    ],
)
def test_variables_that_a_cluster_left_are_refused(
    variables: dict[str, str], message: str, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = verb("run", "smoke-cpu")
    assert code == 2 and re.search(message, err), err


def test_one_who_waits_for_other_processes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    import_quietly("json", said.append)
    assert "process 3 of 8" in said[0] and "127.0.0.1:1" in said[0] and "unset RANK WORLD_SIZE" in said[0]


@pytest.mark.parametrize(
    "optim", ["lomo", "galore_adamw", "schedule_free_adamw", "stable_adamw", "grokadamw"]
)
def test_the_package_of_an_optimiser_is_looked_for_at_once(optim: str, verb: Verb, tmp_path: Path) -> None:
    code, out, err = verb("run", "smoke-cpu", f"grpo.optim={optim}")
    assert code == 2 and "is not installed: pip install" in err and "loading torch" not in out, err
    assert not (tmp_path / "runs").exists()


def test_what_follows_two_dashes_is_no_flag(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALGORIST_TRUST", raising=False)
    for flag in ("--debug", "--trust"):
        assert flag in verb("grade", "--answer", "1", "--gold", "1", "--", flag)[2]
    assert "ALGORIST_TRUST" not in os.environ


def test_ordinary_yaml_reads_as_before() -> None:
    assert read_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2.5}\nf: 2001-01-02\ng: ~", "it")["d"] == {
        "b": 1,
        "e": 2.5,
    }
    assert read_yaml("", "it") is None


@pytest.mark.parametrize("name", ["x" * 5000 + ".yaml", "a\0b.yaml", "/".join(["d"] * 3000) + ".yaml"])
def test_paths_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_recipe(name)
    assert len(str(found.value)) < 500


@pytest.mark.parametrize("name", ["..", "../out", "/tmp/out", "a/b", ".", "a\x1b[2Jb", "x" * 300])
def test_a_run_name_stays_inside_the_output_folder(name: str, tmp_path: Path) -> None:
    recipe = load_recipe("smoke-cpu", [f"output_dir={tmp_path}", f"run_name={json.dumps(name)}"]).recipe
    with pytest.raises(ConfigError, match="expected a plain folder name") as found:
        _ = recipe.path
    assert "\x1b" not in str(found.value)


# --- data


def rows_file(folder: Path, content: str) -> Path:
    (folder / "rows.jsonl").write_text(content)
    return folder / "rows.jsonl"


def repeated(count: int, text: str) -> pyarrow.Array:
    """``count`` times one text, stored once."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [text])


def in_lists(values: pyarrow.Array, lists: int) -> pyarrow.Array:
    ends = range(0, len(values) + 1, len(values) // lists)
    return pyarrow.ListArray.from_arrays(pyarrow.array(ends, pyarrow.int32()), values)


BOMBS = {
    "a column": lambda: repeated(20_000, "x" * 100_000),
    "one list": lambda: in_lists(repeated(1_000_000, "1" * 1000), 1),
    "a list in an object": lambda: pyarrow.StructArray.from_arrays(
        [in_lists(repeated(1_000_000, "1" * 1000), 1)], ["x"]
    ),
    "numbers": lambda: in_lists(pyarrow.repeat(7, 20_000_000), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", first(1, BOMBS))
def test_a_parquet_bomb_is_refused(bomb: str, tmp_path: Path) -> None:
    """At most 200 kB that unpack to gigabytes."""
    column = BOMBS[bomb]()
    table = pyarrow.table({"question": ["q"] * len(column), "answer": column})
    pyarrow.parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 300_000
    code = (
        "import re, sys\nfrom algorist.data.files import read_rows\nfrom algorist.errors import DataError\n"
        "try:\n    read_rows(sys.argv[1])\nexcept DataError as e:\n    print('unpack to more than' in str(e))\n"
        # Not ru_maxrss, which a process inherits from the one that started it.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) < 600_000)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\nTrue\n", done.stderr[-500:]


def test_an_ordinary_table_reads_as_before(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"{n} + 1 = ?",
            "answer": str(n + 1),
            "more": {"steps": [str(n), None], "weights": [n / 2]},
        }
        for n in range(3000)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(
        table, tmp_path / "t.parquet", row_group_size=700, dictionary_pagesize_limit=500
    )
    assert read_rows(tmp_path / "t.parquet") == rows


def test_columns_that_json_does_not_know_are_shown(verb: Verb, tmp_path: Path) -> None:
    """``data check`` reads them, so ``data show`` shows them."""
    table = pyarrow.table(
        {
            "question": ["1 + 1"],
            "answer": ["2"],
            "raw": [b"\xff"],
            "price": [decimal.Decimal("1.5")],
            "took": [datetime.timedelta(seconds=3)],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    code, out, _ = verb("data", "show", "local", "--path", "t.parquet")
    assert code == 0 and json.loads(out)["extra"]["price"] == "1.5"


@pytest.mark.parametrize("damage", [b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b""])
def test_a_damaged_table_is_named(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(damage)
    with pytest.raises(DataError, match=r"t\.parquet"):
        read_rows(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "a \\ud800 b", "answer": "1"}', "row 1 holds half a character"),
        ('{"question": "a", "answer": NaN}', "row 1 has no gold answer"),
        ('{"question": "a", "answer": ' + "[" * 20_000, "not JSON"),
        ('{"question": "a", "answer": "1", "answer": "2"}', "'answer' appears twice in one row"),
        (
            '{"question": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}',
            "row 1 has chat messages .of more than one question and one reply. or an object where",
        ),
        ('{"question": {"text": "a"}, "answer": "1"}', "or an object where a text is expected"),
        ('{"question": "a", "answer": ["1", null]}', "row 1 has null in a list"),
        ('{"question": "a", "answer": Infinity}', "row 1 has infinity as a number"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: str, message: str, tmp_path: Path) -> None:
    from algorist.config.schema import DatasetSection
    from algorist.data import load_problems

    section = DatasetSection(name="local", path=str(rows_file(tmp_path, row + "\n")))
    with pytest.raises(DataError, match=message) as found:
        load_problems(section)
    str(found.value).encode()


# --- replies of a server


def ok(body: bytes, **headers: str) -> Callable[[Any], None]:
    def reply(handler: Any) -> None:
        handler.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def chat(message: Any) -> Callable[[Any], None]:
    return ok(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode())


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65536)


def slow(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def slow_headers(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"a")
        time.sleep(0.05)


def redirect(handler: Any) -> None:
    handler.send_response(302)
    handler.send_header("Location", "file:///etc/passwd")
    handler.end_headers()


def raw(data: bytes) -> Callable[[Any], None]:
    def reply(handler: Any) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return reply


REPLIES: dict[str, Callable[[Any], None]] = {
    "empty": ok(b""),
    "no JSON": ok(b"<html>"),
    "a list": ok(b"[]"),
    "a number": ok(b"1"),
    "null": ok(b"null"),
    "half": ok(b'{"choices": ['),
    "no choices": ok(b'{"choices": []}'),
    "choices of text": ok(b'{"choices": "abc"}'),
    "choices of an object": ok(b'{"choices": {"0": 1}}'),
    "choice of null": ok(b'{"choices": [null]}'),
    "no message": ok(b'{"choices": [{}]}'),
    "message of text": chat("hello"),
    "message of null": chat({"content": None}),
    "message of parts": chat({"content": [{"text": "x"}]}),
    "deep": ok(b"[" * 100_000),
    "huge number": ok(b'{"choices": ' + b"9" * 5000 + b"}"),
    "not UTF-8": ok(b'{"choices": "\xff\xfe"}'),
    "endless": endless,
    "slow": slow,
    "slow headers": slow_headers,
    "redirect": redirect,
    "a wrong length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}"),
    "a length of text": raw(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}"),
    "no HTTP": raw(b"\x00\x01\x02\x03"),
    "a huge header": raw(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n{}"),
    "closed": raw(b""),
    "an error with a terminal's sequences": raw(
        b"HTTP/1.1 500 \x1b]0;x\x07\r\nContent-Length: 5\r\n\r\n\x1b[31m"
    ),
}


@pytest.fixture
def server() -> Iterator[Any]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.asked = self.rfile.read(int(self.headers["Content-Length"]))  # type: ignore[attr-defined]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                made.reply(self)  # type: ignore[attr-defined]

        def log_message(self, *_: Any) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("case", but(REPLIES, "slow headers"))
def test_a_hostile_reply_is_an_error_in_words(case: str, server: Any) -> None:
    server.reply = REPLIES[case]
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for form in ("question_only", "reasoning_answer"):  # a prompt as text, a chat
        asked = Endpoint(url, get_format(form), model="m", timeout_s=2.0)
        with pytest.raises(EngineError) as found:
            asked.solve(["1 + 1 = ?"])
        assert len(str(found.value)) < 1500 and all(c == "\n" or c.isprintable() for c in str(found.value))


def test_a_server_that_does_not_answer_is_the_users_to_mend(
    verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algorist.extensions.openai_server.client.LIST_S", 0.5)
    with socket.socket() as silent:  # takes the connection and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code, _, said = verb(
            "solve", "1 + 1 = ?", "--endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
    assert code == 2 and "error: " in said and "takes longer than 0.5 s" in said
    assert "--debug" not in said


def test_lines_that_are_no_metrics_are_left_out(tmp_path: Path, verb: Verb) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    lines = [
        '{"stage": "grpo", "step": 1, "time": 1.0, "reward": 0.5}',
        '{"step": 1e999}',
        '{"step": 3.5}',
        "[" * 100_000,
    ]
    lines += [
        '{"step": -1}',
        '{"step": 2, "time": "x"}',
        f'{{"stage": "grpo", "step": 2, "reward": {10**30}}}',
        "\0\0",
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "environment.json").write_text("[" * 100_000)
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    for name in ("diagnose", "report", "inspect"):
        code, _, said = verb(name, str(folder))
        assert code in (0, 1, 2) and "failed:" not in said, (name, said)


def test_a_secret_in_what_a_reward_raises_is_hidden(tmp_path: Path, verb: Verb) -> None:
    reward = tmp_path / "own.py"
    reward.write_text(
        "def paid(completion):\n    raise ValueError('\\x1b]0;x\\x07 hf_AbCdEfGhIjKlMnOpQrStUvWx')\n"
    )
    words = (
        "--completion",
        "<answer>7</answer>",
        "--answer",
        "7",
        f"rewards=[correct, {{name: {reward}:paid}}]",
    )
    code, _, said = verb("rewards", "explain", *words)
    assert code == 1 and "got its floor: ValueError" in said and "[redacted]" in said
    assert "hf_" not in said and "\x1b" not in said


def test_characters_that_json_escapes_in_halves_are_joined_and_half_ones_refused() -> None:
    told = "the square is \N{WHITE SQUARE} and the dice are \N{GAME DIE}"
    recipe = load_recipe("quickstart", [f"description={json.dumps(told)}"]).recipe
    assert recipe.description == told
    with pytest.raises(ConfigError, match=r"\\udc00 is half of a character"):
        load_recipe("quickstart", [r'description="\ud83d\udca5 \udc00 b"'])


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'seed' appears twice in one section"):
        read_yaml("seed: 1\nseed: 2\n", "a.yaml")


def test_an_ordinary_reply_is_read(server: Any) -> None:
    server.reply = ok(json.dumps({"choices": [{"text": "so \\boxed{2}", "finish_reason": "stop"}]}).encode())
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    (row,) = Endpoint(url, get_format("question_only"), model="m").solve(["1 + 1 = ?"])
    assert row["answer"] == "2"


@pytest.mark.parametrize(
    ("message", "completion", "reasoning"),
    [
        (
            {"content": "<answer>\n2\n</answer>", "reasoning_content": "1 + 1"},
            "<think>1 + 1</think>\n<answer>\n2\n</answer>",
            "1 + 1",
        ),
        ({"content": None, "reasoning": "1 + "}, "<think>1 + ", None),
        ({"content": "<answer>2</answer>", "reasoning_content": None}, "<answer>2</answer>", None),
    ],
)
def test_thoughts_that_a_server_puts_beside_the_content_are_read(
    message: Any, completion: str, reasoning: str | None, server: Any
) -> None:
    server.reply = ok(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode())
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (row,) = Endpoint(url, get_format("think_answer"), model="m").solve(["1 + 1 = ?"])
    assert (row["completion"], row["reasoning"]) == (completion, reasoning)
    assert row["well_formed"] == (reasoning is not None)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (
            {"text": "so \\boxed{2}. Next: \\boxed{7}", "finish_reason": "length"},
            "2",
        ),  # a server that knows no stops
        ({"text": "so \\boxed{2}", "finish_reason": "stop", "stop_reason": ". Next"}, "2"),
    ],
)
def test_a_server_is_asked_with_the_models_stop_strings(reply: Any, answer: str, server: Any) -> None:
    server.reply = ok(json.dumps({"choices": [reply]}).encode())
    url = f"http://127.0.0.1:{server.server_address[1]}"
    asked = Endpoint(url, get_format("question_only"), model="m", stop_strings=(". Next",))
    (row,) = asked.solve(["1 + 1 = ?"])
    assert (row["answer"], row["completion"], row["truncated"]) == (answer, "so \\boxed{2}. Next", False)
    assert json.loads(server.asked)["stop"] == [". Next"]


def test_a_password_in_the_address_is_not_shown() -> None:
    asked = Endpoint(
        "http://me:s3cret-word@127.0.0.1:9", get_format("question_only"), model="m", timeout_s=2.0
    )
    with pytest.raises(AlgoristError) as found:
        asked.solve(["1 + 1 = ?"])
    assert "s3cret" not in str(found.value)


# --- disk and lock


def test_a_disk_that_refuses_twice_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only disk removing the partial file fails too; the first reason is what is told."""

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(CheckpointError, match=r"cannot write .*x\.json: Read-only file system; free space"):
        replace_file(tmp_path / "x.json", read_only)


def test_one_who_looks_does_not_make_a_starting_run_be_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    with run.lock():
        pass
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            run.is_running()

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(50):
            with run.lock():
                pass
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()


def _torch_saves(path: Path) -> None:
    torch.save({"a": torch.zeros(10**6)}, "/dev/full")


def _safetensors_saves(path: Path) -> None:
    """A limit of the file's size stands for a full disk; the kernel's message is another."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        save_file({"a": torch.zeros(10**6)}, path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def _cpp_writes(path: Path) -> None:
    raise RuntimeError("basic_ios::clear: iostream error")


@pytest.mark.parametrize("save", [_torch_saves, _safetensors_saves, _cpp_writes])
def test_weights_on_a_full_disk_end_in_one_sentence(
    save: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from algorist.cli.main import _tell

    with pytest.raises((RuntimeError, SafetensorError)) as found:
        save(tmp_path)
    assert _tell(found.value) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "is the disk full?" in err and err.count("\n") == 1

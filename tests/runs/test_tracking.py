"""Trackers get the names, the recipe, every metric and every evaluation; nothing that fails there stops a run."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import algorist
from algorist.config.load import load_recipe
from algorist.config.schema import Recipe
from algorist.errors import AlgoristError, ConfigError, MissingExtraError
from algorist.extensions.toolkit.oneshot import DEFAULT_GRPO_ARGS
from algorist.extensions.tracking.trackers import (
    TensorBoardTracker,
    Trackers,
    check_trackers,
    identity,
    open_trackers,
)
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.store.write import MetricsWriter
from tests.conftest import Cli
from tests.marks import first
from tests.tiny import tiny_policy

NAMES = ("wandb", "tensorboard", "trackio", "mlflow")


def is_installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


INSTALLED = [name for name in NAMES if is_installed(name)]
MISSING = [name for name in NAMES if name not in INSTALLED]
PLACE = ("device=cpu", "threads=1")


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe("smoke-cpu", [*PLACE, *overrides]).recipe


class Lines(Quiet):
    """A display that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line."""
        self.lines.append(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A whole run with every tracker that is installed here, wandb offline."""
    folder = tmp_path_factory.mktemp("trackers")
    recipe = recipe_of(
        f"output_dir={folder}",
        "run_name=r",
        f"report_to={json.dumps(INSTALLED)}",
        "tracking={project: p1, entity: team, run_name: first, tags: [tiny, cpu], offline: true}",
        "grpo.eval_every=1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # MLflow keeps files there
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        display = Lines()
        run_recipe(recipe, display=display)
        assert not [line for line in display.lines if line.startswith("tracker ")], display.lines
        yield folder / "r"


def logged(run: Path, stage: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == stage]


def evaluation(run: Path, stage: str) -> dict[str, float]:
    found = json.loads((run / "eval" / f"{stage}.json").read_text())["metrics"]
    return {name: interval["value"] for name, interval in found.items() if interval["value"] is not None}


def during(run: Path, stage: str, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of the evaluation within GRPO; SFT has none."""
    return [(1, evaluation(run, "grpo-step-1")[name])] if stage == "grpo" else []


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return found.Reload()


@pytest.mark.slow
@pytest.mark.parametrize("stage", first(1, ["grpo", "sft"]))
def test_tensorboard_has_every_number_of_metrics_jsonl(run: Path, stage: str) -> None:
    found = events(run / "tensorboard" / stage)
    rows = logged(run, stage)
    names = {name for row in rows for name, v in row.items() if isinstance(v, float)} - {"time"}
    assert {"loss"} <= names <= set(found.Tags()["scalars"])
    for name in ("loss", "learning_rate"):
        told = [(e.step, pytest.approx(e.value, rel=1e-6, abs=1e-12)) for e in found.Scalars(name)]
        assert told == [(row["step"], row[name]) for row in rows if name in row]
    for name, value in evaluation(run, stage).items():
        (event,) = found.Scalars(f"final/{name}")
        assert (event.step, event.value) == (2, pytest.approx(value))
        told = [(e.step, e.value) for e in found.Scalars(f"eval/{name}")]
        assert told == [(step, pytest.approx(v)) for step, v in [*during(run, stage, name), (2, value)]]


def test_tensorboard_has_the_recipe_the_names_and_the_spread_of_rewards(run: Path) -> None:
    found = events(run / "tensorboard" / "grpo")
    texts = {
        name: found.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("recipe", "run")
    }
    unindented = "\n".join(line[4:] for line in texts["recipe"].splitlines())
    assert yaml.safe_load(unindented) == yaml.safe_load((run / "config.yaml").read_text())
    about = yaml.safe_load("\n".join(line[4:] for line in texts["run"].splitlines()))
    assert about == {"name": "first", "project": "p1", "tags": ["tiny", "cpu"]}
    spreads = found.Histograms("reward_distribution")
    assert [e.histogram_value.num for e in spreads] == [16, 16]  # completions per step


def test_a_resumed_run_hides_what_it_logs_again(tmp_path: Path) -> None:
    recipe = recipe_of("report_to=tensorboard")
    for steps, value in (((1, 2, 3, 4), 1.0), ((3, 4, 5), 2.0)):
        tracker = TensorBoardTracker(identity(recipe, tmp_path))
        for step in steps:
            tracker.histogram(
                "grpo", step - 1, "reward_distribution", [value]
            )  # what the step will learn from
            tracker.log("grpo", step, {"loss": value})
        tracker.finish()
    found = [(e.step, e.value) for e in events(tmp_path / "tensorboard" / "grpo").Scalars("loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    spreads = events(tmp_path / "tensorboard" / "grpo").Histograms("reward_distribution")
    assert [(e.step, e.histogram_value.sum) for e in spreads if e.step != 2] == [
        (0, 1),
        (1, 1),
        (3, 2),
        (4, 2),
    ]


def test_a_run_resumed_between_training_and_evaluation_adds_to_the_last_step(tmp_path: Path) -> None:
    recipe = recipe_of("report_to=tensorboard")
    trackers = open_trackers(recipe, tmp_path, print)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        for step in (1, 2, 3):
            metrics.write("sft", step, {"loss": 1.0})
            trackers.log("sft", step, {"loss": 1.0})
    trackers.finish()
    trackers = open_trackers(recipe, tmp_path, print)
    trackers.evaluation("sft", None, {"greedy_accuracy": 0.5})
    trackers.finish()
    found = events(tmp_path / "tensorboard" / "sft")
    assert [e.step for e in found.Scalars("loss")] == [1, 2, 3]
    for name in ("eval/greedy_accuracy", "final/greedy_accuracy"):
        assert [(e.step, e.value) for e in found.Scalars(name)] == [(3, 0.5)]


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    display = Lines()
    place = (f"output_dir={tmp_path}", "run_name=r", "eval.enabled=false", "report_to=tensorboard")
    run_recipe(recipe_of(*place, "grpo.enabled=false"), display=display)
    (line,) = [line for line in display.lines if "tensorboard" in line]
    assert "the run continues without it" in line and "metrics.jsonl" in line
    assert len(logged(tmp_path / "r", "sft")) == 2 and (tmp_path / "r/sft/final/config.json").is_file()


def test_secrets_stay_out_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("description=uses correct-horse-battery")
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    found = identity(recipe, tmp_path)
    assert found.config["description"] == "uses [redacted]"
    assert found.config["grpo"]["max_completion_tokens"] == 24


def test_unknown_trackers_are_refused_and_one_may_stand_alone() -> None:
    with pytest.raises(ConfigError, match=r"report_to\.0.*'tensorboard'"):
        recipe_of("report_to=[tensorbord]")
    assert recipe_of("report_to=wandb").report_to == ["wandb"]
    assert recipe_of("report_to=none").report_to == []
    with pytest.raises(ConfigError, match=r"tracking\.projet.*Did you mean 'project'"):
        recipe_of("tracking.projet=x")


@pytest.mark.skipif(not MISSING, reason="every tracker is installed here")
def test_a_tracker_that_is_not_installed_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = MISSING[0]
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # wandb leaves such a folder behind, and Python would import it
    with pytest.raises(MissingExtraError, match=f"{name}, which is not installed: pip install"):
        run_recipe(recipe_of(f"report_to={name}"))
    assert [p.name for p in tmp_path.iterdir()] == [name]
    with pytest.raises(MissingExtraError, match=r'report_to=\["tensorboard"\]'):
        check_trackers(["tensorboard", name])


@pytest.mark.skipif(not MISSING, reason="every tracker is installed here")
def test_the_tracker_is_checked_before_the_model(tmp_path: Path) -> None:
    """The original checked it after the trainer was built. Here the model cannot be loaded, and still it comes first."""
    nowhere = [f"output_dir={tmp_path}", f"model.name={tmp_path}/no-model"]
    with pytest.raises(MissingExtraError, match=f"report_to names {MISSING[0]}"):
        run_recipe(recipe_of(*nowhere, f"report_to={MISSING[0]}"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AlgoristError, match="no-model"):  # what comes next
        run_recipe(recipe_of(*nowhere))


@pytest.mark.parametrize(
    ("name", "extra"), [("wandb", "wandb"), ("tensorboard", "tracking"), ("trackio", "tracking")]
)
def test_a_tracker_is_an_extra_with_a_name(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"names {name}, .* pip install 'algorist\[{extra}\]'"):
        check_trackers([name])
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert any(text.startswith(name) for text in project["optional-dependencies"][extra])
    assert not any(text.startswith(name) for text in project["dependencies"])


PROJECTS = [("team/maths", "team-maths"), ("a?b:c", "a-b-c"), ("x" * 130, "x" * 128)]


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
@pytest.mark.parametrize(("project", "nearest"), PROJECTS)
def test_wandb_itself_refuses_such_a_project(project: str, nearest: str) -> None:
    """The contract behind the early check: wandb's own comes when its run is opened."""
    import wandb

    with pytest.raises(wandb.errors.UsageError, match="project name"):
        wandb.Settings(project=project)
    assert wandb.Settings(project=nearest).project == nearest


@pytest.mark.parametrize(("project", "nearest"), PROJECTS)
def test_a_project_that_wandb_refuses_is_told_early(
    project: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = recipe_of("report_to=none").tracking
    with pytest.raises(ConfigError, match=f"tracking.project is .* Take {nearest}$"):
        check_trackers(["wandb"], tracking.model_copy(update={"project": project}))
    monkeypatch.setenv("WANDB_PROJECT", project)
    with pytest.raises(ConfigError, match=f"WANDB_PROJECT is .* Take {nearest}$"):
        check_trackers(["wandb"], tracking)
    check_trackers([], tracking)
    if "wandb" in INSTALLED:
        check_trackers(["wandb"], tracking.model_copy(update={"project": nearest}))


def test_without_trackers_nothing_is_opened() -> None:
    trackers = Trackers(lambda line: pytest.fail(line))
    trackers.log("sft", 1, {"loss": 1.0})
    trackers.finish()
    assert not trackers._open


def wandb_records(file: Path) -> list[Any]:
    """Read wandb's offline file once its service, a process of its own, has written the end of the run."""
    for _ in range(200):
        records = _records_so_far(file)
        if any(r.WhichOneof("record_type") == "exit" for r in records):
            return records
        time.sleep(0.1)
    return records


def _records_so_far(file: Path) -> list[Any]:
    """Read LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2 as protocol

    data, place, records, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):
            break  # its end is not written yet
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_wandb_offline_has_names_recipe_metrics_and_an_end(run: Path) -> None:
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    records = wandb_records(file)
    start = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (start.project, start.entity, start.display_name) == ("p1", "team", "first")
    assert list(start.tags) == ["tiny", "cpu"]
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert {k: v for k, v in config.items() if k in stored} == stored
    lines = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    for stage in ("sft", "grpo"):
        told = [(r[f"{stage}/step"], r[f"{stage}/loss"]) for r in lines if f"{stage}/loss" in r]
        assert told == [(r["step"], pytest.approx(r["loss"])) for r in logged(run, stage) if "loss" in r]
        for name, value in evaluation(run, stage).items():
            told = [(r[f"{stage}/step"], r[key]) for r in lines if (key := f"{stage}/eval/{name}") in r]
            assert told == [*during(run, stage, name), (2, value)]
    summary: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            items = record.summary.update
            summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
    final = {k.removeprefix("final/"): v for k, v in summary.items() if k.startswith("final/")}
    assert final == evaluation(run, "grpo") and final["greedy_accuracy"] >= 0
    key = "grpo/reward_distribution/values"
    spreads = [r[key] for r in lines if key in r]
    assert [sum(counts) for counts in spreads] == [16, 16]
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_wandb_that_cannot_be_reached_records_offline(tmp_path: Path) -> None:
    variables = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",  # nobody listens there
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "3",
        "PYTHONPATH": str(Path(algorist.__file__).parents[1]),
    }
    place = [*PLACE, "output_dir=.", "run_name=r", "eval.enabled=false", "report_to=wandb"]
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", "run", "smoke-cpu", "--only", "sft", *place],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "wandb cannot be reached" in told and "wandb sync" in told
    (file,) = (tmp_path / "r").glob("wandb/offline-run-*/run-*.wandb")
    assert "history" in {r.WhichOneof("record_type") for r in wandb_records(file)}
    assert len(logged(tmp_path / "r", "sft")) == 2


@pytest.mark.skipif("trackio" not in INSTALLED, reason="trackio is not installed")
def test_trackio_has_names_recipe_and_metrics(run: Path) -> None:
    with sqlite3.connect(run.parent / "trackio" / "p1.db") as database:
        ((name, config),) = database.execute("select run_name, config from configs").fetchall()
        rows = [json.loads(m) for (m,) in database.execute("select metrics from metrics order by id")]
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert name == "first" and {k: v for k, v in json.loads(config).items() if k in stored} == stored
    final = [r for r in rows if "final/greedy_accuracy" in r]
    assert final[-1]["final/greedy_accuracy"] == evaluation(run, "grpo")["greedy_accuracy"]
    told = [(r["grpo/step"], r["grpo/loss"]) for r in rows if "grpo/loss" in r]
    assert told == [(r["step"], pytest.approx(r["loss"])) for r in logged(run, "grpo") if "loss" in r]


@pytest.mark.skipif("trackio" not in INSTALLED, reason="trackio is not installed")
def test_another_run_of_the_same_name_is_another_one_in_trackio(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for folder in ("one", "two"):
        settings = ("grpo.enabled=false", "eval.enabled=false", "tracking.run_name=same", *PLACE)
        cli("run", "smoke-cpu", f"output_dir={folder}", "report_to=trackio", *settings)
    with sqlite3.connect(tmp_path / "trackio" / "algorist.db") as database:
        kept = database.execute("select config from configs").fetchall()
    assert sorted(json.loads(config)["output_dir"] for (config,) in kept) == ["one", "two"]


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="mlflow is not installed")
def test_mlflow_has_names_recipe_metrics_and_an_end(run: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("p1").experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert found.data.metrics["final/greedy_accuracy"] == evaluation(run, "grpo")["greedy_accuracy"]
    assert found.data.tags["tiny"] == "true" and found.data.params["grpo.group_size"] == "4"
    told = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "grpo/loss")]
    assert told == [(r["step"], pytest.approx(r["loss"])) for r in logged(run, "grpo") if "loss" in r]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in the hub's layout."""
    folder = tmp_path_factory.mktemp("model")
    policy = tiny_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_users_own_wandb_run_gets_the_metrics(
    model: Path, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    from tests.runs.test_tracking import wandb_records

    monkeypatch.setenv("WANDB_SILENT", "true")
    own = wandb.init(mode="offline", project="mine", dir=str(tmp_path))
    try:
        setup = algorist.create_math_training_setup(
            str(model),
            path=real_data / "gsm8k" / "train.jsonl",
            limit=12,
            output_dir=tmp_path / "run",
            device="cpu",
            report_to="wandb",
            grpo_args={
                "num_generations": 4,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "max_completion_length": 12,
                "max_steps": 2,
            },
        )
        algorist.run_training(setup.artifacts)
        assert wandb.run is own
    finally:
        wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = wandb_records(file)
    lines = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    logged = [row for row in setup.artifacts.trainer.state.log_history if "loss" in row]
    told = [row for row in lines if "train/loss" in row]
    assert [row["train/global_step"] for row in told] == [1, 2]
    for name in ("loss", "reward", "reward_std", "rewards/correctness_numeric/mean"):
        assert [row[f"train/{name}"] for row in told] == pytest.approx([row[name] for row in logged])
    config: dict[str, Any] = {}
    for record in records:
        kind = record.WhichOneof("record_type")
        update = (
            record.config.update if kind == "config" else record.run.config.update if kind == "run" else ()
        )
        config |= {i.key: json.loads(i.value_json) for i in update if i.key}
    assert (config["per_device_train_batch_size"], config["max_steps"]) == (8, 2)
    assert config["learning_rate"] == DEFAULT_GRPO_ARGS["learning_rate"]


class Closed(Quiet):
    """A display whose pipe is closed."""

    def step(self, *_: Any, **__: Any) -> None:
        raise BrokenPipeError("closed")


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="mlflow is not installed")
def test_a_run_that_fails_is_no_finished_one_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    settings = ["report_to=mlflow", "eval.enabled=false", "device=cpu", "threads=1", f"output_dir={tmp_path}"]
    with pytest.raises(BrokenPipeError):
        run_recipe(load_recipe("smoke-cpu", settings).recipe, display=Closed())
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FAILED"


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_a_run_that_fails_is_no_finished_one_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = ["report_to=wandb", "eval.enabled=false", "device=cpu", "threads=1", f"output_dir={tmp_path}"]
    with pytest.raises(BrokenPipeError):
        run_recipe(load_recipe("smoke-cpu", settings).recipe, display=Closed())
    (file,) = tmp_path.glob("smoke-cpu/wandb/offline-run-*/run-*.wandb")
    (end,) = [r.exit for r in wandb_records(file) if r.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 1

"""Logging: one line per logged step, the same names everywhere, and no run that it can stop."""

import json
import os
import socket
import time
import zipfile
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import transformers
from comet_server import CometServer
from conftest import SMALL, default_sequences, end, fork, load, metrics, run, script, tiny_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

import plan

NAMED = (*SMALL, "--log-freq", "2", "--max-steps", "6", "--ckpt-freq", "3", "--eval-freq", "3")
TRAIN = ("loss", "grad_norm", "learning_rate", "epoch", "tokens_seen")
ALWAYS = {"step", "throughput/tokens_per_second"} | {f"train/{name}" for name in TRAIN}
PHASES = ("data", "forward", "backward", "update")
ALWAYS |= {f"time/{phase}_ms" for phase in (*PHASES, "total")}
ALWAYS |= {"memory/peak_gb", "memory/state_gb", "throughput/tflops_per_device"}
EVALUATED = {"eval/loss", "eval/perplexity"}


KEY = "thisIsNoKeyOfAnybodys1234"


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """The folder of a run with offline Comet."""
    folder = tmp_path_factory.mktemp("offline")
    result = run("03-fsdp", 2, "-e", "a", "--save-dir", folder, *NAMED, "--comet-offline")
    assert "Comet is off" not in result.out
    assert f"comet upload {folder}/a/comet/*.zip" in result.out
    return folder / "a"


def test_one_flat_line_per_logged_step(offline):
    lines = metrics(offline)
    assert list(lines) == [1, 2, 3, 4, 6]  # what is saved is logged before, so 3 is there
    for step, line in lines.items():
        expected = set(ALWAYS)
        expected |= {"time/log_ms"} if step > 1 else set()  # no log line before the first
        expected |= EVALUATED if step in (3, 6) else set()
        assert set(line) == expected
        assert all(isinstance(value, (int, float)) for value in line.values())


@pytest.mark.law6
def test_the_numbers_agree_with_each_other(offline):
    line = metrics(offline)[6]
    assert line["train/tokens_seen"] == 6 * 8 * 64
    total = line["time/total_ms"]
    assert line["throughput/tokens_per_second"] == pytest.approx(8 * 64 / (total / 1000))
    parts = [line[f"time/{phase}_ms"] for phase in (*PHASES, "log")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(total)
    assert line["eval/perplexity"] == pytest.approx(torch.tensor(line["eval/loss"]).exp().item())
    assert line["memory/peak_gb"] > 0.1 > line["memory/state_gb"] > 0
    flops = line["throughput/tokens_per_second"] * plan.flops_per_token(tiny_model(), 64)
    assert line["throughput/tflops_per_device"] == pytest.approx(flops / 2 / 1e12)
    assert line["train/epoch"] == pytest.approx(6 / (len(default_sequences(64)[0]) // 8))


@pytest.mark.law6
def test_times_are_means_over_the_steps_between_two_log_lines(monkeypatch):
    """Law 6. A step of 10 + 20 + 30 + 40 ms, logged at every step, then after 3."""
    load("01-single-gpu")
    import logs_and_checkpoints as module

    clock = accumulate([0, *[0.01, 0.02, 0.03, 0.04] * 4])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    flags = {"global_batch_size": 2, "seq_length": 5, "device": "cpu"}
    log = module.RunLog(None, 0, 4, None, flags, 3e12)
    for steps in (1, 3):
        for _ in range(steps):
            for phase in PHASES:
                log.lap(phase)
        speeds = [100, 300]  # 10 tokens in 100 ms, of 3 TFLOP each
        means = [*speeds, 10, 20, 30, 40, 100]
        assert list(log.pop_times().values()) == pytest.approx(means)


SIZES = {"vocab_size": 384, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.law6
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("qwen3", {"head_dim": 128, "num_key_value_heads": 2}),
        ("gpt2", {}),
        ("gpt_neox", {}),
    ],
)
def test_flops_per_token_are_those_that_pytorch_counts(kind, more):
    """Counted: matrix products of forward and backward. The formula has the norms' weights and
    biases beside, less than half a percent here."""
    load("01-single-gpu")
    import logs_and_checkpoints as module

    config = transformers.AutoConfig.for_model(kind, **SIZES | more)
    # eager: its attention is two matrix products, which the counter knows on any device.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        length = 256
        ids = torch.zeros(1, length, dtype=torch.long)
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    counted = counter.get_total_flops() / length
    said = module.flops_per_token(model, length)
    assert counted == pytest.approx(said, rel=5e-3)


@pytest.mark.slow
def test_a_number_for_the_log_ends_no_run():
    """FLOPs of each type of model that transformers has: a number, 0 for a mixture of experts."""
    load("01-single-gpu")
    import logs_and_checkpoints as module

    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class().get_text_config()
            if not getattr(config, "layer_types", None):
                config.num_hidden_layers = min(config.num_hidden_layers, 4)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception:  # some have no default sizes
            continue
        flops = module.flops_per_token(model, 64)
        is_mixture = any("expert" in name for name, _ in model.named_parameters())
        assert flops == 0 if is_mixture else flops >= 0, config.model_type


def archives(folder):
    """(experiment, messages) of each offline archive of Comet's, in the order of their writing."""
    for path in sorted((folder / "comet").glob("*.zip"), key=os.path.getmtime):
        with zipfile.ZipFile(path) as archive:
            experiment = json.loads(archive.read("experiment.json"))
            lines = archive.read("messages.json").decode().splitlines()
            yield experiment, [json.loads(line) for line in lines]


def comet_metrics(folder):
    found = {}
    for _, messages in archives(folder):
        for message in messages:
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                found[metric["step"], metric["metricName"]] = metric["metricValue"]
    return found


def test_comet_holds_every_metric_and_parameter(offline):
    found = comet_metrics(offline)
    assert not any(name == "step" for _, name in found)  # it is the axis
    for step, line in metrics(offline).items():
        for name, value in line.items():
            assert name == "step" or found[step, name] == pytest.approx(value)
    parameters = {}
    for experiment, messages in archives(offline):
        assert len(experiment["offline_id"]) == 32
        for message in messages:
            if message["type"] == "parameter_msg":
                parameter = message["payload"]["param"]
                parameters[parameter["paramName"]] = parameter["paramValue"]
    assert parameters["lr"] == 2e-3
    assert parameters["max_steps"] == 6
    assert parameters["world_size"] == 2
    assert not any("key" in name.lower() for name in parameters)


def test_tensorboard_holds_the_same_names(offline):
    """In a folder called as the stage, which TensorBoard shows."""
    [folder] = (offline / "tensorboard").iterdir()
    assert folder.name == "03-fsdp"
    board = EventAccumulator(str(folder)).Reload()
    lines = metrics(offline)
    names = {name for line in lines.values() for name in line} - {"step"}
    assert set(board.Tags()["scalars"]) == names
    losses = {event.step: event.value for event in board.Scalars("train/loss")}
    expected = {step: line["train/loss"] for step, line in lines.items() if "train/loss" in line}
    assert losses == pytest.approx(expected)


@pytest.mark.law4
def test_a_resumed_run_continues_its_experiment(tmp_path):
    """Its archives have one key."""
    flags = ("-e", "a", "--save-dir", tmp_path, *SMALL, "--log-freq", "1", "--comet-offline")
    for steps in (2, 4):
        run("01-single-gpu", 1, *flags, "--max-steps", steps)
    assert len({experiment["offline_id"] for experiment, _ in archives(tmp_path / "a")}) == 1
    assert all(e["resume_strategy"] == "get_or_create" for e, _ in archives(tmp_path / "a"))
    found = {step for step, name in comet_metrics(tmp_path / "a") if name == "train/loss"}
    assert found == {1, 2, 3, 4}


def online(server, *flags, **more):
    more |= {"COMET_URL_OVERRIDE": server.url, "COMET_API_KEY": KEY}
    return run("01-single-gpu", 1, *flags, **more)


def test_a_run_online(tmp_path):
    """A server on this machine gets tags, resolved parameters, metrics, the load of the machine. A
    resumed run continues its experiment. The key stands nowhere."""
    flags = ("-e", "a", "--save-dir", tmp_path, *SMALL, "--log-freq", "1")
    with CometServer() as server:
        first = online(server, *flags, "--max-steps", "3")
        second = online(server, *flags, "--max-steps", "5", "--lr", "1e-4")
        assert server.unknown == []
        [experiment] = server.experiments.values()

    assert list(experiment.runs.values()) == [False, False]  # two have started and ended
    assert experiment.name == "a"
    assert experiment.project == "train-llm"
    assert {"01-single-gpu", "tiny", "python-docs"} <= set(experiment.tags)
    expected = {"world_size": "1", "device": "cpu", "dtype": "fp32", "seq_length": "64"}
    expected |= {"warmup_steps": "0", "max_steps": "5", "compile": "False", "lr": "0.0001"}
    parameters = {name: str(value) for name, value in experiment.parameters.items()}
    assert {name: parameters[name] for name in expected} == expected
    for step, line in metrics(tmp_path / "a").items():
        for name, value in line.items():
            assert name == "step" or experiment.metrics[name, step] == pytest.approx(value)
    assert "step" not in {name for name, _ in experiment.metrics}
    assert any(name.startswith("sys.") for name in experiment.system)

    address = (tmp_path / "a" / "comet.txt").read_text().strip()
    assert address == experiment.url
    for result in (first, second):
        assert f"Comet: {address}" in result.out
        assert KEY not in result.out + result.err
    for path in (tmp_path / "a").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


@pytest.mark.slow
def test_a_server_that_goes_away_stops_nothing(tmp_path):
    """The run goes on, and saves."""
    flags = ("-e", "a", "--save-dir", tmp_path, *SMALL, "--num-epochs", "9999", "--ckpt-freq", "3")
    flags += ("--log-freq", "1")
    environment = {"COMET_API_KEY": KEY}
    with CometServer() as server:
        environment["COMET_URL_OVERRIDE"] = server.url
        process = fork(script("01-single-gpu"), None, *flags, **environment)
        deadline = time.monotonic() + 300
        while not server.experiments and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
    closed_at = max(tmp_path.glob("a/step-????????"), default=None)
    saved = closed_at
    while saved == closed_at and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
        saved = max(tmp_path.glob("a/step-????????"), default=None)
    end(process)
    assert saved != closed_at


@pytest.mark.slow
def test_a_server_that_never_answers_ends_no_run(tmp_path):
    """It takes connections, and is silent."""
    silent = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
    flags = ("-e", "a", "--save-dir", tmp_path, *SMALL, "--max-steps", "2")
    retries = ("COMET_HTTP_SESSION_RETRY_TOTAL", "COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL")
    more = {"COMET_API_KEY": KEY, "COMET_URL_OVERRIDE": url, **dict.fromkeys(retries, "1")}
    result = run("01-single-gpu", 1, *flags, **more)
    silent.close()
    assert "Comet could not be started, training goes on without it" in result.out
    assert list(metrics(tmp_path / "a")) == [1, 2]


@pytest.mark.law5
def test_without_a_key_there_is_one_hint_and_no_question(tmp_path):
    result = run("01-single-gpu", 1, "-e", "a", "--save-dir", tmp_path, *SMALL, "--max-steps", "1")
    assert result.out.count("Comet") == 1
    assert not (tmp_path / "a" / "comet").exists()


def test_an_unnamed_run_only_prints(tmp_path):
    result = run("01-single-gpu", 1, "--save-dir", tmp_path, *SMALL, "--max-steps", "1")
    assert "Comet" not in result.out
    assert not list(tmp_path.iterdir())

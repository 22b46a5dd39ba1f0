"""A resume compares contents, not names; and what could train wrongly without a word is refused."""

import json
import os
import random
import shutil
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SMALL, STAGES, data_args, exact, load, metrics, run
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def stage_01():
    return load("01-single-gpu")


def named(folder, *flags):
    return ("-e", "a", "--save-dir", folder, *SMALL, "--log-freq", "1", *flags)


def text_of(seed):
    draw = random.Random(seed)
    return " ".join(draw.choices(["the", "cat", "sat", "on", "a", "mat", "dog", "ran"], k=5000))


def refusal(stage, *flags):
    result = run(stage, 1, *flags, *exact(stage, 1), check=False)
    assert result.returncode != 0, result.out
    assert "Traceback" not in result.err or stage != "01-single-gpu", result.err
    [line] = result.errors
    return line.removeprefix("train-llm.py: error: ")


# The data.


@pytest.mark.law1
@pytest.mark.parametrize("change", ["text", "length", "text and time"])
def test_a_data_file_that_was_replaced(change, tmp_path):
    """Same name, another text: also if its length, or its time, is the same as before."""
    path = tmp_path / "text.txt"
    path.write_text(text_of(0))
    time_before = path.stat().st_mtime_ns
    run("01-single-gpu", 1, *named(tmp_path, "-d", path, "--max-steps", 2))

    path.write_text(text_of(0)[::-1] + ("more " * 30 if change == "length" else ""))
    if change == "text and time":
        os.utime(path, ns=(time_before, time_before))
    line = refusal("01-single-gpu", *named(tmp_path, "-d", path, "--max-steps", 4))
    said = f"the training data differs from that of the run in {tmp_path}/a"
    assert line == f"--dataset-name {path}: {said}"

    path.write_text(text_of(0))
    run("01-single-gpu", 1, *named(tmp_path, "-d", path, "--max-steps", 4))
    assert list(metrics(tmp_path / "a")) == [1, 2, 3, 4]


@pytest.mark.law1
def test_a_new_run_reads_a_file_that_was_replaced(tmp_path, stage_01):
    """`datasets` caches a file by path and time. Here both are as before, and the text is not."""
    path = tmp_path / "text.txt"
    for text in (text_of(0), text_of(1)):
        path.write_text(text)
        os.utime(path, ns=(10**18, 10**18))
        train, _ = stage_01.load_data(data_args(path, 64), stage_01.byte_tokenizer())
        assert stage_01.byte_tokenizer().decode(train[0]["input_ids"]) == text[:64]


@pytest.mark.law1
@pytest.mark.parametrize("stage", ["01-single-gpu", "06-streaming"])
def test_the_same_data_by_another_path(stage, tmp_path):
    rows = [json.dumps({"text": text_of(seed)[:400]}) for seed in range(300)]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("\n".join(rows))
    flags = named(tmp_path, *exact(stage, 1))
    run(stage, 1, *flags, "-d", tmp_path / "one" / "rows.jsonl", "--max-steps", 2)
    run(stage, 1, *flags, "-d", tmp_path / "other" / "rows.jsonl", "--max-steps", 4)
    assert list(metrics(tmp_path / "a")) == [1, 2, 3, 4]


@pytest.mark.law1
@pytest.mark.parametrize("change", ["added", "removed", "replaced", "longer"])
def test_streams_compare_their_files(change, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for i in range(3):
        rows = [json.dumps({"text": text_of(100 * i + j)[:400]}) for j in range(150)]
        (folder / f"{i}.jsonl").write_text("\n".join(rows))
    run("06-streaming", 1, *named(tmp_path, "-d", folder, "--max-steps", 2))
    last = folder / "2.jsonl"
    if change == "added":
        shutil.copy(last, folder / "3.jsonl")
    elif change == "removed":
        last.unlink()
    elif change == "replaced":
        last.write_text(last.read_text().replace("cat", "cow"))
    else:
        last.write_text(last.read_text() + '\n{"text": "more"}')
    line = refusal("06-streaming", *named(tmp_path, "-d", folder, "--max-steps", 4))
    said = f"the training data differs from that of the run in {tmp_path}/a"
    assert line == f"--dataset-name {folder}: {said}"


@pytest.mark.law1
def test_a_commit_that_leaves_the_files_alone_changes_nothing(monkeypatch):
    """On the hub each commit has a number of its own, and each content of a file. A fake hub."""
    stage_06 = load("06-streaming")

    def checksum(revision, content):
        files = {"train": [f"hf://datasets/somebody/data@{revision}/train.jsonl"]}
        builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
        hub = SimpleNamespace(info=lambda path: {"blob_id": content})
        monkeypatch.setattr(stage_06.datasets, "load_dataset_builder", lambda **source: builder)
        monkeypatch.setattr(stage_06, "HfFileSystem", lambda: hub)
        return stage_06.checksum_of_files({"path": "somebody/data"})

    assert checksum("1", "a") == checksum("2", "a")
    assert checksum("1", "a") != checksum("1", "b")


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES[1:5])
def test_ranks_with_other_files_are_told_apart(stage, tmp_path):
    """As on nodes whose files have the same names, but not the same contents."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_text(text_of(rank))
    (tmp_path / "path").mkdir()
    # Each rank begins in a folder of its own.
    code = "import os; 'RANK' in os.environ and os.chdir(os.environ['FOLDER'] + os.environ['RANK'])"
    (tmp_path / "path" / "sitecustomize.py").write_text(code)
    faults = {"PYTHONPATH": str(tmp_path / "path"), "FOLDER": f"{tmp_path}/"}
    flags = (*SMALL, *exact(stage, 2), "-d", "text.txt", "--max-steps", 2)
    result = run(stage, 2, *flags, check=False, launched=True, **faults)
    assert result.returncode != 0
    [line] = result.errors
    assert line.startswith("train-llm.py: error: training data is ")


# The model.


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(vocab_size=384, bos_token_id=0, eos_token_id=0, **SIZES).save_pretrained(folder)
    return folder


@pytest.mark.law1
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "head"),
        ({"hidden_act": "relu"}, "hidden_act is relu, in the run in "),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, in the run in "),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_parameters is "),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1, in the run in "),
    ],
)
def test_a_model_whose_config_changed(change, said, model_folder, tmp_path):
    """Weights of the same shapes fit, and the loss shows nothing."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    run("01-single-gpu", 1, *named(tmp_path, "-m", folder, "--max-steps", 2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    line = refusal("01-single-gpu", *named(tmp_path, "-m", folder, "--max-steps", 4))
    assert line.startswith(f"--model-name {folder}: ")
    assert said in line


@pytest.mark.law1
def test_a_tokenizer_that_changed(model_folder, tmp_path, stage_01):
    """Two tokens with exchanged numbers."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    stage_01.byte_tokenizer().save_pretrained(folder)
    run("01-single-gpu", 1, *named(tmp_path, "-m", folder, "--max-steps", 2))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    line = refusal("01-single-gpu", *named(tmp_path, "-m", folder, "--max-steps", 4))
    said = f"the tokenizer differs from that of the run in {tmp_path}/a"
    assert line == f"--model-name {folder}: {said}"


@pytest.mark.law3
def test_the_same_model_by_another_path(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    run("01-single-gpu", 1, *named(tmp_path, "-m", model_folder, "--max-steps", 2))
    run("01-single-gpu", 1, *named(tmp_path, "-m", folder, "--max-steps", 4))
    assert list(metrics(tmp_path / "a")) == [1, 2, 3, 4]


@pytest.mark.law3
def test_a_checkpoint_from_another_run_is_said(tmp_path):
    """The log has a hole then. To go on from a copy of a checkpoint is a use that people make."""
    run("01-single-gpu", 1, *named(tmp_path, "--max-steps", 4))
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "step-00000004", tmp_path / "b" / "step-00000004")
    result = run("01-single-gpu", 1, *named(tmp_path), "-e", "b", "--max-steps", 6)
    assert "metrics.jsonl has no lines between step 0 and step 4" in result.out
    result = run("01-single-gpu", 1, *named(tmp_path), "-e", "b", "--max-steps", 8)
    assert "has no lines" not in result.out


@pytest.mark.law3
def test_a_checkpoint_of_another_shape_is_named(tmp_path):
    """A checkpoint of version 0.1 has no contents to compare. Its tensors do not fit."""
    run("01-single-gpu", 1, *named(tmp_path, "--max-steps", 2))
    config = LlamaConfig(vocab_size=384, bos_token_id=0, eos_token_id=0, **SIZES)
    config.save_pretrained(tmp_path / "model")
    state = tmp_path / "a" / "step-00000002" / "state.json"
    values = json.loads(state.read_text())
    del values["contents"], values["experiment"], values["crc32"]
    values["flags"]["model_name"] = str(tmp_path / "model")
    values["crc32"] = zlib.crc32(json.dumps(values).encode())
    state.write_text(json.dumps(values))
    line = refusal("01-single-gpu", *named(tmp_path, "--max-steps", 4))
    folder = tmp_path / "a" / "step-00000002"
    shapes = "model.embed_tokens.weight is (384, 128) there and (384, 32) here"
    assert line == f"{folder} is of another model: {shapes}"


# Models that are not causal.


def small_config(architecture, **more):
    config = AutoConfig.for_model(architecture)
    small = {"vocab_size": 384, "pad_token_id": 0, **SIZES}
    small |= {
        "num_key_value_heads": 4,
        "n_positions": 64,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "rotary_dim": 8,
    }
    names = {*vars(config), *config.attribute_map}
    for name, value in {**small, **more}.items():
        if name in names:
            setattr(config, name, value)
    config.head_dim = 8
    for name in vars(config):
        if "dropout" in name or "pdrop" in name or "jitter" in name:
            setattr(config, name, 0.0)
    return config


CAUSAL = ("llama", "gpt2", "gpt_neox", "mistral", "mixtral", "qwen2_moe", "gemma2", "olmo2", "opt")
CAUSAL += ("bloom", "mamba", "phi", "mpt", "gptj", "phimoe")
NOT_CAUSAL = ("bert", "roberta", "electra", "roformer", "rembert", "megatron-bert", "xlm")


@pytest.mark.law1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", CAUSAL + NOT_CAUSAL)
def test_models_that_are_not_causal_are_refused(architecture, dtype, stage_01, capsys):
    """With random weights, where a wrong attention changes the logits least."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(architecture))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        if architecture in CAUSAL:
            stage_01.check_causal(model, 64, torch.device("cpu"))
            return
        with pytest.raises(SystemExit):
            stage_01.check_causal(model, 64, torch.device("cpu"))
    assert "not causal: a token changes what the model predicts" in capsys.readouterr().err


@pytest.mark.law1
@pytest.mark.parametrize(
    "stage", [STAGES[0], *[pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES[1:]]]
)
def test_each_stage_refuses_bert(stage, tmp_path):
    untied = {"tie_word_embeddings": False}
    small_config("bert", **untied).save_pretrained(tmp_path / "bert")
    line = refusal(stage, *SMALL, "-m", tmp_path / "bert", "--max-steps", 2)
    if stage == "07-tensor-parallel":  # it looks for a plan before anything else
        assert line == "--tensor-size: transformers has no plan to split bert, use 03-fsdp"
    elif stage == "08-pipeline-parallel":
        plan = "the plan of transformers for bert does not say where"
        assert line.startswith(f"--stages: {plan} ")
    else:
        assert line.startswith(f"--model-name {tmp_path / 'bert'}: not causal: a token changes ")


def test_bert_as_a_decoder_is_causal(tmp_path):
    small_config("bert", is_decoder=True).save_pretrained(tmp_path / "decoder")
    run("01-single-gpu", 1, *SMALL, "-m", tmp_path / "decoder", "--max-steps", 2)


# Rows of tokens.

# What one of the rows holds: its column, its value, and what is said of it.
WRONG_ROWS = {
    "negative": ("input_ids", [-1] * 64, "has -1, the model has tokens from 0 to 383"),
    "beyond the vocabulary": ("input_ids", [384] * 64, "has 384, the model has tokens from 0"),
    "short": ("input_ids", [1] * 63, "has 63 tokens, --seq-length is 64"),
    "long": ("input_ids", [1] * 65, "has 65 tokens, --seq-length is 64"),
    "null": ("input_ids", None, "is not a list of tokens: None"),
    "a null within": ("input_ids", [1] * 63 + [None], "has None, the model"),
    "label beyond": ("labels", [384] * 64, "has 384, the model"),
    "label below": ("labels", [-99] * 64, "has -99, the model"),
    "label short": ("labels", [1] * 10, "has 10 tokens, --seq-length is 64"),
    "label null": ("labels", None, "is not a list of tokens: None"),
}
# What all rows hold, because a column has one type.
WRONG_COLUMNS = {
    "float": ("input_ids", [0.5] * 64, "has 0.5, the model"),
    "whole float": ("input_ids", [1.0] * 64, "has 1.0, the model"),
    "bool": ("input_ids", [True] * 64, "has True, the model"),
    "strings": ("input_ids", ["a"] * 64, "has 'a', the model"),
    "nested": ("input_ids", [[1]] * 64, "has [1], the model"),
    "label float": ("labels", [1.0] * 64, "has 1.0, the model"),
    "label string": ("labels", "text", "is not a list of tokens: 'text'"),
    "label scalar": ("labels", 3, "is not a list of tokens: 3"),
}


def rows_of_tokens(count):
    return [{"input_ids": [i % 384] * 64, "labels": [-100] * 32 + [1] * 32} for i in range(count)]


@pytest.mark.parametrize("case", [*WRONG_ROWS, *WRONG_COLUMNS])
def test_wrong_rows_are_named(case, stage_01):
    """Before the first step, with the number of the row."""
    name, value, said = {**WRONG_ROWS, **WRONG_COLUMNS}[case]
    rows = rows_of_tokens(2000)
    first = 1500 if case in WRONG_ROWS else 0
    for i in [first] if case in WRONG_ROWS else range(2000):
        rows[i][name] = value
    data = Dataset.from_list(rows).with_format("torch", columns=["input_ids", "labels"])
    with pytest.raises(ValueError, match=f"row {first} of {name} ") as raised:
        stage_01.checksum_of_tokens(data, 64, 384)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"labels": [[-100] * 8] * 4}, "labels has no target"),
        ({"labels": [[2, 3, 4, 5, 6, 7, 8, -100]] * 4}, "labels are shifted by one"),
        ({"attention_mask": [[1] * 7 + [0]] * 4}, "attention_mask has zeros, for padding"),
        ({"labels": [[-100] * 3 + [4, 5, 6, 7, 8]] * 4}, None),
        ({"labels": [[1, 2, 3, 4, 5, 6, 7, 8]] * 4}, None),
        ({"attention_mask": [[1] * 8] * 4}, None),
        ({"attention_mask": [[1] * 7 + [0]] * 4, "labels": [[1] * 7 + [-100]] * 4}, None),
        ({"labels": [[1], [2, 3], [4], [5]]}, None),  # `checksum_of_tokens` says it
    ],
)
def test_rows_of_other_programs_that_would_train_something_else(columns, said, stage_01):
    """No value is wrong by itself: padding without a mask in the loss, labels shifted already."""
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5, 6, 7, 8]] * 4, **columns})
    if said is None:
        stage_01.check_labels(rows)
    else:
        with pytest.raises(ValueError, match=said):
            stage_01.check_labels(rows)


@pytest.mark.law3
@pytest.mark.parametrize("change", [{"use_cache": False}, {"id2label": {"0": "a", "1": "b"}}])
def test_a_config_that_changes_nothing_may_change(change, model_folder, tmp_path):
    """As after an update of the model on the hub, or of transformers."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    run("01-single-gpu", 1, *named(tmp_path, "-m", folder, "--max-steps", 2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    run("01-single-gpu", 1, *named(tmp_path, "-m", folder, "--max-steps", 4))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["beyond the vocabulary", "short", "label null", "strings"])
def test_wrong_rows_end_a_run_in_one_line(case, tmp_path):
    name, value, said = {**WRONG_ROWS, **WRONG_COLUMNS}[case]
    rows = rows_of_tokens(300)
    for i in [250] if case in WRONG_ROWS else range(300):
        rows[i][name] = value
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    line = refusal("01-single-gpu", *SMALL, "-d", path)
    assert line.startswith(f"--dataset-name {path}: ValueError: row ")
    assert said in line


tokens = st.lists(st.integers(0, 383), min_size=8, max_size=8)
odd_tokens = st.lists(st.integers(-2, 390), min_size=7, max_size=9)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.one_of(tokens, tokens, tokens, odd_tokens), min_size=1, max_size=20))
def test_the_check_agrees_with_the_definition(rows):
    """A property: accepted is what has --seq-length whole numbers, all of the vocabulary."""
    stage_01 = load_once()
    data = Dataset.from_dict({"input_ids": rows}).with_format("torch", columns=["input_ids"])
    wrong = [i for i, row in enumerate(rows) if len(row) != 8 or not all(0 <= x < 384 for x in row)]
    if wrong:
        with pytest.raises(ValueError, match=f"row {wrong[0]} of input_ids"):
            stage_01.checksum_of_tokens(data, 8, 384)
    else:
        checksum = stage_01.checksum_of_tokens(data, 8, 384)
        assert checksum == stage_01.checksum_of_tokens(data.select(range(len(rows))), 8, 384)
        other = [[(x + 1) % 384 for x in rows[0]], *rows[1:]]
        data = Dataset.from_dict({"input_ids": other}).with_format("torch", columns=["input_ids"])
        assert checksum != stage_01.checksum_of_tokens(data, 8, 384)


LOADED = {}


def load_once():
    if not LOADED:
        LOADED["01"] = load("01-single-gpu")
    return LOADED["01"]


def test_the_check_costs_little(stage_01):
    """Far less than to tokenize. What it is was measured by `benchmark.py checking`: README."""
    draw = random.Random(0)
    texts = [text_of(draw.random()) for _ in range(300)]
    tokenizer = stage_01.byte_tokenizer()
    ratios = []
    for _ in range(3):  # another program may disturb one of them
        start = time.perf_counter()
        args = data_args("", 64)
        sequences = stage_01.pack(Dataset.from_dict({"text": texts}), ("text",), tokenizer, args)
        middle = time.perf_counter()
        stage_01.checksum_of_tokens(sequences, 64, 384)
        ratios.append((time.perf_counter() - middle) / (middle - start))
    assert min(ratios) < 0.5, ratios  # no lists of Python: these would take as long
    assert np.isfinite(ratios).all()


def test_a_validation_split_without_the_column(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"text": text_of(0)}) + "\n")
    (folder / "test.jsonl").write_text('{"other": "x"}\n')
    line = refusal("01-single-gpu", *SMALL, "-d", folder)
    assert line.startswith(f"--dataset-name {folder}: ")
    assert "column names don't match" in line

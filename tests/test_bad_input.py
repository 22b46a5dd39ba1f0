"""What a person plausibly does wrong, and what each mistake prints.

It ends in one line of the script's that names the flag or the path, or in the clear error of
Python, PyTorch, transformers or datasets. Nothing trains silently on something else."""

import json

import datasets
import pytest
import torch
from conftest import ROOT, SMALL, STAGES, finish, fork, load, run, save_tokenizer
from transformers import GPT2Config, LlamaConfig, OpenAIGPTConfig, T5Config

pytestmark = pytest.mark.law5

ENDS = {"bos_token_id": 0, "eos_token_id": 0}
TINY = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA = LlamaConfig(**TINY, num_attention_heads=2, **ENDS)

# Flags, and the one line that is expected after "train-llm.py: error: ".
OURS = {
    "-b 0": "--batch-size 0: must be above 0",
    "-b -4": "--batch-size -4: must be above 0",
    "--global-batch-size 0": "--global-batch-size 0: must be above 0",
    "--num-epochs 0": "--num-epochs 0: must be above 0",
    "--max-steps -1": "--max-steps -1: must be above 0",
    "--log-freq 0": "--log-freq 0: must be above 0",
    "--ckpt-freq 0": "--ckpt-freq 0: must be above 0",
    "--keep-checkpoints 0": "--keep-checkpoints 0: must be above 0",
    "--max-grad-norm -1": "--max-grad-norm -1.0: must be above 0",
    "--lr fast": "argument --lr: invalid float value: 'fast'",
    "--dtype fp64": "argument --dtype: invalid choice: 'fp64'",
    "--learning-rate 1e-3": "unrecognized arguments: --learning-rate 1e-3",
    "@nowhere.txt": "[Errno 2] No such file or directory: 'nowhere.txt'",
    "-s 1": "--seq-length 1: tiny takes from 2 to 256 tokens",
    "-s 257": "--seq-length 257: tiny takes from 2 to 256 tokens",
    "-m gpt2-of-64 --from-scratch -s 128": "--seq-length 128: gpt2-of-64 takes from 2 to 64 tokens",
    "--global-batch-size 5000": "--global-batch-size 5000: python-docs has only ",
    "--eval-sequences 0": "--eval-sequences 0: must be above 0",
    "-d short.txt": "--seq-length 256: the texts of a split do not fill a sequence",
    "-d empty": "--dataset-name empty: one format of .txt, .json, .jsonl, .csv, .parquet is ",
    "-d mixed": "--dataset-name mixed: one format of .txt, .json, .jsonl, .csv, .parquet is ",
    "-d script.py": "--dataset-name script.py: one format of .txt, .json, .jsonl, .csv, .parquet",
    "-d dates.jsonl": "column text: it was read as Value('timestamp[s]'); prepare.py takes",
    "-d other.jsonl": "no column is called text: choose one of a, b with --text-column",
    "-d other.jsonl --text-column c": "no column is called c: choose one of a, b with --text-col",
    "-d chat.jsonl": "no column is called text: choose one of messages with --text-column; to ",
    "-d ids.jsonl -s 32": "--seq-length 32: the rows of input_ids have [20] tokens",
    "-d ragged.jsonl": "--seq-length 20: the rows of input_ids have [20, 21] tokens",
    "-d beyond.jsonl": "input_ids: held-out row 5 has the token 384, the model has those below 384",
    "-d padded.jsonl": "attention_mask has zeros, for padding: give labels, with -100 there",
    "-d labels.jsonl": "labels: training row 1 has the token -1, the model has those below 384",
    "-d masked.jsonl": "column loss_mask has a number for each token, and would not be used: use ",
    "--dataset-subset en": "--dataset-subset en: is for a data set on the hub, python-docs is not",
    "-d other.jsonl --dataset-subset en": "--dataset-subset en: is for a data set on the hub, oth",
    "-d saved": "--dataset-name saved: files such as data-00000-of-00001.arrow are read by prepare",
    "-m other-weights": "--model-name other-weights: it lacks weights for ",
    "-m gpt1": "--model-name gpt1: it has no model*.safetensors and no pytorch_model*.bin; for ",
    "-m nobody/nothing": "--model-name nobody/nothing: AutoConfig cannot load it: OSError: ",
    "-m ./missing": "--model-name ./missing: AutoConfig cannot load it: ",
    "-m broken-config": "--model-name broken-config: AutoConfig cannot load it: OSError: ",
    "-m encoder-decoder": "--model-name encoder-decoder: t5 is no causal language model in ",
    "-m half-a-download": "--model-name half-a-download: AutoModelForCausalLM cannot load",
    "-m gpt1 --from-scratch": "--model-name gpt1: no transformer blocks were found in it",
}
# Flags, and what the error of a library says. Tests have no network: with one, the hub is asked.
THEIRS = {
    "-d missing.txt": "missing.txt",
    "-d nobody/nothing": "nobody/nothing",
    "-d broken.jsonl": "JSON parse error",
    "--attn slow": 'attn_implementation="slow"',
    "--lr -1": "Invalid learning rate: -1.0",
    "-e a --save-dir a-file": "a-file/a",
}
# The slow tests try all of them, the quick ones these and those that need no model and no data.
QUICK = (
    "-d chat.jsonl",
    "-d padded.jsonl",
    "-d masked.jsonl",
    "-d mixed",
    "-d missing.txt",
    "-m other-weights",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of inputs, each bad in its own way."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("empty", "mixed", "broken-config"):
        (folder / name).mkdir()
    (folder / "a-file").write_text("x")
    (folder / "script.py").write_text("")
    (folder / "short.txt").write_text("hello world " * 10)
    (folder / "mixed" / "a.txt").write_text("a")
    (folder / "mixed" / "b.jsonl").write_text('{"text": "b"}\n')
    (folder / "broken.jsonl").write_text('{"text": "abc"}\n{not json\n')
    (folder / "broken-config" / "config.json").write_text("{")
    rows = {
        "dates": [{"text": "2021-05-03"}] * 100,
        "other": [{"a": 1, "b": "x"}] * 100,
        "chat": [{"messages": [{"role": "user", "content": "x"}]}] * 100,
        "ids": [{"input_ids": [1] * 20}] * 100,
        "ragged": [{"input_ids": [1] * (20 + i // 99)} for i in range(100)],
        "beyond": [{"input_ids": [1] * 19 + [383 + i // 99]} for i in range(100)],
        "padded": [{"input_ids": [1] * 20, "attention_mask": [1] * 19 + [0]}] * 100,
        # Made by another tool, whose name for it nobody can know.
        "masked": [{"input_ids": [1] * 20, "length": 20, "loss_mask": [0] * 9 + [1] * 11}] * 100,
        "labels": [{"input_ids": [1] * 20, "labels": [-1] * 20}] * 100,
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    datasets.Dataset.from_dict({"text": ["x"] * 99}).save_to_disk(folder / "saved")
    gpt2 = GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=2, n_positions=64, **ENDS)
    gpt2.save_pretrained(folder / "gpt2-of-64")
    gpt1 = OpenAIGPTConfig(vocab_size=384, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    gpt1.save_pretrained(folder / "gpt1")
    T5Config(d_model=32).save_pretrained(folder / "encoder-decoder")
    # Weights of another architecture: they would leave this one's at random.
    from safetensors.torch import save_file

    LLAMA.save_pretrained(folder / "other-weights")
    weights = folder / "other-weights" / "model.safetensors"
    save_file({"something.else": torch.zeros(2)}, weights, metadata={"format": "pt"})
    LLAMA.save_pretrained(folder / "half-a-download")
    for name in ("other-weights", "half-a-download"):
        save_tokenizer(folder / name)
    (folder / "half-a-download" / "model.safetensors").write_bytes(weights.read_bytes()[:-4])
    return folder


def slow_unless_quick(cases):
    marks = [() if case in QUICK else pytest.mark.slow for case in cases]
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


def needs_nothing(flags):
    return any(word in OURS[flags] for word in ("above 0", "argument", "unrecog", "Errno"))


@pytest.mark.parametrize("flags", slow_unless_quick([f for f in OURS if not needs_nothing(f)]))
def test_one_line_names_the_flag_or_the_path(flags, inputs):
    result = run("01-single-gpu", 1, *flags.split(), cwd=inputs, check=False)
    assert result.returncode == 1
    [line] = result.errors
    assert line.startswith(f"train-llm.py: error: {OURS[flags]}")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("stage", [s for s in STAGES if s != "06-streaming"])
@pytest.mark.parametrize("flags", [f for f in OURS if needs_nothing(f)])
def test_flags_are_refused_before_anything_starts(stage, flags, inputs, monkeypatch, capsys):
    """In this process: a run of its own for each would be a minute of imports."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr("sys.argv", ["train-llm.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        load(stage).parse_args()
    said = f"{capsys.readouterr().err}{stop.value.code}"
    assert f"train-llm.py: error: {OURS[flags]}" in said
    assert len(said.splitlines()) <= 3  # usage, message, exit code


@pytest.mark.parametrize("flags", slow_unless_quick(THEIRS))
def test_the_error_of_a_library_says_it(flags, inputs):
    result = run("01-single-gpu", 1, *flags.split(), cwd=inputs, check=False)
    assert result.returncode == 1
    assert THEIRS[flags] in result.err
    assert not any(line.startswith("step ") for line in result.out.splitlines())


@pytest.mark.parametrize(
    "flags", ["-d chat.jsonl", pytest.param("-m other-weights", marks=pytest.mark.slow)]
)
def test_one_line_of_all_ranks(flags, inputs):
    """Each rank finds the error, one of them says it."""
    result = run("03-fsdp", 3, *flags.split(), cwd=inputs, check=False)
    assert result.returncode != 0
    [line] = result.errors
    assert line.startswith(f"train-llm.py: error: {OURS[flags]}")


def test_cpu_offload_in_fp16_is_refused():
    """GradScaler copies its scale to the CPU without waiting for the copy: a wrong one would do."""
    result = run("03-fsdp", 2, "--cpu-offload", "--dtype", "fp16", check=False)
    [line] = result.errors
    assert line.startswith("train-llm.py: error: --cpu-offload: gradients there are not scaled")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cpu_offload_needs_a_gpu():
    result = run("08-pipeline-parallel", 2, "--cpu-offload", check=False)
    [line] = result.errors
    assert line.startswith("train-llm.py: error: --cpu-offload: is for a GPU")


def test_a_seed_below_0_is_refused():
    result = run("01-single-gpu", 1, "--seed", "-1", check=False)
    assert result.errors == ["train-llm.py: error: --seed -1: must not be below 0"]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_that_need_torchrun_say_so(stage):
    result = finish(fork(ROOT / stage / "train-llm.py", None))
    assert result.returncode != 0
    assert result.errors[0].startswith("train-llm.py: error: this stage needs torchrun")


def test_stage_01_refuses_several_processes():
    result = finish(fork(ROOT / "01-single-gpu" / "train-llm.py", 2))
    assert result.returncode != 0
    said = "this stage runs in one process: for several, start 02-ddp"
    assert result.errors == [f"train-llm.py: error: {said}"]


@pytest.mark.parametrize("value", [1, 1.0, True])
@pytest.mark.parametrize("name", ["assistant_masks", "completion_mask", "prompt_mask", "weights"])
def test_a_column_beside_tokens_is_not_ignored(name, value):
    """Whatever its name is: it may say which tokens have no loss. Also if there are labels."""
    rows = {"input_ids": [[1, 2, 3]] * 9, "labels": [[1, 2, 3]] * 9, "length": [3] * 9}
    rows |= {"attention_mask": [[1, 1, 1]] * 9, "position_ids": [[0, 1, 2]] * 9}
    rows |= {"words": [["a", "b", "c"]] * 9, "documents": [[1, 2]] * 9}
    stage = load("01-single-gpu")
    kept = stage.pack(datasets.Dataset.from_dict(rows), "input_ids", None, 3)
    assert kept.column_names == ["input_ids", "labels"]
    rows[name] = [[value, value, type(value)(0)]] * 9
    with pytest.raises(SystemExit) as stop:
        stage.pack(datasets.Dataset.from_dict(rows), "input_ids", None, 3)
    assert f"column {name} has a number for each token" in str(stop.value.code)


def test_padding_with_labels_is_taken(tmp_path):
    """And files that have no data in them are named."""
    rows = {"input_ids": [1] * 64, "attention_mask": [1] * 60 + [0] * 4}
    rows["labels"] = [1] * 60 + [-100] * 4
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(rows)}\n" * 50)
    (tmp_path / "LICENSE").write_text("")
    result = run("01-single-gpu", 1, *SMALL, "--max-steps", 1, "-d", tmp_path)
    assert f"--dataset-name {tmp_path}: not read: LICENSE" in result.out

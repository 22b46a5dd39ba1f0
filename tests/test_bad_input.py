"""What a person plausibly does wrong, and what each mistake prints.

It ends in one line of the script's that names the flag or the path, or in the clear error of
Python, PyTorch, transformers or datasets. Nothing trains silently on something else."""

import pytest
import torch
from conftest import STAGES, load, run, save_rows, save_tokenizer
from safetensors.torch import save_file
from transformers import GPT2Config, LlamaConfig, OpenAIGPTConfig, T5Config

pytestmark = pytest.mark.law5

ENDS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA = LlamaConfig(**SIZES, num_attention_heads=2, **ENDS)

# Flags, and the one line that is expected after "train-llm.py: error: ".
OURS = {
    "-b 0": "--batch-size 0 is too low",
    "-b -4": "--batch-size -4 is too low",
    "-s 0": "--seq-length 0 is too low",
    "--global-batch-size 0": "--global-batch-size 0 is too low",
    "--num-epochs 0": "--num-epochs 0 is too low",
    "--max-steps -1": "--max-steps -1 is too low",
    "--log-freq 0": "--log-freq 0 is too low",
    "--ckpt-freq 0.5": "argument --ckpt-freq: invalid int value: '0.5'",
    "--keep-checkpoints 0": "--keep-checkpoints 0 is too low",
    "--eval-freq 0": "--eval-freq 0 is too low",
    "--eval-sequences 0": "--eval-sequences 0 is too low",
    "--max-grad-norm 0": "--max-grad-norm 0.0 is too low",
    "--lr 0": "--lr 0.0 is too low",
    "--weight-decay -1": "--weight-decay -1.0 is too low",
    "--warmup-steps -1": "--warmup-steps -1 is too low",
    "--seed -1": "--seed -1 is too low",
    "--lr fast": "argument --lr: invalid float value: 'fast'",
    "--dtype fp64": "argument --dtype: invalid choice: 'fp64'",
    "--learning-rate 1e-3": "unrecognized arguments: --learning-rate 1e-3",
    "-s 1": "--seq-length 1: ",
    "-s 257": "--seq-length 257: ",
    "-m gpt2-of-64 --from-scratch -s 128": "--seq-length 128: gpt2-of-64 takes from 2 to 64 tokens",
    "--global-batch-size 5000": "--global-batch-size 5000: python-docs has only ",
    "-d short.txt": "--global-batch-size 8: short.txt has only 0 sequences of 256 tokens",
    "-d empty": "--dataset-name empty: this is not a .txt file of up to 50 MB, run",
    "-d large.txt": "--dataset-name large.txt: this is not a .txt file of up to 50 MB, run",
    "-d script.py": "--dataset-name script.py: this is not a .txt file of up to 50 MB, run",
    "-d texts.jsonl": "--dataset-name texts.jsonl: this is not a .txt file of up to 50 MB, run",
    "-d chat -s 64": "--dataset-name chat: choose a column of texts with --text-column, of m",
    "-d masked": "--dataset-name masked: choose a column of texts with --text-column, of",
    "-d ids -s 32": "--seq-length 32: rows of input_ids have other lengths",
    "-d ragged": "--seq-length 20: rows of input_ids have other lengths",
    "-d beyond": "--dataset-name: input_ids has the token 1024, the model has those below 1024",
    "-d labels": "--dataset-name: labels has the token -1, the model has those below 1024",
    "-m other-weights": "--model-name other-weights: it lacks weights for ",
    "-m gpt1 --from-scratch": "--model-name gpt1: no transformer blocks were found in it",
}
# Flags, and what the error of a library says. Tests have no network: with one, the hub is asked.
THEIRS = {
    "@nowhere.txt": "No such file or directory: 'nowhere.txt'",
    "-d missing.txt": "missing.txt",
    "-d nobody/nothing": "nobody/nothing",
    "-d latin.txt": "'utf-8' codec can't decode byte 0xe9",
    "--attn slow": 'attn_implementation="slow"',
    "-m gpt1": "Error no file named model.safetensors",
    "-m nobody/nothing": "couldn't find them in the cached files",
    "-m ./missing": "./missing",
    "-m broken-config": "broken-config",
    "-m encoder-decoder": "Unrecognized configuration class",
    "-m half-a-download": "SafetensorError",
    "-e a --save-dir a-file": "a-file/a",
}
# The slow tests try all of them, the quick ones these and those that need no model and no data.
QUICK = ("-d chat -s 64", "-d masked", "-d texts.jsonl", "-d missing.txt", "-m other-weights")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of inputs, each bad in its own way."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("empty", "broken-config"):
        (folder / name).mkdir()
    (folder / "a-file").write_text("x")
    (folder / "script.py").write_text("")
    (folder / "short.txt").write_text("hello world " * 10)
    (folder / "latin.txt").write_text("caf\xe9 " * 999, encoding="latin-1")
    with (folder / "large.txt").open("wb") as file:
        file.truncate(50_000_001)
    (folder / "texts.jsonl").write_text('{"text": "abc"}\n' * 100)
    (folder / "broken-config" / "config.json").write_text("{")
    rows = {
        "chat": [{"messages": [{"role": "user", "content": "x"}]}] * 100,
        "ids": [{"input_ids": [1] * 20}] * 100,
        "ragged": [{"input_ids": [1] * (20 + i // 99)} for i in range(100)],
        "beyond": [{"input_ids": [1] * 19 + [1023 + i // 99]} for i in range(100)],
        # Made by another tool, whose name for it nobody can know.
        "masked": [{"input_ids": [1] * 20, "loss_mask": [0] * 9 + [1] * 11}] * 100,
        "labels": [{"input_ids": [1] * 20, "labels": [-1] * 20}] * 100,
    }
    for name, lines in rows.items():
        save_rows(folder / name, lines)

    gpt2 = GPT2Config(vocab_size=1024, n_embd=32, n_layer=1, n_head=2, n_positions=64, **ENDS)
    gpt2.save_pretrained(folder / "gpt2-of-64")
    gpt1 = OpenAIGPTConfig(vocab_size=1024, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    gpt1.save_pretrained(folder / "gpt1")
    T5Config(d_model=32, vocab_size=1024).save_pretrained(folder / "encoder-decoder")
    # Weights of another architecture: they would leave this one's at random.
    LLAMA.save_pretrained(folder / "other-weights")
    weights = folder / "other-weights" / "model.safetensors"
    save_file({"something.else": torch.zeros(2)}, weights, metadata={"format": "pt"})
    LLAMA.save_pretrained(folder / "half-a-download")
    for name in ("other-weights", "half-a-download", "gpt2-of-64", "gpt1", "encoder-decoder"):
        save_tokenizer(folder / name)
    (folder / "half-a-download" / "model.safetensors").write_bytes(weights.read_bytes()[:-4])
    return folder


def slow_unless_quick(cases):
    marks = [() if case in QUICK else pytest.mark.slow for case in cases]
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


def needs_nothing(flags):
    return any(word in OURS[flags] for word in ("argument", "unrecognized", "too low"))


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


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
# Stage, processes or None without torchrun, flags, and the one line of all ranks.
LAUNCHES = [
    ("03-fsdp", 3, "-d chat -s 64", OURS["-d chat -s 64"]),
    pytest.param("03-fsdp", 3, "-m other-weights", "--model-name", marks=pytest.mark.slow),
    # GradScaler copies its scale to the CPU without waiting for the copy: a wrong one would do.
    ("03-fsdp", 2, "--cpu-offload --dtype fp16", "--cpu-offload: gradients there are not scaled"),
    pytest.param(
        "08-pipeline-parallel", 2, "--cpu-offload", "--cpu-offload: needs a GPU", marks=on_cpu
    ),
    ("01-single-gpu", 2, "", "this stage runs in one process: for several, start 02-ddp"),
    *((stage, None, "", "this stage needs torchrun") for stage in STAGES[1:]),
]


@pytest.mark.parametrize(("stage", "processes", "flags", "error"), LAUNCHES)
def test_one_line_of_all_ranks(stage, processes, flags, error, inputs):
    """Each rank finds the error, one of them says it."""
    result = run(stage, processes, *flags.split(), cwd=inputs, check=False)
    assert result.returncode != 0
    [line] = result.errors
    assert line.startswith(f"train-llm.py: error: {error}")

"""Bad input ends in one clear line that names the flag or the path, and a non-zero exit code."""

import json

import pytest
import torch
from conftest import ROOT, SMALL, STAGES, finish, fork, load, mutant, run
from transformers import GPT2Config, LlamaConfig, T5Config

pytestmark = pytest.mark.law5

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
PYTHON = ("01-single-gpu", 1)

# Flags, and the line that is expected after "train-llm.py: error: ". These are refused before
# anything starts,
FLAGS = [
    ("--lr 0", "argument --lr: 0: must be above 0"),
    ("--lr -1", "argument --lr: -1: must be above 0"),
    ("--lr inf", "argument --lr: inf: must be above 0 and below 2**63"),
    ("--seed 99999999999999999999", "argument --seed: 99999999999999999999: must be at least 0"),
    ("--lr nan", "argument --lr: nan: must be above 0"),
    ("--lr fast", "argument --lr: invalid float value: 'fast'"),
    ("--batch-size 0", "argument -b/--batch-size: 0: must be above 0"),
    ("-b 1.5", "argument -b/--batch-size: invalid int value: '1.5'"),
    ("--global-batch-size 0", "argument --global-batch-size: 0: must be above 0"),
    ("--seq-length -5", "argument -s/--seq-length: -5: must be above 0"),
    ("--num-epochs 0", "argument --num-epochs: 0: must be above 0"),
    ("--max-steps 0", "argument --max-steps: 0: must be above 0"),
    ("--seed -1", "argument --seed: -1: must be at least 0 and below 2**63"),
    ("--log-freq 0", "argument --log-freq: 0: must be above 0"),
    ("--ckpt-freq 0", "argument --ckpt-freq: 0: must be above 0"),
    ("--keep-checkpoints 0", "argument --keep-checkpoints: 0: must be above 0"),
    ("--eval-freq -1", "argument --eval-freq: -1: must be at least 0 and below 2**63"),
    ("--eval-sequences 0", "argument --eval-sequences: 0: must be above 0"),
    ("--warmup-steps -1", "argument --warmup-steps: -1: must be at least 0 and below 2**63"),
    ("--weight-decay -0.1", "argument --weight-decay: -0.1: must be at least 0 and below 2**63"),
    ("--max-grad-norm 0", "argument --max-grad-norm: 0: must be above 0"),
    ("--device tpu", "argument --device: invalid choice: 'tpu'"),
    ("--dtype fp64", "argument --dtype: invalid choice: 'fp64'"),
    ("--lr-scheduler magic", "argument --lr-scheduler: invalid choice: 'magic'"),
    ("--no-such-flag 3", "unrecognized arguments: --no-such-flag 3"),
    ("@nowhere.txt", "[Errno 2] No such file or directory: 'nowhere.txt'"),
    ("@flags.txt", "unrecognized arguments: --bogus 3"),
    ("-e a --save-dir a-file", "--save-dir a-file: [Errno 20] Not a directory: 'a-file/a'"),
    ("-e a --save-dir /proc/nowhere", "--save-dir /proc/nowhere: [Errno 2] No such file or "),
]
# those of stage 04, which here has one process,
COMPRESSION = [
    ("--compression dpcm", "argument --compression: invalid choice: 'dpcm'"),
    ("--compression fp16", "argument --compression: invalid choice: 'fp16'"),
    ("--wire-dtype fp16", "argument --wire-dtype: invalid choice: 'fp16'"),
    ("--dct-keep 0", "argument --keep-ratio/--keep/--dct-keep: 0: must be above 0"),
    ("--keep 1.5", "--keep-ratio 1.5: must be above 0 and at most 1"),
    ("--keep-ratio nan", "argument --keep-ratio/--keep/--dct-keep: nan: must be above 0"),
    ("--dct-chunk 1", "argument --chunk/--dct-chunk: invalid choice: 1 (choose from 64, 128, "),
    ("--shard-size 0", "argument --shard-size: 0: must be above 0"),
    ("--shard-size 3", "--shard-size 3: does not divide 1 processes"),
]
# those of stages 05 and 06,
LATER = [
    ("05-multinode", "--timeout 3000000000", "argument --timeout: 3000000000: must be from 1 to "),
    ("05-multinode", "--timeout 0", "argument --timeout: 0: must be from 1 to 604800, a week"),
    ("06-streaming", "--data-streams 80000000", "--data-streams 80000000: must be at most 65536"),
]
# and these once the model and the data have been looked at.
INPUTS = [
    ("--seq-length 1", "--seq-length 1: tiny takes from 2 to 256 tokens"),
    ("--seq-length 257", "--seq-length 257: tiny takes from 2 to 256 tokens"),
    ("--global-batch-size 5000", "--global-batch-size 5000: python-docs has only "),
    ("-d missing.txt", "--dataset-name missing.txt: FileNotFoundError: there is no such file"),
    (
        "-d ./missing/",
        "--dataset-name ./missing/: FileNotFoundError: Couldn't find any data file at ",
    ),
    ("-d nobody/nothing", "--dataset-name nobody/nothing: "),
    ("-d empty.txt", "--global-batch-size 32: empty.txt has only 0 sequences of 256 tokens"),
    ("-d empty", "--dataset-name empty: EmptyDatasetError: The directory at "),
    ("-d short.txt", "--global-batch-size 32: short.txt has only 0 sequences of 256 tokens"),
    (
        "-d numbers.jsonl",
        "--dataset-name numbers.jsonl: ValueError: no column holds text, there are a, b",
    ),
    ("-d broken.jsonl", "--dataset-name broken.jsonl: "),
    (
        "-d ids.jsonl",
        "--dataset-name ids.jsonl: ValueError: row 0 of input_ids has 20 tokens",
    ),
    (
        "-d only-a-test",
        "--dataset-name only-a-test: ValueError: no split is called train, there are ['test']",
    ),
    ("-m nobody/nothing", "--model-name nobody/nothing: "),
    ("-m ./missing", "--model-name ./missing: "),
    ("-m broken-config", "--model-name broken-config: OSError: It looks like the config file at "),
    (
        "-m encoder-decoder",
        "--model-name encoder-decoder --attn auto: ValueError: Unrecognized configuration class ",
    ),
    ("-m small-vocabulary", "--model-name small-vocabulary: 257 tokens, a vocabulary of 100"),
    ("-m too-large", "--model-name too-large: 859,012,612,096 parameters take 13,744 GB with "),
    ("-m gpt2-of-64 -s 128", "--seq-length 128: gpt2-of-64 takes from 2 to 64 tokens"),
    ("-m other-weights", "--model-name other-weights: it lacks weights for "),
    (
        "-m half-a-download",
        "--model-name half-a-download --attn auto: SafetensorError: Error while deserializing ",
    ),
    (
        "-m only-an-index",
        "--model-name only-an-index --attn auto: FileNotFoundError: No such file ",
    ),
    ("-m bad-sizes", "--model-name bad-sizes: "),
    (
        "-m no-vocabulary",
        "--model-name no-vocabulary: ValueError: Couldn't instantiate the backend tokenizer from "
        "one of: (1) a `tokenizers` library serialization file, ",
    ),
    ("-m strange-activation", "--model-name strange-activation --attn auto: KeyError: 'foo'"),
    (
        "--attn slow",
        '--model-name tiny --attn slow: ValueError: Specified `attn_implementation="slow"`',
    ),
    (
        "--attn kernels-community/flash-attn2",
        "--model-name tiny --attn kernels-community/flash-attn2: ",
    ),
    ("-d script.py", "--dataset-name script.py: ValueError: it must end in .txt, .json"),
    (
        "-d numbers-as-ids.jsonl",
        "--dataset-name numbers-as-ids.jsonl: ValueError: row 0 of input_ids is not a list",
    ),
    ("-d no-rows.jsonl", "--global-batch-size 32: no-rows.jsonl has only 0 sequences "),
]
# What depends on the machine: without a GPU these ask for what is not there.
WITHOUT_A_GPU = [
    ("--device cuda", "--device cuda: PyTorch finds no GPU here"),
    ("--dtype fp16", "--dtype fp16: its gradient scaling is for a GPU, a CPU has bf16 and fp32"),
    ("--attn flash_attention_2", "--attn flash_attention_2: needs a GPU, and --dtype bf16 or fp16"),
]
# The same in stage 08, which has no fp16, with a GPU or without.
WITHOUT_FP16 = [
    ("--dtype fp16", "--dtype fp16: is not supported with pipeline stages, use bf16 or fp32"),
    WITHOUT_A_GPU[0],
    ("--attn flash_attention_2", "--attn flash_attention_2: needs a GPU, and --dtype bf16"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of inputs, each bad in its own way."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("empty", "broken-config", "only-a-test"):
        (folder / name).mkdir()
    (folder / "a-file").write_text("x")
    (folder / "flags.txt").write_text("--lr 1e-3\n--bogus 3\n")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("hello world " * 30)
    (folder / "no-rows.jsonl").write_text('{"text": ""}\n')
    (folder / "broken.jsonl").write_text('{"text": "abc"}\n{not json\n')
    (folder / "broken-config" / "config.json").write_text("{")
    (folder / "only-a-test" / "test.jsonl").write_text('{"text": "abc"}\n')
    numbers = [json.dumps({"a": i, "b": [1, 2]}) for i in range(100)]
    (folder / "numbers.jsonl").write_text("\n".join(numbers))
    ids = [json.dumps({"input_ids": [1] * 20}) for _ in range(100)]
    (folder / "ids.jsonl").write_text("\n".join(ids))
    small = LlamaConfig(vocab_size=100, num_attention_heads=2, **TINY)
    small.save_pretrained(folder / "small-vocabulary")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=2, n_positions=64, **ends)
    gpt2.save_pretrained(folder / "gpt2-of-64")
    large = {"hidden_size": 2**14, "intermediate_size": 2**16, "num_hidden_layers": 200}
    LlamaConfig(vocab_size=384, **large).save_pretrained(folder / "too-large")
    T5Config(d_model=32).save_pretrained(folder / "encoder-decoder")
    # Weights of another architecture: they would leave this one's at random.
    from safetensors.torch import save_file

    llama = LlamaConfig(vocab_size=384, num_attention_heads=2, **TINY, **ends)
    llama.save_pretrained(folder / "other-weights")
    weights = folder / "other-weights" / "model.safetensors"
    save_file({"something.else": torch.zeros(2)}, weights, metadata={"format": "pt"})
    llama.save_pretrained(folder / "only-an-index")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "only-an-index" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, more in (
        ("bad-sizes", {"hidden_size": "x"}),
        ("strange-activation", {"hidden_act": "foo"}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(llama.to_dict() | more))
    (folder / "script.py").write_text("")
    (folder / "numbers-as-ids.jsonl").write_text('{"input_ids": 3}\n' * 50)
    llama.save_pretrained(folder / "no-vocabulary")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "no-vocabulary" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    llama.save_pretrained(folder / "half-a-download")
    (folder / "half-a-download" / "model.safetensors").write_bytes(weights.read_bytes()[:-4])
    return folder


def refused(stage, processes, flags, said, folder):
    result = run(stage, processes, *flags.split(), cwd=folder, check=False)
    assert result.returncode != 0
    assert len(result.errors) == 1, result.err
    assert result.errors[0].startswith(f"train-llm.py: error: {said}"), result.errors[0]
    return result


@pytest.fixture(scope="module")
def stages():
    return {stage: load(stage) for stage in STAGES}


@pytest.mark.parametrize(
    ("stage", "flags", "said"),
    [
        (stage, *case)
        for stage in STAGES
        for case in FLAGS
        if not (stage == "06-streaming" and "--num-epochs" in case[0])  # it has no such flag
    ]
    + [("04-compression", *case) for case in COMPRESSION]
    + LATER
    + [(stage, *case) for stage in STAGES if stage[:2] != "08" for case in WITHOUT_A_GPU]
    + [("08-pipeline-parallel", *case) for case in WITHOUT_FP16],
)
def test_flags_are_refused_before_anything_starts(
    stage, flags, said, stages, inputs, monkeypatch, capsys
):
    """In this process: a run of its own for each would be a minute of imports."""
    if (flags, said) in WITHOUT_A_GPU + WITHOUT_FP16[1:] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(inputs)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train-llm.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        stages[stage].open_run_dir(stages[stage].parse_args())
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"train-llm.py: error: {said}"), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        FLAGS[0],
        *INPUTS[::2],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in INPUTS[1::2]],
    ],
)
def test_one_line_and_no_traceback(flags, said, inputs):
    result = refused(*PYTHON, flags, said, inputs)
    assert result.returncode == 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("stage", "flags", "said"),
    [
        pytest.param(
            "02-ddp", "--lr 0", "argument --lr: 0: must be above 0", marks=pytest.mark.slow
        ),
        (
            "03-fsdp",
            "-d numbers.jsonl",
            "--dataset-name numbers.jsonl: ValueError: no column holds text",
        ),
        pytest.param("03-fsdp", "-m ./missing", "--model-name ./missing: ", marks=pytest.mark.slow),
        ("03-fsdp", "-m too-large", "--model-name too-large: "),
        pytest.param(
            "05-multinode", "-m too-large", "--model-name too-large: ", marks=pytest.mark.slow
        ),
        ("04-compression", "--shard-size 2", "--shard-size 2: does not divide 3 processes"),
    ],
)
def test_one_line_of_all_ranks(stage, flags, said, inputs):
    """Each rank finds the error, one of them says it. The only traceback is torchrun's own."""
    result = refused(stage, 3, flags, said, inputs)
    assert f'{stage}/train-llm.py", line' not in result.err


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_that_need_torchrun_say_so(stage):
    """With a command that works where it is pasted: the path and the flags are the user's."""
    path = ROOT / stage / "train-llm.py"
    result = finish(fork(path, None, "-e", "my run"))
    assert result.returncode == 2
    assert result.errors == [
        "train-llm.py: error: this stage needs torchrun: "
        f"torchrun --standalone --nproc-per-node 2 {path} -e 'my run'"
    ]


def test_stage_01_refuses_several_processes():
    result = finish(fork(ROOT / "01-single-gpu" / "train-llm.py", 2))
    assert result.returncode != 0
    assert result.errors == [
        "train-llm.py: error: this stage runs in one process, "
        f"python {ROOT}/01-single-gpu/train-llm.py: for several, start 02-ddp"
    ]


TEXTS = 'datasets.Dataset.from_dict({"text": list(topics.values())})'
OTHER_TEXTS = 'datasets.Dataset.from_dict({{"text": list(topics.values()){}}})'


@pytest.mark.law1
def test_nodes_with_another_default_text_are_told_apart(tmp_path):
    """Versions of Python have different texts. Here rank 1 has another one."""
    path = mutant(tmp_path, "02-ddp", (TEXTS, OTHER_TEXTS.format('[int(os.environ["RANK"]):]')))
    result = run("02-ddp", 2, *SMALL, path=path, check=False)
    assert result.returncode != 0
    [line] = result.errors
    assert line.startswith("train-llm.py: error: training data is ")
    assert line.endswith(" on rank 1: all ranks need the same flags and files")


@pytest.mark.law1
def test_a_run_is_not_resumed_on_another_default_text(tmp_path):
    flags = ("-e", "a", "--save-dir", tmp_path, *SMALL)
    path = mutant(tmp_path / "other", "01-single-gpu", (TEXTS, OTHER_TEXTS.format("[1:]")))
    run("01-single-gpu", 1, *flags, "--max-steps", "1", path=path)
    result = run("01-single-gpu", 1, *flags, "--max-steps", "2", check=False)
    assert result.returncode == 2
    [line] = result.errors
    said = "--dataset-name python-docs: the training data differs from that of the run in"
    assert line == f"train-llm.py: error: {said} {tmp_path}/a"

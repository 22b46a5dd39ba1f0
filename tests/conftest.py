"""Runs the scripts as users do, in processes of their own, and reads what they leave behind."""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import forked
import pandas
import psutil
import pytest
import torch
import transformers
from stages import ROOT, builds_on, script
from stages import STAGES as STAGES  # tests take it from here
from tokenizers import Tokenizer

SUPPORT = ROOT / "tests" / "support"
TINY = ROOT / "tiny"
FAULTS = SUPPORT / "faults"
# On the PYTHONPATH of a process, this lets it import this module and those of tests/support.
TEST_MODULES = f"{ROOT / 'tests'}{os.pathsep}{SUPPORT}"
# Generous: these machines are shared, and slow at times. No test depends on speed.
TIMEOUT = 600
# Packages set variables of their own when tests use them in this process.
AT_START = dict(os.environ)
# Enough to train, little enough for many runs: 8 sequences of 64 tokens a step.
SMALL = ("-s", "64", "--global-batch-size", "8", "-b", "4", "--eval-sequences", "8")


# An edit of stage 09 for tests that watch each operation. Its mask is a tensor of a class of its
# own, which PyTorch cannot make under a TorchDispatchMode.
MASK = "        mask = causal_lower_right(length, end)\n"
UNWATCHED = (
    MASK,
    f"        with torch.utils._python_dispatch._disable_current_modes():\n    {MASK}",
)
# Of the small models of tests.
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
GROUPS = {
    "07-tensor-parallel": "--tensor-size",
    "08-pipeline-parallel": "--stages",
    "09-context-parallel": "--context-size",
    "10-expert-parallel": "--expert-size",
}


def exact(stage, processes):
    """The flags with which a stage computes what the others do: groups of two ranks, if the number
    of processes is even, and in 04 to 06 two replicas, dense."""
    if stage in GROUPS:
        return (GROUPS[stage], 2 - processes % 2)
    if not builds_on(stage, "04-compression"):
        return ()
    return ("--compression", "none", "--shard-size", max(1, processes // 2))


@dataclass
class Result:
    returncode: int
    out: str
    err: str

    @property
    def errors(self):
        """What a script reports of errors of its user's, each once: the line comes again when
        torchrun has ended. The bar of a rank that was stopped may be in front of it."""
        return list(dict.fromkeys(re.findall(r"train-llm\.py: error: .*", self.err)))


def load(stage):
    """A stage as a module, for what can be asked of its functions alone."""
    specification = importlib.util.spec_from_file_location(stage[:2], script(stage))
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def save_tokenizer(folder):
    """The tokenizer of tiny, for a model that is saved: such a model needs its own."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in TINY.glob("tokenizer*"):
        shutil.copy(path, folder)


def config_of(architecture, **sizes):
    """The config of a small model. "mixture" is the tiny model of stage 10."""
    if architecture == "mixture":
        config = transformers.AutoConfig.from_pretrained(ROOT / "tiny-mixture")
        config.update(sizes)
        return config
    config = transformers.AutoConfig.for_model(architecture, **SIZES | sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    return config


def save_config(folder, architecture, **sizes):
    """A model's config and the tokenizer of tiny, for --from-scratch."""
    config_of(architecture, **sizes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_one_sided(folder):
    """A mixture whose routers choose experts 6 and 7 of 8 for each token."""
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of("gpt_oss", **sizes))
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.mlp.router.bias[:6], 0.0)
        torch.nn.init.constant_(layer.mlp.router.bias[6:], 50.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_rows(folder, rows):
    """Rows of tokens in a folder, as prepare.py writes them."""
    folder.mkdir(parents=True)
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    return folder


def save_masked(folder):
    """Sequences with from 1 to 62 targets each: the others are masked by -100."""
    draw = random.Random(1)
    rows = []
    for _ in range(200):
        ids = [draw.randrange(1, 250) for _ in range(64)]
        prompt = draw.randint(2, 63)
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return save_rows(folder, rows)


def data_args(name, seq_length, text_column="text"):
    """What `load_data` and `check_data` of a stage need of the flags."""
    return SimpleNamespace(
        model_name=str(TINY),
        dataset_name=str(name),
        dataset_subset=None,
        seq_length=seq_length,
        text_column=text_column,
        eval_files=None,
        global_batch_size=8,
        seed=0,
    )


def environment(short=True, **more):
    """The environment of a run: one thread, no network, no account, a cache of the test's own. In
    tests the default text is a part of the script's, see support/short; with `short` False not."""
    dropped = ("COMET", "HF_", "TORCHELASTIC", "MASTER_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    clean = {k: v for k, v in AT_START.items() if not k.startswith(dropped) and k not in names}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # More are processes that import torch first.
    clean.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if short and "PYTEST_VERSION" in os.environ:  # and not in a benchmark
        path = [more.get("PYTHONPATH", ""), str(SUPPORT / "short")]
        more["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return clean | {"HF_HOME": os.environ["COURSE_HF_HOME"]} | more


def start(path, processes, *flags, cwd=None, **more):
    """Starts a script; with `processes` None by python alone, else by torchrun."""
    launcher = [sys.executable]
    if processes is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [*launcher, str(path), *map(str, flags)],
        env=environment(**more),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process):
    """Kills a process and all that it started, torchrun's workers in their own sessions too."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        if member.is_running():
            member.kill()
    process.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=60)


def finish(process, timeout=TIMEOUT):
    """Waits for a process, and ends it and its children if it takes longer than `timeout`."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    return Result(process.returncode, out, err)


def fork(path, processes, *flags, cwd=None, sample="", **more):
    """As `start`, but from the fork server, which saves the imports. Where that would not be the
    same, the script is started: with another environment for packages to read, or with a GPU.

    `sample` is the number of tokens of the sample at the end, if not the script's own."""
    variables = environment(**more)
    forked.start_server(environment())
    if torch.cuda.is_available() or not forked.can_fork(variables):
        return start(path, processes, *flags, cwd=cwd, **more)
    return forked.ForkedRun(path, processes, [*map(str, flags)], variables, cwd, sample)


def run(
    stage, processes, *flags, path=None, check=True, cwd=None, launched=False, sampled=False, **more
):
    """Runs a stage to its end; with `check` it must end well. The run is forked, which saves the
    imports, or with `launched` started by python and torchrun as users start it. A forked run
    writes a sample of one token, or with `sampled` one as long as the script's."""
    if stage == "01-single-gpu" and processes == 1:
        processes = None
    if "--compile" in flags and not (shutil.which("g++") or torch.cuda.is_available()):
        pytest.skip("--compile on a CPU needs a compiler (Debian: apt-get install g++)")
    path = path or script(stage)
    if launched:
        process = start(path, processes, *flags, cwd=cwd, **more)
    else:
        more["sample"] = "" if sampled else "1"
        process = fork(path, processes, *flags, cwd=cwd, **more)
    result = finish(process)
    if check:
        assert result.returncode == 0, f"{stage} on {processes}\n{result.out}\n{result.err}"
    return result


def metrics(folder):
    """What a run's metrics.jsonl holds, by step. An evaluation has a line of its own."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps), f"not in order: {steps}"
    trained = [line["step"] for line in lines if "train/loss" in line]
    assert trained == sorted(set(trained)), f"a step is logged twice: {trained}"
    merged = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line)
    return merged


def tiny_config():
    """The config of the default model as stage 01 reads it."""
    return load("01-single-gpu").load_config(TINY)


@cache
def tiny_model():
    """The model of the default run, with weights that do not matter."""
    return transformers.AutoModelForCausalLM.from_config(tiny_config())


@cache
def default_tokenizer():
    """The tokenizer of tiny, read without transformers."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def packed(texts, seq_length):
    """Texts as tokens of tiny, an end of text behind each, cut to `seq_length`: what the scripts
    should read."""
    tokens = []
    for text in filter(None, texts):
        tokens += [*default_tokenizer().encode(text).ids, 0]
    ends = range(seq_length, len(tokens) + 1, seq_length)
    return [tokens[end - seq_length : end] for end in ends]


def default_texts():
    """The texts of the default data: of paragraphs that are in several texts, the first. They are
    those of this Python."""
    texts = [text.split("\n\n") for text in topics.values()]
    first_text = {}
    for number, paragraphs in enumerate(texts):
        for paragraph in paragraphs:
            first_text.setdefault(paragraph, number)
    return [
        "\n\n".join(p for p in dict.fromkeys(paragraphs) if first_text[p] == number)
        for number, paragraphs in enumerate(texts)
    ]


def default_sequences(seq_length):
    """The sequences of the default data, those to train on and those held out, made without the
    scripts."""
    sequences = torch.tensor(packed(default_texts(), seq_length))
    num_held_out = math.ceil(len(sequences) / 20)
    return sequences.split([len(sequences) - num_held_out, num_held_out])


def assert_same_curve(one, other, steps, rel_loss=1e-5, rel_norm=1e-4, learns=True, cut=False):
    """Law 1: loss and gradient norm agree at every step, and the loss of each evaluation.

    Two runs that learn nothing agree, too. So the loss has to fall, unless a test with a step or
    two, or with weights that are trained already, says that it does not. So do ranks that all do
    the whole batch, to the last bit. With `cut` the two runs have divided it in different ways, by
    which some sum is rounded otherwise."""
    losses = [one[step]["train/loss"] for step in steps]
    assert min(losses) < 0.99 * losses[0] or not learns, f"two runs that learn nothing: {losses}"
    assert not (cut and same_bits(one, other, steps)), "the work of the ranks was not divided"
    for step in steps:
        if one[step].get("eval/loss") is not None:
            expected = pytest.approx(one[step]["eval/loss"], rel=rel_loss)
            assert other[step]["eval/loss"] == expected, step
        assert other[step]["train/loss"] == pytest.approx(
            one[step]["train/loss"], rel=rel_loss, abs=0
        ), step
        assert other[step]["train/grad_norm"] == pytest.approx(
            one[step]["train/grad_norm"], rel=rel_norm
        ), step


def same_bits(one, other, steps):
    return all(one[s]["train/loss"] == other[s]["train/loss"] for s in steps)


def share(folder):
    """Gives copies of scripts, in folders in this one, what stands beside those of the course."""
    shutil.copy(ROOT / "logs_and_checkpoints.py", folder)
    for name in ("tiny", "tiny-mixture"):
        if not Path(folder, name).exists():
            Path(folder, name).symlink_to(ROOT / name)


def mutant(folder, stage, *edits):
    """A copy of a stage, and of the module that it shares, with pieces of its text replaced."""
    text = script(stage).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{stage} has {text.count(old)} times: {old}"
        text = text.replace(old, new)
    compile(text, stage, "exec")  # a copy with a mistake in its syntax proves nothing
    path = Path(folder) / stage / "train-llm.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    share(folder)
    return path


def mount_small_disk(folder, megabytes):
    """A tmpfs, for which one has to be root."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small disk needs root and mount")


def pytest_collection_modifyitems(items):
    """Begins with the file whose tests take longest, so that no worker ends with one of them while
    the others have nothing left to do."""
    items.sort(key=lambda item: item.path.stem != "test_launchers")


def pytest_terminal_summary(terminalreporter):
    """Prints a line for each reason for which tests were skipped, with their number."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session", autouse=True)
def hf_home(tmp_path_factory):
    os.environ["COURSE_HF_HOME"] = str(tmp_path_factory.mktemp("hf_home"))


@pytest.fixture(scope="session")
def curve(tmp_path_factory):
    """Runs a stage with a name, once per set of flags, and returns its metrics by step. Adds the
    flags of `exact`, unless the flags name a compression."""
    done = {}

    def curve_of(stage, processes, *flags):
        flags = flags if "--compression" in flags else (*exact(stage, processes), *flags)
        key = (stage, processes, *flags)
        if key not in done:
            folder = tmp_path_factory.mktemp("curve")
            run(stage, processes, "-e", "a", "--save-dir", folder, "--log-freq", 1, *flags)
            done[key] = metrics(folder / "a")
        return done[key]

    return curve_of


@pytest.fixture(scope="session")
def from_scratch(tmp_path_factory):
    """Flags of a small model with random weights, the same folder for the same sizes."""
    folders = {}

    def flags_of(architecture, **sizes):
        key = f"{architecture} {sizes}"
        if key not in folders:
            folder = tmp_path_factory.mktemp("model")
            folders[key] = save_config(folder, architecture, **sizes)
        return ("-m", folders[key], "--from-scratch")

    return flags_of


@pytest.fixture(scope="session")
def mixture(from_scratch):
    """Flags of the tiny model of stage 10, for each stage that trains any model."""
    return from_scratch("mixture")


@pytest.fixture(scope="session")
def mixture_without_choice(from_scratch):
    """The same where each token has all experts. So no route can flip when a rounding is another
    one, as in compiled code or on a GPU."""
    return from_scratch("mixture", num_experts_per_tok=8)


@pytest.fixture(scope="session")
def documents():
    """600 short documents of a small vocabulary."""
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "red", "tree", "sky"]
    return [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(600)]


@pytest.fixture(scope="session")
def masked_data(tmp_path_factory):
    return save_masked(tmp_path_factory.mktemp("masked") / "rows")

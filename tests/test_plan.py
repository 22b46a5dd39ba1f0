"""plan.py against what was measured on an H100, what the scripts count, and published sizes."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import bench_paper
import pytest
import torch
import transformers
from bench_common import table
from conftest import ROOT, end, environment, metrics, run, save_config, save_tokenizer, tiny_config
from nodes import free_port, launcher_environment
from published import MODELS, config_of
from published import save_config as save_published
from test_traffic import planned_bytes, watched

import plan

pytestmark = pytest.mark.law6

TWO_STEPS = ("--max-steps", 2, "--log-freq", 1)
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def ask(*flags):
    """What plan.py prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        plan.main(plan.parse_args(list(map(str, flags))))
    return out.getvalue()


def model_of(folder, length=1024):
    args = SimpleNamespace(model_name=str(folder), seq_length=length, from_scratch=False)
    return plan.load_model(args)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_public_models(tmp_path, name):
    model = model_of(save_published(tmp_path / "m", name))
    assert model.num_parameters == MODELS[name][2]
    assert 0 < model.in_root < model.num_parameters


def rows_of(table):
    """The rows of a table of outputs/measured, as dicts."""
    text = (ROOT / "outputs" / "measured" / table).read_text()
    lines = [line.strip("| \n").split(" | ") for line in re.findall(r"^\|.*$", text, re.MULTILINE)]
    return [dict(zip(lines[0], line, strict=False)) for line in lines[2:]]


def test_the_peaks_that_an_h100_measured(tmp_path):
    """With micro-batches of four sequences, within 0.5 % for stage 01 and 1 % for stage 03."""
    names = {"Llama-3.2-1B, 2048 tokens": "Llama-3.2-1B", "Qwen3-0.6B, 2048 tokens": "Qwen3-0.6B"}
    models = {key: model_of(save_published(tmp_path / key, names[key]), 2048) for key in names}
    checked = []
    for row in rows_of("gpu.md"):
        if "--no-compile" in row["flags"] or "flash" in row["flags"]:
            continue
        model, recompute = models[row["model"]], "checkpointing" in row["flags"]
        if row["stage"] in ("01-single-gpu", "02-ddp"):
            parts = plan.memory_of_a_whole_copy(model, 4 * 2048, recompute)
        else:
            split = plan.Split(row["stage"])
            whole = plan.Part(model.num_blocks, model.in_blocks, model.in_root)
            parts = plan.memory_with_fsdp(model, whole, 4 * 2048, recompute, split, 4)
        peak = float(row["peak, GB"])
        error = 0.005 if row["stage"] == "01-single-gpu" else 0.01
        assert sum(parts.values()) / 1e9 == pytest.approx(peak, rel=error), row
        checked.append(row["stage"])
    assert {"01-single-gpu", "02-ddp", "03-fsdp", "04-compression"} <= set(checked)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in plan.LLAMA_LIKE), ("llama", True), ("qwen3", True)],
)
def test_what_autograd_keeps_of_a_block(name, compiled):
    """To the byte: the difference between two blocks and one, in bf16 as with FSDP, and by autocast
    as in stages 01 and 02. A GPU keeps the same. Chapter 01 also has the formula of blocks that are
    not compiled."""
    if compiled and not shutil.which("g++"):
        pytest.skip("to compile on a CPU needs a compiler (Debian: apt-get install g++)")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024}
    ids = torch.zeros(2, 256, dtype=torch.int64)

    def kept_by(layers, autocast):
        config = transformers.AutoConfig.for_model(name, num_hidden_layers=layers, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = model if autocast else model.bfloat16()
        for layer in model.model.layers if compiled else ():
            layer.forward = torch.compile(layer.forward, dynamic=False)
        own = {p.data_ptr() for p in model.parameters()}
        saved = {}

        def keep(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
            _output = model.model(input_ids=ids, use_cache=False)
        torch._dynamo.reset()
        tensors = [tensor for pointer, tensor in saved.items() if pointer not in own]
        copies = 2 * sum(p.numel() for p in model.model.layers[-1].parameters() if p.ndim > 1)
        kept = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return config, kept - layers * copies * autocast

    config, one = kept_by(1, True)
    _, two = kept_by(2, True)
    expected = plan.bytes_of_an_autocast_block(config)
    if not compiled:
        expected += 16 * config.hidden_size + 2 * config.intermediate_size
        if name == "qwen3":  # the norms of queries and keys
            expected += 4 * config.head_dim * (config.num_attention_heads + 2)
    assert (two - one) / ids.numel() == expected
    if compiled:
        _, one = kept_by(1, False)
        _, two = kept_by(2, False)
        assert (two - one) / ids.numel() == plan.bytes_of_a_block(config)


RECOMPUTE, KEEP = "--activation-checkpointing", "--no-reshard-after-forward"


@pytest.mark.parametrize(
    "flags", [(), *(pytest.param((flag,), marks=pytest.mark.slow) for flag in (RECOMPUTE, KEEP))]
)
def test_bytes_of_fsdp_are_those_of_its_collectives(tmp_path, flags):
    """Two ranks and two micro-batches, in bf16. Stages 07 and 09 have such a test each."""
    model = tmp_path / "m"
    tiny_config().save_pretrained(model)
    save_tokenizer(model)
    more = ("-m", model, "--from-scratch", "--dtype", "bf16", "-s", 64, *flags)
    more += ("--global-batch-size", 4, "-b", 1)
    counted = watched(tmp_path, "03-fsdp", 2, *more)["bytes"]
    names = ("_allgather_base_", "_reduce_scatter_base_")
    split = plan.Split("03-fsdp", shards=2, keep_gathered=KEEP in flags)
    planned = planned_bytes(model, split, recompute=RECOMPUTE in flags, batch_size=1)
    assert planned["FSDP"] == sum(counted[name] for name in names) / 2


@pytest.mark.parametrize(("recompute", "tokens"), [(False, 36_864), (True, 24_576)])
def test_stages_03_and_10_send_equally_much_at_the_break_even(recompute, tokens):
    """The first number is in chapter 10: 3 I E / K of Qwen3-30B-A3B, with checkpointing 2 I E / K.
    It is the same for each size of an expert group."""
    model = plan.sizes_of(config_of("Qwen3-30B-A3B"), tokens)
    args = SimpleNamespace(gpu=None, gpus=8, nodes=1, seq_length=tokens)
    totals = []
    for expert_size in (1, 2, 8):
        split = plan.Split("10-expert-parallel", shards=8, expert_size=expert_size)
        sent, _, _ = plan.time_of_a_step(model, args, split, recompute, batch_size=1, sequences=1)
        totals.append(sent["FSDP"] + sent["group"])
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-12)


def lines_of_table(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_readme_quotes_the_table_of_its_command(tmp_path):
    text = (ROOT / "README.md").read_text().split("## Does it fit?")[1].split("\n## ")[0]
    [flags] = re.findall(r"^python plan.py -m Qwen/Qwen3-8B (.*)$", text, re.MULTILINE)
    out = ask("-m", save_published(tmp_path / "m", "Qwen3-8B"), *flags.split())
    assert lines_of_table(out) == lines_of_table(text)


@pytest.mark.slow
def test_the_guide_quotes_what_fits():
    text = (ROOT / "GUIDE.md").read_text().split("## What fits")[1].split("\n## ")[0]
    fits = (ROOT / "outputs" / "measured" / "fits.md").read_text()
    assert lines_of_table(fits) == lines_of_table(text)
    head, rows = bench_paper.what_fits()
    assert lines_of_table(fits) == lines_of_table(table(head, rows))


def test_the_guide_quotes_plans(tmp_path):
    """Qwen3-0.6B on 24 GB with the default micro-batch, and Qwen3-8B on eight GPUs."""
    guide = " ".join((ROOT / "GUIDE.md").read_text().split())
    model = model_of(save_published(tmp_path / "small", "Qwen3-0.6B"))
    parts = plan.memory_of_a_whole_copy(model, 4 * 1024, recompute=False)
    [needed] = re.findall(r"one GPU with 24 GB, of which it needs ([\d.]+) by", guide)
    assert float(needed) == round(sum(parts.values()) / 1e9, 1)

    sentence = guide.split("`python plan.py -m Qwen/Qwen3-8B ")[1].split(" million tokens")[0]
    flags, said = sentence.split("` says what this takes: ")
    gpu, cpu, disk, hours = re.findall(r"\d+ GB|[\d.]+ hours", said)
    out = ask("-m", save_published(tmp_path / "large", "Qwen3-8B"), *flags.split())
    first = lines_of_table(out)[2].strip("| ").split(" | ")
    assert first[0] == "03-fsdp"
    assert first[2] == "2"  # as in the command of the guide
    assert [f"{float(first[8]):.0f} GB", f"{first[-1]} hours"] == [gpu, hours]
    sizes = re.findall(r"^(?:CPU|disk).*: (.*) GB$", out, re.MULTILINE)
    assert [f"{float(size):.0f} GB" for size in sizes] == [cpu, disk]


def test_a_card_of_24_gb(tmp_path):
    folder = save_published(tmp_path / "m", "Qwen3-0.6B")
    out = ask("-m", folder, "--gpu-memory", 24, "-s", 1024)
    assert f"python 01-single-gpu/train-llm.py -e my-run -m {folder} --from-scratch -s 1024" in out


def test_what_does_not_fit_is_said_with_what_would_help(tmp_path):
    folder = save_published(tmp_path / "m", "Llama-3.1-405B")
    out = ask("-m", folder, "--gpus", 8, "--nodes", 2, "-s", 8192)
    too_much = r"^05-multinode .* needs [\d.]+ GB, which is [\d.]+ GB too much"
    assert re.search(too_much, out, re.MULTILINE)
    assert re.search(r"It would fit with .*--gpus \d+", out)


def test_a_model_with_other_blocks_has_no_activations(tmp_path):
    folder = save_published(tmp_path / "m", "Qwen3-30B-A3B")
    out = json.loads(ask("-m", folder, "--gpus", 8, "--json"))
    assert not out["activations_are_known"]
    flag = "--activation-checkpointing"
    [one] = [p for p in out["plans"] if p["stage"] == "03-fsdp" and p["flags"] == flag]
    assert one["gb"]["activations"] is None
    state = one["gb"]["parameters"] + one["gb"]["gradients"] + one["gb"]["moments"]
    assert state == pytest.approx(16 * MODELS["Qwen3-30B-A3B"][2] / 8 / 1e9)

    # Stage 10 has the same state, and gathers the experts of this rank only.
    sizes = {}
    for other in out["plans"]:
        if other["stage"] == "10-expert-parallel":
            assert other["gb"]["moments"] == one["gb"]["moments"]
            sizes[other["flags"].split()[1]] = other["gb"]["copies"]
    # With 4 and 8 ranks the peak is at the end of the backward pass, where the root is.
    assert one["gb"]["copies"] > sizes["2"] > sizes["4"] == sizes["8"]


@pytest.mark.parametrize(("flag", "value"), [("-s", 0), ("-s", 999999), ("--gpus", "two")])
def test_a_mistake_ends_in_one_line(tmp_path, capsys, flag, value):
    folder = save_published(tmp_path / "m", "Qwen3-0.6B")
    with pytest.raises(SystemExit) as error:
        ask("-m", folder, flag, value)
    assert flag in f"{error.value} {capsys.readouterr().err}"


def test_a_model_that_is_not_there_ends_in_one_line():
    command = [sys.executable, ROOT / "plan.py", "-m", "nothing/here"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode != 0
    assert "plan.py: error: --model-name nothing/here: " in result.stderr
    assert "Traceback" not in result.stderr


def first_plans(mixture):
    """The fastest plan of each stage for two GPUs, which may be in two machines."""
    found = {}
    for places in (("--gpus", 1), ("--gpus", 1, "--nodes", 2), ("--gpus", 2)):
        for model in ("tiny", mixture):
            out = json.loads(ask("-m", model, *places, "--global-batch-size", 4, "--json"))
            for one in out["plans"]:
                if "--cpu-offload" not in one["flags"]:
                    found.setdefault(one["stage"], one)
    return found


def run_as_printed(command, folder):
    """Word for word, but for the address of a machine, with two steps on CPUs."""
    command = command.replace("MASTER_ADDR=HOST", "MASTER_ADDR=127.0.0.1")
    command = f"{command} {shlex.join(map(str, TWO_STEPS))} --save-dir {folder}"
    places = ["127.0.0.1", "127.0.0.2"] if "NNODES=2" in command else ["127.0.0.1"]
    own = {"MASTER_PORT": str(free_port()), "RDZV_ID": str(folder), "LAST_CALL": "3"}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    runs = []
    for place in places:
        how = {"cwd": ROOT, "env": launcher_environment(**own, LOCAL_ADDR=place), **PIPES}
        run = subprocess.Popen(["bash", "-c", command], **how)
        runs.append(run)
    try:
        outputs = [run.communicate(timeout=600)[0] for run in runs]
    finally:
        for run in runs:
            end(run)
    assert all(run.returncode == 0 for run in runs), f"{command}\n" + "\n".join(outputs)


@pytest.mark.slow
def test_every_command_runs_and_has_the_state_of_its_plan(tmp_path):
    """With each way to start a script as it is printed, in the other stages its flags."""
    plans = first_plans(save_config(tmp_path / "mixture", "mixture"))
    without_04_and_06 = {path.parent.name for path in ROOT.glob("[0-9]*/train-llm.py")}
    without_04_and_06 -= {"04-compression", "06-streaming"}
    assert plans.keys() == without_04_and_06
    for stage, one in plans.items():
        if stage in ("01-single-gpu", "03-fsdp", "08-pipeline-parallel"):
            run_as_printed(one["command"], tmp_path / stage)
        else:
            _, _, flags = one["command"].partition(" -e ")
            run(stage, 2, "-e", *shlex.split(flags), *TWO_STEPS, "--save-dir", tmp_path / stage)
        state = one["gb"]["parameters"] + one["gb"]["gradients"] + one["gb"]["moments"]
        measured = metrics(tmp_path / stage / "my-run")[2]["memory/state_gb"]
        assert measured == pytest.approx(state, rel=0.02), stage

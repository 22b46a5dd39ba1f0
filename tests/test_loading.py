"""Weights from files to shards and back: each rank reads its own, and none holds all."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import STAGES, assert_same_curve, load, metrics, mutant, run
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {
    "vocab_size": 389,  # rows that no number of ranks divides
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama-tied": ("llama", {**SIZES, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"vocab_size": 389, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("gpt_neox", {key: SIZES[key] for key in SIZES if "_dim" not in key}),
    # In files an expert is three matrices, in the model two parameters hold those of all experts.
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2": ("gemma2", SIZES),
    "gemma3_text": ("gemma3_text", SIZES),
    "bloom": ("bloom", {"vocab_size": 389, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        "opt",
        {
            "vocab_size": 389,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# Step 1 has a learning rate of 0, so the weights are at the end what they were in the files.
ONE_STEP = ("-s", "32", "--global-batch-size", "6", "--max-steps", "1", "--warmup-steps", "1")
ONE_STEP += ("--log-freq", "1", "--eval-sequences", "2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with random weights in bf16, in files of at most 50 kB."""
    root = tmp_path_factory.mktemp("saved")

    def folder_of(name):
        if not (root / name).exists():
            kind, sizes = MODELS[name]
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **ENDS}))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.05)
            model.to(torch.bfloat16).save_pretrained(root / name, max_shard_size="50KB")
            assert (root / name / "model.safetensors.index.json").exists()
        return root / name

    return folder_of


def tensors(folder):
    """The tensors in the files of a model, by the names that they have there."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


QUICK = {("mixtral", "03-fsdp")}
CASES = [(name, "03-fsdp", 3) for name in MODELS]
CASES += [("mixtral", "01-single-gpu", 1), ("llama-tied", "02-ddp", 2)]
CASES += [("mixtral", "04-compression", 4), ("llama-tied", "05-multinode", 3)]


@pytest.mark.parametrize(
    ("name", "stage", "processes"),
    [pytest.param(*c, marks=[] if c[:2] in QUICK else [pytest.mark.slow]) for c in CASES],
)
def test_what_is_read_is_what_is_exported(name, stage, processes, saved, tmp_path):
    """From the files through shards to final_model: names and bits stay as they are."""
    more = ("--shard-size", 2) if processes == 4 else ()
    flags = (*ONE_STEP, "-m", saved(name), "--export-dtype", "bf16", *more)
    run(stage, processes, *flags, "-e", "a", "--save-dir", tmp_path)
    before, after = tensors(saved(name)), tensors(tmp_path / "a" / "final_model")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == torch.bfloat16
        assert torch.equal(after[key], tensor), key
    _, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a" / "final_model", output_loading_info=True
    )
    assert not any(info.values())


@pytest.mark.parametrize("stage", ["05-multinode", pytest.param("03-fsdp", marks=pytest.mark.slow)])
def test_checkpoints_of_shards_that_are_read_from_fp32(stage, saved, tmp_path):
    """Then a shard is a view of what was read, and DCP's copy of it in the background failed."""
    model = AutoModelForCausalLM.from_pretrained(saved("llama-tied"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "fp32")
    more = ("--compression", "none", "--shard-size", 2) if stage == "05-multinode" else ()
    flags = (*ONE_STEP, "-m", tmp_path / "fp32", *more)
    run(stage, 2, *flags, "-e", "a", "--save-dir", tmp_path)
    before, after = tensors(tmp_path / "fp32"), tensors(tmp_path / "a" / "final_model")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_shards_that_are_read_give_the_curve_of_stage_01(name, saved, curve):
    """With buffers, which are in no file: rotary frequencies, the scale of Gemma's embeddings."""
    flags = (*ONE_STEP, "--max-steps", "3", "-m", saved(name))
    one = curve("01-single-gpu", 1, *flags)
    assert_same_curve(one, curve("03-fsdp", 3, *flags), range(1, 4))


# Their files hold matrices that the model has in other rows. Read in shards they would be wrong.
FROM_RANK_0 = {
    "olmo_hybrid": {},
    "hrm_text": {},
    "kimi_linear": {},
    "bailing_hybrid": {},
    "qwen4_exp_text": {
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
    },
    "inkling2_text": {},
}


@pytest.mark.parametrize("kind", FROM_RANK_0)
def test_architectures_that_rank_0_reads(kind, saved):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    stage = load("03-fsdp")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**FROM_RANK_0[kind]))
    assert stage.find_weights(model, str(saved("mixtral")))[0] == []


def test_other_architectures_are_read_in_shards(saved):
    """The check above is not one that refuses everything."""
    stage = load("03-fsdp")
    for name in MODELS:
        config = transformers.AutoConfig.from_pretrained(saved(name))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        files, _ = stage.find_weights(model, str(saved(name)))
        assert len(files) == len(list(saved(name).glob("*.safetensors"))) > 1


@pytest.mark.law1
@pytest.mark.slow
def test_a_file_that_shards_cannot_be_read_from(saved, tmp_path, curve):
    """Weights in PyTorch's older format, a pickle: rank 0 reads them, with weights_only."""
    folder = tmp_path / "bin"
    model = AutoModelForCausalLM.from_pretrained(saved("gpt2"))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    flags = (*ONE_STEP, "--max-steps", "3", "-m")
    assert_same_curve(
        curve("01-single-gpu", 1, *flags, saved("gpt2")),
        curve("03-fsdp", 2, *flags, folder),
        range(1, 4),
    )


@pytest.mark.parametrize(
    "stage",
    ["03-fsdp", *[pytest.param(r, marks=pytest.mark.slow) for r in STAGES if r > "03-fsdp"]],
)
def test_weights_that_are_missing_are_named(stage, saved, tmp_path):
    """One line, and not the random numbers that would be in their place."""
    folder = tmp_path / "m"
    shutil.copytree(saved("llama-tied"), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.down_proj.weight"
    lost = index["weight_map"][name]
    lost_weights = {key for key, file in index["weight_map"].items() if file == lost}
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != lost}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run(stage, 2, *ONE_STEP, "-b", 1, "-m", folder, check=False)
    assert result.returncode != 0
    assert len(result.errors) == 1
    assert f"--model-name {folder}: it lacks weights for model.layers." in result.errors[0]
    assert lost_weights & {result.errors[0].split()[-1]}


@pytest.mark.parametrize("stage", ["01-single-gpu", "03-fsdp"])
def test_a_large_model_is_exported_in_several_files(stage, saved, tmp_path):
    path = mutant(tmp_path, stage)
    module = tmp_path / "logs_and_checkpoints.py"
    text = module.read_text()
    assert text.count('max_shard_size="5GB"') == 1
    module.write_text(text.replace('max_shard_size="5GB"', 'max_shard_size="50KB"'))
    processes = 1 if stage == "01-single-gpu" else 2
    flags = (*ONE_STEP, "-m", saved("mixtral"), "-e", "a", "--save-dir", tmp_path)
    run(stage, processes, *flags, path=path)
    folder = tmp_path / "a" / "final_model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(saved("mixtral"), dtype=torch.float32)
    assert model.dtype == torch.float32
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
def test_the_dtype_of_the_export(saved, tmp_path):
    flags = ("-s", "32", "--global-batch-size", "6", "--max-steps", "2", "-m", saved("gpt2"))
    for dtype in ("fp32", "bf16"):
        named = ("-e", dtype, "--save-dir", tmp_path, "--export-dtype", dtype)
        run("01-single-gpu", 1, *flags, *named)
    fp32 = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32" / "final_model")
    bf16 = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16" / "final_model")
    assert (fp32.dtype, bf16.dtype) == (torch.float32, torch.bfloat16)
    for one, other in zip(fp32.parameters(), bf16.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)
    assert list(metrics(tmp_path / "bf16")) == [1, 2]

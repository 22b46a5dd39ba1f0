"""Weights from files to shards and back."""

import json
import shutil

import pytest
import torch
from conftest import assert_same_curve, run, save_tokenizer
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {
    "vocab_size": 1031,  # rows that no number of ranks divides
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
    "gpt2": ("gpt2", {"vocab_size": 1031, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("gpt_neox", {key: SIZES[key] for key in SIZES if "_dim" not in key}),
    # In files an expert is three matrices, in the model two parameters hold those of all experts.
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2": ("gemma2", SIZES),
    "gemma3_text": ("gemma3_text", SIZES),
    "bloom": ("bloom", {"vocab_size": 1031, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        "opt",
        {
            "vocab_size": 1031,
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
ONE_STEP = ("-s", "32", "--global-batch-size", "6", "--max-steps", "1")
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
            save_tokenizer(root / name)
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
CASES = [(name, "03-fsdp", 2) for name in MODELS]
CASES += [("mixtral", "01-single-gpu", 1)]


@pytest.mark.parametrize(
    ("name", "stage", "processes"),
    [pytest.param(*c, marks=[] if c[:2] in QUICK else [pytest.mark.slow]) for c in CASES],
)
def test_what_is_read_is_what_is_exported(name, stage, processes, saved, tmp_path):
    """From the files through shards to final_model: names and bits stay as they are."""
    flags = (*ONE_STEP, "-m", saved(name), "--lr", "1e-30")
    run(stage, processes, *flags, "-e", "a", "--save-dir", tmp_path)
    before, after = tensors(saved(name)), tensors(tmp_path / "a" / "final_model")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        stays_fp32 = "correction_bias" in key  # of a router
        assert after[key].dtype == (torch.float32 if stays_fp32 else torch.bfloat16)
        assert torch.equal(after[key].bfloat16(), tensor), key
    _, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a" / "final_model", output_loading_info=True
    )
    assert not any(info.values())


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "qwen3_moe", "gemma3_text"])
def test_shards_that_are_read_give_the_curve_of_stage_01(name, saved, curve):
    """With buffers, which are in no file: rotary frequencies, the scale of Gemma's embeddings."""
    flags = (*ONE_STEP, "--max-steps", "3", "-m", saved(name))
    one = curve("01-single-gpu", 1, *flags)
    assert_same_curve(one, curve("03-fsdp", 2, *flags), range(1, 4), learns=False)


@pytest.mark.law1
@pytest.mark.slow
def test_weights_in_a_pickle(saved, tmp_path, curve):
    """PyTorch's older format. transformers reads it with weights_only."""
    folder = tmp_path / "bin"
    model = AutoModelForCausalLM.from_pretrained(saved("gpt2"))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    save_tokenizer(folder)
    flags = (*ONE_STEP, "--max-steps", "3", "-m")
    one = curve("01-single-gpu", 1, *flags, saved("gpt2"))
    assert_same_curve(one, curve("03-fsdp", 2, *flags, folder), range(1, 4), learns=False)


@pytest.mark.parametrize(
    "stage", ["03-fsdp", pytest.param("08-pipeline-parallel", marks=pytest.mark.slow)]
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
    assert f"--model-name {folder}: it lacks weights for " in result.errors[0]
    assert any(name in result.errors[0] for name in lost_weights)

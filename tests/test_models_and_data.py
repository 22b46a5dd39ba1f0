"""Real models and data, as a practitioner has them: folders, hub ids, formats, precisions."""

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import all_topics

import datasets
import numpy
import pytest
import torch
import transformers
from conftest import (
    ROOT,
    SMALL,
    TINY,
    assert_same_curve,
    data_args,
    default_sequences,
    default_tokenizer,
    load,
    metrics,
    mutant,
    packed,
    run,
    save_one_sided,
    save_rows,
    save_tokenizer,
)
from safetensors.torch import load_file, save_file
from test_course import SAME_TEXT
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SIZE = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "max_position_embeddings": 128, **SIZE}
GROUPED = LLAMA | {"num_key_value_heads": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZE),
}
FEW = (*SMALL, "--max-steps", "4", "--log-freq", "1", "--dtype", "fp32")
STAGES = [("01-single-gpu", 1), ("03-fsdp", 2)]
STAGES += [pytest.param("02-ddp", 2, marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """For an architecture a folder of weights, as a hub has it: trained a little on the default
    data, saved in bf16 with its tokenizer."""
    root, done = tmp_path_factory.mktemp("pretrained"), {}

    def folder_of(name):
        if name not in done:
            CONFIGS[name].save_pretrained(root / f"{name}-config")
            save_tokenizer(root / f"{name}-config")
            flags = (*SMALL, "--max-steps", "20", "--lr", "5e-3")
            flags += ("-m", root / f"{name}-config", "--from-scratch")
            run("01-single-gpu", 1, "-e", name, "--save-dir", root, *flags)
            model = AutoModelForCausalLM.from_pretrained(root / name / "final_model")
            done[name] = root / f"{name}-weights"
            model.to(torch.bfloat16).save_pretrained(done[name])
            tokenizer = AutoTokenizer.from_pretrained(root / name / "final_model")
            tokenizer.save_pretrained(done[name])
        return done[name]

    return folder_of


def loss_of_first_batch(model):
    """The loss of step 1 worked out by hand: mean over all targets of the first 8 sequences."""
    train, _ = default_sequences(64)
    batch = train[numpy.random.default_rng((0, 0)).permutation(len(train))[:8]]
    with torch.no_grad():
        logits = model(batch).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


@pytest.mark.law1
@pytest.mark.parametrize(("stage", "processes"), STAGES)
def test_fine_tuning_starts_at_the_pretrained_loss(stage, processes, pretrained, curve):
    """Not at ln 1024: weights that a stage re-initialises by accident are the best-known bug. The
    curve is that of stage 01."""
    folder = pretrained("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = loss_of_first_batch(model)
    assert expected < math.log(1024) - 0.5
    losses = curve(stage, processes, *FEW, "-m", folder)
    assert losses[1]["train/loss"] == pytest.approx(expected, rel=1e-5)
    one = curve("01-single-gpu", 1, *FEW, "-m", folder)
    assert_same_curve(one, losses, range(1, 5), learns=False)


def test_lr_defaults_to_less_with_loaded_weights(pretrained, curve):
    for flags, lr in (((), 2e-5), (("--from-scratch",), 2e-3)):
        losses = curve("01-single-gpu", 1, *FEW, "-m", pretrained("llama"), *flags)
        assert losses[1]["train/learning_rate"] == lr


def test_weights_that_transformers_does_not_read_are_refused(stage_01, tmp_path):
    """They would be ignored, and the run would begin with random weights."""
    CONFIGS["llama"].save_pretrained(tmp_path)
    config = stage_01.load_config(str(tmp_path))
    for name in ("model-q4.gguf", "consolidated.00.pth", "weights.pt", "__0_0.distcp", "x.bin"):
        (tmp_path / name).write_bytes(b"weights")
        with pytest.raises(OSError, match="Error no file"):
            stage_01.load_model(config, str(tmp_path), "auto", 0)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("make", [transformers.GPT2Config, transformers.GemmaConfig])
def test_a_model_without_a_tokenizer(make, stage_01, tmp_path):
    """transformers makes one with nothing but special tokens."""
    make(**SIZE).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=f"--model-name {tmp_path}: it has no tokenizer"):
        stage_01.load_tokenizer(str(tmp_path), "")


@pytest.mark.skipif(not SAME_TEXT, reason="the default text is that of Python 3.11.7")
def test_the_default_models_are_made_again(tmp_path):
    command = [sys.executable, ROOT / "tests" / "support" / "make_tiny.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("tiny", "tiny-mixture"):
        made, ours = (
            json.loads((folder / name / "config.json").read_text()) for folder in (tmp_path, ROOT)
        )
        assert made | {"transformers_version": ours["transformers_version"]} == ours
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / name / file).read_bytes() == (ROOT / name / file).read_bytes()


def test_dropout_is_set_to_zero_and_said(tmp_path):
    CONFIGS["gpt2"].save_pretrained(tmp_path / "config")
    save_tokenizer(tmp_path / "config")
    out = run("01-single-gpu", 1, *FEW, "-m", tmp_path / "config", "--from-scratch").out
    assert f"resid_pdrop is 0.1 in {tmp_path}/config and 0 here" in out


@pytest.mark.law1
@pytest.mark.parametrize(
    "make",
    [
        transformers.BertConfig,
        pytest.param(transformers.MambaConfig, marks=pytest.mark.slow),
        pytest.param(transformers.BioGptConfig, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_any_architecture(make, tmp_path, curve):
    """`_no_split_modules` names too much for Mamba and nothing for BioGPT. BERT becomes causal."""
    known = vars(make())
    sizes = {name: value for name, value in LLAMA.items() if name in known}
    more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    more = {name: value for name, value in more.items() if name in known}
    make(**sizes, **more).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    flags = (*FEW, "-m", tmp_path / "m", "--from-scratch", "--activation-checkpointing")
    one = curve("01-single-gpu", 1, *flags)
    assert_same_curve(one, curve("03-fsdp", 2, *flags), range(1, 5), learns=False)


def test_bert_reads_no_token_that_it_has_to_predict(stage_01, tmp_path):
    """Its logits do not depend on the tokens behind."""
    sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64}
    transformers.BertConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=False
    ).save_pretrained(tmp_path)
    config = stage_01.load_config(str(tmp_path))
    model = stage_01.load_model(config, None, "auto", 0)
    tokens = torch.randint(384, (1, 32))
    other = tokens.clone()
    other[:, 16:] = (other[:, 16:] + 1) % 1024
    with torch.no_grad():
        logits, changed = model(input_ids=tokens).logits, model(input_ids=other).logits
    assert torch.equal(logits[:, :16], changed[:, :16])
    assert not torch.equal(logits[:, 16:], changed[:, 16:])


@pytest.mark.parametrize(
    ("make", "own_limit"),
    [
        (transformers.BertConfig, None),
        (transformers.OPTConfig, None),  # here two more embeddings than max_position_embeddings
        # The positions of tokens begin with 2 here. Tokenizers of these models say how many remain.
        (transformers.RobertaConfig, 38),
        (transformers.CamembertConfig, 38),
    ],
)
def test_the_default_length_is_the_longest_that_the_model_takes(make, own_limit, stage_01):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32, "intermediate_size": 64}
    config = make(vocab_size=1024, max_position_embeddings=40, **sizes, is_decoder=True)
    args = data_args("dummy", None)
    tokenizer = stage_01.load_tokenizer(TINY, "")
    tokenizer.model_max_length = own_limit or 10**30
    train, _, length = stage_01.load_data(args, config, tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    tokens = train[0]["input_ids"][None] % 100 + 3  # none is padding
    assert model(input_ids=tokens).logits.shape[1] == length
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.cat([tokens, tokens[:, :1]], 1))


@pytest.mark.parametrize(("stage", "processes"), STAGES[1:])
def test_final_model_is_the_trained_model(stage, processes, tmp_path):
    """from_pretrained opens it, and it has the evaluation loss that the run ended with. Its
    tokenizer writes no end of text behind a prompt."""
    run(stage, processes, "-e", "a", "--save-dir", tmp_path, *FEW)
    folder = tmp_path / "a" / "final_model"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    text = "The assert statement"
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == default_tokenizer().encode(text).ids
    again = run("01-single-gpu", 1, *SMALL, "-m", folder, "--lr", "1e-9", "--max-steps", "1")
    measured = float(again.out.split("eval/loss ")[1].split()[0])
    assert measured == pytest.approx(metrics(tmp_path / "a")[4]["eval/loss"], abs=2e-4)


def test_the_export_keeps_the_generation_config(pretrained, tmp_path):
    folder = shutil.copytree(pretrained("llama"), tmp_path / "m")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 1024]}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    run("01-single-gpu", 1, "-m", folder, "-e", "a", "--save-dir", tmp_path, *FEW)
    kept = json.loads((tmp_path / "a" / "final_model" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == [0, 1024]


@pytest.mark.parametrize(
    ("flags", "exported"),
    [(("--dtype", "bf16"), "bfloat16"), ((), "bfloat16"), (("--from-scratch",), "float32")],
)
def test_the_dtype_of_the_export(flags, exported, pretrained, tmp_path):
    """That of the pretrained weights, from scratch fp32. It is said."""
    few = (*FEW, "--max-steps", "1", "-e", "a", "--save-dir", tmp_path, "-m", pretrained("llama"))
    out = run("01-single-gpu", 1, *few, *flags).out
    folder = tmp_path / "a" / "final_model"
    assert f"exported in {exported}: {folder}" in out
    weights = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {f"torch.{exported}"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == exported


@pytest.mark.parametrize(("stage", "processes"), [("01-single-gpu", 1), ("03-fsdp", 2)])
def test_the_bias_of_a_router_stays_fp32_in_a_bf16_export(stage, processes, tmp_path):
    """In bf16 its values of about 7 would be a few equal ones, and choose other experts."""
    sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 16, "num_experts_per_tok": 4}
    sizes |= {"n_group": 1, "topk_group": 1, "max_position_embeddings": 128}
    config = AutoConfig.for_model("glm4_moe", **sizes, eos_token_id=0, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    [(name, bias)] = [pair for pair in model.named_buffers() if "correction_bias" in pair[0]]
    bias.data = 6.8 + 0.26 * torch.rand(16)
    model.save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    flags = (*FEW, "--max-steps", "1", "-m", tmp_path / "m", "-e", "a", "--save-dir", tmp_path)
    run(stage, processes, *flags)
    weights = load_file(tmp_path / "a" / "final_model" / "model.safetensors")
    assert torch.equal(weights[name], bias)
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_biases_of_experts_have_no_weight_decay(tmp_path):
    """They are stacked, so that they have two dimensions. Here the decay is a tenth in one step."""
    path = save_one_sided(tmp_path / "m") / "model.safetensors"
    before = {name: torch.ones_like(tensor) for name, tensor in load_file(path).items()}
    save_file(before, path, metadata={"format": "pt"})
    flags = (*FEW, "--max-steps", "1", "-m", tmp_path / "m", "-e", "a", "--save-dir", tmp_path)
    run("01-single-gpu", 1, *flags, "--warmup-steps", 0, "--lr", "1e-6", "--weight-decay", "1e5")
    after = load_file(tmp_path / "a" / "final_model" / "model.safetensors")
    for name, tensor in after.items():
        decays = tensor.ndim > 1 and not name.endswith("bias")
        assert tensor.flatten()[0].item() == pytest.approx(0.9 if decays else 1, abs=1e-4), name
    assert any(tensor.ndim == 2 and name.endswith("_bias") for name, tensor in after.items())


def test_an_evaluation_without_targets_costs_no_checkpoint(tmp_path):
    labels = [[5] * 64] * 90 + [[-100] * 64] * 9
    rows = [{"input_ids": [5] * 64, "labels": row} for row in labels]
    folder = save_rows(tmp_path / "rows", rows)
    flags = ("-d", folder, "-e", "a", "--save-dir", tmp_path)
    run("01-single-gpu", 1, *flags, *FEW)
    assert math.isnan(metrics(tmp_path / "a")[4]["eval/loss"])
    assert (tmp_path / "a" / "step-00000004").exists()


SMALL_SIZES = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 3}
SMALL_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
MIXTURES = {
    # What the config calls an expert's width, the experts, and those of a token.
    "mixtral": ("intermediate_size", "num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": ("moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    "olmoe": ("intermediate_size", "num_experts", "num_experts_per_tok"),
    "deepseek_v3": ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    "gpt_oss": ("intermediate_size", "num_local_experts", "num_experts_per_tok"),
    "ernie4_5_moe": ("moe_intermediate_size", "moe_num_experts", "moe_k"),
}


@pytest.mark.law6
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_counts_the_experts_of_a_token(kind, stage_01):
    """16 experts, 4 a token, each of three matrices of 32 by 48. So 12 of 16 do not count."""
    from plan import flops_per_token

    sizes = dict(zip(MIXTURES[kind], (48, 16, 4), strict=True))
    # The first blocks of some families have no experts.
    sizes |= {"first_k_dense_replace": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2}
    sizes |= {"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {"qk_head_dim": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    known = AutoConfig.for_model(kind).to_dict().keys() | set(MIXTURES[kind])
    sizes = {name: size for name, size in (SMALL_SIZES | sizes).items() if name in known}
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    blocks = 2 if kind in ("deepseek_v3", "ernie4_5_moe") else 3
    expert = 3 * 32 * 48 + (2 * 48 + 32 if kind == "gpt_oss" else 0)  # the latter are biases
    used = model.num_parameters() - model.get_input_embeddings().weight.numel()
    used -= blocks * 12 * expert
    if config.tie_word_embeddings:
        used += 1024 * 32
    attention = flops_per_token(model, 2) - flops_per_token(model, 1)
    assert flops_per_token(model, 64) - 64 * attention == pytest.approx(6 * used)


@pytest.mark.law6
def test_the_peaks_of_devices(stage_01):
    """By their names, as PyTorch says them. Parts of a GPU, and chips that share the beginning of a
    name, have none."""
    from plan import peak_flops

    peaks = {
        65: ["Tesla T4"],
        125: ["NVIDIA A10"],
        70: ["NVIDIA A10G"],
        71: ["NVIDIA GeForce RTX 3090"],
        165.2: ["NVIDIA GeForce RTX 4090"],
        209.5: ["NVIDIA GeForce RTX 5090"],
        121: ["NVIDIA L4"],
        362: ["NVIDIA L40S"],
        312: ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
        989: ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H200"],
        756: ["NVIDIA H100 PCIe"],
        835: ["NVIDIA H100 NVL", "NVIDIA H200 NVL"],
        2250: ["NVIDIA B200", "NVIDIA B300 SXM6 AC"],
        2500: ["NVIDIA GB200", "NVIDIA GB300"],
    }
    gaming = [f"NVIDIA GeForce RTX {name}" for name in ("3090 Ti", "4090 D", "4090 Laptop GPU")]
    peaks[0] = [*gaming, "NVIDIA GeForce RTX 5090 D", "NVIDIA L40", "NVIDIA H20", "CPU"]
    peaks[0] += ["NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
    for tflops, names in peaks.items():
        for name in names:
            assert peak_flops(name) / 1e12 == pytest.approx(tflops), name


IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
IMAGES |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
PADDED = {**GROUPED, "pad_token_id": 0}
MULTIMODAL = {
    "gemma3": ({**GROUPED, "head_dim": 8}, IMAGES),
    "mistral3": ({**GROUPED, "model_type": "mistral"}, {**IMAGES, "head_dim": 8}),
    "llava": (GROUPED, {**IMAGES, "model_type": "clip_vision_model", "projection_dim": 32}),
    "smolvlm": (PADDED, IMAGES),
    "qwen3_5": ({**GROUPED, "head_dim": 8}, {"depth": 1, "hidden_size": 32, "num_heads": 4}),
}


@pytest.mark.parametrize(
    "kind",
    [x if x != "qwen3_5" else pytest.param(x, marks=pytest.mark.slow) for x in MULTIMODAL],
)
def test_the_recipe_for_the_text_part_of_a_multimodal_model(kind, stage_01, tmp_path):
    """The folder that GUIDE's program makes trains, and its logits of texts are those of the whole
    model. The weights of the whole model are refused, with a line that leads to the program."""
    text, images = MULTIMODAL[kind]
    config = AutoConfig.for_model(kind, text_config=text, vision_config=images)
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path / "whole")
    save_tokenizer(tmp_path / "whole")
    guide = (ROOT / "GUIDE.md").read_text()
    section = guide[guide.index("## Multimodal") :]
    program = section.split("```python\n")[1].split("```")[0]
    program = program.replace("google/gemma-3-4b-it", str(tmp_path / "whole"))
    exec(program.replace('"gemma-3-4b-text"', repr(str(tmp_path / "text"))), {})

    config = stage_01.load_config(str(tmp_path / "text"))
    model = stage_01.load_model(config, str(tmp_path / "text"), "auto", 0)
    tokens = torch.arange(5, 69)[None]
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=tokens, use_cache=False).logits for m in (model, whole))
    assert torch.allclose(ours, theirs, atol=1e-6)
    run("01-single-gpu", 1, *FEW, "-m", tmp_path / "text")
    name = str(tmp_path / "whole")
    if kind == "qwen3_5":  # its weights transformers finds by itself
        model = stage_01.load_model(stage_01.load_config(name), name, "auto", 0).eval()
        with torch.no_grad():
            ours = model(input_ids=tokens, use_cache=False).logits
        assert torch.allclose(ours, theirs, atol=1e-6)
        return
    with pytest.raises(SystemExit, match="it lacks weights for .*, see Multimodal in GUIDE.md"):
        stage_01.load_model(stage_01.load_config(name), name, "auto", 0)


def read(stage_01, name, **more):
    config = stage_01.load_config(stage_01.TINY)
    args = data_args(name, 64, **more)
    return stage_01.load_data(args, config, stage_01.load_tokenizer(TINY, ""))[:2]


def all_rows(*parts):
    return [row["input_ids"].tolist() for part in parts for row in part]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Makes datasets of the hub: folders that have no path of their own."""
    monkeypatch.chdir(tmp_path)
    load_dataset = datasets.load_dataset

    def load_from_hub(name, subset=None, **more):
        """As `datasets.load_dataset`, which finds a dataset of the hub in this folder."""
        if name.startswith("someone/"):
            return load_dataset(f"hub/{name}", subset, **more)
        return load_dataset(name, subset, **more)

    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)
    (tmp_path / "hub" / "someone").mkdir(parents=True)
    return tmp_path / "hub" / "someone"


def write_split(folder, split, texts, **more):
    folder.mkdir(exist_ok=True)
    rows = [{"text": text, **more} for text in texts]
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.law6
def test_the_text_that_is_held_out_is_not_trained_on(stage_01, monkeypatch):
    """Some texts of Python's documentation contain others. As they are, a third of what is held out
    is also in the training data, and with Python 3.13 more than a fifth."""
    tokenizer = stage_01.load_tokenizer(TINY, "")
    shares = []
    monkeypatch.setattr(stage_01, "topics", all_topics)
    for texts in (list(all_topics.values()), stage_01.python_docs()):
        data = stage_01.pack(datasets.Dataset.from_dict({"text": texts}), "text", tokenizer, 64)
        text = tokenizer.decode(data["input_ids"][:].flatten())
        trained, held_out = text[: len(text) * 19 // 20], text[len(text) * 19 // 20 :]
        windows = [held_out[i : i + 60] for i in range(0, len(held_out) - 60, 60)]
        shares.append(sum(window in trained for window in windows) / len(windows))
    assert shares[0] > (0.25 if sys.version_info < (3, 12) else 0.2)
    assert shares[1] < 0.05


def test_a_text_is_one_document(documents, stage_01, tmp_path):
    """Windows writes a mark of the encoding (BOM) in front of UTF-8. It is no part of the text."""
    text = "\n".join(documents)
    for name, encoding in (("a.txt", "utf-8"), ("b.txt", "utf-8-sig")):
        (tmp_path / name).write_text(text, encoding=encoding)
        train, held_out = read(stage_01, tmp_path / name)
        rows = all_rows(train, held_out)
        assert rows == packed([text], 64)
        assert len(held_out) == math.ceil(len(rows) / 20)


def test_a_data_set_of_the_hub(documents, hub, stage_01, capsys):
    """Documents joined by the end of text and cut. Missing and empty texts are left out."""
    write_split(hub / "plain", "train", [*documents[:300], None, "", *documents[300:]])
    train, held_out = read(stage_01, "someone/plain")
    rows = all_rows(train, held_out)
    assert rows == packed(documents, 64)
    assert len(held_out) == math.ceil(len(rows) / 20)
    assert "training on" not in capsys.readouterr().out

    write_split(hub / "more", "train", documents, title="x")
    train, held_out = read(stage_01, "someone/more")
    assert all_rows(train, held_out) == rows
    assert "training on the column text of text, title\n" in capsys.readouterr().out


def test_splits_of_the_hub_that_are_held_out(documents, hub, stage_01):
    for split in ("train", "test"):
        write_split(hub / "two", split, [f"{split} {text}" for text in documents])
        write_split(hub / "three", split, [f"{split} {text}" for text in documents])
    write_split(hub / "three", "validation", [f"validation {text}" for text in documents])
    for name, split in (("someone/two", "test"), ("someone/three", "validation")):
        train, held_out = read(stage_01, name)
        assert all_rows(train) == packed([f"train {text}" for text in documents], 64)
        assert all_rows(held_out) == packed([f"{split} {text}" for text in documents], 64)


def test_rows_of_tokens_stay_as_they_are(stage_01, tmp_path):
    """Those of the folder and their length, whatever --text-column and --dataset-subset say."""
    rows = [{"input_ids": [i] * 20, "labels": [-100] * 9 + [i] * 11} for i in range(99)]
    save_rows(tmp_path / "rows", rows)
    args = data_args(tmp_path / "rows", None, "body")
    args.dataset_subset = "en"
    config = stage_01.load_config(stage_01.TINY)
    train, held_out, length = stage_01.load_data(args, config, stage_01.load_tokenizer(TINY, ""))
    assert length == 20
    assert all_rows(train, held_out) == [row["input_ids"] for row in rows]
    assert train[3]["labels"].tolist() == rows[3]["labels"]


def test_a_tokenizer_without_eos_joins_documents_bare(stage_01):
    tokenizer = stage_01.load_tokenizer(TINY, "")
    tokenizer.eos_token = None
    documents = datasets.Dataset.from_dict({"text": ["x y", None, "z"]})
    [row] = stage_01.pack(documents, "text", tokenizer, 3)
    assert [tokenizer.decode(token) for token in row["input_ids"]] == ["x", " y", "z"]


def test_a_text_that_has_its_special_tokens_does_not_get_them_twice(stage_01):
    """Such texts are written by tools that have applied a template. Llama's tokenizer, for example,
    begins each text with a token."""
    tokenizer = stage_01.load_tokenizer(TINY, "")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.backend_tokenizer.post_processor = processor
    texts = ["ab", "<s>ab", "ab<|endoftext|>", "<s>ab<|endoftext|>", "a<s>b"]
    written = [tokenizer.decode(tokens) for tokens in stage_01.tokenize(texts, tokenizer)]
    assert written == ["<s>ab<|endoftext|>"] * 4 + ["<s>a<s>b<|endoftext|>"]


def test_packing_loses_less_than_a_sequence(hub, stage_01):
    """Also of many documents that are short, and of long ones."""
    texts = [f"{i} " * (i % 5 + 1) for i in range(3000)]
    texts += ["one line " * 9000, "\n".join(f"line {i}" for i in range(9000))]
    write_split(hub / "lengths", "train", texts)
    train, held_out = read(stage_01, "someone/lengths")
    assert all_rows(train, held_out) == packed(texts, 64)


def test_a_tokenizer_with_more_tokens_than_the_model(stage_01, tmp_path):
    """Is no error, if no text has such a token. Nor do the random tokens of `dummy`."""
    (tmp_path / "d.txt").write_text("some text " * 999)
    config = stage_01.load_config(stage_01.TINY)
    tokenizer = stage_01.load_tokenizer(TINY, "")
    config.vocab_size = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    for name in ("dummy", tmp_path / "d.txt"):
        args = data_args(name, 64)
        train, held_out, length = stage_01.load_data(args, config, tokenizer)
        stage_01.check_data(args, config, train, held_out, length)


def test_a_config_of_another_version_of_transformers(tmp_path):
    """Keys that only one of two versions knows make no difference. A value that differs ends the
    run."""
    named = ("-e", "a", "--save-dir", tmp_path, *FEW)

    def change(step, **changes):
        path = tmp_path / "a" / f"step-{step:08d}" / "state.json"
        state = json.loads(path.read_text())
        del state["experiment"]["config.mlp_bias"]
        state["experiment"] |= {f"config.{name}": value for name, value in changes.items()}
        path.write_text(json.dumps(state))

    run("01-single-gpu", 1, *named, "--max-steps", "1")
    change(1, new_key=1.0)
    run("01-single-gpu", 1, *named, "--max-steps", "2")
    assert list(metrics(tmp_path / "a")) == [1, 2]
    change(2, hidden_act="x")
    [line] = run("01-single-gpu", 1, *named, check=False).errors
    assert f"config.hidden_act is silu, but x in {tmp_path}/a/step-00000002: use another" in line


@pytest.fixture(scope="session")
def stage_01(tmp_path_factory):
    """The functions of stage 01, for what need not run the whole script."""
    datasets.config.HF_DATASETS_CACHE = str(tmp_path_factory.mktemp("datasets"))
    return load("01-single-gpu")


@pytest.mark.slow
def test_one_process_of_a_node_tokenises(documents, tmp_path):
    bars = []
    for processes in (1, 3):
        path = tmp_path / f"not-seen-before-{processes}.txt"
        path.write_text(" ".join(documents))
        result = run("02-ddp", processes, *FEW, "-d", path)
        bars.append(result.err.count("Map:   0%"))
    assert bars[0] == bars[1] > 0


@pytest.mark.law5
def test_a_populated_hub_cache_is_enough(pretrained, documents, tmp_path):
    """A hub id is loaded from the cache that an earlier download left, without a network."""
    folder = Path(os.environ["COURSE_HF_HOME"]) / "hub" / "models--someone--little"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(pretrained("llama"), folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (tmp_path / "d.txt").write_text(" ".join(documents))
    flags = (*FEW, "-m", "someone/little", "-d", tmp_path / "d.txt", "--save-dir", tmp_path)
    for stage, processes in (("01-single-gpu", 1), ("03-fsdp", 2)):
        run(stage, processes, *flags, "-e", stage)
        assert metrics(tmp_path / stage)[1]["train/learning_rate"] == 2e-5


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "processes"), STAGES)
@pytest.mark.parametrize(
    ("flags", "rel"),
    [
        (("--attn", "eager", "--activation-checkpointing"), 1e-5),
        (("--compile", "--activation-checkpointing"), 1e-5),
        (("--dtype", "bf16"), 5e-3),
    ],
)
def test_switches_leave_the_curve(flags, rel, stage, processes, curve):
    plain = curve(stage, processes, *FEW)
    switched = curve(stage, processes, *FEW, *flags)
    assert_same_curve(plain, switched, range(1, 5), rel_loss=rel, rel_norm=max(rel, 1e-2))


PROBES = {
    # What runs inside a block, asked for by the flag.
    "--compile": "len(torch._dynamo.utils.counters['stats']) > 0",
    "--activation-checkpointing": "all(b.forward.func.__name__ == 'checkpoint' for b in blocks)",
    "--attn eager": "config._attn_implementation == 'eager'",
    "--attn sdpa": "config._attn_implementation == 'sdpa'",
}


@pytest.mark.parametrize(
    "flag", [pytest.param(f, marks=[pytest.mark.slow] if "compile" in f else []) for f in PROBES]
)
def test_switches_do_what_they_claim(flag, tmp_path):
    edit = ("    log.close()\n", f"    log.close()\n    print('probe', {PROBES[flag]})\n")
    path = mutant(tmp_path, "01-single-gpu", edit)
    few = (*SMALL[:6], "--max-steps", "1", "--eval-sequences", "1")
    assert "probe True" in run("01-single-gpu", 1, *few, *flag.split(), path=path).out


@pytest.mark.slow
def test_a_config_alone_trains_from_scratch(tmp_path):
    """With a tokenizer in which token 5, the end of text of the config, is a letter."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.eos_token_id = 5
    config.save_pretrained(tmp_path / "config")
    save_tokenizer(tmp_path / "config")
    named = ("-e", "a", "--save-dir", tmp_path)
    run("03-fsdp", 2, *FEW, "-m", tmp_path / "config", "--from-scratch", *named)
    folder = tmp_path / "a" / "final_model"
    assert AutoConfig.from_pretrained(folder).model_type == "llama"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0]
    assert metrics(tmp_path / "a")[1]["train/loss"] == pytest.approx(math.log(1024), rel=0.05)

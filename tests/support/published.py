"""The sizes of published models, and a config.json with them."""

import json

import transformers

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
QWEN = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
QWEN_MOE = QWEN | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128}
MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000, "num_key_value_heads": 8}
GEMMA = {"model_type": "gemma3_text", "vocab_size": 262144, "tie_word_embeddings": True}
GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201088, "num_key_value_heads": 8, "head_dim": 64}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
TIED = {"tie_word_embeddings": True}
# Sizes and numbers of parameters as the models' pages on the Hub give them.
MODELS = {
    "Llama-3.2-1B": (LLAMA | TIED, (2048, 16, 32, 8192), 1_235_814_400),
    "Llama-3.2-3B": (LLAMA | TIED, (3072, 28, 24, 8192), 3_212_749_824),
    "Llama-3-8B": (LLAMA, (4096, 32, 32, 14336), 8_030_261_248),
    "Llama-3-70B": (LLAMA, (8192, 80, 64, 28672), 70_553_706_496),
    "Llama-3.1-405B": (LLAMA, (16384, 126, 128, 53248), 405_853_388_800),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "vocab_size": 32000, "num_key_value_heads": 8},
        (4096, 32, 32, 14336),
        7_241_732_096,
    ),
    "Qwen3-0.6B": (QWEN | TIED, (1024, 28, 16, 3072), 596_049_920),
    "Qwen3-1.7B": (QWEN | TIED, (2048, 28, 16, 6144), 1_720_574_976),
    "Qwen3-4B": (QWEN | TIED, (2560, 36, 32, 9728), 4_022_468_096),
    "Qwen3-8B": (QWEN, (4096, 36, 32, 12288), 8_190_735_360),
    "Qwen3-14B": (QWEN, (5120, 40, 40, 17408), 14_768_307_200),
    "Qwen3-32B": (QWEN, (5120, 64, 64, 25600), 32_762_123_264),
    "Qwen3-30B-A3B": (
        QWEN_MOE | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        (2048, 48, 32, 6144),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        QWEN_MOE | {"num_experts_per_tok": 8, "moe_intermediate_size": 1536},
        (4096, 94, 64, 12288),
        235_093_634_560,
    ),
    "Mixtral-8x7B": (MIXTRAL, (4096, 32, 32, 14336), 46_702_792_704),
    "Mixtral-8x22B": (MIXTRAL | {"vocab_size": 32768}, (6144, 56, 48, 16384), 140_630_071_296),
    "gemma-3-1b": (
        GEMMA | {"num_key_value_heads": 1, "head_dim": 256},
        (1152, 26, 4, 6912),
        999_885_952,
    ),
    "gemma-3-27b": (
        GEMMA | {"vocab_size": 262208, "num_key_value_heads": 16, "head_dim": 128},
        (5376, 62, 32, 21504),
        27_009_346_304,
    ),
    "gpt-oss-20b": (GPT_OSS | {"num_local_experts": 32}, (2880, 24, 64, 2880), 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS | {"num_local_experts": 128}, (2880, 36, 64, 2880), 116_829_156_672),
}


def config_of(name):
    given, sizes, _ = MODELS[name]
    config = given | dict(zip(SIZES, sizes, strict=True)) | {"max_position_embeddings": 131072}
    kind = config.pop("model_type")
    return transformers.AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=0, **config)


def save_config(folder, name):
    """The config.json of a model, with nothing beside it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(name).to_dict()))
    return folder

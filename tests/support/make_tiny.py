"""Makes the default models, tiny/ and tiny-mixture/: configs, and a tokenizer for both.

    python tests/support/make_tiny.py FOLDER    writes FOLDER/tiny and FOLDER/tiny-mixture

The tokenizer is a byte-level BPE of 1,024 tokens. <|endoftext|> has number 0, and the 256 bytes
follow it. It was trained on the documentation that comes with Python 3.11.7.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import transformers
from tokenizers.pre_tokenizers import ByteLevel

SIZES = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}


def main(folder):
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = transformers.GPT2Tokenizer(vocabulary, merges=[], model_max_length=256)
    tokenizer = tokenizer.train_new_from_iterator(
        topics.values(), vocab_size=1024, show_progress=False
    )
    llama = transformers.LlamaConfig(
        **SIZES, intermediate_size=320, architectures=["LlamaForCausalLM"]
    )
    mixtral = transformers.MixtralConfig(
        **SIZES, intermediate_size=160, architectures=["MixtralForCausalLM"]
    )
    for name, config in (("tiny", llama), ("tiny-mixture", mixtral)):
        config.save_pretrained(Path(folder, name))
        tokenizer.save_pretrained(Path(folder, name))


if __name__ == "__main__":
    main(sys.argv[1])

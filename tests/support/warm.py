"""Imported by the fork server: what each run would compute alike, computed once.

Without it, about a quarter of the time of a short run of stage 01 goes into the tokenizer of tiny
and into tables that transformers builds before it saves a model.
"""

import contextlib
import importlib.util
import multiprocessing
import pickle

import transformers
from stages import script

train = transformers.GPT2Tokenizer.train_new_from_iterator


def train_tiny(connection):
    """Trains the tokenizer of stage 01, and sends it with the arguments of the training."""

    def record(tokenizer, texts, **options):
        trained = train(tokenizer, texts, **options)
        connection.send((tokenizer.get_vocab(), list(texts), options, pickle.dumps(trained)))
        return trained

    transformers.GPT2Tokenizer.train_new_from_iterator = record
    specification = importlib.util.spec_from_file_location("stage", script("01-single-gpu"))
    stage = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(stage)
    stage.tiny_tokenizer()


def train_or_copy(tokenizer, texts, **options):
    """As `train_new_from_iterator`. With the arguments of stage 01, the result is known."""
    texts = list(texts)
    if (tokenizer.get_vocab(), texts, options) == known:
        return pickle.loads(trained)
    return train(tokenizer, texts, **options)


# In a process of its own: tokenizers has threads, and a process with threads must not fork.
context = multiprocessing.get_context("fork")
receiver, sender = context.Pipe(duplex=False)
process = context.Process(target=train_tiny, args=(sender,))
process.start()
*known, trained = receiver.recv()
known = tuple(known)
process.join()
transformers.GPT2Tokenizer.train_new_from_iterator = train_or_copy
with contextlib.suppress(ImportError):  # not in each release
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")

"""Turns documents and conversations into rows of tokens, on which every stage can train.

In conversations only the answers are trained on: the labels of all other tokens are -100.

    python prepare.py -m Qwen/Qwen3-0.6B -d tatsu-lab/alpaca -o data/alpaca
    python 01-single-gpu/train-llm.py -m Qwen/Qwen3-0.6B -d data/alpaca -e my-run

The data are on the hub, or in files: .jsonl, .json, .csv, .parquet or .txt, each also with .gz.
"""

import argparse
import glob
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm
from transformers.utils.chat_template_utils import render_jinja_template

transformers.logging.set_verbosity_error()  # hides warnings

# The columns of conversations: those of chats, of ShareGPT, of TRL and of Alpaca.
CHAT_COLUMNS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
# Other names for the roles of chat templates.
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
# The formats of data files, by their endings. Each may be followed by .gz.
FORMATS = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
# A chat template is a program that turns the messages of a conversation into a text. This one is
# for tokenizers that have none: headings as in Alpaca, the end-of-text token after each answer.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ "" if loop.first else "\\n\\n" }}
{%- if message.role == "assistant" -%}
{{ "### Response:\\n" }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else -%}
{{ "### Instruction:" if message.role == "user" else "### " + message.role.capitalize() + ":" }}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{{ "\\n\\n### Response:\\n" if add_generation_prompt else "" }}"""


def main(args):
    out = Path(args.out)
    if out.exists() and any(out.iterdir()):
        fail(f"-o {out}: this folder is not empty")
    tokenizer = load_tokenizer(args.model_name)
    splits = load_splits(args.dataset_name, args.dataset_subset)
    columns = choose_columns(splits["train"].column_names, args.text_column)
    print(f"training on the columns {', '.join(columns)}")

    # A prompt and a completion that are strings are joined, without a template.
    are_strings = columns[0] == "prompt" and isinstance(splits["train"][0]["prompt"], str)
    if columns in CHAT_COLUMNS and not are_strings and tokenizer.chat_template is None:
        set_chat_template(tokenizer)

    out.mkdir(parents=True, exist_ok=True)
    for name, documents in splits.items():
        write_rows(out / f"{name}.parquet", documents, columns, tokenizer, args)
        describe(out / f"{name}.parquet", tokenizer)
    tokenizer.save_pretrained(out / "tokenizer")
    command = ["python", "01-single-gpu/train-llm.py", "-m", args.model_name, "-d", str(out)]
    print(f"to train: {shlex.join(command)} -e my-run")


def fail(message):
    """Ends the program with one line, for errors that the user can fix."""
    sys.exit(f"prepare.py: error: {message}")


def load_tokenizer(name):
    """The tokenizer of a model: a hub id, a folder, or tiny, whose tokens are bytes."""
    if name != "tiny":
        return transformers.AutoTokenizer.from_pretrained(name)
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.GPT2Tokenizer(vocabulary, merges=[])


def load_splits(name, subset):
    """Returns the data: the split train, and validation or test if there is one, by name."""
    path = Path(name)
    splits = load_files(path) if path.exists() else datasets.load_dataset(name, subset)
    # Chats on the hub often have train_sft and test_sft.
    splits = {key.removesuffix("_sft"): split for key, split in splits.items()}
    if "train" not in splits:
        fail(f"-d {name}: no split is called train, there are {', '.join(splits)}")
    chosen = {"train": splits["train"]}
    for held_out in ("validation", "test"):
        if held_out in splits:
            return {**chosen, "validation": splits[held_out]}
    return chosen


def load_files(path):
    """Returns the splits, by name, of a file or of all files in a folder.

    A file or folder called validation or test is a split, and files of the hub have the name of
    theirs, as in test-00000-of-00002.parquet. All other files are training data."""
    splits, formats, unread = {}, set(), []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        parts = file.relative_to(path).parts
        if file.is_dir() or parts[:1] == ("tokenizer",):
            continue
        ending = Path(file.name.removesuffix(".gz")).suffix
        if ending not in FORMATS:
            unread.append(file.name)
            continue
        formats.add(FORMATS[ending])
        split = "train"
        for part in parts:
            match = re.fullmatch(r"(\w+)-\d{5}-of-\d{5}|validation|test", part.split(".")[0])
            split = match[1] or match[0] if match else split
        splits.setdefault(split, []).append(glob.escape(str(file)))

    if len(formats) != 1:
        found = ", ".join(sorted(formats)) or "none of these"
        fail(f"-d {path}: one format of {', '.join(FORMATS)} is needed, found: {found}")
    if unread:
        print(f"-d {path}: not read: {', '.join(unread)}")
    [name] = formats
    options = {"sample_by": "document"} if name == "text" else {}  # else a document is a line
    return {
        split: datasets.load_dataset(name, data_files=files, split="train", **options)
        for split, files in splits.items()
    }


def choose_columns(names, text_column):
    """Returns the columns to train on: a column of text, or one of `CHAT_COLUMNS`."""
    if text_column in names:
        return (text_column,)
    for columns in (*CHAT_COLUMNS, ("text",)):
        if set(columns) <= set(names) and text_column is None:
            return columns
    fail(f"choose one of the columns {', '.join(names)} with --text-column, or call them messages")


def set_chat_template(tokenizer):
    """Gives a tokenizer our chat template, which is saved with the data and with the model."""
    print("no chat template: '### Instruction:' and '### Response:' are the headings")
    tokenizer.chat_template = CHAT_TEMPLATE
    # Some tokenizers begin each text with a special token. A conversation must begin with it, too.
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE


def write_rows(path, documents, columns, tokenizer, args):
    """Writes documents as rows of `args.seq_length` tokens to a Parquet file (packing).

    The tokens of all documents are joined and cut. The last ones, which do not fill a row, are left
    out. A row has `input_ids` and `labels`, lists of int32. A label is -100 for a token that is not
    part of an answer, so that it has no loss."""
    tokens = pa.list_(pa.int32())
    schema = pa.schema({"input_ids": tokens, "labels": tokens})
    input_ids, labels = [], []
    num_rows = num_left_out = 0
    with (
        pq.ParquetWriter(path, schema) as writer,
        tqdm(total=len(documents), unit="document", desc=path.stem) as bar,
    ):
        for rows in documents.select_columns(list(columns)).iter(batch_size=1000):
            for values in zip(*rows.values(), strict=True):
                row = dict(zip(rows, values, strict=True))
                examples = tokenize(row, columns, tokenizer)
                num_left_out += not examples
                for ids, is_answer in examples:
                    input_ids += ids
                    labels += ids if args.train_on_prompt else mask(ids, is_answer)
                bar.update()

            end = len(input_ids) - len(input_ids) % args.seq_length
            starts = range(0, end, args.seq_length)
            cut = {
                "input_ids": [input_ids[i : i + args.seq_length] for i in starts],
                "labels": [labels[i : i + args.seq_length] for i in starts],
            }
            writer.write_table(pa.table(cut, schema))
            num_rows += len(starts)
            input_ids, labels = input_ids[end:], labels[end:]
    print(f"{path.stem}: {len(documents):,} documents, {num_left_out:,} without an answer or text")
    if num_rows == 0:
        fail(f"{path.stem}: it has only {len(input_ids)} tokens, a row has {args.seq_length} (-s)")


def mask(ids, is_answer):
    """Labels: the token ids of answers, and -100 for all others."""
    return np.where(is_answer, ids, -100).tolist()


def tokenize(row, columns, tokenizer):
    """Returns the examples of a document: token ids, and for each whether it is trained on."""
    try:
        return list(tokenize_row(row, columns, tokenizer))
    except Exception as error:  # chat templates raise errors of any type
        fail(f"a row cannot be read: {error!r}: {row!r:.200}")


def tokenize_row(row, columns, tokenizer):
    """Yields the token ids of a row, and for each token whether it is part of an answer."""
    given = []
    if columns in (("messages",), ("conversations",)):
        messages = clean_messages(row[columns[0]])
    elif "instruction" in row:
        request = "\n\n".join(filter(None, [row["instruction"], row.get("input")]))
        answer = {"role": "assistant", "content": row["output"]}
        messages = clean_messages([{"role": "user", "content": request}, answer])
    elif isinstance(row.get("completion"), list):
        given = clean_messages(row["prompt"])
        messages = given + clean_messages(row["completion"])
    else:
        # A text, or two strings that are joined as they are. The end-of-text token follows.
        prompt = row.get("prompt") or ""
        answer = row[columns[-1]]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if answer is not None:
            answers = [(len(prompt), len(prompt + answer))]
            ids, is_answer = tokenize_answers(prompt + answer, answers, tokenizer)
            if ids[-1:] == eos:  # some tokenizers add the token themselves
                ids, is_answer = ids[:-1], is_answer[:-1]
            yield ids + eos, is_answer + [True] * len(eos)
        return
    yield from tokenize_conversation(messages, len(given), tokenizer)


def clean_messages(messages):
    """Messages as chat templates want them: no missing values, and one text as the content.

    `datasets` gives each message all keys that any message has, with None for those it lacks."""
    cleaned = []
    for message in messages or []:
        message = {key: value for key, value in message.items() if value is not None}
        if "from" in message:  # ShareGPT
            message = {"role": message["from"], "content": message.get("value")}
        role = message["role"].lower()
        message["role"] = ROLES.get(role, role)
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        if message.keys() - {"role"}:  # otherwise it says nothing
            cleaned.append(message)
    return cleaned


def tokenize_conversation(messages, num_given, tokenizer):
    """Yields the token ids of a conversation, and for each token whether it is part of an answer.

    The answers are what the assistant says, but not in the first `num_given` messages."""
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    template = tokenizer.get_chat_template()
    if re.search(r"\{%-?\s*generation\b", template):
        # The template marks what the assistant has to write.
        [text], [answers] = render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        end_of_given = len(render(messages[:num_given])) if num_given > 0 else 0
        answers = [(start, end) for start, end in answers if start >= end_of_given]
        if answers:
            yield tokenize_answers(text, answers, tokenizer, add_special_tokens=False)
        return

    # Otherwise an answer is what the template adds when the answer is added to the messages. Some
    # templates write an answer differently when a question follows it, for example without the
    # reasoning. Then the messages up to each answer are an example of their own.
    text, answers = "", []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= max(1, num_given):
            prompt = render(messages[:i], add_generation_prompt=True)
            longer_text = render(messages[: i + 1])
            if not longer_text.startswith(text):
                yield tokenize_answers(text, answers, tokenizer, add_special_tokens=False)
                answers = []
            text = longer_text
            # The prompt may end in what this answer does not have, such as <think>.
            start = len(os.path.commonprefix([prompt, text]))
            answers.append((start, len(text)))
    if answers:
        yield tokenize_answers(text, answers, tokenizer, add_special_tokens=False)


def tokenize_answers(text, answers, tokenizer, **options):
    """Token ids of a text, and for each whether it is in one of `answers`, ranges of characters."""
    tokens = tokenizer(text, return_offsets_mapping=True, **options)
    ends = np.array([end for _, end in tokens["offset_mapping"]])  # of each token, in the text
    is_answer = np.zeros(len(ends), bool)
    for start, end in answers:
        is_answer |= (start < ends) & (ends <= end)
    return tokens["input_ids"], is_answer.tolist()


def describe(path, tokenizer):
    """Prints how much a file of rows holds, and its first tokens with the answers marked."""
    rows = pq.ParquetFile(path)
    num_tokens = num_targets = 0
    for batch in rows.iter_batches(1000, columns=["labels"]):
        labels = batch["labels"].flatten().to_numpy()
        num_tokens += labels.size
        num_targets += (labels != -100).sum()
    print(
        f"{path.stem}: {rows.metadata.num_rows:,} rows, {num_tokens:,} tokens, "
        f"{num_targets / num_tokens:.1%} of them trained on"
    )

    [first] = next(rows.iter_batches(1)).to_pylist()
    input_ids, labels = np.array([first["input_ids"], first["labels"]])[:, :300]
    is_target = labels != -100
    borders = np.flatnonzero(np.diff(is_target)) + 1
    text = ""
    for part in np.split(np.arange(len(input_ids)), borders):
        part_text = tokenizer.decode(input_ids[part])
        text += f"⟦{part_text}⟧" if is_target[part[0]] else part_text
    print(f"its first row, trained on between ⟦ and ⟧:\n{text}\n")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model-name", required=True, help="whose tokenizer: tiny, a hub id, or a folder")
    add("-d", "--dataset-name", required=True, help="a hub id, a file, or a folder")
    add("-o", "--out", required=True, help="folder for the rows")
    add("-s", "--seq-length", type=int, default=1024, help="tokens of a row, default: 1024")
    add("--dataset-subset", help="the configuration of a data set on the hub")
    add("--text-column", help="train on this column, default: found by the names of the columns")
    prompt_help = "train on the prompts too, default: on the answers only"
    add("--train-on-prompt", action="store_true", help=prompt_help)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())

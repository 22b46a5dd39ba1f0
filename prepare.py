"""Turns documents and conversations into rows of tokens, on which every stage but 06 can train.

In conversations only the answers are trained on: the labels of all other tokens are -100. Rows that
another tool has tokenized keep their tokens and their labels.

    python prepare.py -m Qwen/Qwen3-0.6B -d tatsu-lab/alpaca -o data/alpaca
    python 01-single-gpu/train-llm.py -m Qwen/Qwen3-0.6B -d data/alpaca -e my-run

The data are on the hub, or in files: .jsonl, .json, .csv, .parquet or .txt, each also with .gz or
.zst. It also reads a folder of `Dataset.save_to_disk`, and one of MDS, or with folders of MDS for
its splits, if mosaicml-streaming is installed. Columns are found by their names: input_ids for rows
of tokens, messages, conversations, prompt and completion, instruction and output, or text.
"""

import argparse
import copy
import csv
import fcntl
import gzip
import io
import json
import os
import re
import shlex
import shutil
import sys
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import datasets
import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from tqdm import tqdm

csv.field_size_limit(2**31 - 1)  # the default is 128 KiB for a value

# The columns of conversations: those of chats, of ShareGPT, of TRL, of Alpaca and of Dolly.
CHAT_COLUMNS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
)
# What conversations may have beside them: more of the instruction, the system message, and the
# tools that may be called.
INPUTS = ("input", "context")
SYSTEMS = ("system", "system_prompt", "system_message")
TOOLS = ("tools", "functions")
# Columns that would change what a conversation means, and what to do about them.
REFUSED = {
    "history": "has earlier turns: put them into messages",
    "label": "may say which answers are good: leave out rows of bad ones, and then the column",
}
# A message or a row whose value for one of these is false or 0 is not trained on. Other numbers and
# truth values of an answer could mean the same, but these do not.
MARKS = ("weight", "loss", "loss_mask", "train", "training", "trainable", "train_on_turn", "learn")
HARMLESS = {"id", "index", "turn", "turn_id", "turn_identifier", "timestamp", "create_time"}
HARMLESS |= {"created_at", "toxic", "redacted", "num_tokens", "token_count"}
# Columns that rows of tokens may have. Others could be a mask of the loss, which has to be in the
# labels.
TOKEN_COLUMNS = {"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"}
TOKEN_COLUMNS |= {"special_tokens_mask"}
# Other names for the roles of chat templates.
ROLES = {"human": "user", "prompter": "user", "observation": "tool", "function": "tool"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant")
# Names of splits that are not trained on. The first of these that exists is for evaluation.
HELD_OUT = ("validation", "valid", "val", "evaluation", "eval", "development", "dev")
HELD_OUT += ("testing", "test")
# Longer texts are cut at the end of a line: a tokenizer needs 200 bytes of memory per character.
PIECE_LENGTH = 10_000
# Files that `datasets` and the hub leave beside the data.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# A chat template is a program that turns the messages of a conversation into a text. This one is
# for tokenizers that have none: headings as in Alpaca, the end-of-text token after each answer.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ "" if loop.first else "\\n\\n" }}
{%- if message.role == "assistant" -%}
{{ "### Response:\\n" ~ message.content ~ eos_token }}
{%- else -%}
{{ "### Instruction:" if message.role == "user" else "### " + message.role.capitalize() + ":" }}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{{ "\\n\\n### Response:\\n" if add_generation_prompt else "" }}"""


def main(args):
    out = Path(args.out)
    temporary = lock_out(out)
    try:
        prepare(args, out, temporary)
    finally:
        shutil.rmtree(temporary)
    command = ["python", "01-single-gpu/train-llm.py", "-m", args.model_name, "-d", str(out)]
    print(f"to train: {shlex.join(command)} -e my-run")


def lock_out(out):
    """Returns the folder in which the rows are written until all are there, locked and empty.

    The system releases the lock when the process ends, also after kill -9. Files that such a
    process has left are removed."""
    if out.exists():
        fail(f"-o {out}: this exists already")
    temporary = out.with_name(f".prepare-{out.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    lock = os.open(temporary / "lock", os.O_RDWR | os.O_CREAT)  # it stays open
    try:
        # Unlike that of `flock`, this lock is not passed on to the processes that tokenize.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fail(f"-o {out}: another prepare.py is writing this; wait for it, or choose another folder")
    shutil.rmtree(temporary / out.name, ignore_errors=True)
    return temporary


def prepare(args, out, temporary):
    """Writes the rows and the tokenizer to a folder in `temporary`, and renames it to `out`."""
    tokenizer = load_tokenizer(args.model_name)
    splits = load_splits(args.dataset_name, args.dataset_subset)
    first = next(chain.from_iterable(map(read_rows, splits["train"])), None)
    if first is None:
        fail(f"-d {args.dataset_name}: there are no documents to train on")
    columns = choose_columns(list(first), args.text_column)
    args.seq_length = args.seq_length or default_length(first, columns, tokenizer)

    has_tokens = "input_ids" in columns
    if has_tokens and args.train_on_prompt:
        fail("--train-on-prompt: these rows are tokens: give them labels that have the prompts too")
    has_prompts = columns in CHAT_COLUMNS and not args.train_on_prompt
    if has_prompts and not tokenizer.is_fast:
        problem = "its tokenizer has no tokenizer.json and cannot say which tokens are the answers"
        fail(f"-m {args.model_name}: {problem}; choose another model, or give --train-on-prompt")
    # A prompt and a completion that are not lists of messages are joined, without a template.
    are_texts = "completion" in columns and not is_chat(first["completion"])
    eos_token, suffix = tokenizer.eos_token, None
    if columns in CHAT_COLUMNS and not are_texts:
        eos_token, suffix = end_of_answer(tokenizer)
    elif eos_token is None and not has_tokens:
        problem = "nothing separates documents, and the model will not stop"
        print(f"the tokenizer has no end-of-text token: {problem}")
    work = partial(tokenize, tokenizer, columns, suffix, args.train_on_prompt)
    if has_tokens:
        work = partial(take_tokens, columns, max(tokenizer.get_vocab().values()) + 1)

    # The folder gets its name when all is written.
    folder = temporary / out.name
    folder.mkdir()
    for name, sources in splits.items():
        write_rows(folder / f"{name}.parquet", sources, columns, work, tokenizer, args)
    tokenizer.eos_token = eos_token  # the trained model stops generating at this token
    tokenizer.save_pretrained(folder / "tokenizer")
    folder.rename(out)


def fail(message):
    """Ends the program with one line, for errors that the user can fix."""
    sys.exit(f"prepare.py: error: {message}")


def load_tokenizer(name):
    """Loads the tokenizer of a model: a hub id, a folder, or tiny."""
    path = Path(__file__).parent / "tiny" if name == "tiny" else name
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)  # may warn that it is wrong
    transformers.logging.set_verbosity_error()  # not of texts that are longer than the model takes
    return tokenizer


def default_length(row, columns, tokenizer):
    """Returns the length of `row` if it is tokens already, otherwise 1024 or the model's limit."""
    tokens = row["input_ids"] if "input_ids" in columns else None
    if tokens and isinstance(tokens, list):
        print(f"rows of {len(tokens)} tokens, as the first one has (-s)")
        return len(tokens)
    return min(1024, tokenizer.model_max_length)


# Reading. A source is a file, or a dataset whose items are dicts.


def load_splits(name, subset):
    """Returns the sources of the split train, and of validation if there is one, by name."""
    path = Path(name)
    if subset and path.exists():
        advice = f"{name} is not one: leave the flag out, or give the files of one"
        fail(f"--dataset-subset {subset}: is for a dataset on the hub, {advice}")
    # An MDS folder, or folders of MDS, which are splits.
    folders = [path] if (path / "index.json").exists() else []
    folders = folders or sorted({file.parent for file in path.glob("*/*.mds*")})
    if folders:
        try:
            from streaming import LocalDataset
        except ImportError:
            # Its package asks for transformers 4, but this part of it works with 5.
            command = "pip install mosaicml-streaming && pip install -U transformers"
            fail(f"-d {name}: to read an MDS folder: {command}")
        splits = {}
        for folder in folders:
            key = "train" if folder == path else folder.name
            splits[key] = [LocalDataset(str(folder))]
    elif (path / "dataset_dict.json").exists():
        splits = {key: [rows] for key, rows in datasets.load_from_disk(name).items()}
    elif (path / "state.json").exists():
        splits = {"train": [datasets.load_from_disk(name)]}
    elif path.exists():
        splits = find_files(path)
    else:
        splits = {key: [rows] for key, rows in datasets.load_dataset(name, subset).items()}

    # Chats on the hub often have train_sft and test_sft.
    for key in ("train", "test"):
        if key not in splits and f"{key}_sft" in splits:
            splits[key] = splits.pop(f"{key}_sft")
    held_out = next((key for key in HELD_OUT if key in splits), None)
    if "train" not in splits:
        fail(f"-d {name}: no split is called train, there are {', '.join(splits)}")
    if unread := splits.keys() - {"train", held_out}:
        print(f"not read: the splits {', '.join(sorted(unread))}")
    return {"train": splits["train"]} | ({"validation": splits[held_out]} if held_out else {})


def find_files(path):
    """Returns the splits, by name, of a file or of all files in a folder.

    A file or folder whose name is in `HELD_OUT` is a split, and files of the hub have the name of
    theirs, as in test-00000-of-00002.parquet. If the name only contains such a word, another file
    or folder must have the same name with train instead, as dev_data.jsonl and train_data.jsonl.
    All other files are training data. Hidden files and folders are ignored, and the tokenizer in a
    folder that this program has written."""
    parts, unread = {}, []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        names = file.relative_to(path).parts
        is_hidden = any(name.startswith(".") for name in names)
        is_folder = file.is_dir() and not file.is_symlink()  # `rglob` does not follow links
        is_tokenizer = names[:1] == ("tokenizer",) and (path / "train.parquet").exists()
        if is_folder or is_hidden or is_tokenizer or file.name in DESCRIPTIONS:
            continue
        if ending_of(file) in READERS:
            parts[file] = [name.lower() for name in names]
        else:
            unread.append(file.name)
    if not parts:
        fail(f"-d {path}: no file ends in {', '.join(READERS)}")
    if unread:
        print(f"not read: {', '.join(unread)}")

    words = "|".join(HELD_OUT)
    whole_name = rf"({words})(?=\.|$)|(train|{words})\w*(?=-\d{{5}}-of-\d{{5}})"
    word = rf"(?<![^\W\d_])({words})(?![^\W\d_])"  # no letter before it or after it
    all_letters = {letters(part) for names in parts.values() for part in names}
    splits = {}
    for file, names in parts.items():
        split = "train"
        for name in names:
            for match in re.finditer(word, name):
                before, after = name[: match.start()], name[match.end() :]
                if {letters(f"{before}{x}{after}") for x in ("train", "training")} & all_letters:
                    split = match[0]
            if match := re.match(whole_name, name):
                split = match[0]
        splits.setdefault(split, []).append(file)

    is_alone = splits.keys() <= set(HELD_OUT)
    if is_alone:
        splits = {"train": [file for files in splits.values() for file in files]}
    found = {file: re.search(word, "/".join(parts[file])) for file in splits.get("train", [])}
    if doubtful := [file for file, match in found.items() if match]:
        names = ", ".join(str(file.relative_to(path)) for file in doubtful)
        held_out = found[doubtful[0]][0]
        advice = f"to hold a file out, call it {held_out}{doubtful[0].suffix}"
        advice = "there is nothing else to train on" if is_alone else advice
        print(f"trained on: {names:.300} (the name says {held_out}; {advice})")
    return splits


def letters(name):
    return "".join(filter(str.isalpha, name))


def ending_of(file):
    """Returns the ending of a file's name, such as .csv, without a .gz or .zst behind it."""
    return Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix


def read_rows(source, bar=None):
    """Yields the documents of a source, dicts. A progress bar counts bytes of files, or documents.

    The values are those that are in the file: nothing guesses their types. But Parquet and
    `datasets` give all objects of a column the same keys, for example the arguments of all tools to
    each call of a tool. Those that were not there have the value None, and are removed again. A
    null that was written there on purpose looks the same, and is removed too."""
    if bar is None:
        bar = tqdm(disable=True)
    if not isinstance(source, Path):
        if isinstance(source, datasets.Dataset):
            source = map(without_nulls, source.with_format(None))  # with lists, not with tensors
        for row in source:
            arrays = {name: v.tolist() for name, v in row.items() if isinstance(v, np.ndarray)}
            yield {**row, **arrays}
            bar.update()
        return
    number = position = 0
    try:
        with source.open("rb") as file:
            content = file
            if source.suffix == ".gz":
                content = gzip.GzipFile(fileobj=file)
            elif source.suffix == ".zst":
                content = pa.input_stream(file, compression="zstd")
            for row in READERS[ending_of(source)](content):
                yield row
                number += 1
                bar.update(file.tell() - position)
                position = file.tell()
    except (ValueError, EOFError, OSError, csv.Error, zlib.error) as error:
        fail(f"{source}: after {number:,} documents: {error}")


def read_text(file):
    """Yields the file as one document. Its lines end in \\n, also if Windows has written them."""
    text = io.TextIOWrapper(file, "utf-8-sig")
    yield {"text": text.read()}


class JsonInt(int):
    """A number in a .json file. As a text it is what is written there, see `text_of`."""


class JsonFloat(float):
    """The same for a number with a point or an exponent: 0.50 keeps all its digits."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


NUMBERS = {"parse_int": JsonInt, "parse_float": JsonFloat}


def read_json(file):
    """Yields the objects of a list, or the object in each line."""
    file = io.BufferedReader(file)
    is_list = file.peek(100).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    text = io.TextIOWrapper(file, "utf-8-sig")
    if is_list:
        rows = json.load(text, **NUMBERS)
    else:
        rows = (json.loads(line, **NUMBERS) for line in text if line.strip())
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"not an object: {row!r:.100}")
        yield row


def read_csv(file):
    """Yields the rows. The first line has the names of the columns."""
    rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    if len(set(rows.fieldnames or [])) < len(rows.fieldnames or []):
        raise ValueError(f"two columns have the same name: {', '.join(rows.fieldnames)}")
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"line {rows.line_num} has more or fewer values than the first line")
        yield row


def read_parquet(file):
    for batch in pq.ParquetFile(file).iter_batches(1000):
        yield from map(without_nulls, batch.to_pylist())


def without_nulls(row):
    """Returns a row without keys whose value is None, except for the columns themselves."""

    def clean(value):
        if isinstance(value, dict):
            return {key: clean(v) for key, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return {name: clean(value) for name, value in row.items()}


READERS = {
    ".txt": read_text,
    ".json": read_json,
    ".jsonl": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def choose_columns(names, text_column):
    """Returns the columns to train on: tokens, one of `CHAT_COLUMNS`, or a column of text."""
    of_tokens = [("input_ids", "labels"), ("input_ids",)]
    choices = [*of_tokens, *CHAT_COLUMNS, ("text",)]
    if text_column:
        choices = of_tokens if text_column == "input_ids" else [(text_column,)]
    for columns in choices:
        if set(columns) <= set(names):
            used = [name for name in names if name in (*columns, *beside(columns))]
            unused = ", ".join(name for name in names if name not in used)
            print(f"training on {', '.join(used)}; columns not used: {unused or 'none'}")
            return columns
    fail(f"choose one of the columns {', '.join(names)} with --text-column, or call them messages")


def beside(columns):
    """Returns the columns that are used too if rows have them: none, if these are not chats."""
    if columns not in CHAT_COLUMNS:
        return ()
    return (*SYSTEMS, *TOOLS, *MARKS, *(INPUTS if "instruction" in columns else ()))


class Piece(NamedTuple):
    """A document, or a part of it if it is a long text."""

    row: dict  # of the columns to train on
    place: str  # the file and the number of the row, for errors
    is_first: bool = True  # whether the document begins with this piece
    is_last: bool = True


def read_batches(sources, columns, split, bar):
    """Yields lists of pieces, each with about a million characters."""
    batch, length = [], 0
    for source in sources:
        name = source if isinstance(source, Path) else split
        for number, row in enumerate(read_rows(source, bar), 1):
            place = f"{name}: row {number:,}"
            check_other_columns(row, columns, place)
            for piece in pieces_of(row, columns, place):
                batch.append(piece)
                length += len(str(piece))
                if length > 1_000_000:
                    yield batch
                    batch, length = [], 0
    yield batch


def pieces_of(row, columns, place):
    """Yields the pieces of a document: several of a long text, one of everything else."""
    used = (*columns, *beside(columns))
    row = {name: row[name] for name in used if name in row}
    text = row.get(columns[0])
    if len(columns) > 1 or columns in CHAT_COLUMNS or not isinstance(text, str):
        yield Piece(row, place)
        return
    start = end = 0
    while start == 0 or end < len(text):
        latest = start + 2 * PIECE_LENGTH  # for text without line ends
        end = text.find("\n", start + PIECE_LENGTH, latest) + 1 or latest
        yield Piece({columns[0]: text[start:end]}, place, start == 0, end >= len(text))
        start = end


def check_other_columns(row, columns, place):
    """Ends the program if a column that is not used says that something else should be trained on.

    In rows of tokens, it is one that says which of them have no loss."""
    if columns in CHAT_COLUMNS:
        for name, problem in REFUSED.items():
            if row.get(name) not in (None, "", [], "[]"):
                fail(f"{place}: the column {name} {problem}")
        for name, value in row.items():
            if isinstance(value, list) and value and all(x in (0, 1) for x in value):
                problem = "may say which messages have no loss: give those the key weight, 0"
                fail(f"{place}: the column {name} {problem}, and remove it")
    if "input_ids" not in columns:
        return
    ids = row.get("input_ids")
    for name, value in row.items():
        # Masks have many names, and some of them have ones where others have zeros.
        is_list = isinstance(value, list) and isinstance(ids, list) and len(value) == len(ids) > 0
        if name not in TOKEN_COLUMNS and is_list and isinstance(value[0], int | float):
            problem = f"the column {name} has a number for each token, and would not be used"
            advice = "use it to make labels, with -100 where there is no loss, and remove it"
            fail(f"{place}: {problem}: {advice}")
    if "labels" not in columns and row.get("labels") is not None:
        fail(f"{place}: it has labels, but the first row has none: give them to all rows, or none")
    if "labels" not in columns and 0 in (row.get("attention_mask") or []):
        fail(f"{place}: attention_mask has zeros, for padding: give labels, with -100 there")


# Tokens and labels.


def end_of_answer(tokenizer):
    """Returns the token at which the model has to stop, and what has to be added to each answer.

    The token is the one with which the chat template ends an answer, and nothing is added. If the
    template does not end answers, both are the end-of-text token."""
    if tokenizer.chat_template is None:
        print("no chat template: '### Instruction:' and '### Response:' are the headings")
        tokenizer.chat_template = CHAT_TEMPLATE
        # Some tokenizers begin each text with a special token. A conversation must begin with it.
        if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
            tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    if "strftime_now" in tokenizer.get_chat_template():
        print("the chat template writes the date: in these rows that of today")

    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    after_answer = tokenizer.tokenize(text[text.rindex("ANSWER") + len("ANSWER") :])
    ends = [token for token in after_answer if token in tokenizer.added_tokens_encoder]
    if ends:
        print(f"the chat template ends answers with {ends[0]}")
        return ends[0], ""
    if tokenizer.eos_token is None:
        fail("the chat template does not end answers, and the tokenizer has no end-of-text token")
    print(f"the chat template does not end answers, so this does: {tokenizer.eos_token}")
    return tokenizer.eos_token, tokenizer.eos_token


class LeftOut(Exception):
    """Raised for a document that is not trained on. The message is the reason."""


class Unclear(Exception):
    """Raised for a document that could mean something else. The message says why."""


class Example(NamedTuple):
    """The text of a piece, or one of several texts of a conversation."""

    text: str
    answers: list | None  # ranges of characters to train on, or None: all of them
    is_first: bool = True  # as in the piece
    is_last: bool = True
    unwritten: tuple = ()  # the keys of messages whose values the template has not written


def tokenize(tokenizer, columns, suffix, train_on_prompt, pieces):
    """Turns a list of pieces into tokens.

    `suffix` is added to answers; it is None if documents are texts. Returns token ids and labels,
    (2, N) int32, the positions where documents end in them, and a Counter of documents, and of
    reasons to leave them out. A label is -100 for a token that is not part of an answer, so that it
    has no loss."""
    read = partial(examples_of, columns=columns, tokenizer=tokenizer, suffix=suffix)
    examples, counts = convert(pieces, read)
    for name in chain.from_iterable(example.unwritten for example in examples):
        counts[f"left out: {name} of a message, which the chat template does not write"] += 1
    # In a conversation the chat template has written the special tokens.
    bos, eos = special_ids(tokenizer) if suffix is None else ([], [])
    parts = []
    encoded = encode(examples, tokenizer, train_on_prompt)
    for example, (ids, labels) in zip(examples, encoded, strict=True):
        # A text that has these special tokens already does not get them twice.
        before = bos if example.is_first and ids[:1] != bos else []
        after = eos if example.is_last and ids[-1:] != eos else []
        # The token that begins a prompt has no loss, like the prompt.
        before_labels = before if labels[:1] == ids[:1] else [-100] * len(before)
        parts.append([[*before, *ids, *after], [*before_labels, *labels, *after]])
    return *join(parts, [example.is_last for example in examples]), counts


def take_tokens(columns, vocab_size, pieces):
    """Does what `tokenize` does, for rows that are tokens already. Nothing is added to them."""
    parts, counts = convert(pieces, partial(tokens_of, columns=columns, vocab_size=vocab_size))
    return *join(parts, [True] * len(parts)), counts


def convert(pieces, read):
    """Returns a list of all that `read` yields for the pieces, and a Counter as in `tokenize`."""
    counts = Counter()
    results = []
    for piece in pieces:
        counts["documents"] += piece.is_first
        try:
            results += list(read(piece))
        except LeftOut as reason:
            counts[f"left out: {reason}"] += 1
        except jinja2.TemplateError as error:
            counts[f"left out, the chat template says: {error}"] += 1
        except Unclear as problem:
            fail(f"{piece.place}: {problem}")
        except Exception as error:
            fail(f"{piece.place} cannot be read: {error!r}: {piece.row!r:.300}")
    return results, counts


def join(parts, are_last):
    """Joins parts, each (2, n). Returns (2, N) int32, and the positions where documents end."""
    parts = [np.array(part, np.int32) for part in parts]
    ends = accumulate(part.shape[1] for part in parts)
    tokens = np.concatenate([np.empty((2, 0), np.int32), *parts], axis=1)
    return tokens, [end for end, is_last in zip(ends, are_last, strict=True) if is_last]


def special_ids(tokenizer):
    """Returns the tokens before and after each text: two lists, each with one token or none."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    adds_bos = tokenizer("a")["input_ids"][:1] == [bos]
    return [bos] if adds_bos else [], [] if eos is None else [eos]


def encode(examples, tokenizer, train_on_prompt):
    """Yields the token ids and the labels of each example, without special tokens around them."""
    if not examples:
        return
    has_prompts = any(example.answers for example in examples) and not train_on_prompt
    texts = [example.text for example in examples]
    tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=has_prompts)
    for i, example in enumerate(examples):
        ids = labels = tokens["input_ids"][i]
        if example.answers and has_prompts:
            labels = mask(ids, tokens["offset_mapping"][i], example.answers)
        yield ids, labels


def examples_of(piece, columns, tokenizer, suffix):
    """Yields the examples of a piece: several of a conversation if the template rewrites it."""
    if not is_trained_on({name: piece.row.get(name) for name in MARKS if name not in columns}):
        raise LeftOut("marked as not to be trained on")
    if suffix is not None:
        yield from conversations_of(*messages_of(piece.row, columns), tokenizer, suffix)
        return
    if found := [name for name in (*SYSTEMS, *TOOLS) if piece.row.get(name)]:
        raise Unclear(f"the column {found[0]} is for chats, so give lists of messages")
    *prompts, text = (text_of(piece.row[column]) for column in columns)
    if not text:
        raise LeftOut("no text")
    prompt = "".join(prompts)
    answers = [(len(prompt), len(prompt + text))] if prompt else None
    yield Example(prompt + text, answers, piece.is_first, piece.is_last)


def tokens_of(piece, columns, vocab_size):
    """Yields the token ids and labels of a row that is tokens already."""
    arrays = [np.array(piece.row[name] or [], ndmin=1) for name in columns]
    ids, labels = arrays[0], arrays[-1]
    if len(labels) != len(ids):
        problem = f"it has {len(labels):,} labels for {len(ids):,} input_ids"
        fail(f"{piece.place}: {problem}: give each token a label, -100 where there is no loss")
    if len(ids) == 0:
        raise LeftOut("no tokens")

    for name, numbers in zip(columns, arrays, strict=True):
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise TypeError(f"{name} is not a list of integers")
        is_right = (numbers >= 0) & (numbers < vocab_size)
        if name == "labels":
            is_right |= numbers == -100  # where there is no loss
        if not is_right.all():
            problem = f"{name} has {numbers[~is_right][0]}, which is not a token of -m"
            advice = f"its tokens are 0 to {vocab_size - 1}, and a label without a loss is -100"
            fail(f"{piece.place}: {problem}: {advice}")
    yield ids, labels


def text_of(value):
    """Returns the text of a value: a string, a number of a .json file, or a list of parts."""
    if isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and "text" not in part:
                raise Unclear(f"a message has a part of type {part.get('type')}")
        return "".join(part["text"] for part in value)
    if isinstance(value, str | JsonInt | JsonFloat):
        text = str(value)
        text.encode()  # an error if half of a surrogate pair is missing, as in "\\ud83d" in JSON
        return text
    if value is not None:
        raise TypeError(f"this is not a text: {value!r}")
    return ""


def messages_of(row, columns):
    """Returns the messages of a conversation, how many of the first ones are not answers, and the
    tools that may be called in it, a list or None."""
    given, messages = [], row[columns[0]]
    if "instruction" in columns:
        parts = [text_of(row.get(name)) for name in ("instruction", *INPUTS)]
        given = [{"role": "user", "content": "\n\n".join(filter(None, parts))}]
        messages = [{"role": "assistant", "content": row[columns[1]]}]
    elif "completion" in columns:
        given, messages = row["prompt"], row["completion"]
    given, messages = clean_messages(given), clean_messages(messages)

    systems = [text_of(row.get(name)) for name in SYSTEMS]
    system = {"role": "system", "content": "\n\n".join(filter(None, systems))}
    if system["content"] and [system] != (given + messages)[:1]:
        if any(message["role"] == "system" for message in given + messages):
            raise LeftOut("a system message, and another one in a column")
        given = [system, *given]
    tools = next((row[name] for name in TOOLS if row.get(name)), None)
    return given + messages, len(given), decoded_list(tools, "tools")


def decoded(value):
    """Returns the object or list that a text of JSON stands for, or else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return json.loads(value, **NUMBERS)
    return value


def decoded_list(value, name):
    """Returns the list in a column, whose items or itself may be texts of JSON. None stays None."""
    value = decoded(value)
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, str):
        raise Unclear(f"{name} is a text that is not JSON")
    return None if value is None else [decoded(item) for item in value]


def is_chat(value):
    """Whether a value is a list of messages, which may be a text of JSON."""
    messages = decoded(value) if isinstance(decoded(value), list) else [None]
    return all(isinstance(m, dict) and {"role", "from"} & m.keys() for m in messages)


def is_trained_on(item):
    """Whether the marks of a message, or of a row, allow to train on it."""
    is_allowed = True
    for name in MARKS:
        value = item.get(name)
        number = {"true": 1, "false": 0}.get(str(value).lower(), value)
        if value in (None, ""):
            continue
        try:
            is_allowed &= {0: False, 1: True}[float(number)]
        except (TypeError, ValueError, KeyError):
            raise Unclear(f"{name} is {value}: only 0 and 1 are known, or false and true") from None
    return is_allowed


def clean_messages(messages):
    """Returns messages as chat templates expect them: no missing values, one text as the content.

    `datasets` gives each message all keys that any message has, with None for those it lacks."""
    cleaned = []
    for message in decoded_list(messages, "a list of messages") or []:
        message = {key: value for key, value in message.items() if value is not None}
        role = message.pop("from" if "from" in message else "role").lower()  # from: ShareGPT
        content = message.pop("value", message.pop("content", None))
        # A call has its own role in ShareGPT, and an older API of OpenAI had one in a message.
        calls = message.pop("tool_calls", message.pop("function_call", None))
        if role == "function_call":
            role, content, calls = "assistant", "", content
        message |= {"role": ROLES.get(role, role), "content": text_of(content)}
        if calls:
            message["tool_calls"] = [clean_call(call) for call in decoded_list(calls, "a call")]
        cleaned.append(message)
    return cleaned


def clean_call(call):
    """Returns a call of a tool as OpenAI writes it, but with its arguments as an object."""
    if not isinstance(call, dict):
        return call
    function = decoded(call.get("function", call))
    if "arguments" in function:
        function = {**function, "arguments": decoded(function["arguments"])}
    return {**call, "function": function} if "function" in call else {"function": function}


def functions_of(messages):
    """Returns the functions that messages call."""
    calls = chain.from_iterable(message.get("tool_calls", []) for message in messages)
    return [call["function"] for call in calls if isinstance(call, dict)]


def render(messages, tokenizer, tools, add_generation_prompt=False):
    """Returns the text that the chat template makes of messages.

    Most templates want the arguments of a call as an object. Others add them to a text, and want
    JSON. With an object those fail, or write it as Python does."""
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    apply = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    with suppress(TypeError, jinja2.TemplateError):
        text = apply(messages)
        objects = [x for f in functions_of(messages) if isinstance(x := f.get("arguments"), dict)]
        if not any(x and str(x) in text for x in objects):
            return text
    messages = copy.deepcopy(messages)
    for function in functions_of(messages):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return apply(messages)


def conversations_of(messages, num_given, tools, tokenizer, suffix):
    """Yields the examples of a conversation.

    The answers are what the assistant says, but not in the first `num_given` messages."""
    for i, message in enumerate(messages):
        is_empty = not message["content"].strip() and not message.get("tool_calls")
        if is_empty and message["role"] == "assistant" and i >= num_given:
            raise LeftOut("an answer is empty")
        if found := special_tokens(tokenizer).search(message["content"]):
            raise LeftOut(f"a message has the special token {found[0]}")
        if message["role"] == "assistant":
            check_keys(message)

    # An answer is what the template adds when the answer is added to the messages. Some templates
    # write an answer differently when a question follows it, for example without the reasoning.
    # Then the messages up to each answer are an example of their own.
    text, ranges, unwritten, num_checked = "", [], [], 0
    for i, message in enumerate(messages):
        is_answer = message["role"] == "assistant" and is_trained_on(message)
        if is_answer and i >= max(1, num_given):  # a greeting, which is the first, answers nothing
            prompt = render(messages[:i], tokenizer, tools, add_generation_prompt=True)
            longer_text = render(messages[: i + 1], tokenizer, tools) + suffix
            if not longer_text.startswith(text):
                yield Example(text, ranges, unwritten=unwritten)
                ranges, unwritten = [], []
            text = longer_text
            # The prompt may end in what this answer does not have, such as <think>.
            start = len(os.path.commonprefix([prompt, text]))
            ranges.append((start, len(text)))
            # Some templates write no system message, or one of an unknown role.
            for given in messages[:i]:
                is_written = given["content"].strip() in text[:start]
                if given["role"] not in ("assistant", "tool") and not is_written:
                    raise LeftOut(f"the chat template does not write a message of: {given['role']}")
            check_calls(messages[: i + 1], tokenizer, tools)
            for other in messages[num_checked:i]:
                if other["role"] != "assistant":
                    unwritten += [name for name in unwritten_keys(other, text) if name != "content"]
            unwritten += unwritten_keys(message, text)
            num_checked = i + 1
    if not ranges:
        roles = ", ".join(message["role"] for message in messages[:3])
        raise LeftOut(f"no answer of the assistant, but messages of: {roles or 'nobody'}")
    yield Example(text, ranges, unwritten=unwritten)


def check_keys(answer):
    """Ends the program if a number or truth value may forbid to train on the answer."""
    for name, value in answer.items():
        if isinstance(value, int | float) and name not in HARMLESS and name not in MARKS:
            advice = "if 0 or false means that it is not trained on, call it weight; or remove it"
            raise Unclear(f"an answer has {name}, which is {value}: {advice}")


def check_calls(messages, tokenizer, tools):
    """Raises LeftOut if the template does not write the tools, or the calls of the last answer."""
    *others, answer = messages
    calls = answer.get("tool_calls", [])
    text = render(messages, tokenizer, tools) if calls or tools else None
    if tools and render(messages, tokenizer, None) == text:
        raise LeftOut("the chat template does not write the tools")
    for i in range(len(calls)):
        fewer = {**answer, "tool_calls": calls[:i] + calls[i + 1 :]}
        with suppress(jinja2.TemplateError):  # some templates refuse an answer without any
            if render([*others, fewer], tokenizer, tools) == text:
                raise LeftOut("the chat template does not write the calls of an answer")


def unwritten_keys(message, text):
    """Returns the names of values of a message whose texts are not in `text`, spaces apart."""
    ignored = {"role", "tool_calls", "tool_call_id", *HARMLESS, *MARKS}
    names = []
    for name in message.keys() - ignored:
        missing = [part for part in texts_in(message[name]) if part not in text]
        if any("".join(part.split()) not in "".join(text.split()) for part in missing):
            names.append(name)
    return names


def texts_in(value):
    """Yields the texts in a value, or in the lists and objects in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        yield from chain.from_iterable(map(texts_in, getattr(value, "values", lambda: value)()))


@cache
def special_tokens(tokenizer):
    """Returns a pattern that finds the special tokens in a text."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def mask(ids, offsets, answers):
    """Returns labels: the id of a token that ends in one of the answers, otherwise -100.

    `answers` and `offsets` are the ranges of characters of the answers and of the tokens."""
    ends = np.array([end for _, end in offsets])
    is_answer = np.zeros(len(ids), bool)
    for start, end in answers:
        is_answer |= (start < ends) & (ends <= end)
    return np.where(is_answer, ids, -100).tolist()


# Rows.


def write_rows(path, sources, columns, work, tokenizer, args):
    """Writes documents as rows to a Parquet file, and prints what it has read and written.

    A row has `input_ids` and `labels`, lists of `args.seq_length` int32. `work` is `tokenize` or
    `take_tokens`, which turn a batch of pieces into tokens."""
    schema = pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "labels")})
    counts = Counter()
    first_row = None
    are_files = isinstance(sources[0], Path)
    size = sum(source.stat().st_size if are_files else len(source) for source in sources)
    unit = {"unit": "B", "unit_scale": True} if are_files else {"unit": "document"}

    with pq.ParquetWriter(path, schema) as writer, tqdm(total=size, desc=path.stem, **unit) as bar:
        documents = read_batches(sources, columns, path.stem, bar)
        batches = in_processes(work, documents, args.num_proc)
        for rows in cut_rows(batches, tokenizer, args, counts):
            has_target = (rows[1, :, 1:] != -100).any(axis=1)  # nothing predicts the first token
            counts["left out: rows without a token to learn"] += int((~has_target).sum())
            rows = rows[:, has_target]
            counts["rows"] += rows.shape[1]
            counts["targets"] += int((rows[1] != -100).sum())
            if first_row is None and rows.size:
                first_row = rows[:, 0]
            starts = pa.array(np.arange(0, rows[0].size + 1, args.seq_length, dtype=np.int32))
            lists = [pa.ListArray.from_arrays(starts, tokens.ravel()) for tokens in rows]
            writer.write_table(pa.table(lists, schema=schema))

    place = f" in {len(sources):,} file(s)" if are_files else ""
    print(f"{path.stem}: {counts['documents']:,} documents{place}")
    for name, number in counts.items():
        if name.startswith("left out") and number:
            print(f"  {number:,} {name}")
    if first_row is None:
        message = f"{path.stem}: this does not fill a row of {args.seq_length} tokens (-s)"
        if path.stem == "train":
            fail(message)
        print(message)
        path.unlink()
        return
    num_tokens = counts["rows"] * args.seq_length
    share = counts["targets"] / num_tokens
    print(f"  {counts['rows']:,} rows, {num_tokens:,} tokens, {share:.1%} of them trained on")
    print(f"  the first row, trained on between ⟦ and ⟧:\n{show(first_row, tokenizer)}\n")


def in_processes(work, batches, num_proc):
    """Like `map(work, batches)`, in processes that are at most two batches each ahead."""
    if num_proc == 1:
        yield from map(work, batches)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of these processes has one thread
    with ProcessPoolExecutor(num_proc, initializer=set_work, initargs=(work,)) as pool:
        waiting = deque()
        for batch in batches:
            waiting.append(pool.submit(do_work, batch))
            if len(waiting) > 2 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def set_work(work):
    """Gives a process its tokenizer, once: to send it with each batch would be slow."""
    global work_of_process
    work_of_process = work


def do_work(batch):
    return work_of_process(batch)


def cut_rows(batches, tokenizer, args, counts):
    """Yields rows of token ids and labels, (2, number, T), and adds up the counts.

    The strategies: "pack" joins all documents and cuts them. With "overflow" each document begins
    a row, and with "truncate" it also ends there. Padding fills these rows up, without a loss."""
    length = args.seq_length
    pad = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    rest = np.empty((2, 0), np.int32)
    length_so_far = 0  # of the current document, which the batch before may have begun
    for tokens, ends, counts_of_batch in batches:
        counts.update(counts_of_batch)
        parts = [rest, tokens]
        if args.strategy != "pack":
            parts = [rest]
            # The last part is of a document that goes on in the next batch, or it is empty.
            for i, part in enumerate(np.split(tokens, ends, axis=1)):
                if args.strategy == "truncate":
                    num_cut = max(0, length_so_far + part.shape[1] - length)
                    counts[f"left out: tokens after the first {length} of a text"] += num_cut
                    part = part[:, : length - length_so_far]
                length_so_far += part.shape[1]
                parts.append(part)
                if i < len(ends):  # the document ends here
                    num_padding = (-length_so_far) % length  # up to the end of the row
                    parts.append(np.tile(np.array([[pad], [-100]], np.int32), num_padding))
                    length_so_far = 0
        tokens = np.concatenate(parts, axis=1)
        end = tokens.shape[1] // length * length
        yield tokens[:, :end].reshape(2, -1, length)
        rest = tokens[:, end:]
    counts["left out: tokens at the end, less than a row"] = rest.shape[1]


def show(row, tokenizer):
    """Returns the first tokens of a row, (2, T), as text, and marks those that are trained on."""
    last_target = np.flatnonzero(row[1] != -100)[-1]
    input_ids, labels = row[:, : min(last_target + 1, 300)]
    is_target = labels != -100
    borders = np.flatnonzero(np.diff(is_target)) + 1
    text = ""
    for part in np.split(np.arange(len(input_ids)), borders):
        part_text = tokenizer.decode(input_ids[part])
        text += f"⟦{part_text}⟧" if is_target[part[0]] else part_text
    return text


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model-name", required=True, help="whose tokenizer: tiny, a hub id, or a folder")
    add("-d", "--dataset-name", required=True, help="a hub id, a file, or a folder")
    add("-o", "--out", required=True, help="folder for the rows, a new one")
    length_help = "tokens of a row, default: 1024, or the model's limit"
    add("-s", "--seq-length", type=int, help=length_help)
    add("--dataset-subset", help="the configuration of a dataset on the hub")
    add("--text-column", help="train on this column, default: found by the names of the columns")
    strategy_help = "join documents, give long ones several rows, or cut them; default: pack"
    strategies = ("pack", "overflow", "truncate")
    add("--strategy", choices=strategies, default="pack", help=strategy_help)
    prompt_help = "train on the prompts too, default: on the answers only"
    add("--train-on-prompt", action="store_true", help=prompt_help)
    add("--num-proc", type=int, default=1, help="processes that tokenize, default: 1")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())

"""prepare.py: which tokens of which rows are trained on."""

import csv
import gzip
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
import types

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import transformers
from conftest import ROOT, SMALL, assert_same_curve, environment, finish, metrics, run
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

FEW = (*SMALL[2:], "--max-steps", "4", "--log-freq", "1", "--dtype", "fp32")
# A template as ChatML has it. It does not mark what the assistant writes.
CHATML = """{%- for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor -%}
{{ "<|im_start|>assistant\\n" if add_generation_prompt else "" }}"""
# It writes reasoning into the last answer only, as templates of reasoning models do.
REASONING = CHATML.replace(
    '"\\n" + message.content',
    '"\\n" + ("<think></think>" if loop.last and message.role == "assistant" else "")'
    " + message.content",
)
# The same as CHATML, but it marks the content of an answer, and not the token that ends it.
MARKED = CHATML.replace(
    "message.content + ",
    '"" }}{% generation %}{{ message.content }}{% endgeneration %}{{ ',
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe? 😀"},
    {"role": "assistant", "content": "groß 😀"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def prepare():
    specification = importlib.util.spec_from_file_location("prepare", ROOT / "prepare.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def tokenizer():
    """Each byte is a token of it, so that tests can tell which tokens a text has."""
    tokens = [END, *sorted(ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.GPT2Tokenizer(vocabulary, merges=[], model_max_length=256)


@pytest.fixture
def model(tokenizer, tmp_path_factory):
    """A folder with this tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return folder


def tokenized(prepare, tokenizer, columns, *rows, end=""):
    """What prepare.py makes of rows: ids, labels, the ends of documents, counts."""
    is_text = columns == ("text",) or isinstance(rows[0].get("completion"), str)
    pieces = [prepare.Piece(row, f"row {number}") for number, row in enumerate(rows, 1)]
    arguments = (tokenizer, columns, None if is_text else end, False, pieces)
    (ids, labels), ends, counts = prepare.tokenize(*arguments)
    return ids, labels, ends, counts


def tokens_of(prepare, tokenizer, columns, *values, **more):
    """(text, text that has a loss) of each example that a document gives."""
    row = dict(zip(columns, values, strict=True))
    columns = tuple(name for name in columns if name != "input")
    ids, labels, ends, _ = tokenized(prepare, tokenizer, columns, row, **more)
    assert all(label in (token, -100) for token, label in zip(ids, labels, strict=True))
    examples = []
    for start, end in zip([0, *ends], ends, strict=False):
        trained_on = [label for label in labels[start:end] if label != -100]
        examples.append((tokenizer.decode(ids[start:end]), tokenizer.decode(trained_on)))
    return examples


def test_the_tokenizer_of_tiny(prepare, capfd):
    """It has all bytes, and longer tokens of Python's documentation. Its training prints nothing:
    it would do so in each process of a run."""
    tokenizer = prepare.load_tokenizer("tiny")
    assert capfd.readouterr() == ("", "")
    assert (len(tokenizer), tokenizer.model_max_length) == (1024, 256)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (END, 0)
    assert tokenizer.convert_ids_to_tokens(range(257)) == [END, *sorted(ByteLevel.alphabet())]
    text = f"The import statement\n\n  größe 😀\0 {END}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) > 257 and len(ids) < 30


def test_two_strings_are_joined_as_they_are(prepare, tokenizer):
    """The convention of TRL: no template, the end-of-text token after the completion."""
    tokenizer.chat_template = CHATML
    examples = tokens_of(prepare, tokenizer, ("prompt", "completion"), "2 + 2 =", " 4")
    assert examples == [(f"2 + 2 = 4{END}", f" 4{END}")]


@pytest.mark.parametrize("request_text", [("Add.", "2 2"), ("Add.", ""), ("Add.", None)])
def test_instructions_have_the_format_of_alpaca(request_text, prepare, tokenizer):
    tokenizer.chat_template = prepare.CHAT_TEMPLATE
    columns = ("instruction", "input", "output")
    [(text, trained_on)] = tokens_of(prepare, tokenizer, columns, *request_text, "4")
    request = "\n\n".join(part for part in request_text if part)
    assert text == f"### Instruction:\n{request}\n\n### Response:\n4{END}"
    assert trained_on == f"4{END}"
    short = tokens_of(prepare, tokenizer, ("instruction", "output"), "Add.", "4")
    assert short == [(f"### Instruction:\nAdd.\n\n### Response:\n4{END}", f"4{END}")]


def test_the_prompt_of_our_template_is_the_beginning_of_its_text(prepare, tokenizer):
    """What is generated from later is what was trained on."""
    tokenizer.chat_template = prepare.CHAT_TEMPLATE
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    for number in (2, 4):
        prompt = tokenizer.apply_chat_template(
            CHAT[:number], tokenize=False, add_generation_prompt=True
        )
        assert prompt.endswith("### Response:\n")
        assert whole.startswith(prompt + CHAT[number]["content"] + END)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_is_what_the_template_adds_for_it(template, prepare, tokenizer):
    """From the prompt for an answer to the end of its turn. Marks in the template change nothing:
    they may leave out the token that ends the turn, and a model would never learn to stop."""
    tokenizer.chat_template = template
    [(text, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), CHAT)
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == "groß 😀<|im_end|>\nYes.<|im_end|>\n"
    lists = tokens_of(prepare, tokenizer, ("prompt", "completion"), CHAT[:2], CHAT[2:3])
    assert lists[0][1] == "groß 😀<|im_end|>\n"


def test_conversations_of_sharegpt(prepare, tokenizer):
    tokenizer.chat_template = CHATML
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    expected = tokens_of(prepare, tokenizer, ("messages",), CHAT)
    assert tokens_of(prepare, tokenizer, ("conversations",), turns) == expected


def test_answers_in_a_prompt_have_no_loss(prepare, tokenizer):
    """The convention of TRL: the loss is on the completion."""
    tokenizer.chat_template = CHATML
    columns = ("prompt", "completion")
    [(text, trained_on)] = tokens_of(prepare, tokenizer, columns, CHAT[:4], CHAT[4:])
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == "Yes.<|im_end|>\n"


def test_values_that_are_missing_are_not_trained_on(prepare, tokenizer):
    """`datasets` fills rows up with None. Parts of a content are one text."""
    tokenizer.chat_template = prepare.CHAT_TEMPLATE
    columns = ("instruction", "input", "output")
    assert tokens_of(prepare, tokenizer, columns, "q", None, None) == []
    assert tokens_of(prepare, tokenizer, ("messages",), None) == []
    assert tokens_of(prepare, tokenizer, ("text",), None) == []
    [(text, _)] = tokens_of(prepare, tokenizer, ("prompt", "completion"), None, "a")
    assert text == f"a{END}"
    messages = [{"role": "user", "content": [{"type": "text", "text": "q"}], "tools": None}]
    messages += [{"role": "assistant", "content": "a", "tools": None}]
    tokenizer.chat_template = CHATML.replace(
        "message.role +", 'message.role + (message.tools or "") +'
    )
    [(_, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), messages)
    assert trained_on == "a<|im_end|>\n"


def test_a_greeting_is_no_answer(prepare, tokenizer):
    tokenizer.chat_template = CHATML
    [(_, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), CHAT[2:])
    assert trained_on == "Yes.<|im_end|>\n"


def test_a_tokenizer_that_begins_texts_begins_conversations_so_too(prepare, tokenizer):
    """As Llama's does: what the model has seen at the start of each text in its pretraining."""
    begin = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert prepare.end_of_answer(tokenizer) == (END, "")
    [(text, _)] = tokens_of(prepare, tokenizer, ("instruction", "output"), "q", "a")
    assert text == f"{END}### Instruction:\nq\n\n### Response:\na{END}"


def test_a_template_that_rewrites_earlier_answers_gives_an_example_each(prepare, tokenizer):
    """Each answer is trained on as it is written when it is the last one."""
    tokenizer.chat_template = REASONING
    examples = tokens_of(prepare, tokenizer, ("messages",), CHAT)
    texts = [tokenizer.apply_chat_template(CHAT[:n], tokenize=False) for n in (3, 5)]
    assert [text for text, _ in examples] == texts
    answers = ["<think></think>groß 😀<|im_end|>\n", "<think></think>Yes.<|im_end|>\n"]
    assert [trained_on for _, trained_on in examples] == answers


def test_the_calls_of_tools_keep_their_numbers(prepare, tokenizer, tmp_path):
    """A call has no content. Its arguments are no texts: a template may write them as JSON."""
    call = {"role": "assistant", "tool_calls": [{"arguments": {"a": 4, "b": 0.5, "c": "4"}}]}
    row = {"messages": [{"role": "user", "content": 7}, call]}
    [row] = prepare.read_rows(write_lines(tmp_path / "d.jsonl", [row]))
    calls = 'message.content + (message.tool_calls | tojson if message.tool_calls else "")'
    tokenizer.chat_template = CHATML.replace("message.content", calls)
    [(text, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), row["messages"])
    assert text.startswith("<|im_start|>user\n7<|im_end|>")
    assert trained_on == '[{"arguments": {"a": 4, "b": 0.5, "c": "4"}}]<|im_end|>\n'


# Arguments of calls, as they were written, and as the template should see them.
ARGUMENTS = [{"city": "Rome"}, {"a": 4, "many": [{"x": 1}, {"y": [None, 2]}]}, {}, {"b": 0.5}]


@pytest.mark.parametrize("kind", ["parquet", "datasets", "jsonl"])
def test_calls_have_the_arguments_that_they_were_written_with(kind, prepare, tokenizer, tmp_path):
    """Parquet gives the arguments of all tools to each call, with nulls. In a line of JSON nobody
    adds a null: there it is a value."""
    arguments = [*ARGUMENTS, {"city": None}] if kind == "jsonl" else ARGUMENTS
    rows = []
    for argument in arguments:
        call = {"type": "function", "function": {"name": "f", "arguments": argument}}
        answer = {"role": "assistant", "tool_calls": [call]}
        rows.append({"messages": [{"role": "user", "content": "q"}, answer]})
    if kind == "parquet":
        source = tmp_path / "d.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    elif kind == "datasets":
        # From the table: `from_list` may keep objects as they are.
        source = datasets.Dataset(pyarrow.Table.from_pylist(rows))
    else:
        source = write_lines(tmp_path / "d.jsonl", rows)
    calls = 'message.content + (message.tool_calls | tojson if message.tool_calls else "")'
    tokenizer.chat_template = CHATML.replace("message.content", calls)
    written = []
    for row in prepare.read_rows(source):
        [(_, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), row["messages"])
        [call] = json.loads(trained_on.removesuffix("<|im_end|>\n"))
        written.append(call["function"]["arguments"])
    assert written == arguments


def test_a_text_that_has_its_special_tokens_does_not_get_them_twice(prepare, tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special_tokens = [("<s>", tokenizer.bos_token_id)]
    begin = TemplateProcessing(single="<s> $A", special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = begin
    [(whole, _)] = tokens_of(prepare, tokenizer, ("text",), "a<s>b")
    assert whole == f"<s>a<s>b{END}"
    for text in ("ab", "<s>ab", f"ab{END}", f"<s>ab{END}"):
        [(whole, trained_on)] = tokens_of(prepare, tokenizer, ("text",), text)
        assert whole == trained_on == f"<s>ab{END}"
        prompt, answer = text[: text.index("b")], text[text.index("b") :]
        examples = tokens_of(prepare, tokenizer, ("prompt", "completion"), prompt, answer)
        assert examples == [(f"<s>ab{END}", f"b{END}")]


@pytest.mark.parametrize("begin", [END, ""])
def test_a_tokenizer_may_end_texts_with_the_token_that_begins_them(begin, prepare, tokenizer):
    """bos_token and eos_token of GPT-2 are one token: not each text that has it begins with it."""
    around = TemplateProcessing(single=f"{begin} $A {END}".strip(), special_tokens=[(END, 0)])
    tokenizer.backend_tokenizer.post_processor = around
    for text in ("ab", f"{begin}ab", f"ab{END}", f"{begin}ab{END}"):
        examples = tokens_of(prepare, tokenizer, ("text",), text)
        assert examples == [(f"{begin}ab{END}", f"{begin}ab{END}")]


def test_a_tokenizer_without_an_end_of_text_joins_documents_bare(prepare, tokenizer):
    tokenizer.eos_token = None
    rows = [{"text": "ab"}, {"text": None}, {"text": "c"}]
    ids, _, ends, _ = tokenized(prepare, tokenizer, ("text",), *rows)
    assert (tokenizer.decode(ids), ends) == ("abc", [2, 3])


def test_the_beginning_and_the_end_of_a_long_text_have_special_tokens(prepare, tokenizer):
    """And not its pieces."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    for text in ("a" * 70_000, "ab\n" * 30_000):
        pieces = list(prepare.pieces_of({"text": text}, ("text",), "row 1"))
        assert len(pieces) > 3
        tokens, ends, counts = prepare.tokenize(tokenizer, ("text",), None, False, pieces)
        assert tokenizer.decode(tokens[0]) == f"{END}{text}{END}"
        assert (ends, counts) == ([len(text) + 2], {"documents": 1})


def test_a_template_that_does_not_end_answers(prepare, tokenizer, capsys):
    """As that of GLM-4: the end-of-text token follows each answer, and all of it is learned."""
    tokenizer.chat_template = CHATML.replace('"<|im_end|>\\n"', '""')
    stop, end = prepare.end_of_answer(tokenizer)
    assert stop == end == END
    assert f"does not end answers, so this does: {END}" in capsys.readouterr().out
    examples = tokens_of(prepare, tokenizer, ("messages",), CHAT, end=end)
    assert [trained_on for _, trained_on in examples] == [f"groß 😀{END}", f"Yes.{END}"]


def test_a_template_that_writes_the_date_is_named(prepare, tokenizer, capsys):
    """As that of Llama 3.2: rows that are prepared tomorrow would have other tokens."""
    tokenizer.chat_template = '{{ strftime_now("%d %b %Y") }}' + CHATML
    prepare.end_of_answer(tokenizer)
    assert "the chat template writes the date" in capsys.readouterr().out


def test_roles_have_many_names_and_what_is_left_out_is_counted(prepare, tokenizer):
    tokenizer.chat_template = CHATML
    answers = [("user", "assistant"), ("USER", "Assistant"), ("human", "gpt"), ("user", "model")]
    answers += [("prompter", "bot"), ("user", "narrator"), ("assistant", "user")]
    contents = [("q", "a")] * len(answers) + [("q", " "), ("q<|endoftext|>", "a")]
    answers += [("user", "assistant")] * 2
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]}
        for roles, texts in zip(answers, contents, strict=True)
    ]
    # A message that the author does not want to be learned, and an answer with another key.
    rows.append({"messages": [*rows[0]["messages"], rows[0]["messages"][0]]})
    rows[-1]["messages"].append({"role": "assistant", "content": "b", "weight": 0})
    rows.append({"messages": [{"from": "user", "content": "q"}, {"role": "model", "value": ""}]})
    _, _, ends, counts = tokenized(prepare, tokenizer, ("messages",), *rows)
    assert len(ends) == 6
    assert counts == {
        "documents": 11,
        "left out: no answer of the assistant, but messages of: user, narrator": 1,
        "left out: no answer of the assistant, but messages of: assistant, user": 1,
        "left out: an answer is empty": 2,
        f"left out: a message has the special token {END}": 1,
    }


def test_a_template_that_omits_messages(prepare, tokenizer):
    """As Mistral's, which writes the system prompt only if the last message is the user's, and
    Qwen's, which writes no message of an unknown role: an answer without them is another one."""
    tokenizer.chat_template = CHATML.replace(
        "{{ ", '{%- if message.role in ("user", "assistant", "tool") -%}{{ ', 1
    ).replace("{%- endfor -%}", "{%- endif -%}{%- endfor -%}")
    rows = [{"messages": CHAT}, {"messages": CHAT[1:]}]
    _, _, ends, counts = tokenized(prepare, tokenizer, ("messages",), *rows)
    assert len(ends) == 1
    assert counts["left out: the chat template does not write a message of: system"] == 1


def test_a_prompt_has_no_loss_on_the_token_that_begins_it(prepare, tokenizer):
    begin = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    columns = ("prompt", "completion")
    assert tokens_of(prepare, tokenizer, columns, "a", "b") == [(f"{END}ab{END}", f"b{END}")]


def test_a_conversation_is_left_out_as_a_whole(prepare, tokenizer):
    """Also if the template refuses only its third turn, and its answers are examples each."""
    refusal = "{%- if messages | length > 3 -%}{{ raise_exception('too long') }}{%- endif -%}"
    tokenizer.chat_template = refusal + REASONING
    _, _, ends, counts = tokenized(prepare, tokenizer, ("messages",), {"messages": CHAT})
    assert (ends, counts["left out, the chat template says: too long"]) == ([], 1)


def test_a_token_over_the_border_belongs_to_the_answer(prepare):
    """Tokens of a prompt and its answer may be one: such as a space and the word after it."""
    vocabulary = {END: 0, "a": 1, "Ġ": 2, "b": 3, "Ġb": 4}
    tokenizer = transformers.GPT2Tokenizer(vocabulary, merges=[("Ġ", "b")])
    row = {"prompt": "a ", "completion": "b"}
    ids, labels, _, _ = tokenized(prepare, tokenizer, ("prompt", "completion"), row)
    assert (ids.tolist(), labels.tolist()) == ([1, 4, 0], [-100, 4, 0])


# The program.

WORDS = random.Random(0).choices(
    ["one", "two", "three", "four", "five", "six", "seven", "eight"], k=6000
)
TEXT = [" ".join(WORDS[i : i + 30]) for i in range(0, len(WORDS), 30)]
ALPACA = [{"instruction": "q", "input": "", "output": text, "text": f"q {text}"} for text in TEXT]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(data, out, *flags, check=True):
    """Runs prepare.py as a user does, with rows of 64 tokens."""
    command = [sys.executable, ROOT / "prepare.py", "-m", "tiny", "-d", data, "-o", out, "-s", 64]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [str(word) for word in (*command, *flags)],
        env=environment(),
        start_new_session=True,
        **how,
    )
    result = finish(process)
    if check:
        assert result.returncode == 0, result.err
    return result


@pytest.fixture
def written(prepare, model, monkeypatch, capsys):
    """The same in this process, with bytes as tokens: the rows, and what was printed."""

    def rows_of(data, out, *flags):
        command = ["prepare.py", "-m", model, "-d", data, "-o", out, *flags]
        monkeypatch.setattr("sys.argv", [str(word) for word in command])
        args = prepare.parse_args()
        prepare.main(args)
        said = capsys.readouterr().out
        last_line = f"python 01-single-gpu/train-llm.py -m {args.model_name} -d {out} -e my-run\n"
        assert said.endswith(f"to train: {last_line}")
        return pyarrow.parquet.read_table(out / "train.parquet").to_pylist(), said

    return rows_of


@pytest.fixture
def made(written, tokenizer):
    """The same with rows of 64 tokens: what is trained on, as text, and what was printed."""

    def made_of(data, out, *flags):
        rows, said = written(data, out, "-s", 64, *flags)
        assert all(len(row["input_ids"]) == len(row["labels"]) == 64 for row in rows)
        labels = [label for row in rows for label in row["labels"] if label != -100]
        return tokenizer.decode(labels), said

    return made_of


def test_alpaca_is_trained_on_its_answers(made, tmp_path):
    """Also if it has a column of text beside, as tatsu-lab/alpaca does."""
    path = write_lines(tmp_path / "alpaca.jsonl", ALPACA)
    text, said = made(path, tmp_path / "a")
    assert text.startswith(END.join(TEXT[:100]))
    assert "training on instruction, output; columns not used: text" in said
    assert "train: 200 documents in 1 file(s)" in said
    assert said.count("left out") == 1  # the last row is not full
    assert f"### Response:\n⟦{TEXT[0][:9]}" in said
    text, said = made(path, tmp_path / "b", "--text-column", "text")
    assert text.startswith(f"q {TEXT[0]}{END}q {TEXT[1]}")
    text, said = made(path, tmp_path / "c", "--train-on-prompt")
    assert text.startswith(f"### Instruction:\nq\n\n### Response:\n{TEXT[0]}{END}###")
    assert "100.0% of them trained on" in said


ENDINGS = [".csv.gz", ".csv", ".txt.gz", ".txt", ".parquet", ".jsonl", ".jsonl.gz", ".json"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_formats_of_files(made, ending, tmp_path):
    """A .txt file is one document. Windows writes a mark (BOM) in front of its text."""
    path = tmp_path / f"my.data{ending}"
    frame = pandas.DataFrame({"title": "x", "content": TEXT})
    flags = ("--text-column", "content")
    if ".csv" in ending:
        frame.to_csv(path, index=False)
    elif ending == ".parquet":
        frame.to_parquet(path)
    elif ".json" in ending:
        frame.to_json(path, orient="records", lines=ending != ".json")
    else:
        content = END.join(TEXT).encode("utf-8-sig")
        path.write_bytes(gzip.compress(content) if ending == ".txt.gz" else content)
        flags = ()
    text, said = made(path, tmp_path / "out", *flags)
    assert (END.join(TEXT) + END).startswith(text)
    assert len(text) > len(END.join(TEXT)) - 64 - len(END)
    assert f"train: {1 if '.txt' in ending else 200} documents in 1 file(s)" in said


# What `datasets` takes for numbers, truth values, dates and missing values.
VALUES = ["007", "8", "TRUE", "2021-05-03", "None", "NA", "1e5", "0.50", 'a "b"\r\nc,\n d ', "é"]


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".json"])
def test_values_are_those_of_the_file(made, ending, tmp_path):
    """No type is guessed, also where a cell is empty, and numbers in JSON keep their digits. A mark
    of the byte order (BOM) at the beginning and line ends of Windows are no part of a value."""
    path = tmp_path / f"d{ending}"
    rows = [{"text": value, "empty": ""} for value in ["", *VALUES]]
    if ending == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["text", "empty"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        objects = ["4", "0.5", "0.50", *[json.dumps(value) for value in VALUES]]
        objects = [f'{{"text": {value}, "empty": null}}' for value in objects]
        text = "[" + ",".join(objects) + "]" if ending == ".json" else "\r\n".join(objects)
        path.write_bytes(text.encode("utf-8-sig"))
    numbers = [] if ending == ".csv" else ["4", "0.5", "0.50"]
    text, said = made(path, tmp_path / "out", "--strategy", "overflow")
    assert text == "".join(value + END for value in numbers + VALUES)
    assert ("1 left out: no text" in said) == (ending == ".csv")


def test_rows_of_alpaca_may_have_an_input_later(made, tmp_path):
    rows = [{"instruction": "q", "output": "a"}, {"instruction": "r", "input": "s", "output": 4}]
    path = write_lines(tmp_path / "d.jsonl", rows)
    out = tmp_path / "out"
    text, _ = made(path, out, "--train-on-prompt", "--strategy", "overflow")
    assert text.endswith(f"### Instruction:\nr\n\ns\n\n### Response:\n4{END}")


def test_every_file_of_a_folder_is_read_or_named(made, tmp_path):
    """Of all formats, whatever their names are."""
    names = ["the train.txt", "my test notes.txt", "below/a.txt", "part-00000-of-00001.txt"]
    names += ["b.jsonl", "Val/c.txt", "dev/d.txt", "e.md", ".hidden/f.txt", "c[1].txt"]
    names += ["test-00000-of-00001.txt", "LICENSE", "Train.csv"]
    (tmp_path / "real").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to(tmp_path / "real")
    for number, name in enumerate(names):
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = chr(ord("A") + number) * 99
        before = "text\n" if name == "Train.csv" else ""
        path.write_text(json.dumps({"text": text}) if name == "b.jsonl" else before + text)
    text, said = made(tmp_path / "d", tmp_path / "a")
    assert set(text.replace(END, "")) == set("ABCDEJM")
    assert "not read: LICENSE, e.md, link\n" in said
    assert "not read: the splits dev, test\n" in said
    assert "train: 7 documents in 7 file(s)" in said
    assert "validation: 1 documents in 1 file(s)" in said
    assert "⟦FFFFF" in said
    # Nothing else is there to train on.
    (tmp_path / "d" / "Val" / "c.txt").rename(tmp_path / "d" / "Val" / "test.txt")
    text, said = made(tmp_path / "d" / "Val", tmp_path / "c")
    assert set(text.replace(END, "")) == {"F"}


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("name", ["validation", "valid", "Val", "eval", "Dev", "test"])
def test_names_of_what_is_held_out(name, is_folder, prepare, tmp_path, capsys):
    """Without other data, it is trained on. One split is for evaluation, others are named."""
    held_out = tmp_path / name / "a.txt" if is_folder else tmp_path / f"{name}.txt"
    held_out.parent.mkdir(exist_ok=True)
    held_out.touch()
    assert prepare.load_splits(str(tmp_path), None) == {"train": [held_out]}
    (tmp_path / "b.txt").touch()
    expected = {"train": [tmp_path / "b.txt"], "validation": [held_out]}
    assert prepare.load_splits(str(tmp_path), None) == expected
    (tmp_path / "validation-00000-of-00001.txt").touch()
    prepare.load_splits(str(tmp_path), None)
    said = f"not read: the splits {name.lower()}\n"
    assert (said in capsys.readouterr().out) == (name != "validation")


@pytest.mark.law5
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("d.txt", "abc".encode("utf-16"), "after 0 documents: 'utf-8' codec can't decode"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "b', "after 1 documents: Unterminated string"),
        ("d.json", b'[{"text": "a"}, 4]', "after 1 documents: not an object: 4"),
        ("d.csv", b"text,b\na,b\na,b,c\n", "after 1 documents: line 3 has more or fewer values"),
        ("d.csv", b'text,b\na,b\n"a,b\n', "after 1 documents: unexpected end of data"),
        ("d.csv", b"text,b\na,b,\n", "after 0 documents: line 2 has more or fewer values"),
        ("d.csv", b"text,b,text\na,b,c\n", "after 0 documents: two columns have the same name"),
        ("d.txt.gz", gzip.compress(bytes(999), mtime=0)[:-9], "after 0 documents: Compressed file"),
        ("d.parquet", b"abc", "after 0 documents: Parquet file size is 3 bytes"),
    ],
)
def test_a_damaged_file_is_named(made, name, content, problem, prepare, tmp_path):
    """Also if its first documents can be read. No folder is left then."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        made(tmp_path / name, tmp_path / "out")
    assert str(stop.value.code).startswith(f"prepare.py: error: {tmp_path / name}: {problem}")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_strategies(made, tokenizer, model, tmp_path):
    """pack: joined and cut. overflow: each document begins a row. truncate: and has only one. What
    is padding has no loss. A row with the last token of a document alone has nothing to predict it
    from, and is left out. Documents are longer than the pieces that they are tokenized in, or end
    with a row. Several processes make the same rows."""
    draw = random.Random(5)
    lengths = [0, 1, 62, 63, 64, 127, 25_000, 250_000] + [draw.randint(1, 300) for _ in range(99)]
    draw.shuffle(lengths)
    texts = ["".join(draw.choices("ab\n", k=length)) for length in lengths]
    texts += ["one line " * 9000, *(f"{i} " * (i % 5 + 1) for i in range(3000))]
    path = write_lines(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    documents = [text + END for text in texts if text]
    ids = [np.array(tokenizer(document)["input_ids"]) for document in documents]

    def padded(ids):
        return np.pad(ids, (0, -len(ids) % 64), constant_values=-100)

    joined = np.concatenate(ids)
    expected = {
        "pack": joined[: len(joined) // 64 * 64],
        "overflow": np.concatenate([padded(document) for document in ids]),
        "truncate": np.concatenate([padded(document[:64]) for document in ids]),
    }
    for strategy, labels in expected.items():
        rows = labels.reshape(-1, 64)
        labels = rows[(rows[:, 1:] != -100).any(axis=1)].flatten()
        made(path, tmp_path / strategy, "--strategy", strategy)
        table = pyarrow.parquet.read_table(tmp_path / strategy / "train.parquet")
        assert np.array_equal(table["labels"].combine_chunks().flatten(), labels)
        input_ids = np.array(table["input_ids"].combine_chunks().flatten())
        assert np.array_equal(input_ids, np.where(labels == -100, 0, labels))
    call(path, tmp_path / "two", "-m", model, "--strategy", "truncate", "--num-proc", 2)
    assert pyarrow.parquet.read_table(tmp_path / "two" / "train.parquet") == table


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS counts memory in other units")
def test_a_large_text_takes_little_memory(tmp_path):
    """A tokenizer needs 200 bytes a character and more: for 20 MB at once it took 5.3 GB. Half of
    them are enough."""
    (tmp_path / "d.txt").write_text("some text, " * 9 + "\n" + "and a line of it\n" * 600_000)
    command = [sys.executable, ROOT / "prepare.py", "-m", "tiny", "-d", tmp_path / "d.txt"]
    command += ["-s", 256, "-o", tmp_path / "out"]
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    code += "print('KiB:', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code, *map(str, command)]
    result = finish(subprocess.Popen(command, env=environment(), **how))
    assert result.returncode == 0, result.err
    assert int(result.out.split("KiB: ")[1]) < 1_500_000


def test_a_killed_run_leaves_no_folder_that_looks_complete(tmp_path):
    path = tmp_path / "d.txt"
    path.write_text("some text\n" * 5_000_000)
    command = [sys.executable, ROOT / "prepare.py", "-m", "tiny", "-d", path, "-o", "out"]
    command += ["--num-proc", 2]  # these processes live on
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen([*map(str, command)], cwd=tmp_path, env=environment(), **how)
    deadline = time.monotonic() + 600
    while not any(file.stat().st_size > 99 for file in tmp_path.glob(".prepare-*/out/*.parquet")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    # What it has left is in nobody's way, and goes with the next start.
    path.write_text("some text\n" * 500)
    call(path, tmp_path / "out")
    os.killpg(process.pid, signal.SIGKILL)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d.txt", "out"]


@pytest.mark.parametrize("ending", [".jsonl.zst", ".json.zst", ".txt.zst", ".csv.zst"])
def test_files_with_zst(made, ending, tmp_path):
    plain = {
        ".jsonl.zst": "".join(json.dumps({"text": text}) + "\n" for text in TEXT),
        ".json.zst": "\ufeff" + json.dumps([{"text": text} for text in TEXT]),
        ".txt.zst": END.join(TEXT),
        ".csv.zst": "text\n" + "\n".join(TEXT),
    }[ending]
    path = tmp_path / f"d{ending}"
    path.write_bytes(pyarrow.compress(plain.encode(), codec="zstd", asbytes=True))
    text, _ = made(path, tmp_path / "out")
    assert text.startswith(END.join(TEXT[:150]))


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".head.csv", ".jsonl", ".json", ".txt"])
def test_files_without_documents_are_read_over(made, ending, tmp_path):
    """As tools leave them that write a file for each of their workers."""
    (tmp_path / "d").mkdir()
    for name, texts in (("a", []), ("b", TEXT), ("c", [])):
        path, frame = tmp_path / "d" / f"{name}{ending}", pandas.DataFrame({"text": texts})
        if ending == ".parquet":
            frame.to_parquet(path)
        elif ending == ".head.csv":
            frame.to_csv(path, index=False)
        elif not texts:
            path.touch()
        elif ending == ".csv":
            frame.to_csv(path, index=False)
        elif ending == ".txt":
            path.write_text(END.join(TEXT))
        else:
            frame.to_json(path, orient="records", lines=ending == ".jsonl")
    text, said = made(tmp_path / "d", tmp_path / "out")
    assert text.startswith(END.join(TEXT[:150]))
    assert ("2 left out: no text" in said) == (ending == ".txt")


@pytest.mark.parametrize("has_splits", [True, False])
def test_a_folder_of_save_to_disk(made, has_splits, tmp_path):
    rows = datasets.Dataset.from_dict({"text": TEXT})
    if has_splits:
        rows = datasets.DatasetDict(train=rows, test=rows.select(range(50)))
    rows.save_to_disk(tmp_path / "d")
    text, said = made(tmp_path / "d", tmp_path / "out")
    assert text.startswith(END.join(TEXT[:150]))
    assert ("validation: 50 documents" in said) == has_splits


# Rows that another tool has tokenized.


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".jsonl.gz", ".parquet", "torch", "mds"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_rows_of_tokens_stay_what_they_are(
    written, prepare, kind, has_labels, monkeypatch, tmp_path
):
    """Of a file, of a dataset that was saved with tensors as its format, and of MDS, whose rows
    have arrays. Without -s, rows keep their length. Other columns of such rows are no loss."""
    draw = random.Random(7)
    rows, expected = [], []
    for number in range(50):
        ids = [draw.randrange(257) for _ in range(20)]
        labels = [-100] * 7 + ids[7:18] + [-100] * 2 if has_labels else ids
        expected.append({"input_ids": ids, "labels": labels})
        # With labels, a mask of padding says nothing more.
        mask = [1] * 18 + [0] * 2 if has_labels else [1] * 20
        row = {"id": number, "input_ids": ids, "attention_mask": mask, "words": ["a"] * 20}
        row |= {"special_tokens_mask": [0] * 20, "position_ids": [*range(20)], "sizes": [9, 11]}
        rows.append(row | {"length": 20} | ({"labels": labels} if has_labels else {}))
    path = tmp_path / f"d{kind}"
    if kind == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif kind == "torch":
        datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(path)
    elif kind == "mds":
        arrays = [{k: np.array(v) if k != "words" else v for k, v in row.items()} for row in rows]
        monkeypatch.setattr(prepare, "load_splits", lambda *_: {"train": [arrays]})
    elif kind == ".json":
        path.write_text(json.dumps(rows))
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if kind == ".jsonl.gz" else content)
    result, said = written(path, tmp_path / "out")
    assert result == expected
    assert "rows of 20 tokens, as the first one has (-s)" in said
    used = "input_ids, labels" if has_labels else "input_ids"
    assert f"training on {used}; columns not used: id, attention_mask, words, special" in said
    assert "left out" not in said
    # A folder that prepare.py has written can be read again: its tokenizer is no data.
    again, _ = written(tmp_path / "out", tmp_path / "again", "--text-column", "input_ids")
    assert again == result


def test_rows_of_tokens_may_have_other_lengths(written, tmp_path):
    """Nothing is added to them. They are joined and cut, or filled up, as texts are."""
    rows = [[5, 6, 7, 8], [], [9] * 11, [4], [3, 2]]
    labels = [[-100, 6, 7, -100], [], [9] * 11, [4], [3, 2]]
    data = [{"input_ids": i, "labels": x} for i, x in zip(rows, labels, strict=True)]
    path = write_lines(tmp_path / "d.jsonl", data)
    result, said = written(path, tmp_path / "a")
    assert [row["input_ids"] for row in result] == [[5, 6, 7, 8], [9] * 4, [9] * 4, [9, 9, 9, 4]]
    assert result[0]["labels"] == labels[0]
    assert "1 left out: no tokens" in said
    assert "2 left out: tokens at the end, less than a row" in said
    result, _ = written(path, tmp_path / "b", "--strategy", "truncate", "-s", 5)
    assert [row["input_ids"] for row in result] == [[5, 6, 7, 8, 0], [9] * 5, [3, 2, 0, 0, 0]]
    assert [row["labels"] for row in result][0::2] == [[*labels[0], -100], [3, 2, *[-100] * 3]]


@pytest.mark.law5
@pytest.mark.parametrize("value", [1, 1.0, True])
@pytest.mark.parametrize("name", ["assistant_masks", "completion_mask", "prompt_mask", "weights"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_a_column_beside_tokens_is_not_ignored(name, value, has_labels, written, tmp_path):
    """Whatever its name is: it may say which tokens have no loss. Also if there are labels."""
    row = {"input_ids": [1, 2, 3], name: [value, value, type(value)(0)]}
    row |= {"labels": [1, 2, 3]} if has_labels else {}
    path = write_lines(tmp_path / "d.jsonl", [row] * 9)
    with pytest.raises(SystemExit) as stop:
        written(path, tmp_path / "out")
    line = f"{path}: row 1: the column {name} has a number for each token, and would not be used: "
    assert str(stop.value.code).startswith(f"prepare.py: error: {line}use it to make labels, with")


@pytest.mark.law5
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"attention_mask": [1, 1, 0]}, "attention_mask has zeros, for padding: give labels, with"),
        ({"attention_mask": [True, True, False]}, "attention_mask has zeros, for padding: give "),
        ({"loss_mask": [0, 1, 1]}, "the column loss_mask has a number for each token, and would"),
        ({"labels": [1, 2, 3]}, "it has labels, but the first row has none: give them to all "),
        (
            {"input_ids": [1, -2, 3]},
            "input_ids has -2, which is not a token of -m: its tokens are ",
        ),
        ({"input_ids": [1, 257, 3]}, "input_ids has 257, which is not a token of -m: its tokens "),
        ({"input_ids": [1, 2**31, 3]}, "input_ids has 2147483648, which is not a token of -m: "),
        ({"input_ids": [1, 2**70, 3]}, "cannot be read: TypeError('input_ids is not a list of "),
        ({"input_ids": [1, 2.0, 3]}, "cannot be read: TypeError('input_ids is not a list of int"),
        ({"input_ids": [True, False]}, "cannot be read: TypeError('input_ids is not a list of i"),
        ({"input_ids": [1, None, 3]}, "cannot be read: TypeError('input_ids is not a list of i"),
        ({"input_ids": [[1], [2]]}, "cannot be read: TypeError('input_ids is not a list of int"),
        ({"input_ids": "[1, 2]"}, "cannot be read: TypeError('input_ids is not a list of int"),
    ],
)
def test_a_row_of_tokens_that_is_wrong_is_named(row, problem, written, tmp_path):
    """Not only the first row is looked at."""
    right = {"input_ids": [1, 2, 3], "documents": [3]}
    path = write_lines(tmp_path / "d.jsonl", [right] * 9 + [right | row])
    with pytest.raises(SystemExit) as stop:
        written(path, tmp_path / "out")
    place = f"{path}: row 10" + ("" if problem.startswith("cannot") else ":")
    assert str(stop.value.code).startswith(f"prepare.py: error: {place} {problem}")
    assert len(str(stop.value.code).splitlines()) == 1


@pytest.mark.law5
@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([1, 2], ": it has 2 labels for 3 input_ids: give each token a label, -100 where there"),
        ([], ": it has 0 labels for 3 input_ids: give each token a label, -100 where there is"),
        (None, ": it has 0 labels for 3 input_ids: give each token a label, -100 where there is"),
        (1, ": it has 1 labels for 3 input_ids: give each token a label, -100 where there is no"),
        (
            [-1, 2, 3],
            ": labels has -1, which is not a token of -m: its tokens are 0 to 256, and a ",
        ),
        ([1, 2, 300], ": labels has 300, which is not a token of -m: its tokens are 0 to 256, and"),
        ([0.0, 1.0, 1.0], " cannot be read: TypeError('labels is not a list of integers')"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "datasets"])
def test_labels_that_are_wrong_are_named(kind, labels, problem, written, tmp_path):
    row = {"input_ids": [1, 2, 3], "labels": labels}
    path = write_lines(tmp_path / "d.jsonl", [row] * 9)
    place = f"{path}: row 1"
    if kind == "datasets":
        path, place = tmp_path / "saved", "train: row 1"
        datasets.Dataset.from_list([row] * 9).save_to_disk(path)
    with pytest.raises(SystemExit) as stop:
        written(path, tmp_path / "out")
    assert str(stop.value.code).startswith(f"prepare.py: error: {place}{problem}")


@pytest.mark.law5
def test_flags_for_texts_are_refused_for_tokens(written, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"input_ids": [1, 2, 3], "text": "a" * 99}] * 9)
    with pytest.raises(SystemExit) as stop:
        written(path, tmp_path / "out", "--train-on-prompt")
    assert str(stop.value.code).startswith("prepare.py: error: --train-on-prompt: these rows are")
    rows, _ = written(path, tmp_path / "out", "--text-column", "text", "-s", 99)
    assert len(rows) == 9


def test_a_description_of_the_data_is_no_data(made, tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("dataset_info.json", "dataset_infos.json"):
        (tmp_path / "d" / name).write_text('{"default": {"features": {}}}')
    write_lines(tmp_path / "d" / "e.jsonl", [{"text": text} for text in TEXT])
    text, _ = made(tmp_path / "d", tmp_path / "out")
    assert text.startswith(END.join(TEXT[:150]))


def test_folders_of_mds_that_are_splits(prepare, monkeypatch, tmp_path):
    """Read by its package, or one line says how to install it."""
    for name in ("train", "val"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "index.json").write_text('{"shards": [], "version": 2}')
        (tmp_path / "d" / name / "shard.00000.mds").touch()
    monkeypatch.setitem(sys.modules, "streaming", None)
    with pytest.raises(SystemExit) as stop:
        prepare.load_splits(str(tmp_path / "d"), None)
    assert "to read an MDS folder: pip install mosaicml-streaming" in str(stop.value.code)
    package = types.SimpleNamespace(LocalDataset=lambda path: f"MDS of {path}")
    monkeypatch.setitem(sys.modules, "streaming", package)
    splits = prepare.load_splits(str(tmp_path / "d"), None)
    assert splits == {
        "train": [f"MDS of {tmp_path / 'd' / 'train'}"],
        "validation": [f"MDS of {tmp_path / 'd' / 'val'}"],
    }


def test_a_folder_of_mds(made, tmp_path):
    streaming = pytest.importorskip("streaming", reason="needs mosaicml-streaming")
    with streaming.MDSWriter(out=str(tmp_path / "d"), columns={"text": "str"}) as writer:
        for text in TEXT:
            writer.write({"text": text})
    text, said = made(tmp_path / "d", tmp_path / "out")
    assert text.startswith(END.join(TEXT[:150]))
    assert "train: 200 documents" in said


def test_splits_of_chats_on_the_hub(made, tmp_path):
    """train_sft and test_sft, with the files laid out as the hub has them."""
    (tmp_path / "d" / "data").mkdir(parents=True)
    for split, texts in (("train_sft", TEXT[:150]), ("test_sft", TEXT[150:]), ("train_gen", ["x"])):
        messages = [
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
            for text in texts
        ]
        frame = pandas.DataFrame({"prompt": "q", "messages": messages})
        frame.to_parquet(tmp_path / "d" / "data" / f"{split}-00000-of-00001.parquet")
    text, said = made(tmp_path / "d", tmp_path / "out")
    assert text.startswith(END.join(TEXT[:100]))
    assert text.endswith(TEXT[149][-20:] + END) or TEXT[150] not in text
    assert "validation: 50 documents" in said


@pytest.mark.law5
@pytest.mark.parametrize(
    ("row", "flags", "problem"),
    [
        ({"title": "a", "body": "b"}, (), "choose one of the columns title, body with --text-col"),
        ({"messages": [{"who": "user"}]}, (), "{path}: row 1 cannot be read: KeyError('role')"),
        ({"prompt": "a", "completion": {}}, (), "{path}: row 1 cannot be read: TypeError("),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            (),
            "train: this does not fill a row of 256 tokens (-s)",
        ),
        ({"text": "a \ud83d"}, (), "{path}: row 1 cannot be read: UnicodeEncodeError("),
        ({"text": "a"}, ("--dataset-subset", "en"), "--dataset-subset en: is for a dataset on"),
        ({"text": "a"}, ("-o", "."), "-o .: this exists already"),
        ({"a": 1, "b": "x"}, ("--text-column", "c"), "choose one of the columns a, b with --text-"),
        ({"text": "a"}, ("-d", "empty"), "-d empty: no file ends in .txt, .json, .jsonl, .csv, "),
        ({"text": "a"}, ("-d", "LICENSE"), "-d LICENSE: no file ends in .txt, .json, .jsonl, "),
        ({"text": "a"}, ("-d", "empty.jsonl"), "-d empty.jsonl: there are no documents to train"),
        ({"text": "a"}, ("-d", "short.txt"), "train: this does not fill a row of 256 tokens (-s)"),
        ({"text": "a"}, ("-d", "saved"), "-d saved: no split is called train, there are a, b"),
    ],
)
def test_one_line_says_what_is_wrong(row, flags, problem, written, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "d.jsonl", [row] * 99)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "LICENSE").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "short.txt").write_text("hello world " * 10)
    if "saved" in flags:
        rows = datasets.Dataset.from_dict({"text": ["x"]})
        datasets.DatasetDict(a=rows, b=rows).save_to_disk("saved")
    with pytest.raises(SystemExit) as stop:
        written(path, "out", *flags)
    assert str(stop.value.code).startswith(f"prepare.py: error: {problem.format(path=path)}")


@pytest.mark.law5
def test_a_path_that_is_missing_is_named(tmp_path):
    """By `datasets`: it is taken for a dataset on the hub."""
    result = call(tmp_path / "missing.txt", tmp_path / "out", check=False)
    assert result.returncode == 1
    assert "missing.txt" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.law5
@pytest.mark.parametrize(
    ("num_proc", "right", "wrong", "problem"),
    [
        (1, {"text": TEXT[0]}, {"text": ["x"]}, " cannot be read: TypeError("),
        (2, {"text": TEXT[0]}, {"text": ["x"]}, " cannot be read: TypeError("),
        (2, {"input_ids": [1] * 64}, {"input_ids": [-1]}, ": input_ids has -1, which is not a "),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_file(
    num_proc, right, wrong, problem, tmp_path
):
    """Also the last one of many, in the second of two files."""
    (tmp_path / "d").mkdir()
    write_lines(tmp_path / "d" / "a.jsonl", [right] * 200)
    write_lines(tmp_path / "d" / "b.jsonl", [right] * 200 + [wrong])
    result = call(tmp_path / "d", tmp_path / "out", "--num-proc", num_proc, check=False)
    line = f"prepare.py: error: {tmp_path / 'd' / 'b.jsonl'}: row 201{problem}"
    assert line in result.err and "Traceback" not in result.err
    assert result.returncode == 1


@pytest.mark.law5
def test_a_second_process_for_the_same_folder_ends_at_once(made, prepare, tmp_path):
    """And the first one is not disturbed."""
    path = write_lines(tmp_path / "d.jsonl", [{"text": text} for text in TEXT])
    temporary = prepare.lock_out(tmp_path / "out")  # it is locked as long as this process lives
    (temporary / "out").mkdir()
    result = call(path, tmp_path / "out", check=False)
    said = f"-o {tmp_path / 'out'}: another prepare.py is writing this; wait for it, or choose"
    assert result.returncode == 1
    assert said in result.err and "Traceback" not in result.err
    assert (temporary / "out").exists()
    made(path, tmp_path / "other")


@pytest.mark.law5
def test_a_tokenizer_in_python_cannot_mark_answers(made, tmp_path):
    """That of ByT5 has no tokenizer.json. Texts are all trained on, and can be prepared."""
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "m")
    alpaca = write_lines(tmp_path / "alpaca.jsonl", ALPACA)
    with pytest.raises(SystemExit) as stop:
        made(alpaca, tmp_path / "out", "-m", tmp_path / "m")
    line = f"prepare.py: error: -m {tmp_path / 'm'}: its tokenizer has no tokenizer.json and cannot"
    assert str(stop.value.code).startswith(line)
    made(alpaca, tmp_path / "a", "-m", tmp_path / "m", "--text-column", "text")
    made(alpaca, tmp_path / "b", "-m", tmp_path / "m", "--train-on-prompt")


# From a file of chats to a model.


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations whose answers have from 1 to 30 words, and questions as many."""
    draw = random.Random(3)

    def words():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))

    rows = []
    for _ in range(400):
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages += [{"role": "user", "content": words()}]
            messages += [{"role": "assistant", "content": words()}]
        rows.append({"messages": messages})
    return write_lines(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture(scope="module")
def prepared(chats, tmp_path_factory):
    """The folder that prepare.py makes of them for tiny."""
    folder = tmp_path_factory.mktemp("prepared") / "prepared"
    said = call(chats, folder).out
    assert f"to train: python 01-single-gpu/train-llm.py -m tiny -d {folder} -e my-run" in said
    return folder


def test_the_tokenizer_of_tiny_is_the_same_in_every_process(prepared, prepare):
    saved = transformers.AutoTokenizer.from_pretrained(prepared / "tokenizer")
    assert saved.get_vocab() == prepare.load_tokenizer("tiny").get_vocab()


@pytest.mark.law1
@pytest.mark.parametrize(
    ("stage", "processes", "flags"),
    [
        ("01-single-gpu", 1, ("-b", "3")),
        ("03-fsdp", 3, ()),
        pytest.param("02-ddp", 3, (), marks=pytest.mark.slow),
    ],
)
def test_one_curve_on_chats(stage, processes, flags, prepared, curve):
    """The loss is the mean over the answers of the global batch, however it is split. Rows have
    the length that they were prepared with."""
    one = curve("01-single-gpu", 1, *FEW, "-d", prepared)
    assert_same_curve(one, curve(stage, processes, *FEW, *flags, "-d", prepared), range(1, 5))
    assert one[4]["train/tokens_seen"] == 4 * 8 * 64


def test_a_fine_tuned_base_model_stops_by_itself(tokenizer, tmp_path):
    """Base models of Qwen have a chat template that ends a turn with <|im_end|>, and a tokenizer
    and a generation_config that end a text with <|endoftext|>. Trained in 01 and on in 03, the
    model ends its answers, in a chat of `pipeline` and in the sample of the scripts. Its tokenizer
    has one token more than its embedding."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<image>"])
    tokenizer.chat_template = CHATML
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=len(tokenizer) - 1, bos_token_id=None, eos_token_id=0
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")

    answers = {"a?": "one, two", "b?": "three", "c?": "four, five, six"}
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in answers.items()
    ]
    path = write_lines(tmp_path / "d.jsonl", rows * 100)
    model = ("-m", tmp_path / "base")
    said = call(path, tmp_path / "data", *model).out
    assert "the chat template ends answers with <|im_end|>" in said
    flags = (*model, "-d", tmp_path / "data", "-e", "a", "--save-dir", tmp_path, *SMALL[2:])
    flags += ("--lr", "5e-3", "--lr-scheduler", "constant", "--num-epochs", 9, "--dtype", "fp32")
    run("01-single-gpu", 1, *flags, "--max-steps", 60)
    out = run("03-fsdp", 2, *flags, "--max-steps", 80, sampled=True).out
    assert list(metrics(tmp_path / "a"))[-1] == 80
    [written] = [x for x in out.splitlines() if x.startswith("what the model writes after it: ")]
    assert written.split(": ", 1)[1] in answers.values()

    folder = str(tmp_path / "a" / "final_model")
    write = transformers.pipeline("text-generation", model=folder)
    for question, answer in answers.items():
        chat = [{"role": "user", "content": question}]
        [result] = write(chat, max_new_tokens=60, do_sample=False)
        assert result["generated_text"][-1] == {"role": "assistant", "content": answer}
    assert write.model.generation_config.eos_token_id == [0, 258]


def test_rows_for_another_tokenizer_are_refused(prepared, tmp_path):
    """Its token numbers stand for other texts, and are all in the vocabulary."""
    tokenizer = transformers.GPT2Tokenizer({END: 0, **{chr(97 + i): 1 + i for i in range(26)}}, [])
    sizes = {"vocab_size": 1024, "n_embd": 32, "n_layer": 1, "n_head": 2}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    flags = (*FEW, "-m", tmp_path, "--from-scratch", "-d", prepared)
    result = run("01-single-gpu", 1, *flags, check=False)
    said = f"--dataset-name {prepared}: prepared for another tokenizer than {tmp_path} has"
    assert result.errors == [f"train-llm.py: error: {said}"]

"""prepare.py: which tokens of which rows are trained on."""

import gzip
import json
import os
import random
import signal
import sys
import time
from itertools import groupby
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import transformers
from conftest import (
    ROOT,
    SMALL,
    assert_same_curve,
    finish,
    fork,
    metrics,
    run,
    save_tokenizer,
    start,
)
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

import prepare

FEW = (*SMALL[2:], "--max-steps", "4", "--log-freq", "1", "--dtype", "fp32")
END = "<|endoftext|>"
# Chat templates. This one writes u>q;a>a;
SHORT = """{%- for m in messages -%}{{ m.role[0] + ">" + m.content + ";" }}{%- endfor -%}
{{- "a>" if add_generation_prompt else "" }}"""
OPEN = SHORT.replace('";"', '""')  # it does not end answers, as that of GLM-4
DATED = '{{ strftime_now("") }}' + SHORT  # as that of Llama 3.2
TRIMS = SHORT.replace("m.content", "m.content | trim")
MARKED = SHORT.replace("m.content", '"" }}{% generation %}{{ m.content }}{% endgeneration %}{{ ""')
# It writes reasoning into the last answer only, as templates of reasoning models do.
THINKS = SHORT.replace('">"', '(">" if m.role == "user" or not loop.last else "><think>")')
ASKS_TO_THINK = SHORT.replace('"a>"', '"a><think>"')  # which an answer may lack
TOOLS = SHORT.replace("m.content", 'm.content + ("T" if m.tools is defined else "")')
CALLS = SHORT.replace("m.content", 'm.content + (m.tool_calls | tojson if m.tool_calls else "")')
# As Mistral's, which often omits the system's messages, and Qwen's, those of an unknown role.
OMITS = SHORT.replace("endfor", "endif -%}{%- endfor")
OMITS = OMITS.replace("{{ m", '{%- if m.role in ("user", "assistant") -%}{{ m')
# As Llama's, which writes no content beside a call, and others, no reasoning.
ONLY_CALLS = SHORT.replace(
    "m.content", "(m.tool_calls[0].function.name if m.tool_calls else m.content)"
)
REASONS = SHORT.replace("m.content", '(m.reasoning_content or "") + m.content')
# Three ways to write the arguments of a call, and what they write.
WRITTEN = {"| tojson": '{"city": "Oslo"}', ".items() | list | string": "[('city', 'Oslo')]"}
WRITTEN |= {'+ ""': '{"city": "Oslo"}', '~ ""': '{"city": "Oslo"}'}
CALLED = SHORT.replace(
    "m.content", "(m.tool_calls[0].function.arguments WAY if m.tool_calls else m.content)"
)
WITH_TOOLS = "{{ (tools | tojson) if tools else '' }}" + SHORT
REFUSES = "{{ raise_exception('too long') if messages | length > 5 }}" + THINKS
ROLES = {"s": "system", "u": "user", "a": "assistant", "n": "narrator"}
SHAREGPT = {"s": "system", "u": "human", "a": "gpt"}


def chat(text, role="role", content="content", names=ROLES):
    """Messages, as SHORT writes them."""
    turns = [turn.split(">", 1) for turn in text.removesuffix(";").split(";")]
    return [{role: names[name], content: value} for name, value in turns]


QA = chat("u>q;a>a")
PARTS = {"role": "user", "content": [{"text": "7"}, {"text": " a"}]}
FREE = {"role": "assistant", "content": "b", "weight": 0}
CALL = {"role": "assistant", "tool_calls": [4, 0.5, "4"]}
CALLS_F = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOOL_TEXT, EACH_TOOL = json.dumps(TOOL), [json.dumps(TOOL[0])]
FUNCTIONS = {"functions": TOOL_TEXT, "messages": QA}
JSON_PROMPT = {"prompt": json.dumps(QA[:1]), "completion": json.dumps(QA[1:])}
SYSTEM_PROMPT = {"prompt": QA, "completion": QA, "system_message": "s"}
REASONED = {"role": "assistant", "reasoning_content": "r", "content": "a"}
HARMLESS = {"toxic": False, "id": 4, "weight": 1, "train": "True"}
ALPACA = {"instruction": "q", "input": "", "output": "a", "text": "b"}
ASKED = "### Instruction:\nq\n\n### Response:\n"
ASKED_OF = ASKED.replace("q", "q\n\ni")
LONG = "s>Be brief.;u>Größe? 😀;a>groß 😀;u>Sure?;a>Yes.;"
LONG_MARKED = "s>Be brief.;u>Größe? 😀;a>⟦groß 😀;⟧u>Sure?;a>⟦Yes.;⟧"
TEXT = [" ".join(random.Random(i).choices(["one", "two", "six", "ten"], k=30)) for i in range(200)]
# Arguments of calls, as they were written, and as the template should see them.
ARGUMENTS = [{"city": "Rome"}, {"a": 4, "many": [{"x": 1}, {"y": [None, 2]}]}, {}, {"b": 0.5}]
NO_ANSWER = "no answer of the assistant, but messages of"
EACH = ("--strategy", "overflow", "-s", 999)  # a row for each of some short documents
AROUND = [("<s> $A", "<s>"), (f"{END} $A {END}", END), (f"$A {END}", ""), ("$A", "")]
ENDINGS = [".csv", ".json", ".jsonl", ".txt", ".parquet", ".csv.gz", ".json.gz", ".jsonl.gz"]
ENDINGS += [".txt.gz", ".csv.zst", ".json.zst", ".jsonl.zst", ".txt.zst"]
# What `datasets` takes for numbers, truth values, dates and missing values.
VALUES = ["007", "8", "TRUE", "2021-05-03", "None", "NA", "1e5", "0.50", 'a "b"\r\nc,\n d ', "é"]
STAGES = [("01-single-gpu", 1, ("-b", "3")), ("03-fsdp", 3, ())]
STAGES += [pytest.param("02-ddp", 3, (), marks=pytest.mark.slow)]


def write(path, rows, encoding="utf-8"):
    """Writes rows, or bytes, to a file of the format in its name. A .txt is one document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(rows, bytes):
        path.write_bytes(rows)
        return path
    ending = prepare.ending_of(path)
    if ending == ".saved":
        data = datasets.Dataset(pyarrow.Table.from_pylist(rows))  # `from_list` may keep objects
        data.with_format("torch").save_to_disk(path)
        return path
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if ending == ".json":
        content = json.dumps(rows)
    elif ending == ".csv":
        content = pandas.DataFrame(rows or {"text": []}).to_csv(index=False, lineterminator="\r\n")
    elif ending == ".txt":
        content = END.join(row["text"] for row in rows)
    content = content.encode(encoding)
    if ending == ".parquet":
        content = pandas.DataFrame(rows or {"text": []}).to_parquet()
    elif path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def tokenizer():
    """Each byte is a token of it, so that tests can tell which tokens a text has."""
    vocabulary = dict(zip([END, *sorted(ByteLevel.alphabet())], range(257), strict=True))
    return transformers.GPT2Tokenizer(vocabulary, merges=[], model_max_length=256)


@pytest.fixture
def made(tokenizer, tmp_path, monkeypatch, capsys):
    """Runs the program in this process, with bytes as tokens. Returns rows, and what it said."""
    monkeypatch.chdir(tmp_path)

    def made_by(data, *flags):
        tokenizer.save_pretrained(".model")
        command = ["prepare.py", "-m", ".model", "-o", "out", "-d", data, *flags]
        monkeypatch.setattr("sys.argv", [str(word) for word in command])
        args = prepare.parse_args()
        prepare.main(args)
        said = capsys.readouterr().out
        command = f"train-llm.py -m {args.model_name} -d {args.out} -e my-run"
        assert said.endswith(f"to train: python 01-single-gpu/{command}\n")
        return pyarrow.parquet.read_table(f"{args.out}/train.parquet").to_pylist(), said

    return made_by


def marked(rows, tokenizer):
    """Their text, up to where the padding begins. What is trained on is between ⟦ and ⟧."""
    texts = []
    for row in rows:
        text = ""
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        for has_loss, part in groupby(pairs, lambda pair: pair[1] != -100):
            ids, labels = zip(*part, strict=True)
            assert not has_loss or ids == labels
            text += f"⟦{tokenizer.decode(ids)}⟧" if has_loss else tokenizer.decode(ids)
        texts.append(text[: text.rindex("⟧") + 1])
    return texts


def call(data, out, *flags):
    """Runs prepare.py in a process of its own, with rows of 64 tokens."""
    flags = ("-m", "tiny", "-d", data, "-o", out, "-s", 64, *flags)
    return finish(fork(ROOT / "prepare.py", None, *flags))


DOCUMENTS = {
    "--text-column text": (None, ALPACA, f"⟦b{END}⟧"),
    "--train-on-prompt": (None, ALPACA, f"⟦{ASKED}a{END}⟧"),
    "Alpaca, also with a text": (None, ALPACA, f"{ASKED}⟦a{END}⟧"),
    "two strings": (SHORT, {"prompt": "1 + 1 =", "completion": " 2"}, f"1 + 1 =⟦ 2{END}⟧"),
    "no prompt": (None, {"prompt": None, "completion": "a"}, f"⟦a{END}⟧"),
    "no input": (None, {"instruction": "q", "output": "a"}, f"{ASKED}⟦a{END}⟧"),
    "input": (None, {"instruction": "q", "input": "i", "output": 4}, f"{ASKED_OF}⟦4{END}⟧"),
    "null input": (None, {"instruction": "q", "input": None, "output": "a"}, f"{ASKED}⟦a{END}⟧"),
    "no template": (None, {"messages": chat("s>s;u>q;a>a")}, f"### System:\ns\n\n{ASKED}⟦a{END}⟧"),
    "turns": (None, {"messages": QA * 2}, f"{ASKED}⟦a{END}⟧\n\n{ASKED}⟦a{END}⟧"),
    "what ends an answer": (SHORT, {"messages": chat(LONG)}, LONG_MARKED),
    "marks change nothing": (MARKED, {"messages": chat(LONG)}, LONG_MARKED),
    "ShareGPT": (SHORT, {"conversations": chat(LONG, "from", "value", SHAREGPT)}, LONG_MARKED),
    "not the answers of a prompt": (SHORT, {"prompt": QA, "completion": QA}, "u>q;a>a;u>q;a>⟦a;⟧"),
    "empty in a prompt": (SHORT, {"prompt": chat("u>q;a>"), "completion": QA}, "u>q;a>;u>q;a>⟦a;⟧"),
    "empty question": (SHORT, {"messages": chat("u>;a>a")}, "u>;a>⟦a;⟧"),
    "not a greeting": (SHORT, {"messages": chat("a>a;u>q;a>a")}, "a>a;u>q;a>⟦a;⟧"),
    "not weight 0": (SHORT, {"messages": QA * 2 + [QA[0], FREE]}, "u>q;a>⟦a;⟧u>q;a>⟦a;⟧"),
    "messages in JSON": (SHORT, {"messages": json.dumps(chat(LONG))}, LONG_MARKED),
    "a completion in JSON": (SHORT, JSON_PROMPT, "u>q;a>⟦a;⟧"),
    "a completion of JSON": (SHORT, {"prompt": "q ", "completion": "[1]"}, f"q ⟦[1]{END}⟧"),
    "Dolly": (None, {"instruction": "q", "context": "i", "response": "a"}, f"{ASKED_OF}⟦a{END}⟧"),
    "system": (SHORT, {"system": "s", "messages": QA}, "s>s;u>q;a>⟦a;⟧"),
    "system of Alpaca": (SHORT, {**ALPACA, "system_prompt": "s"}, "s>s;u>q;a>⟦a;⟧"),
    "system of a prompt": (SHORT, SYSTEM_PROMPT, "s>s;u>q;a>a;u>q;a>⟦a;⟧"),
    "system twice": (SHORT, {"system": "s", "messages": chat("s>s;u>q;a>a")}, "s>s;u>q;a>⟦a;⟧"),
    "no system": (SHORT, {"system": "", "tools": [], "label": None, "messages": QA}, "u>q;a>⟦a;⟧"),
    "tools": (WITH_TOOLS, {"tools": TOOL, "messages": QA}, f"{TOOL_TEXT}u>q;a>⟦a;⟧"),
    "tools in JSON": (WITH_TOOLS, FUNCTIONS, f"{TOOL_TEXT}u>q;a>⟦a;⟧"),
    "each in JSON": (WITH_TOOLS, {"tools": EACH_TOOL, "messages": QA}, f"{TOOL_TEXT}u>q;a>⟦a;⟧"),
    "reasoning": (REASONS, {"messages": [QA[0], REASONED]}, "u>q;a>⟦ra;⟧"),
    "harmless keys": (SHORT, {"messages": [QA[0], QA[1] | HARMLESS]}, "u>q;a>⟦a;⟧"),
    "null": (TOOLS, {"messages": [turn | {"tools": None} for turn in QA]}, "u>q;a>⟦a;⟧"),
    "a list of parts": (SHORT, {"messages": [PARTS, QA[1]]}, "u>7 a;a>⟦a;⟧"),
    "other keys": (SHORT, {"messages": [{"from": "gpt", "content": "a"}] + QA}, "a>a;u>q;a>⟦a;⟧"),
    "a call keeps its numbers": (CALLS, {"messages": [QA[0], CALL]}, 'u>q;a>⟦[4, 0.5, "4"];⟧'),
    "the prompt ends in what is not in the answer": (ASKS_TO_THINK, {"messages": QA}, "u>q;a>⟦a;⟧"),
    "the template writes the date": (DATED, {"messages": QA}, "u>q;a>⟦a;⟧"),
    "the template trims": (TRIMS, {"messages": chat("u> q ;a>a")}, "u>q;a>⟦a;⟧"),
    "open end": (OPEN, {"messages": QA * 2}, f"u>qa>⟦a{END}⟧|u>qa>au>qa>⟦a{END}⟧"),
    "rewritten": (THINKS, {"messages": QA * 2}, "u>q;a>⟦<think>a;⟧|u>q;a>a;u>q;a>⟦<think>a;⟧"),
}
for names in ("user assistant", "USER Assistant", "human gpt", "prompter bot", "user model"):
    messages = chat("u>q;a>a", names=dict(zip("ua", names.split(), strict=True)))
    DOCUMENTS[f"roles: {names}"] = (SHORT, {"messages": messages}, "u>q;a>⟦a;⟧")


MARKED_0 = (("weight", "0"), ("loss", False), ("loss", 0.0), ("train", "False"), ("loss_mask", 0))
for name, value in (*MARKED_0, ("trainable", False)):  # the last two: verl#5316
    messages = [*QA * 2, QA[0], {"role": "assistant", "content": "b", name: value}]
    document = {"messages": messages, name: 1}
    DOCUMENTS[f"not {name}: {value!r}"] = (SHORT, document, "u>q;a>⟦a;⟧u>q;a>⟦a;⟧")
for way, written in WRITTEN.items():
    city = {"city": "Oslo"}
    flat = {"name": "f", "arguments": city}
    template = CALLED.replace("WAY", way)
    for form, called in {
        "an object": {"tool_calls": [{"function": {"arguments": city}}]},
        "a text": {"tool_calls": [{"function": {"arguments": '{"city":"Oslo"}'}}]},
        "all a text": {"tool_calls": json.dumps([{"function": {"arguments": city}}])},
        "without a function": {"tool_calls": [flat]},
        "of an older API": {"function_call": {**flat, "arguments": json.dumps(city)}},
        "of ShareGPT": {"role": "function_call", "content": json.dumps(flat)},
    }.items():
        document = {"messages": [QA[0], {"role": "assistant"} | called]}
        DOCUMENTS[f"arguments {way}, {form}"] = (template, document, f"u>q;a>⟦{written};⟧")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_trained_on(name, made, tokenizer, tmp_path):
    """Examples are separated by |. The trained model stops at what ends the last one."""
    template, document, expected = DOCUMENTS[name]
    tokenizer.chat_template = template
    tokenizer.add_tokens([";", "<think>"], special_tokens=template != OPEN)
    flags = name.split() if name.startswith("--") else ()
    rows, said = made(write(tmp_path / "d.jsonl", [document]), *EACH, *flags)
    texts = marked(rows, tokenizer)
    assert "|".join(texts) == expected
    assert f"the first row, trained on between ⟦ and ⟧:\n{texts[0]}\n" in said
    assert "left out" not in said
    saved = transformers.AutoTokenizer.from_pretrained("out/tokenizer")
    assert expected.endswith(f"{saved.eos_token}⟧")
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert ("the chat template writes the date" in said) == (template == DATED)
    assert (f"does not end answers, so this does: {END}\n" in said) == (template == OPEN)


UNWANTED = {"prompt": "q", "completion": "a", "loss": 0}
LEFT_OUT = {
    f": {NO_ANSWER}: nobody": (SHORT, None),
    f": {NO_ANSWER}: user, narrator": (SHORT, chat("u>q;n>a")),
    f": {NO_ANSWER}: assistant, user": (SHORT, chat("a>a;u>q")),
    ": an answer is empty": (SHORT, chat("u>q;a> ")),
    f": a message has the special token {END}": (SHORT, chat(f"u>q{END};a>a")),
    ": the chat template does not write a message of: system": (OMITS, chat(LONG)),
    ", the chat template says: too long": (REFUSES, QA * 3),
    ": marked as not to be trained on": (SHORT, QA, {"train": False}),
    ": marked as not to be trained on ": (
        None,
        None,
        {"prompt": "q", "completion": "a", "loss": 0},
    ),
    ": a system message, and another one in a column": (SHORT, chat(LONG), {"system": "t"}),
    ": the chat template does not write the tools": (SHORT, QA, {"tools": TOOL}),
    ": the chat template does not write the calls of an answer": (
        SHORT,
        [QA[0], {"role": "assistant", "content": "a", "tool_calls": CALLS_F}],
    ),
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_conversation_is_left_out_and_counted(reason, made, tokenizer, tmp_path, capsys):
    tokenizer.chat_template, messages, *columns = LEFT_OUT[reason]
    rows = [{"messages": messages, **dict(*columns)}]
    if "prompt" in rows[0]:
        del rows[0]["messages"]
    with pytest.raises(SystemExit, match="train: this does not fill a row of 256 tokens"):
        made(write(tmp_path / "d.jsonl", rows))
    said = capsys.readouterr().out
    assert said.endswith(f"train: 1 documents in 1 file(s)\n  1 left out{reason.rstrip()}\n")


# Keys of an answer and, if it is another one, its template.
UNWRITTEN = {
    "reasoning_content": ("r", SHORT),
    "thinking": ("r", SHORT),
    "name": ("Bob", SHORT),
    "notes": ([{"a": ["b c"]}], SHORT),
    "content": ("Let me look.", ONLY_CALLS),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_the_template_does_not_write_is_counted(name, made, tokenizer, tmp_path):
    value, tokenizer.chat_template = UNWRITTEN[name]
    answer = {"role": "assistant", "content": "a", "tool_calls": CALLS_F} | {name: value}
    if name != "content":
        del answer["tool_calls"]
    _, said = made(write(tmp_path / "d.jsonl", [{"messages": [QA[0], answer]}] * 40), "-s", 8)
    line = f"  40 left out: {name} of a message, which the chat template does not write\n"
    assert line in said and said.count("of a message") == 1


@pytest.mark.parametrize("kind", ["parquet", "saved", "jsonl"])
def test_calls_have_the_arguments_that_they_were_written_with(kind, made, tokenizer, tmp_path):
    """Parquet gives each call the arguments of all, with nulls. In JSON, a null is a value."""
    tokenizer.chat_template = CALLS
    arguments = [*ARGUMENTS, {"city": None}] if kind == "jsonl" else ARGUMENTS
    calls = [[{"function": {"arguments": argument}}] for argument in arguments]
    rows = [{"messages": [QA[0], {"role": "assistant", "tool_calls": call}]} for call in calls]
    expected = [f"u>q;a>⟦{json.dumps(call)};{END}⟧" for call in calls]
    rows, _ = made(write(tmp_path / f"d.{kind}", rows), *EACH)
    assert marked(rows, tokenizer) == expected


@pytest.mark.parametrize(("form", "begin"), AROUND)
def test_special_tokens_that_are_there_are_not_added(form, begin, made, tokenizer, tmp_path):
    """Nor between the pieces of a long text. One that begins a prompt has no loss. Conversations
    without a template begin as texts do."""
    if begin == "<s>":
        tokenizer.add_special_tokens({"bos_token": "<s>"})
    special_tokens = [(END, tokenizer.eos_token_id), (tokenizer.bos_token, tokenizer.bos_token_id)]
    around = TemplateProcessing(single=form, special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = around
    texts = ["ab", f"{begin}ab", f"ab{END}", f"{begin}ab{END}"]
    more = [f"a{begin}b", "a" * 40_000, "ab\n" * 15_000]
    path = write(tmp_path / "d.jsonl", [{"text": text} for text in [*texts, *more]])
    assert len([*prepare.pieces_of({"text": more[2]}, ("text",), "row 1")]) > 3
    rows, said = made(path, *EACH, "-s", 50_000)
    expected = [f"⟦{begin}{text}{END}⟧" for text in ["ab"] * 4 + more]
    assert marked(rows, tokenizer) == expected
    assert "train: 7 documents in 1 file(s)" in said
    parts = [text.partition("b") for text in texts]
    write(path, [{"prompt": prompt, "completion": b + rest} for prompt, b, rest in parts])
    rows, _ = made(path, *EACH, "-o", "prompts")
    assert marked(rows, tokenizer) == [f"{begin}a⟦b{END}⟧"] * 4
    write(path, [{"messages": QA}])
    rows, _ = made(path, *EACH, "-o", "chats")
    assert marked(rows, tokenizer) == [f"{begin}{ASKED}⟦a{END}⟧"]


def test_a_tokenizer_without_an_end_of_text_joins_documents_bare(made, tokenizer, tmp_path):
    tokenizer.eos_token = None
    texts = [{"text": text} for text in ("ab", None, "c")]
    rows, said = made(write(tmp_path / "d.jsonl", texts), "-s", 3)
    assert marked(rows, tokenizer) == ["⟦abc⟧"]
    assert "the tokenizer has no end-of-text token: nothing separates documents" in said


def test_a_token_over_the_border_belongs_to_the_answer():
    """Tokens of a prompt and its answer may be one: such as a space and the word after it."""
    vocabulary = {END: 0, "a": 1, "Ġ": 2, "b": 3, "Ġb": 4}
    tokenizer = transformers.GPT2Tokenizer(vocabulary, merges=[("Ġ", "b")])
    piece = prepare.Piece({"prompt": "a ", "completion": "b"}, "row")
    tokens, _, _ = prepare.tokenize(tokenizer, ("prompt", "completion"), None, False, [piece])
    assert tokens.tolist() == [[1, 4, 0], [-100, 4, 0]]


@pytest.mark.parametrize("ending", ENDINGS)
def test_documents_are_read_and_files_without_any_read_over(ending, made, tokenizer, tmp_path):
    """As tools leave them for each of their workers. A .txt is one document."""
    rows = [{"text": text} for text in TEXT]
    write(tmp_path / "d" / f"my.data{ending}", rows, "utf-8-sig")
    write(tmp_path / "d" / f"test{ending}", rows[:50])
    write(tmp_path / "d" / f"a{ending}", [])  # a .csv of one line, for the names
    write(tmp_path / "d" / f"z{ending}", b"" if ending in (".csv", ".json") else [])
    rows, said = made("d", "-s", 32)
    text = "".join(marked(rows, tokenizer)).replace("⟧⟦", "").strip("⟦⟧")
    assert (END.join(TEXT) + END).startswith(text)
    assert len(text) > len(END.join(TEXT)) - 32 - len(END)
    assert "columns not used: none\n" in said
    is_text = ".txt" in ending
    assert f"train: {3 if is_text else 200} documents in 3 file(s)" in said
    assert f"validation: {1 if is_text else 50} documents in 1 file(s)" in said
    assert ("2 left out: no text" in said) == is_text


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".json"])
def test_values_are_those_of_the_file(ending, made, tokenizer, tmp_path):
    """No type is guessed. A mark (BOM) and line ends of Windows are no part of a value."""
    path = tmp_path / f"d{ending}"
    if ending == ".csv":
        write(path, [{"text": value, "empty": ""} for value in ["", *VALUES]], "utf-8-sig")
    else:
        values = ["4", "0.5", "0.50", *map(json.dumps, VALUES)]
        objects = [f'{{"text": {value}, "empty": null}}' for value in values]
        text = f"[{','.join(objects)}]" if ending == ".json" else "\r\n".join([*objects, "", ""])
        path.write_bytes(text.encode("utf-8-sig"))
    rows, said = made(path, *EACH)
    values = VALUES if ending == ".csv" else ["4", "0.5", "0.50", *VALUES]
    assert marked(rows, tokenizer) == [f"⟦{value}{END}⟧" for value in values]
    assert ("1 left out: no text" in said) == (ending == ".csv")


ALL = "a b.txt, below/a.txt, b.jsonl, c[1].txt, part-00000-of-00001.txt, Train.csv, tests.txt"
FOLDERS = {  # the files of the split train and of validation, others, what is said of them
    "all formats": (ALL, "", "e.md, link, LICENSE", "not read: LICENSE, e.md, link\n"),
    "hidden files": ("a.txt", "", ".b.txt, .c/d.txt", ""),
    "descriptions": ("a.json", "", "dataset_info.json, dataset_infos.json", ""),
    "splits": ("a.txt", "Val/c.txt", "dev/d.txt, test.txt", "not read: the splits dev, test\n"),
    "names": (
        "contest.csv, the train.txt, my test notes.txt, train_data.csv, latest.txt",
        "dev_data.csv",
        "",
        "trained on: my test notes.txt (the name says test; to hold a file out, call it test.txt)",
    ),
    "C4": ("c4-train.00007-of-01024.json.gz", "c4-validation.00001-of-00008.json.gz", "", ""),
    "news": ("news.train.jsonl", "news.dev.jsonl", "", ""),
    "numbers": ("train-1.jsonl, train-22.jsonl", "valid-1.jsonl", "", ""),
    "stories": ("TinyStories-train.txt", "TinyStories-valid.txt", "", ""),
    "training": ("my_training.csv", "my_testing.csv", "", ""),
    "evaluation": ("train.csv", "evaluation.csv", "", ""),
    "folders": ("my-train/a.csv, my-train/b.csv", "my-test/a.csv", "", ""),
    "part of a word": ("www_farodevigo_es.jsonl.gz", "", "", ""),  # datasets#3788
    "one file of all": (
        "test-1.csv, a.csv",
        "",
        "",
        "trained on: test-1.csv (the name says test; to",
    ),
    "hub": ("train_sft#", "data/test_sft#", "train_gen#", "not read: the splits train_gen\n"),
    "our own": ("train.parquet", "validation.parquet", "tokenizer/tokenizer.json", ""),
    "of a tokenizer": ("tokenizer/a.json", "", "", ""),
}
for name in ("validation", "valid", "Val", "eval", "Dev", "test"):
    for held_out in (f"{name}.txt", f"{name}/a.txt"):
        FOLDERS[f"{held_out} alone"] = (held_out, "", "", f"trained on: {held_out} (the name says")
        FOLDERS[held_out] = ("b.txt", held_out, "", "")
    if name != "validation":
        said = f"not read: the splits {name.lower()}\n"
        FOLDERS[f"{name} and validation"] = ("b.txt", "validation#", held_out, said)


@pytest.mark.parametrize("name", FOLDERS)
def test_which_files_of_a_folder_are_read(name, tmp_path, capsys):
    """Here # stands for what names on the hub end in."""
    *files, line = (value.replace("#", "-00000-of-00001.parquet") for value in FOLDERS[name])
    files = [[tmp_path / "d" / x for x in names.split(", ") if x] for names in files]
    train, validation, others = map(sorted, files)
    for path in train + validation + others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path) if path.name == "link" else path.touch()
    expected = {"train": train, "validation": validation} if validation else {"train": train}
    assert prepare.load_splits(str(tmp_path / "d"), None) == expected
    said = capsys.readouterr().out
    assert line in said and bool(line) == bool(said) and len(said.splitlines()) < 2


NOT_A_LIST = " cannot be read: TypeError('input_ids is not a list of integers')"
NO_TOKEN = "which is not a token of -m: its tokens are 0 to 256, and a label without a loss is -100"
LABELS = "input_ids: give each token a label, -100 where there is no loss"
RIGHT = {"input_ids": [1, 2, 3], "documents": [3]}
MASKS = ([1, 1, 0], [True, True, False], [1.0, 1.0, 0.0])
# Columns of a row of tokens that are wrong, and what is said of them.
TOKENS = [({"mask": x}, ": the column mask has a number for each token, and wo") for x in MASKS]
TOKENS += [({"attention_mask": x}, ": attention_mask has zeros, for padding: give") for x in MASKS]
TOKENS += [({"labels": [1, 2, 3]}, ": it has labels, but the first row has none: give them to all")]
for wrong in (-2, -100, 257, 2**31):
    TOKENS += [({"input_ids": [1, wrong, 3]}, f": input_ids has {wrong}, {NO_TOKEN}")]
for wrong in ([1, 2**70, 3], [1, 2.0, 3], [True, False], [1, None, 3], [[1], [2]], "[1, 2]"):
    TOKENS += [({"input_ids": wrong}, NOT_A_LIST)]
COUNTS = (([1, 2], 2), ([], 0), (None, 0), (1, 1))
LABELLED = [(wrong, f": it has {count} labels for 3 {LABELS}") for wrong, count in COUNTS]
LABELLED += [([1, wrong, 3], f": labels has {wrong}, {NO_TOKEN}") for wrong in (-1, 300)]
LABELLED += [([0.0, 1.0, 1.0], NOT_A_LIST.replace("input_ids", "labels"))]
T = [{"text": "a"}]
IMAGE = {"role": "user", "content": [{"type": "image", "url": "a"}]}
CHATS = [  # columns of a conversation, and what is said of them
    ({"history": [["q", "a"]]}, "the column history has earlier turns: put them into messages"),
    ({"label": False}, "the column label may say which answers are good: leave out rows of bad"),
    ({"messages": [QA[0], QA[1] | {"weight": 0.5}]}, "weight is 0.5: only 0 and 1 are known, or"),
    ({"loss": [0, 1]}, "the column loss may say which messages have no loss: give those the key"),
    ({"turns": [True]}, "the column turns may say which messages have no loss: give those the key"),
    ({"weight": "half"}, "weight is half: only 0 and 1 are known, or false and true"),
    ({"messages": [QA[0], QA[1] | {"masked": True}]}, "an answer has masked, which is True: if 0"),
    ({"messages": [QA[0], QA[1] | {"mask": 0.0}]}, "an answer has mask, which is 0.0: if 0 or"),
    ({"messages": "u>q"}, "a list of messages is a text that is not JSON"),
    ({"messages": [IMAGE, QA[1]]}, "a message has a part of type image"),
    ({"tools": "f, g"}, "tools is a text that is not JSON"),
]
PROMPT = {"prompt": "q", "completion": "a", "system": "s"}
BAD = [  # the flags after -d, what is in this file, and what is said
    ("d.txt", "abc".encode("utf-16"), "d.txt: after 0 documents: 'utf-8' codec can't decode"),
    ("d.jsonl", b'{"text": "a"}\n{"text": "b', "d.jsonl: after 1 documents: Unterminated string"),
    ("d.json", b'[{"text": "a"}, 4]', "d.json: after 1 documents: not an object: 4"),
    ("d.csv", b"text,b\na,b\na,b,c\n", "d.csv: after 1 documents: line 3 has more or fewer values"),
    ("d.csv", b"text,b\na,b\na\n", "d.csv: after 1 documents: line 3 has more or fewer values"),
    ("d.csv", b'text,b\na,b\n"a,b\n', "d.csv: after 1 documents: unexpected end of data"),
    ("d.csv", b"text,b,text\na,b,c\n", "d.csv: after 0 documents: two columns have the same name"),
    ("d.txt.gz", gzip.compress(bytes(999))[:-9], "d.txt.gz: after 0 documents: Compressed file"),
    ("d.parquet", b"abc", "d.parquet: after 0 documents: Parquet file size is 3 bytes"),
    ("d.jsonl", [{"a": 1, "b": 2}], "choose one of the columns a, b with --text-column, or call"),
    ("d.jsonl --text-column c", T, "choose one of the columns text with --text-column, or call"),
    ("d.jsonl", [{"messages": [{"who": 1}]}], "d.jsonl: row 1 cannot be read: KeyError('role')"),
    ("d.jsonl", [{"prompt": "a", "completion": {}}], "d.jsonl: row 1 cannot be read: TypeError("),
    ("d.jsonl", [*T, {"text": ["x"]}], "d.jsonl: row 2 cannot be read: TypeError("),
    ("d.jsonl", [{"text": "a \ud83d"}], "d.jsonl: row 1 cannot be read: UnicodeEncodeError("),
    ("d.jsonl --dataset-subset en", T, "--dataset-subset en: is for a dataset on the hub, d.jsonl"),
    ("d.jsonl -o .", T, "-o .: this exists already"),
    ("d.jsonl", b"", "-d d.jsonl: there are no documents to train on"),
    ("d.txt", b"hello world " * 10, "train: this does not fill a row of 256 tokens (-s)"),
    ("LICENSE", b"", "-d LICENSE: no file ends in .txt, .json, .jsonl, .csv, .parquet"),
    (".model/empty", b"", "-d .model/empty: no file ends in .txt, .json, .jsonl, .csv, .parquet"),
    ("d.jsonl --train-on-prompt", [RIGHT], "--train-on-prompt: these rows are tokens: give them"),
    *(("d.jsonl", [RIGHT] * 9 + [RIGHT | row], f"d.jsonl: row 10{line}") for row, line in TOKENS),
    *(("d.jsonl", [RIGHT | {"labels": x}], f"d.jsonl: row 1{line}") for x, line in LABELLED),
    *(("d.jsonl", [{"messages": QA} | row], f"d.jsonl: row 1: {line}") for row, line in CHATS),
    ("d.jsonl", [PROMPT], "d.jsonl: row 1: the column system is for chats, so give lists of"),
    ("d.saved", [RIGHT | {"labels": None}], f"train: row 1: it has 0 labels for 3 {LABELS}"),
    ("d.jsonl", [{**RIGHT, "labels": [1, 2, 3], "a": [0, 1, 1]}], "d.jsonl: row 1: the column a"),
]


@pytest.mark.law5
@pytest.mark.parametrize(("flags", "content", "line"), BAD, ids=[f"{x[0]} {x[2]}" for x in BAD])
def test_one_line_says_what_is_wrong(flags, content, line, made, tmp_path):
    """Also if the first documents can be read. No folder is left."""
    path = tmp_path / flags.split()[0]
    write(path, content)
    with pytest.raises(SystemExit) as stop:
        made(*flags.split())
    said = str(stop.value.code)
    assert said.startswith(f"prepare.py: error: {line}") and len(said.splitlines()) == 1
    assert {file.name for file in tmp_path.iterdir()} <= {path.name, ".model"}


@pytest.mark.law5
def test_a_tokenizer_in_python_cannot_mark_answers(made, tmp_path):
    transformers.ByT5Tokenizer().save_pretrained("m")
    flags = (write(tmp_path / "d.jsonl", [ALPACA] * 99), "-s", 64, "-m", "m")
    with pytest.raises(SystemExit, match="error: -m m: its tokenizer has no tokenizer.json and ca"):
        made(*flags)
    made(*flags, "-o", "a", "--text-column", "text")
    _, said = made(*flags, "-o", "b", "--train-on-prompt")
    assert "training on instruction, input, output; columns not used: text\n" in said


@pytest.mark.law5
def test_splits_of_save_to_disk_and_mds_are_read_or_named(made, tmp_path, monkeypatch):
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]})
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk("saved")
    rows, said = made("saved")
    assert [row["input_ids"] for row in rows] == [[1, 2], [3, 4]]
    assert "train: 2 documents\n" in said and "validation: 1 documents\n" in said
    datasets.DatasetDict(a=data, b=data).save_to_disk("other")
    with pytest.raises(SystemExit, match="-d other: no split is called train, there are a, b"):
        prepare.load_splits("other", None)
    for split in ("train", "val"):
        write(tmp_path / "d" / split / "index.json", [])
        write(tmp_path / "d" / split / "shard.00000.mds", [])
    monkeypatch.setitem(sys.modules, "streaming", None)
    with pytest.raises(SystemExit, match="to read an MDS folder: pip install mosaicml-streaming"):
        prepare.load_splits("d", None)
    monkeypatch.setitem(sys.modules, "streaming", SimpleNamespace(LocalDataset="MDS of {}".format))
    expected = {"train": ["MDS of d/train"], "validation": ["MDS of d/val"]}
    assert prepare.load_splits("d", None) == expected
    assert prepare.load_splits("d/val", None) == {"train": ["MDS of d/val"]}


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".jsonl.gz", ".parquet", ".saved", ".mds"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_rows_of_tokens_are_kept_and_read_again(made, kind, has_labels, monkeypatch, tmp_path):
    """The rows of a saved dataset may be tensors, those of MDS arrays."""
    rows, expected = [], []
    for number in range(50):
        ids = [*range(number, number + 20)]
        labels = [-100] * 7 + ids[7:18] + [-100] * 2 if has_labels else ids
        expected.append({"input_ids": ids, "labels": labels})
        row = {"id": number, "attention_mask": [1] * 18 + [int(not has_labels)] * 2, "length": 20}
        row |= {"words": ["a"] * 20, "special_tokens_mask": [0] * 20, "sizes": [9, 11]}
        row |= {"position_ids": ids, "input_ids": ids, "text": "a", "messages": "b"}
        rows.append(row | ({"labels": labels} if has_labels else {}))
    path = tmp_path / f"d{kind}"
    if kind == ".mds":
        arrays = [{k: np.array(v) if k != "words" else v for k, v in row.items()} for row in rows]
        monkeypatch.setattr(prepare, "load_splits", lambda *_: {"train": [arrays]})
    else:
        write(path, rows)
    result, said = made(path)
    assert result == expected
    assert "rows of 20 tokens, as the first one has (-s)" in said
    used = "input_ids, labels" if has_labels else "input_ids"
    assert f"training on {used}; columns not used: id, attention_mask, length, words, spec" in said
    assert "left out" not in said
    assert made("out", "-o", "again", "--text-column", "input_ids")[0] == result


def test_rows_of_tokens_may_have_other_lengths(made, tmp_path):
    rows = [[5, 6, 7, 8], [], [9] * 11, [4], [3, 2]]
    labels = [[-100, 6, 7, -100], *rows[1:]]
    pairs = zip(rows, labels, strict=True)
    path = write(tmp_path / "d.jsonl", [{"input_ids": i, "labels": x} for i, x in pairs])
    result, said = made(path, "-o", "a")
    assert [row["input_ids"] for row in result] == [[5, 6, 7, 8], [9] * 4, [9] * 4, [9, 9, 9, 4]]
    assert result[0]["labels"] == labels[0]
    assert "1 left out: no tokens" in said
    assert "2 left out: tokens at the end, less than a row" in said
    result, _ = made(path, "-o", "b", "--strategy", "truncate", "-s", 5)
    assert [row["input_ids"] for row in result] == [[5, 6, 7, 8, 0], [9] * 5, [3, 2, 0, 0, 0]]
    assert [row["labels"] for row in result][0::2] == [[*labels[0], -100], [3, 2, *[-100] * 3]]


def test_strategies(made, tokenizer, tmp_path):
    """pack: joined and cut. overflow: each document begins a row. truncate: and has only one. A row
    with only the last token of a document has nothing to predict it from, and is left out."""
    draw = random.Random(5)
    lengths = [0, 1, 62, 63, 64, 127, 25_000, 250_000] + [draw.randint(1, 300) for _ in range(99)]
    draw.shuffle(lengths)
    texts = ["".join(draw.choices("ab\n", k=length)) for length in lengths]
    texts += [*(f"{i} " * (i % 5 + 1) for i in range(3000)), "one line " * 40_000]
    path = write(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    ids = [np.array(tokenizer(text + END)["input_ids"]) for text in texts if text]
    joined = np.concatenate(ids)
    cut = {"pack": [joined[: len(joined) // 64 * 64]], "overflow": ids}
    cut["truncate"] = [document[:64] for document in ids]
    for strategy, parts in cut.items():
        padded = [np.pad(part, (0, -len(part) % 64), constant_values=-100) for part in parts]
        labels = np.concatenate(padded).reshape(-1, 64)
        labels = labels[(labels[:, 1:] != -100).any(axis=1)]
        rows, _ = made(path, "-s", 64, "--strategy", strategy, "-o", strategy)
        assert np.array_equal([row["labels"] for row in rows], labels)
        input_ids = np.where(labels == -100, 0, labels)
        assert np.array_equal([row["input_ids"] for row in rows], input_ids)
    call(path, "two", "-m", ".model", "--strategy", "truncate", "--num-proc", 2)
    assert pyarrow.parquet.read_table("two/train.parquet").to_pylist() == rows


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS counts memory in other units")
def test_a_large_text_takes_little_memory(tmp_path):
    """Tokenized at once, these 20 MB of lines took 5.3 GB."""
    (tmp_path / "d.txt").write_text("some text, " * 9 + "\n" + "and a line of it\n" * 600_000)
    flags = ("-m", "tiny", "-s", 256, "-d", tmp_path / "d.txt", "-o", tmp_path / "out")
    process = start(ROOT / "prepare.py", None, *flags)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, process.stderr.read()
    assert usage.ru_maxrss < 1_500_000


def test_a_killed_run_leaves_nothing_that_looks_complete_or_is_in_the_way(tmp_path):
    path = tmp_path / "d.txt"
    path.write_text("some text\n" * 5_000_000)
    flags = ("-m", "tiny", "-d", path, "-o", "out", "--num-proc", 2)  # these processes live on
    process = start(ROOT / "prepare.py", None, *flags, cwd=tmp_path)
    while not any(file.stat().st_size > 99 for file in tmp_path.glob(".prepare-*/out/*.parquet")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    path.write_text("some text\n" * 500)
    call(path, tmp_path / "out")
    os.killpg(process.pid, signal.SIGKILL)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d.txt", "out"]


TURNS = [("human", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}')]
TURNS = [{"from": x, "value": y} for x, y in [*TURNS, ("observation", "1"), ("gpt", "a")]]
WRITES_ALL = SHORT.replace("m.content", "(m.tool_calls | tojson if m.tool_calls else m.content)")
WRITES_ALL = "{{ tools | tojson }}" + WRITES_ALL
HUB = "-00000-of-00001.parquet"
PROMPTED = {"prompt": "q", "prompt_id": "i", "messages": QA}
DOLLY = {"instruction": "q", "context": "", "response": "a", "category": "c"}
C4, TINY = "en/c4-train.00007-of-01024.json.gz", "TinyStories-train.txt"
C4_HELD_OUT, TINY_HELD_OUT = "en/c4-validation.00001-of-00008.json.gz", "TinyStories-valid.txt"
# Files and a row of each, as public data sets have them, the template, and what is said.
TOOLS_OF_F = {"conversations": TURNS, "system": "s", "tools": json.dumps(TOOL)}
LAYOUTS = [
    ({C4: T[0] | {"timestamp": "2019", "url": "u"}, C4_HELD_OUT: T[0]}, None),
    ({"sample/10BT/000_00000.parquet": T[0] | {"id": "i", "token_count": 3}}, None),  # FineWeb
    ({TINY: T[0], TINY_HELD_OUT: T[0]}, None),
    ({f"plain_text/train{HUB}": T[0]}, None),  # OpenWebText
    ({f"data/train{HUB}": ALPACA}, None),
    ({"ShareGPT_V3_split.json": {"id": "i", "conversations": TURNS[::3]}}, SHORT),
    (
        {f"data/{x}{HUB}": PROMPTED for x in ("train_sft", "test_sft", "train_gen")},
        SHORT,
    ),  # UltraChat
    ({"databricks-dolly-15k.jsonl": DOLLY}, None),
    ({"train.json": TOOLS_OF_F}, WRITES_ALL),
    ({f"data/train{HUB}": {"prompt": QA[:1], "completion": QA[1:], "label": False}}, SHORT),  # KTO
]
A_CALL = 'a>⟦[{"function": {"name": "f", "arguments": {"x": 1}}}]'
SAID = [
    "training on text; columns not used: timestamp, url|validation: 9 documents in 1 file(s)",
    "training on text; columns not used: id, token_count|train: 9 documents in 1 file(s)",
    "train: 1 documents in 1 file(s)|validation: 1 documents in 1 file(s)",
    "training on text; columns not used: none|train: 9 documents in 1 file(s)",
    f"training on instruction, input, output; columns not used: text|{ASKED}⟦a",
    "training on conversations; columns not used: id|u>q;a>⟦a",
    "not read: the splits train_gen|columns not used: prompt, prompt_id|validation: 9 documents",
    f"training on instruction, context, response; columns not used: category|{ASKED}⟦a",
    f"training on conversations, system, tools; columns not used: none|{A_CALL}",
    "row 1: the column label may say which answers are good: leave out rows of bad ones",
]


@pytest.mark.parametrize("number", range(10))
def test_what_is_said_of_public_data_sets(number, made, tokenizer, tmp_path):
    files, tokenizer.chat_template = LAYOUTS[number]
    for file, row in files.items():
        write(tmp_path / "d" / file, [row] * 9)
    try:
        _, said = made("d", *EACH)
    except SystemExit as stop:
        said = str(stop.code)
    assert all(line in said for line in SAID[number].split("|")), said


PROCESSES = {
    "missing": ("missing.txt", "out", "missing.txt"),  # said by `datasets`, which looks on the hub
    "a row": ("d", "out", "error: {}/d/b.jsonl: row 201: input_ids has -1, which is not a token"),
    "in use": ("d/a.jsonl", "used", "error: -o {}/used: another prepare.py is writing this; wait"),
}


@pytest.mark.law5
@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_ends_with_a_line(name, tmp_path):
    """Also for the last row, in the second file. The process that is writing is not disturbed."""
    data, out, line = PROCESSES[name]
    right = {"input_ids": [1] * 64}
    write(tmp_path / "d" / "a.jsonl", [right] * 200)
    write(tmp_path / "d" / "b.jsonl", [right] * 200 + [{"input_ids": [-1]}])
    temporary = prepare.lock_out(tmp_path / "used")  # it is locked as long as this process lives
    (temporary / "used").mkdir()
    result = call(tmp_path / data, tmp_path / out, "--num-proc", 2)
    assert result.returncode == 1 and line.format(tmp_path) in result.err
    assert ("Traceback" in result.err) == (name == "missing")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".prepare-used", "d"]
    assert (temporary / "used").exists()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    draw = random.Random(3)
    turns = [f"u>{'a ' * draw.randint(1, 30)};a>{'b ' * draw.randint(1, 30)};" for _ in range(800)]
    chats = [chat(turns[i] + turns[i + 1] * (i % 3)) for i in range(799)]
    folder = tmp_path_factory.mktemp("prepared")
    call(write(folder / "d.jsonl", [{"messages": x} for x in chats]), folder / "rows")
    return folder / "rows"


@pytest.mark.law1
@pytest.mark.parametrize(("stage", "processes", "flags"), STAGES)
def test_one_curve_on_chats(stage, processes, flags, prepared, curve):
    """The loss is the mean over the answers of the global batch, however it is split."""
    few = (*FEW, "-d", prepared)
    one = curve("01-single-gpu", 1, *few)
    assert_same_curve(one, curve(stage, processes, *few, *flags), range(1, 5))
    assert one[4]["train/tokens_seen"] == 4 * 8 * 64


def test_a_fine_tuned_base_model_stops_by_itself(tokenizer, tmp_path):
    """In a chat of `pipeline` and in the sample of the scripts. As in those of Qwen, the tokenizer
    and generation_config end a text with <|endoftext|>, and the embedding has fewer tokens."""
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["<image>"])
    tokenizer.chat_template = SHORT.replace(";", "<|im_end|>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256, "eos_token_id": 0}
    sizes |= {"vocab_size": len(tokenizer) - 1, "bos_token_id": None}
    config = transformers.LlamaConfig(**sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    answers = {"a?": "one, two", "b?": "three", "c?": "four, five, six"}
    rows = [{"messages": chat(f"u>{q};a>{a}")} for q, a in answers.items()]
    flags = ("-m", tmp_path / "base")
    said = call(write(tmp_path / "d.jsonl", rows * 100), tmp_path / "data", *flags).out
    assert "the chat template ends answers with <|im_end|>" in said
    flags += ("-d", tmp_path / "data", "-e", "a", "--save-dir", tmp_path, *SMALL[2:])
    flags += ("--lr", "5e-3", "--lr-scheduler", "constant", "--num-epochs", 9, "--dtype", "fp32")
    run("01-single-gpu", 1, *flags, "--max-steps", 60)
    out = run("03-fsdp", 2, *flags, "--max-steps", 80, sampled=True).out
    assert list(metrics(tmp_path / "a"))[-1] == 80
    [written] = [x for x in out.splitlines() if x.startswith("what the model writes after it: ")]
    assert written.split(": ", 1)[1] in answers.values()
    write_on = transformers.pipeline("text-generation", model=str(tmp_path / "a" / "final_model"))
    for question, answer in answers.items():
        [result] = write_on(chat(f"u>{question}"), max_new_tokens=60, do_sample=False)
        assert result["generated_text"][-1] == {"role": "assistant", "content": answer}
    assert write_on.model.generation_config.eos_token_id == [0, 258]


def test_no_text_loses_characters_and_a_warning_of_a_wrong_tokenizer_is_seen(tmp_path):
    """A tokenizer.json decides, whatever class is named beside it (transformers#45488). When one is
    loaded whose pattern is known to be wrong, transformers warns of it."""
    text = "The quick brown fox, at 5 km,\n saw a café."
    save_tokenizer(tmp_path)
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    for name in ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer"):
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        tokenizer = prepare.load_tokenizer(tmp_path)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected, name
        assert tokenizer.decode(expected) == text
    big = {f"t{i}": i for i in range(100_001)}
    transformers.GPT2Tokenizer(vocab=big, merges=[]).save_pretrained(tmp_path / "m")
    config = {"model_type": "mistral", "transformers_version": "4.50.0"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    result = call(write(tmp_path / "d.txt", [{"text": "a"}]), tmp_path / "o", "-m", tmp_path / "m")
    assert "fix_mistral_regex=True" in result.err


def test_rows_for_another_tokenizer_are_refused(made, tmp_path):
    """Its token numbers stand for other texts, and are all in the vocabulary."""
    made(write(tmp_path / "d.jsonl", [ALPACA] * 99), "-s", 64)
    result = run("01-single-gpu", 1, *FEW, "-m", ROOT / "tiny", "-d", "out", check=False)
    line = f"--dataset-name out: prepared for another tokenizer than {ROOT / 'tiny'} has"
    assert result.errors == [f"train-llm.py: error: {line}"]

"""prepare.py: which tokens of which rows are trained on."""

import gzip
import importlib.util
import json
import random
import subprocess
import sys

import pandas
import pyarrow.parquet
import pytest
import transformers
from conftest import ROOT, SMALL, assert_same_curve, environment, finish, metrics, run
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
# The same as CHATML, but it says that the content of an answer is what has to be learned.
MARKED = """{%- for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content }}{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- endif -%}
{{ "<|im_end|>\\n" }}
{%- endfor -%}"""
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
def tokenizer(prepare):
    return prepare.load_tokenizer("tiny")


def tokens_of(prepare, tokenizer, columns, *values):
    """(text, text that has a loss) of each example that a document gives."""
    row = dict(zip(columns, values, strict=True))
    examples = []
    for ids, is_answer in prepare.tokenize(row, columns, tokenizer):
        labels = prepare.mask(ids, is_answer)
        assert all(label in (token, -100) for token, label in zip(ids, labels, strict=True))
        trained_on = tokenizer.decode([label for label in labels if label != -100])
        examples.append((tokenizer.decode(ids), trained_on))
    return examples


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


def test_an_answer_is_what_the_template_adds_for_it(prepare, tokenizer):
    """Without marks in the template: from the prompt for an answer to the end of its turn."""
    tokenizer.chat_template = CHATML
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


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_have_no_loss(template, prepare, tokenizer):
    """The convention of TRL: the loss is on the completion."""
    tokenizer.chat_template = template
    columns = ("prompt", "completion")
    [(text, trained_on)] = tokens_of(prepare, tokenizer, columns, CHAT[:4], CHAT[4:])
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == ("Yes.<|im_end|>\n" if template == CHATML else "Yes.")


def test_values_that_are_missing_are_not_trained_on(prepare, tokenizer):
    """`datasets` fills rows up with None. Parts of a content are one text."""
    tokenizer.chat_template = prepare.CHAT_TEMPLATE
    columns = ("instruction", "input", "output")
    assert tokens_of(prepare, tokenizer, columns, "q", None, None) == []
    assert tokens_of(prepare, tokenizer, ("prompt", "completion"), "q", None) == []
    assert tokens_of(prepare, tokenizer, ("messages",), None) == []
    messages = [{"role": "user", "content": [{"type": "text", "text": "q"}], "tools": None}]
    messages += [{"role": "assistant", "content": "a", "tools": None}]
    for template in (MARKED, CHATML):
        tokenizer.chat_template = template.replace(
            "message.role +", 'message.role + (message.tools or "") +'
        )
        [(_, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), messages)
        assert trained_on.startswith("a")
        assert "None" not in trained_on


def test_a_greeting_is_no_answer(prepare, tokenizer):
    tokenizer.chat_template = CHATML
    [(_, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), CHAT[2:])
    assert trained_on == "Yes.<|im_end|>\n"


def test_a_tokenizer_that_begins_texts_begins_conversations_so_too(prepare, tokenizer):
    """As Llama's does: what the model has seen at the start of each text in its pretraining."""
    begin = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    prepare.set_chat_template(tokenizer)
    [(text, _)] = tokens_of(prepare, tokenizer, ("instruction", "output"), "q", "a")
    assert text == f"{END}### Instruction:\nq\n\n### Response:\na{END}"


def test_marks_of_a_template_say_what_an_answer_is(prepare, tokenizer):
    tokenizer.chat_template = MARKED
    [(text, trained_on)] = tokens_of(prepare, tokenizer, ("messages",), CHAT)
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == "groß 😀Yes."


def test_a_template_that_rewrites_earlier_answers_gives_an_example_each(prepare, tokenizer):
    """Each answer is trained on as it is written when it is the last one."""
    tokenizer.chat_template = REASONING
    examples = tokens_of(prepare, tokenizer, ("messages",), CHAT)
    texts = [tokenizer.apply_chat_template(CHAT[:n], tokenize=False) for n in (3, 5)]
    assert [text for text, _ in examples] == texts
    answers = ["<think></think>groß 😀<|im_end|>\n", "<think></think>Yes.<|im_end|>\n"]
    assert [trained_on for _, trained_on in examples] == answers


def test_a_token_over_the_border_belongs_to_the_answer(prepare):
    """Tokens of a prompt and its answer may be one: such as a space and the word after it."""
    vocabulary = {END: 0, "a": 1, "Ġ": 2, "b": 3, "Ġb": 4}
    tokenizer = transformers.GPT2Tokenizer(vocabulary, merges=[("Ġ", "b")])
    columns = ("prompt", "completion")
    row = {"prompt": "a ", "completion": "b"}
    [(ids, is_answer)] = prepare.tokenize(row, columns, tokenizer)
    assert (ids, is_answer) == ([1, 4, 0], [False, True, True])


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


def main(prepare, monkeypatch, capsys, data, out, *flags):
    """The same in this process. Returns what is trained on, as text, and what was printed."""
    command = ["prepare.py", "-m", "tiny", "-d", data, "-o", out, "-s", 64, *flags]
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    prepare.main(prepare.parse_args())
    rows = pyarrow.parquet.read_table(out / "train.parquet").to_pylist()
    assert all(len(row["input_ids"]) == len(row["labels"]) == 64 for row in rows)
    labels = [label for row in rows for label in row["labels"] if label != -100]
    return prepare.load_tokenizer("tiny").decode(labels), capsys.readouterr().out


def test_alpaca_is_trained_on_its_answers(prepare, tmp_path, monkeypatch, capsys):
    """Also if it has a column of text beside, as tatsu-lab/alpaca does."""
    path = write_lines(tmp_path / "alpaca.jsonl", ALPACA)
    arguments = (prepare, monkeypatch, capsys, path)
    text, said = main(*arguments, tmp_path / "a")
    assert text.startswith(END.join(TEXT[:100]))
    assert "training on the columns instruction, input, output" in said
    assert "train: 200 documents, 0 without an answer or text" in said
    assert f"### Response:\n⟦{TEXT[0][:9]}" in said
    text, said = main(*arguments, tmp_path / "b", "--text-column", "text")
    assert text.startswith(f"q {TEXT[0]}{END}q {TEXT[1]}")
    text, said = main(*arguments, tmp_path / "c", "--train-on-prompt")
    assert text.startswith(f"### Instruction:\nq\n\n### Response:\n{TEXT[0]}{END}###")
    assert "100.0% of them trained on" in said


def test_packing_loses_less_than_a_row(prepare, tmp_path, monkeypatch, capsys):
    """Also where one batch of documents ends and the next begins."""
    texts = [f"{i} " * (i % 7) for i in range(2500)]
    path = write_lines(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    text, said = main(prepare, monkeypatch, capsys, path, tmp_path / "a")
    whole = END.join(texts) + END
    assert whole.startswith(text)
    num_tokens = sum(len(text) + 1 for text in texts)
    assert f"{num_tokens // 64:,} rows" in said


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".jsonl.gz", ".txt.gz", ".parquet", ".json"])
def test_formats_of_files(ending, prepare, tmp_path, monkeypatch, capsys):
    path = tmp_path / f"my.data{ending}"
    frame = pandas.DataFrame({"text": TEXT})
    if ending.startswith(".csv"):
        frame.to_csv(path, index=False)
    elif ending == ".parquet":
        frame.to_parquet(path)
    elif ending == ".txt.gz":
        path.write_bytes(gzip.compress(END.join(TEXT).encode()))
    elif ending == ".json":
        path.write_text(json.dumps([{"text": text} for text in TEXT]))
    else:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXT)
        path.write_bytes(gzip.compress(rows.encode()))
    text, _ = main(prepare, monkeypatch, capsys, path, tmp_path / "out")
    assert text.startswith(END.join(TEXT[:150]))


def test_splits_of_chats_on_the_hub(prepare, tmp_path, monkeypatch, capsys):
    """train_sft and test_sft, with the files laid out as the hub has them."""
    (tmp_path / "d" / "data").mkdir(parents=True)
    for split, texts in (("train_sft", TEXT[:150]), ("test_sft", TEXT[150:]), ("train_gen", ["x"])):
        messages = [
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
            for text in texts
        ]
        frame = pandas.DataFrame({"prompt": "q", "messages": messages})
        frame.to_parquet(tmp_path / "d" / "data" / f"{split}-00000-of-00001.parquet")
    text, said = main(prepare, monkeypatch, capsys, tmp_path / "d", tmp_path / "out")
    assert text.startswith(END.join(TEXT[:100]))
    assert text.endswith(TEXT[149][-20:] + END) or TEXT[150] not in text
    assert "validation: 50 documents" in said


@pytest.mark.law5
@pytest.mark.parametrize(
    ("row", "flags", "problem"),
    [
        ({"title": "a", "body": "b"}, (), "choose one of the columns title, body with --text-col"),
        ({"messages": [{"who": "user"}]}, (), "a row cannot be read: KeyError('role')"),
        ({"prompt": "a", "completion": 4}, (), "a row cannot be read: TypeError("),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            (),
            "train: it has only 0 tokens, a row",
        ),
        ({"text": "a"}, ("-o", "."), "-o .: this folder is not empty"),
    ],
)
def test_one_line_says_what_is_wrong(row, flags, problem, prepare, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "d.jsonl", [row] * 99)
    monkeypatch.chdir(tmp_path)
    command = ["prepare.py", "-m", "tiny", "-d", str(path), "-o", "out", *flags]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        prepare.main(prepare.parse_args())
    assert str(stop.value.code).startswith(f"prepare.py: error: {problem}")


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
    """The folder, after the very command that stage 01 shows to a user who gives it the chats."""
    folder = tmp_path_factory.mktemp("prepared")
    refused = run("01-single-gpu", 1, "-d", chats, "-s", 64, check=False, cwd=folder)
    [line] = refused.errors
    command = line.split("to train on answers: ")[1].split(", and then -d prepared")[0]
    assert command.endswith(f"-m tiny -d {chats} -o prepared -s 64")
    words = command.replace("python ", f"{sys.executable} ", 1).split()
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    result = finish(subprocess.Popen(words, cwd=folder, env=environment(), **how))
    assert result.returncode == 0, result.err
    assert "to train: python 01-single-gpu/train-llm.py -m tiny -d prepared -e my-run" in result.out
    return folder / "prepared"


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


def test_the_model_is_exported_with_its_format(prepared, tmp_path):
    """final_model writes a prompt for an answer in the format that it was trained in."""
    run("01-single-gpu", 1, "-e", "a", "--save-dir", tmp_path, *FEW, "-d", prepared)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a" / "final_model")
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert text.endswith("😀\n\n### Response:\n")
    assert list(metrics(tmp_path / "a")) == [1, 2, 3, 4]


def test_rows_for_another_tokenizer_are_refused(prepared, tmp_path):
    """Its token numbers stand for other texts, and are all in the vocabulary."""
    tokenizer = transformers.GPT2Tokenizer({END: 0, **{chr(97 + i): 1 + i for i in range(26)}}, [])
    sizes = {"vocab_size": 384, "n_embd": 32, "n_layer": 1, "n_head": 2}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = run("01-single-gpu", 1, *FEW, "-m", tmp_path, "-d", prepared, check=False)
    said = f"--dataset-name {prepared}: was not prepared for the tokens of {tmp_path}"
    assert result.errors == [f"train-llm.py: error: {said}"]


def test_text_beside_instructions_is_trained_on_and_said(tmp_path):
    path = write_lines(tmp_path / "alpaca.jsonl", ALPACA)
    result = run("01-single-gpu", 1, *SMALL, "--max-steps", 1, "-d", path)
    assert "training on the column text, prompts included; to train on answers: " in result.out

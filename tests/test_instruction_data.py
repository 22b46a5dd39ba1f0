"""Which column is trained on, and which tokens of instruction data have a loss."""

import gzip
import json
import random

import datasets
import pandas
import pytest
import transformers
from conftest import SMALL, assert_same_curve, data_args, load, run
from tokenizers.processors import TemplateProcessing

FEW = (*SMALL, "--max-steps", "4", "--log-freq", "1", "--dtype", "fp32")
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


@pytest.fixture(scope="module")
def stage_01(tmp_path_factory):
    datasets.config.HF_DATASETS_CACHE = str(tmp_path_factory.mktemp("datasets"))
    return load("01-single-gpu")


@pytest.fixture
def tokenizer(stage_01):
    return stage_01.byte_tokenizer()


def tokens_of(stage_01, tokenizer, columns, row, train_on_prompt=False):
    """(text, text that has a loss) of each example that a row gives."""
    rows = {name: [value] for name, value in zip(columns, row, strict=True)}
    tokens = stage_01.tokenize(rows, columns, tokenizer, train_on_prompt)
    examples = []
    for ids, labels in zip(tokens["input_ids"], tokens["labels"], strict=True):
        assert all(label in (token, -100) for token, label in zip(ids, labels, strict=True))
        trained_on = tokenizer.decode([label for label in labels if label != -100])
        examples.append((tokenizer.decode(ids), trained_on))
    return examples


def test_two_strings_are_joined_as_they_are(stage_01, tokenizer):
    """The convention of TRL: no template, the end-of-text token after the completion."""
    tokenizer.chat_template = CHATML
    examples = tokens_of(stage_01, tokenizer, ("prompt", "completion"), ("2 + 2 =", " 4"))
    assert examples == [("2 + 2 = 4<|endoftext|>", " 4<|endoftext|>")]


@pytest.mark.parametrize("request_text", [("Add.", "2 2"), ("Add.", ""), ("Add.", None)])
def test_instructions_have_the_format_of_alpaca(request_text, stage_01, tokenizer):
    tokenizer.chat_template = stage_01.CHAT_TEMPLATE
    columns = ("instruction", "input", "output")
    [(text, trained_on)] = tokens_of(stage_01, tokenizer, columns, (*request_text, "4"))
    request = "\n\n".join(part for part in request_text if part)
    assert text == f"### Instruction:\n{request}\n\n### Response:\n4<|endoftext|>"
    assert trained_on == "4<|endoftext|>"
    short = tokens_of(stage_01, tokenizer, ("instruction", "output"), ("Add.", "4"))
    assert short == [("### Instruction:\nAdd.\n\n### Response:\n4<|endoftext|>", "4<|endoftext|>")]


def test_the_prompt_of_our_template_is_the_beginning_of_its_text(stage_01, tokenizer):
    """What is generated from later is what was trained on."""
    tokenizer.chat_template = stage_01.CHAT_TEMPLATE
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    for number in (2, 4):
        prompt = tokenizer.apply_chat_template(
            CHAT[:number], tokenize=False, add_generation_prompt=True
        )
        assert prompt.endswith("### Response:\n")
        assert whole.startswith(prompt + CHAT[number]["content"] + "<|endoftext|>")


def test_an_answer_is_what_the_template_adds_for_it(stage_01, tokenizer):
    """Without marks in the template: from the prompt for an answer to the end of its turn."""
    tokenizer.chat_template = CHATML
    [(text, trained_on)] = tokens_of(stage_01, tokenizer, ("messages",), (CHAT,))
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == "groß 😀<|im_end|>\nYes.<|im_end|>\n"
    lists = tokens_of(stage_01, tokenizer, ("prompt", "completion"), (CHAT[:2], CHAT[2:3]))
    assert lists[0][1] == "groß 😀<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_in_a_prompt_have_no_loss(template, stage_01, tokenizer):
    """The convention of TRL: the loss is on the completion."""
    tokenizer.chat_template = template
    row = (CHAT[:4], CHAT[4:])
    [(text, trained_on)] = tokens_of(stage_01, tokenizer, ("prompt", "completion"), row)
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == ("Yes.<|im_end|>\n" if template == CHATML else "Yes.")


def test_values_that_are_missing_are_not_trained_on(stage_01, tokenizer):
    """`datasets` fills rows up with None. Parts of a content are one text."""
    columns = ("instruction", "input", "output")
    tokenizer.chat_template = stage_01.CHAT_TEMPLATE
    assert tokens_of(stage_01, tokenizer, columns, ("q", None, None)) == []
    assert tokens_of(stage_01, tokenizer, ("prompt", "completion"), ("q", None)) == []
    assert tokens_of(stage_01, tokenizer, ("messages",), (None,)) == []
    messages = [{"role": "user", "content": [{"type": "text", "text": "q"}], "tools": None}]
    messages += [{"role": "assistant", "content": "a", "tools": None}]
    for template in (MARKED, CHATML):
        tokenizer.chat_template = template.replace(
            "message.role +", 'message.role + (message.tools or "") +'
        )
        [(_, trained_on)] = tokens_of(stage_01, tokenizer, ("messages",), (messages,))
        assert trained_on.startswith("a")
        assert "None" not in trained_on


def test_a_greeting_is_no_answer(stage_01, tokenizer):
    tokenizer.chat_template = CHATML
    [(_, trained_on)] = tokens_of(stage_01, tokenizer, ("messages",), (CHAT[2:],))
    assert trained_on == "Yes.<|im_end|>\n"


def test_a_tokenizer_that_begins_texts_begins_conversations_so_too(stage_01, tmp_path, capsys):
    """As Llama's does: what the model has seen at the start of each text in its pretraining."""
    tokenizer = stage_01.byte_tokenizer()
    rows = datasets.Dataset.from_dict({"instruction": ["q"], "output": ["a"]})
    begin = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    columns = stage_01.choose_columns(rows, tokenizer, None, False)
    [(text, _)] = tokens_of(stage_01, tokenizer, columns, ("q", "a"))
    assert text == "<|endoftext|>### Instruction:\nq\n\n### Response:\na<|endoftext|>"


def test_marks_of_a_template_say_what_an_answer_is(stage_01, tokenizer):
    tokenizer.chat_template = MARKED
    [(text, trained_on)] = tokens_of(stage_01, tokenizer, ("messages",), (CHAT,))
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_on == "groß 😀Yes."


def test_a_template_that_rewrites_earlier_answers_gives_an_example_each(stage_01, tokenizer):
    """Each answer is trained on as it is written when it is the last one."""
    tokenizer.chat_template = REASONING
    examples = tokens_of(stage_01, tokenizer, ("messages",), (CHAT,))
    texts = [tokenizer.apply_chat_template(CHAT[:n], tokenize=False) for n in (3, 5)]
    assert [text for text, _ in examples] == texts
    answers = ["<think></think>groß 😀<|im_end|>\n", "<think></think>Yes.<|im_end|>\n"]
    assert [trained_on for _, trained_on in examples] == answers


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_what_has_no_answer_is_left_out(template, stage_01, tokenizer):
    tokenizer.chat_template = template
    for messages in ([], CHAT[:2]) if template == CHATML else (CHAT[:2],):
        assert tokens_of(stage_01, tokenizer, ("messages",), (messages,)) == []


def test_train_on_prompt_counts_all_tokens(stage_01, tokenizer):
    tokenizer.chat_template = CHATML
    [(text, trained_on)] = tokens_of(stage_01, tokenizer, ("messages",), (CHAT,), True)
    assert trained_on == text


def test_an_answer_that_a_sequence_cuts_goes_on_in_the_next(stage_01, tokenizer):
    """Packing cuts tokens and labels at the same places, and loses neither."""
    rows = {"prompt": ["ab", "c"] * 40, "completion": ["defgh", "ij"] * 40}
    packer = stage_01.Packer(("prompt", "completion"), tokenizer, 5, False)
    cut = packer({name: values[:30] for name, values in rows.items()})
    more = packer({name: values[30:] for name, values in rows.items()})
    ids = sum([*cut["input_ids"], *more["input_ids"]], packer.leftover["input_ids"][:0])
    labels = sum([*cut["labels"], *more["labels"]], [])
    whole = stage_01.tokenize(rows, ("prompt", "completion"), tokenizer, False)
    assert ids + packer.leftover["input_ids"] == sum(whole["input_ids"], [])
    assert labels + packer.leftover["labels"] == sum(whole["labels"], [])
    # abdefgh<eos>cij<eos>: the first sequence ends in the middle of the answer defgh.
    text = [tokenizer.decode([t]) for t in ids[:10]]
    assert "".join(text) == "abdefgh<|endoftext|>ci"
    assert [label == -100 for label in labels[:10]] == [c in "abc" for c in text]


def test_a_token_over_the_border_belongs_to_the_answer(stage_01):
    """Tokens of a prompt and its answer may be one: such as a space and the word after it."""
    vocabulary = {"<|endoftext|>": 0, "a": 1, "Ġ": 2, "b": 3, "Ġb": 4}
    tokenizer = transformers.GPT2Tokenizer(vocabulary, merges=[("Ġ", "b")])
    tokens = stage_01.tokenize(
        {"prompt": ["a "], "completion": ["b"]}, ("prompt", "completion"), tokenizer, False
    )
    assert tokens == {"input_ids": [[1, 4, 0]], "labels": [[-100, 4, 0]]}


# Which column


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WORDS = random.Random(0).choices(
    ["one", "two", "three", "four", "five", "six", "seven", "eight"], k=6000
)
TEXT = [" ".join(WORDS[i : i + 30]) for i in range(0, len(WORDS), 30)]


def loaded(stage_01, path, capsys, **more):
    """The tokens with a loss of all sequences, as text; what was said; the tokenizer."""
    tokenizer = stage_01.byte_tokenizer()
    train, held_out = stage_01.load_data(data_args(path, 64, **more), tokenizer)
    labels = []
    for part in (train, held_out):
        for row in part:
            labels += row.get("labels", row["input_ids"]).tolist()
    text = tokenizer.decode([label for label in labels if label != -100])
    return text, capsys.readouterr().out, tokenizer


def test_alpaca_is_trained_on_its_answers(stage_01, tmp_path, capsys):
    """Also if it has a column of text beside, as tatsu-lab/alpaca does."""
    rows = [{"instruction": "q", "input": "", "output": text, "text": f"q {text}"} for text in TEXT]
    path = write_rows(tmp_path / "alpaca.jsonl", *rows)
    text, said, tokenizer = loaded(stage_01, path, capsys)
    assert text.startswith("<|endoftext|>".join(TEXT[:100]))
    assert "training on the answers in the columns instruction, input, output" in said
    assert "--text-column text" in said
    assert tokenizer.chat_template == stage_01.CHAT_TEMPLATE
    text, said, _ = loaded(stage_01, path, capsys, text_column="text")
    assert text.startswith(f"q {TEXT[0]}<|endoftext|>q {TEXT[1]}")
    assert said == "training on column 'text'\n"
    text, said, _ = loaded(stage_01, path, capsys, train_on_prompt=True)
    assert text.startswith(f"### Instruction:\nq\n\n### Response:\n{TEXT[0]}<|endoftext|>###")
    assert "training on prompts and answers" in said


def test_ids_are_not_trained_on(stage_01, tmp_path, capsys):
    rows = [{"id": f"row{i}", "prompt": "q", "completion": text} for i, text in enumerate(TEXT)]
    text, said, tokenizer = loaded(stage_01, write_rows(tmp_path / "d.jsonl", *rows), capsys)
    assert text.startswith("<|endoftext|>".join(TEXT[:100]))
    assert "columns prompt, completion" in said
    assert tokenizer.chat_template is None


def test_the_only_column_of_text_is_trained_on_and_said(stage_01, tmp_path, capsys):
    rows = [{"number": i, "body": text} for i, text in enumerate(TEXT)]
    text, said, _ = loaded(stage_01, write_rows(tmp_path / "d.jsonl", *rows), capsys)
    assert text.startswith(f"{TEXT[0]}<|endoftext|>")
    assert said == "training on column 'body'\n"


@pytest.mark.law5
@pytest.mark.parametrize(
    ("row", "flags", "problem"),
    [
        ({"title": "a", "body": "b"}, (), "several columns hold text: choose one of title, body"),
        ({"number": 1}, (), "no column holds text, there are number"),
        ({"id": "a", "dialog": [{"from": "x"}]}, (), "dialog: conversations must be in a column"),
        ({"id": "a", "messages": [{"from": "x"}]}, (), "a row cannot be read: UndefinedError("),
        ({"prompt": "a", "completion": 4}, (), "a row cannot be read: TypeError("),
        ({"messages": [{"role": "human", "content": "x"}]}, (), "no row has an answer"),
        ({"title": "a"}, ("--text-column", "body"), "--text-column body: the columns of text are"),
    ],
)
def test_one_line_names_the_columns(row, flags, problem, tmp_path):
    path = write_rows(tmp_path / "d.jsonl", *[row] * 99)
    result = run("01-single-gpu", 1, *FEW, "-d", path, *flags, check=False)
    assert result.returncode == 2
    assert len(result.errors) == 1
    assert problem in result.errors[0]
    assert "Traceback" not in result.err


@pytest.mark.law5
def test_a_file_with_another_ending_gets_the_list(tmp_path):
    (tmp_path / "d.toml").write_text("a = 1")
    for name, problem in (("d.toml", ".txt, .json, .jsonl, .csv, .parquet"), ("e.txt", "no such")):
        result = run("01-single-gpu", 1, "-d", tmp_path / name, check=False)
        assert result.returncode == 2
        assert problem in result.errors[0]
        assert len(result.errors[0]) < 300


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".jsonl.gz", ".txt.gz", ".parquet", ".json"])
def test_formats_of_files(ending, stage_01, tmp_path, capsys):
    path = tmp_path / f"my.data{ending}"
    frame = pandas.DataFrame({"text": TEXT})
    if ending.startswith(".csv"):
        frame.to_csv(path, index=False)
    elif ending == ".parquet":
        frame.to_parquet(path)
    elif ending == ".txt.gz":
        path.write_bytes(gzip.compress("<|endoftext|>".join(TEXT).encode()))
    elif ending == ".json":
        path.write_text(json.dumps([{"text": text} for text in TEXT]))
    else:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXT)
        path.write_bytes(gzip.compress(rows.encode()))
    text, _, _ = loaded(stage_01, path, capsys)
    assert text.startswith("<|endoftext|>".join(TEXT[:150]))


def test_splits_of_chats_on_the_hub(stage_01, tmp_path, capsys):
    """train_sft and test_sft, with the files laid out as the hub has them."""
    (tmp_path / "d" / "data").mkdir(parents=True)
    for split, texts in (("train_sft", TEXT[:150]), ("test_sft", TEXT[150:]), ("train_gen", ["x"])):
        messages = [
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
            for text in texts
        ]
        frame = pandas.DataFrame({"prompt": "q", "messages": messages})
        frame.to_parquet(tmp_path / "d" / "data" / f"{split}-00000-of-00001.parquet")
    text, said, _ = loaded(stage_01, tmp_path / "d", capsys)
    assert text.startswith("<|endoftext|>".join(TEXT[:100]))
    train, held_out = stage_01.load_data(
        data_args(tmp_path / "d", 64), tokenizer := stage_01.byte_tokenizer()
    )
    assert TEXT[150] in "".join(tokenizer.decode(row["input_ids"]) for row in held_out)
    assert "columns messages" in said


# Whole runs


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
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", *rows)


OTHERS = [("01-single-gpu", 1, ("-b", "3")), ("03-fsdp", 3, ())]
SLOW = [("02-ddp", 3, ()), ("04-compression", 2, ()), ("05-multinode", 2, ())]
OTHERS += [pytest.param(*other, marks=pytest.mark.slow) for other in SLOW]


@pytest.mark.law1
@pytest.mark.parametrize(("stage", "processes", "flags"), OTHERS)
def test_one_curve_on_instruction_data(stage, processes, flags, chats, curve):
    """The loss is the mean over the answers of the global batch, however it is split."""
    one = curve("01-single-gpu", 1, *FEW, "-d", chats)
    assert_same_curve(one, curve(stage, processes, *FEW, *flags, "-d", chats), range(1, 5))
    everything = curve("01-single-gpu", 1, *FEW, "-d", chats, "--train-on-prompt")
    assert everything[1]["train/loss"] != one[1]["train/loss"]


@pytest.mark.law1
@pytest.mark.slow
def test_streams_of_instruction_data_are_the_same_on_any_world_size(chats, curve):
    one = curve("06-streaming", 1, *FEW, "-d", chats)
    assert_same_curve(one, curve("06-streaming", 3, *FEW, "-d", chats), range(1, 5))


def test_the_model_is_exported_with_its_format(chats, tmp_path):
    """final_model answers a chat in the format that it was trained in; the run shows an answer."""
    flags = ("-e", "a", "--save-dir", tmp_path, *FEW, "-d", chats, "-s", 256)
    out = run("01-single-gpu", 1, *flags).out
    prompt = out.split("prompt, from text that the model was not trained on:")[1]
    assert prompt.split("what the model writes")[0].rstrip(" \n").endswith("### Response:")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a" / "final_model")
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert text.endswith("😀\n\n### Response:\n")
    refused = run(
        "01-single-gpu", 1, "-e", "a", "--save-dir", tmp_path, "--train-on-prompt", check=False
    )
    assert refused.returncode == 2
    assert refused.errors[0].endswith("/a --train-on-prompt False")

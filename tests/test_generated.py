"""Whatever the rows and the flags are: they are taken, or refused in exactly one line."""

import json
import math

import pytest
from conftest import STAGES, data_args, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile(
    "generated",
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PROFILE = settings.get_profile("generated")


@pytest.fixture(scope="module")
def stages():
    return {stage: load(stage) for stage in STAGES}


def is_taken(function, capsys):
    """Calls a function. It may end the run, but in one line, and with exit code 2."""
    capsys.readouterr()
    try:
        function()
    except SystemExit as stop:
        err = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert stop.code == 2
        assert len(err) == 1, err
        assert err[0].split(": ")[1] == "error"
        return False
    return True


# Rows.

texts = st.text(st.characters(codec="utf-8"), max_size=30)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    texts,
    st.lists(st.integers(-1, 400), max_size=9),
    st.lists(st.integers(0, 383), min_size=8, max_size=8),
    st.fixed_dictionaries({"role": texts, "content": texts}),
    st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3),
)
names = st.sampled_from(
    ["text", "input_ids", "labels", "messages", "prompt", "completion", "output", "instruction"]
)
rows = st.lists(st.dictionaries(names, values, max_size=3), max_size=8)


@settings(PROFILE)
@given(rows=rows, train_on_prompt=st.booleans())
def test_rows_are_taken_or_refused_in_one_line(rows, train_on_prompt, stages, tmp_path, capsys):
    stage = stages["01-single-gpu"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = stage.byte_tokenizer()
    args = data_args(path, 8, train_on_prompt=train_on_prompt)
    config, _, _ = stage.load_config("tiny", False)

    def read():
        with stage.reading(f"--dataset-name {path}"):
            train, held_out = stage.load_data(args, tokenizer)
            stage.contents_of(args, config, tokenizer, train, held_out)
            for data in (train, held_out):
                for row in data:
                    assert len(row["input_ids"]) == len(row.get("labels", row["input_ids"])) == 8
                    assert 0 <= row["input_ids"].min() <= row["input_ids"].max() < 384

    is_taken(read, capsys)


# Flags.

flag_values = st.one_of(
    st.integers(-3, 2**70).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["cpu", "fp32", "bf16", "cosine", "tiny", "dummy", "auto", "", "-", "--", "@x"]
    ),
    texts.filter(lambda text: "\0" not in text),
)


@pytest.mark.parametrize("stage", STAGES)
@settings(PROFILE)
@given(data=st.data())
def test_flags_are_taken_or_refused_in_one_line(stage, data, stages, tmp_path, capsys, monkeypatch):
    script = stages[stage]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    flags = ["-e", "-m", "-d", "-b", "-s", "--seed", "--lr", "--max-steps", "--global-batch-size"]
    flags += ["--dtype", "--device", "--eval-freq", "--warmup-steps", "--weight-decay", "--bogus"]
    flags += ["--lr-scheduler", "--comet-offline", "--compile", "--attn", "--export-dtype", "x"]
    words = []
    for flag in data.draw(st.lists(st.sampled_from(flags), max_size=5)):
        words.append(flag)
        if data.draw(st.booleans()):
            words.append(data.draw(flag_values))
    monkeypatch.setattr("sys.argv", ["train-llm.py", *words, f"--save-dir={tmp_path}"])
    parsed = []
    if is_taken(lambda: parsed.append(script.parse_args()), capsys):
        [args] = parsed
        assert args.batch_size > 0
        assert args.global_batch_size > 0
        assert args.seed >= 0
        assert args.lr is None or 0 < args.lr < math.inf


@settings(PROFILE)
@given(content=st.binary(max_size=200))
def test_files_of_flags_are_taken_or_refused_in_one_line(
    content, stages, tmp_path, capsys, monkeypatch
):
    (tmp_path / "flags.txt").write_bytes(content)
    words = [f"@{tmp_path}/flags.txt", f"--save-dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["train-llm.py", *words])
    is_taken(stages["01-single-gpu"].parse_args, capsys)

"""Stage 06: any world size reads the same sequences in the same order, and resumes exactly."""

import gzip
import itertools
import json
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

import datasets
import pandas
import pytest
import transformers
from conftest import (
    SMALL,
    SUPPORT,
    TEST_MODULES,
    TINY,
    assert_same_curve,
    data_args,
    default_tokenizer,
    end,
    environment,
    finish,
    fork,
    load,
    metrics,
    packed,
    run,
)
from tokenizers import Tokenizer, models, pre_tokenizers

STAGE = "06-streaming"
# A schedule that does not depend on the total, so that --max-steps says where a run stops.
STREAMING = (*SMALL, "--log-freq", "1", "--lr-scheduler", "constant")
STREAMING += ("--warmup-steps", "3", "--compression", "none", "--shard-size", "1")


def write_files(folder, counts, seed, longest=300):
    """Files of as many documents of random length in a folder; returns the texts of each."""
    draw, texts = random.Random(seed), []
    folder.mkdir(parents=True)
    for number, count in enumerate(counts):
        texts.append(
            ["".join(draw.choices("abcdefgh ", k=draw.randint(0, longest))) for _ in range(count)]
        )
        lines = [json.dumps({"title": str(i), "text": text}) for i, text in enumerate(texts[-1])]
        (folder / f"{number:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return texts


def expected(tokens_of, texts, num_streams, length, num_batches):
    """The batches: what a stream has to read, written down a second time and simply."""
    parts = max(n for n in range(1, num_streams + 1) if num_streams % n == 0 and n <= len(texts))
    batches = []
    for stream in range(num_streams):
        turn, part = divmod(stream, parts)
        # Of files that cannot be divided equally, the first parts have one more.
        size, more = divmod(len(texts), parts)
        first = part * size + min(part, more)
        files = texts[first : first + size + (part < more)]
        documents = [text for file in files for text in file if zlib.crc32(text.encode()) % 20]
        own = documents[turn :: num_streams // parts]
        ids = []
        while len(ids) < length * num_batches:
            ids += [i for text in own for i in tokens_of(text)]
        batches.append([ids[i * length : (i + 1) * length] for i in range(num_batches)])
    return [list(batch) for batch in zip(*batches, strict=True)]


PLANS = {
    "one process": [[1, 12]],
    "three processes": [[3, 12]],
    "3, 2, 4 and 1 processes": [[3, 3], [2, 3], [4, 3], [1, 3]],
}
DATA = {
    # documents of each file, streams
    "a file for each stream": ([9] * 8, 8),
    "more files than streams": ([5] * 11, 8),
    "one file": ([90], 8),
    "streams that end at different times": ([3, 20, 3, 12, 40, 4, 4, 9], 8),
}
LENGTH = 32


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """For each data and plan what four processes drew, and the texts."""
    folder = tmp_path_factory.mktemp("streams")
    scenarios, texts = {}, {}
    for seed, (data, (counts, streams)) in enumerate(DATA.items()):
        path = folder / str(seed)
        texts[data] = write_files(path, counts, seed)
        for name, plan in PLANS.items():
            scenario = {"path": str(path), "plan": plan, "streams": streams, "length": LENGTH}
            scenarios[data, name] = scenario
    (folder / "scenarios").write_text(json.dumps(list(scenarios.values())))
    worker = (SUPPORT / "streams_worker.py", None, folder / "scenarios", folder)
    processes = [fork(*worker, rank, PYTHONPATH=TEST_MODULES) for rank in range(4)]
    try:
        for process in processes:
            result = finish(process)
            assert result.returncode == 0, result.err
    finally:
        for process in processes:
            end(process)
    results = [json.loads((folder / f"drawn-{rank}").read_text()) for rank in range(4)]
    return texts, {key: [part[i] for part in results] for i, key in enumerate(scenarios)}


@pytest.fixture(scope="module")
def tokens_of():
    """Tokens of a document, an end of text behind them, made without the scripts."""
    return lambda text: [*default_tokenizer().encode(text).ids, 0]


@pytest.mark.law1
@pytest.mark.law3
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("data", DATA)
def test_each_sequence_in_its_turn_on_its_rank(drawn, tokens_of, data, plan):
    """By any number of processes, and across changes of it and ends of streams: each batch has the
    next sequence of each stream, and the rank that owns the stream trains on it."""
    texts, results = drawn
    streams = DATA[data][1]
    batches = expected(tokens_of, texts[data], streams, LENGTH, 12)
    worlds = [world for world, count in PLANS[plan] for _ in range(count)]
    for step, (world, batch) in enumerate(zip(worlds, batches, strict=True)):
        for rank in range(4):
            owned = batch[rank::world] if rank < world else []
            assert results[data, plan][rank][step] == owned, (step, rank)


def stream(processes, folder, *flags, check=True):
    flags = ("-e", "a", "--save-dir", folder, *STREAMING, *flags)
    return run(STAGE, processes, *flags, check=check)


@pytest.mark.law3
@pytest.mark.law1
def test_a_streamed_run_is_the_same_on_any_number_of_processes(tmp_path):
    """Law 1, and law 3 from 2 processes to 3 and to 1. Data that end in between begin again."""
    write_files(tmp_path / "data", [25, 12, 40], 1)
    data = ("-d", tmp_path / "data", "--eval-freq", "6")
    stream(1, tmp_path / "one", *data, "--max-steps", "24")
    for processes, steps in ((2, "9"), (3, "14"), (1, "24")):
        out = stream(processes, tmp_path / "many", *data, "--max-steps", steps).out
        assert ("resumed from" in out) == (processes != 2)
    one, many = metrics(tmp_path / "one" / "a"), metrics(tmp_path / "many" / "a")
    assert_same_curve(one, many, range(1, 25))
    assert one[24]["eval/loss"] == pytest.approx(many[24]["eval/loss"], rel=1e-5)
    assert one[24]["train/epoch"] == many[24]["train/epoch"] > 0
    # The other stages read other sequences. They refuse its checkpoint, and it refuses theirs.
    crc = "data_crc is "
    same = ("-e", "a", "--save-dir", tmp_path / "many", *SMALL, "--max-steps", "30")
    refused = run("05-multinode", 1, *same, check=False)
    assert crc in refused.errors[0]
    other = ("-e", "a", "--save-dir", tmp_path / "other", *SMALL, "--max-steps", "2")
    run("05-multinode", 1, *other)
    refused = run(STAGE, 1, *other, check=False)
    assert crc in refused.errors[0]
    # Other files would be dealt to the streams in another way.
    (tmp_path / "data" / "003.jsonl").write_text('{"text": "one more"}\n')
    refused = stream(1, tmp_path / "many", *data, check=False)
    assert crc in refused.errors[0]


@pytest.fixture
def texts_of(tmp_path):
    """Returns a function that writes files of rows and returns the texts that the stage reads."""
    stage = load(STAGE)

    def read(files, name=".", eval_files=None):
        folder = tmp_path / "data"
        for file, rows in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        args = data_args(folder / name, 8, "text")
        args.eval_files = eval_files and str(folder / eval_files)
        documents, held_out, _ = stage.load_data(
            args, stage.load_config(stage.TINY), stage.load_tokenizer(TINY, "")
        )
        return [document["text"] for document in documents], held_out

    return read


def kept(texts):
    """What is not held out."""
    return [text for text in texts if zlib.crc32(text.encode()) % 20]


def test_texts_stay_as_they_are_and_other_columns_do_not_matter(texts_of):
    """`datasets` would make times of the dates in a file of dates, and end the run at a file with
    one more column, with another type of a column, or with a null where others have texts."""
    texts = [f"a text of some words, {i}" for i in range(80)]
    dates = [f"2021-05-{i:02d}" for i in range(1, 29)]
    files = {
        "a.jsonl": [{"text": text, "id": 1, "meta": {}} for text in texts],
        "b.jsonl": [{"text": date} for date in dates],
        "c.jsonl": [{"text": "one", "id": "n1", "meta": {"more": [1]}, "license": "mit"}],
        "d.jsonl": [{"text": None, "id": None}, {"text": ""}],
    }
    assert texts_of(files)[0] == kept([*texts, *dates, "one"])


def test_a_glob_or_one_file_and_names_that_say_otherwise(texts_of, capsys):
    files = {f"{name}.jsonl": [{"text": f"{name} {i}"} for i in range(60)] for name in "ab"}
    files |= {"my-test/c.jsonl": [{"text": "held out by its name alone"}]}
    both, one = texts_of(files, "?.jsonl")[0], texts_of(files, "a.jsonl")[0]
    assert both == kept([f"{name} {i}" for name in "ab" for i in range(60)])
    assert one == both[: len(one)]
    assert "trained on" not in capsys.readouterr().out
    assert "held out by its name alone" in texts_of(files)[0]
    assert "trained on, without --eval-files for them: " in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["jsonl", "json.gz"])
def test_other_files_to_evaluate_on_are_not_trained_on(ending, texts_of, tmp_path, capsys):
    """All else is trained on then. The files of C4 are .json.gz, with an object in each line."""
    texts = [f"a {i}" for i in range(60)]
    files = {"a.jsonl": [{"text": text} for text in texts]}
    name = f"data/my-test/c.{ending}"
    if ending == "json.gz":
        name = f"other/c.{ending}"
        (tmp_path / "other").mkdir()
        (tmp_path / name).write_bytes(gzip.compress(b'{"id": 4, "text": "held out"}\n' * 9))
    else:
        files["my-test/c.jsonl"] = [{"text": ""}, {"id": 4}, *[{"text": "held out"}] * 9]
    trained_on, held_out = texts_of(files, ".", f"../{name}")
    assert trained_on == texts
    ids = {int(i) for row in held_out["input_ids"] for i in row}
    assert ids and ids <= {0, *default_tokenizer().encode("held out").ids}
    assert "trained on, without" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet", "txt"])
def test_kinds_of_files(ending, tmp_path):
    [texts] = write_files(tmp_path / "json", [80], 2)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"data.{ending}"
    if ending == "parquet":
        pandas.DataFrame({"id": [*range(80)], "text": texts}).to_parquet(path)
    elif ending == "txt":
        path.write_text("\n\n".join(texts))
    else:
        with gzip.open(path, "wb") as file:
            file.write((tmp_path / "json" / "000.jsonl").read_bytes())
    out = stream(1, tmp_path / "one", "-d", path, "--max-steps", "4").out
    held_out = int(re.search(r"and (\d+) held out|, (\d+) held out", out)[0].split()[1])
    expected_texts = [text for text in texts if zlib.crc32(text.encode()) % 20 == 0]
    assert held_out == min(8, len(packed(filter(None, expected_texts), 64))) > 0
    stream(2, tmp_path / "two", "-d", path, "--max-steps", "4")
    assert_same_curve(metrics(tmp_path / "one" / "a"), metrics(tmp_path / "two" / "a"), range(1, 5))


@pytest.mark.law4
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("num_files", [1, 3])
def test_a_stream_goes_on_after_any_of_its_documents(ending, num_files, tmp_path):
    """What `datasets` promises: the state of a stream, as a checkpoint has it, leads to the next
    document, and to no other. A stream is filtered, sharded and filtered again."""
    stage = load(STAGE)
    texts = write_files(tmp_path / "d", [21] * num_files, 3)
    for path, documents in zip(sorted((tmp_path / "d").iterdir()), texts, strict=True):
        if ending == ".txt":
            path.with_suffix(ending).write_text("\n\n".join(documents))
        elif ending == ".parquet":
            frame = pandas.DataFrame({"text": documents})
            frame.to_parquet(path.with_suffix(ending), row_group_size=4)
        if ending != ".jsonl":
            path.unlink()

    args = data_args(tmp_path / "d", 32, "text")
    args.global_batch_size = 4
    config = stage.load_config(stage.TINY)
    documents, _, _ = stage.load_data(args, config, stage.load_tokenizer(TINY, ""))
    streams = stage.Streams.__new__(stage.Streams)
    streams.documents, streams.count = documents, 4
    for number in range(4):
        whole = [document["text"] for document in streams.documents_of(number)]
        assert len(whole) > 2
        # A run that stops after so many documents, again and again.
        for interval in (1, 2):
            read, state = [], None
            for count in range(interval, len(whole) + interval, interval):
                part = streams.documents_of(number)
                if state:
                    part.load_state_dict(json.loads(json.dumps(state)))
                for document in itertools.islice(part, interval):
                    read.append(document["text"])
                    state = part.state_dict()
                assert read == whole[:count], (number, interval)


def test_a_token_that_the_model_lacks_ends_the_run():
    stage = load(STAGE)
    streams = stage.Streams.__new__(stage.Streams)
    streams.vocab_size, streams.count, streams.positions = 1024, 1, {}
    streams.sequences = {0: iter([([7, 1024], None)] * 2)}
    streams.ahead = {0: next(streams.sequences[0])}
    with pytest.raises(SystemExit, match="--dataset-name: a text has token 1024, which the model"):
        streams.next_batch()


@pytest.mark.law5
def test_a_stream_whose_texts_have_no_tokens_ends_the_run(tmp_path):
    """Spaces, for a tokenizer of words: the stream would begin again forever."""
    stage = load(STAGE)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    streams = stage.Streams.__new__(stage.Streams)
    streams.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    streams.flags = {"text_column": "text", "seq_length": 4}
    streams.documents, streams.count, streams.positions = None, 2, {0: [0, None, 0]}
    texts = datasets.Dataset.from_dict({"text": ["a a a", " ", "  "]}).to_iterable_dataset()
    streams.documents_of = lambda stream: texts
    assert next(streams.cut(0)) == ([1, 1, 1, 1], [1, None, 1])
    texts = texts.skip(1)
    with pytest.raises(SystemExit, match="--global-batch-size 2: as many streams need more doc"):
        next(streams.cut(0))


def python(code):
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=TEST_MODULES),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MORE = "--global-batch-size 8: as many streams need more documents"
BAD = {
    "no text": ("numbers.jsonl", "choose a column of texts with --text-column, of number, or run"),
    "one document": ("one.txt", "--seq-length 64: there are too few documents to evaluate on"),
    "little text": ("little.jsonl", "--seq-length 64: there are too few documents to evaluate on"),
    "empty texts": ("empty.jsonl", MORE),
    "few documents": ("few.jsonl", MORE),
    "a damaged line": ("damaged.jsonl", "damaged.jsonl: one of its lines cannot be read: "),
    "a list": ("list.json", "list.json: one of its lines cannot be read: "),
    "two formats": ("two", ": has .jsonl, .txt; choose files of one format with a glob"),
}


@pytest.mark.law5
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path):
    data, line = BAD[case]
    (tmp_path / "one.txt").write_text("many " * 1000)
    (tmp_path / "numbers.jsonl").write_text("".join(f'{{"number": {i}}}\n' for i in range(50)))
    # Of these some are held out, and others are for some of the streams only.
    rows = [json.dumps({"text": f"document {i} " * 20}) for i in range(40)]
    held_out = [row for row in rows if zlib.crc32(json.loads(row)["text"].encode()) % 20 == 0]
    short = [json.dumps({"text": f"text {i}"}) for i in range(200)]
    (tmp_path / "little.jsonl").write_text("\n".join(short) + "\n")
    (tmp_path / "few.jsonl").write_text("\n".join(held_out + rows[:3]) + "\n")
    empty = [json.dumps({"text": ""})] * 99
    (tmp_path / "empty.jsonl").write_text("\n".join(held_out + rows[:3] + empty) + "\n")
    (tmp_path / "two").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "two" / name).write_text("{}\n")
    (tmp_path / "list.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    (tmp_path / "damaged.jsonl").write_text("\n".join([*rows, rows[0][:20]]) + "\n")
    result = stream(1, tmp_path / "out", "-d", tmp_path / data, "--max-steps", 3, check=False)
    assert result.returncode != 0
    assert len(result.errors) == 1
    assert line in result.errors[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """All documents of 40 MB and of 240 MB are read, without being tokenized."""
    peaks = []
    for name, count in (("little", 4000), ("much", 24000)):
        path = tmp_path / f"{name}.jsonl"
        line = json.dumps({"text": "a b " * 2500})
        with path.open("w") as file:
            file.writelines([line + "\n"] * count)
        code = f"""
import re, datasets, torch.distributed as dist
from conftest import load
stage = load("06-streaming")
dist.init_process_group("gloo", init_method="file://{tmp_path}/{name}", rank=0, world_size=1)
options = {{"files": ["{path}"], "column": "text"}}
data = datasets.IterableDataset.from_generator(stage.read_files, gen_kwargs=options)
flags = {{"global_batch_size": 1, "seq_length": 256, "text_column": "text"}}
stage.tokenize = lambda texts, tokenizer: iter([[*range(256)]])
streams = stage.Streams(data, None, flags, 256, None)
for _ in range({count}):
    streams.next_batch()
print(streams.epoch())
streams.next_batch()
print(streams.epoch())
# Not ru_maxrss: it starts from the peak of the process that started this one.
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
        before, after, peak = map(int, python(code).split()[-3:])
        assert (before, after) == (0, 1)
        peaks.append(peak / 1024)
    little, much = peaks
    assert much < little + 40, "MB"

"""Streaming: any world size reads the same sequences in the same order, and none twice."""

import json
import random
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import (
    SMALL,
    SUPPORT,
    TEST_MODULES,
    assert_same_curve,
    end,
    environment,
    finish,
    fork,
    metrics,
    run,
)

# A schedule that does not depend on the total, so that --max-steps says where a run stops.
STREAMING = (*SMALL, "--log-freq", "1", "--lr-scheduler", "constant_with_warmup")
STREAMING += ("--warmup-steps", "3", "--compression", "none", "--shard-size", "1")
STREAMING += ("--data-held-out", "6")


def write_files(folder, counts, seed, longest=300):
    """Files of as many documents of random length; returns the files and their texts."""
    draw, texts = random.Random(seed), []
    for number, count in enumerate(counts):
        texts.append(
            ["".join(draw.choices("abcdefgh ", k=draw.randint(0, longest))) for _ in range(count)]
        )
        lines = [json.dumps({"title": str(i), "text": text}) for i, text in enumerate(texts[-1])]
        (folder / f"{seed}-{number:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return [str(folder / f"{seed}-{number:03d}.jsonl") for number in range(len(counts))], texts


def expected(tokens_of, texts, scenario):
    """The batches of two epochs: a list of (stream, sequence) each, by the words of the issue."""
    count, length, batch = scenario["streams"], scenario["length"], scenario["batch"]
    by_file = len(texts) >= count
    # Neighbouring files share a reader: where they do not divide, the first readers have one more.
    shares = np.array_split(np.arange(len(texts)), count if by_file else 1)
    readers = [[text for number in share for text in texts[number]] for share in shares]
    skip = scenario["held_out"]
    sequences = []
    for stream in range(count):
        documents = readers[stream] if by_file else readers[0]
        # One to each stream, each round begins with the next one.
        numbers = [
            n for n in range(len(documents)) if by_file or (n + n // count) % count == stream
        ]
        first = skip if stream == 0 or not by_file else 0
        ids = [i for n in numbers if n >= first for i in tokens_of(documents[n])]
        sequences.append([ids[i : i + length] for i in range(0, len(ids) - length + 1, length)])
    order = []
    for _ in range(40):  # epochs
        left, turn = [list(part) for part in sequences], 0
        while any(left):
            if left[turn % count]:
                order.append((turn % count, left[turn % count].pop(0)))
            turn += 1
    return [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]


PLANS = {
    "one process": [[1, 12]],
    "two processes": [[2, 12]],
    "three processes": [[3, 12]],
    "3, 2, 4 and 1 processes": [[3, 3], [2, 3], [4, 3], [1, 3]],
    "a second resume at once": [[2, 4], [2, 1], [3, 1], [3, 6]],
}
DATA = {
    # documents of each file, streams, batch
    "a file for each stream": ([9] * 8, 8, 4),
    "more files than streams": ([5] * 11, 8, 8),
    "one file": ([90], 8, 8),
    "three files for eight streams": ([30, 1, 40], 8, 4),
    "streams that run dry at different times": ([1, 20, 3, 12, 40, 2, 2, 9], 8, 8),
    "fewer documents than streams": ([9], 16, 16),
    "a file without a sequence": ([8, 8, 1, 8], 4, 4),
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """For each data and plan what four processes drew, and what was to be drawn."""
    folder = tmp_path_factory.mktemp("streams")
    scenarios, texts = {}, {}
    for seed, (data, (counts, streams, batch)) in enumerate(DATA.items()):
        files, texts[data] = write_files(folder, counts, seed)
        for name, plan in PLANS.items():
            scenario = {"files": files, "plan": plan, "streams": streams, "batch": batch}
            scenario |= {"length": 32, "steps": 100, "held_out": 3 if seed % 2 else 1}
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
    by_key = {key: [part[i] for part in results] for i, key in enumerate(scenarios)}
    return scenarios, texts, by_key


@pytest.fixture(scope="module")
def tokens_of():
    """Tokens of a document, an end of text behind them, made without a tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    number = {letter: 1 + i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return lambda text: [number["Ġ" if letter == " " else letter] for letter in text] + [0]


@pytest.mark.law1
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("data", DATA)
def test_each_sequence_in_its_turn_on_its_rank(drawn, tokens_of, data, plan):
    """By any number of processes, and across changes of it: each batch is that of one process, in
    the same order, and each sequence is read by the rank that owns its stream."""
    scenarios, texts, results = drawn
    scenario = scenarios[data, plan]
    batches = expected(tokens_of, texts[data], scenario)[:12]
    assert len(batches) == 12, "the data last for the test"
    worlds = [world for world, count in scenario["plan"] for _ in range(count)]
    for step, (world, batch) in enumerate(zip(worlds, batches, strict=True)):
        for rank in range(4):
            owned = [ids for stream, ids in batch if stream % scenario["batch"] % world == rank]
            assert results[data, plan][rank][step] == (owned if rank < world else []), (step, rank)


def test_unlike_documents_do_not_pile_up(tmp_path):
    """One reader for eight streams. Every eighth document is long: if all these were of one stream,
    they would wait in its queue while the others read on."""
    lines = [json.dumps({"text": "ab " * (300 if i % 8 == 0 else 10)}) for i in range(6000)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    code = f"""
import datasets, torch.distributed as dist
from conftest import load, open_streams
stage = load("06-streaming")
dist.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1)
data = datasets.load_dataset("json", data_files="{tmp_path}/data.jsonl", streaming=True)["train"]
streams = open_streams(stage, data, 256, 8, 8, 8)
streams.open(0, 0, None)
for step in range(200):
    streams.draw()
    print(max(len(queue) for queue in streams.readers[0].queues.values()))
"""
    longest = [int(line) for line in python(code).split()[-200:]]
    assert max(longest) <= 16


@pytest.mark.law1
def test_an_epoch_has_each_sequence_once(drawn, tokens_of):
    """The multiset of the first epoch, counted without the order."""
    scenarios, texts, results = drawn
    scenario = scenarios["more files than streams", "3, 2, 4 and 1 processes"]
    ids = sum(len(tokens_of(text)) for part in texts["more files than streams"] for text in part)
    read = [
        row
        for rank in results["more files than streams", "3, 2, 4 and 1 processes"]
        for batch in rank
        for row in batch
    ]
    assert len(read) == 12 * scenario["batch"]
    assert ids // scenario["length"] > len(read)
    assert len({tuple(row) for row in read}) == len(read)


def stream(processes, folder, *flags, check=True):
    flags = ("-e", "a", "--save-dir", folder, *STREAMING, *flags)
    return run("06-streaming", processes, *flags, check=check)


@pytest.mark.law3
@pytest.mark.law1
@pytest.mark.slow
def test_a_streamed_run_is_the_same_on_any_number_of_processes(tmp_path):
    """Law 1, and law 3 from 3 processes to 2 and to 4. Data that end in between begin again."""
    files, _ = write_files(tmp_path, [25, 2, 40], 1)
    data = ("-d", Path(files[0]).parent / "data", "--eval-freq", "6")
    (tmp_path / "data").mkdir()
    for file in files:
        Path(file).rename(tmp_path / "data" / Path(file).name)
    stream(1, tmp_path / "one", *data, "--max-steps", "24")
    for processes, steps in ((3, "9"), (2, "14"), (4, "24")):
        out = stream(processes, tmp_path / "many", *data, "--max-steps", steps).out
        assert ("resumed from" in out) == (processes != 3)
    one, many = metrics(tmp_path / "one" / "a"), metrics(tmp_path / "many" / "a")
    assert_same_curve(one, many, range(1, 25))
    assert one[24]["eval/loss"] == pytest.approx(many[24]["eval/loss"], rel=1e-5)
    assert one[24]["train/epoch"] == many[24]["train/epoch"] > 0
    # The other stages read other sequences. They refuse its checkpoint, and it refuses theirs.
    same = ("-e", "a", "--save-dir", tmp_path / "many", *SMALL, *data, "--max-steps", "30")
    refused = run("05-multinode", 1, *same, check=False)
    assert refused.returncode != 0
    said = f"--data-streams None: the run in {tmp_path}/many/a has 8"
    assert refused.errors == [f"train-llm.py: error: {said}"]
    other = ("-e", "a", "--save-dir", tmp_path / "other", *SMALL, *data, "--max-steps", "2")
    run("05-multinode", 1, *other)
    refused = run("06-streaming", 1, *other, check=False)
    assert f"--data-streams 8: the run in {tmp_path}/other/a has None" in refused.errors[0]
    # Others held out would be others trained on.
    refused = stream(1, tmp_path / "many", *data, "--data-held-out", 5, check=False)
    assert f"--data-held-out 5: the run in {tmp_path}/many/a has 6" in refused.errors[0]


def python(code):
    """What a program prints."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=TEST_MODULES),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "folder of txt"])
def test_kinds_of_files(kind, tmp_path):
    _, texts = write_files(tmp_path, [80], 2)
    if kind == "parquet":
        path = tmp_path / "data.parquet"
        datasets.Dataset.from_dict({"id": [*range(80)], "text": texts[0]}).to_parquet(path)
    else:
        path = tmp_path / "data"
        path.mkdir()
        for number, text in enumerate(texts[0]):
            (path / f"{number:02d}.txt").write_text(text + ".")
    stream(1, tmp_path / "one", "-d", path, "--max-steps", "4")
    stream(2, tmp_path / "two", "-d", path, "--max-steps", "4")
    assert_same_curve(metrics(tmp_path / "one" / "a"), metrics(tmp_path / "two" / "a"), range(1, 5))


BAD = {
    "--max-steps": ((), "--max-steps: is needed, because the length of a stream is not known"),
    "--num-epochs": (
        ("--num-epochs", "3"),
        "--num-epochs: the length of a stream is not known, use",
    ),
    "--data-streams": (
        ("--max-steps", "3", "--data-streams", "12"),
        "--data-streams 12: must be a multiple of 8",
    ),
    "no text": (
        ("--max-steps", "3", "-d", "numbers.jsonl"),
        "no column holds text, there are number",
    ),
    "too little": (
        ("--max-steps", "3", "-d", "few.txt"),
        "--data-held-out 6: the first documents of ",
    ),
    "one document": (("--max-steps", "3", "-d", "one.txt"), "fill no sequence besides those held"),
}


@pytest.mark.law5
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path):
    flags, line = BAD[case]
    (tmp_path / "few.txt").write_text("few")
    (tmp_path / "one.txt").write_text("many " * 1000)
    (tmp_path / "numbers.jsonl").write_text('{"number": 3}\n' * 50)
    files = (".txt", ".jsonl")
    flags = [tmp_path / flag if flag.endswith(files) else flag for flag in flags]
    if "-d" not in flags:
        flags += ["-d", tmp_path / "few.txt"]
    result = stream(1, tmp_path, *flags, check=False)
    assert result.returncode != 0
    assert len(result.errors) == 1
    assert line in result.errors[0]
    assert "Traceback" not in result.err.split("ChildFailedError")[0].split(line)[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """All documents of 40 MB and of 240 MB are read. A reader takes 10 MB at a time, of both. So
    that this is quick, a document counts as one sequence, and is not tokenised."""
    peaks = []
    for name, count in (("little", 4000), ("much", 24000)):
        path = tmp_path / f"{name}.jsonl"
        line = json.dumps({"text": "a b " * 2500})
        with path.open("w") as file:
            file.writelines([line + "\n"] * count)
        code = f"""
import re, datasets, torch.distributed as dist
from conftest import load, open_streams
stage = load("06-streaming")
dist.init_process_group("gloo", init_method="file://{tmp_path}/{name}", rank=0, world_size=1)
data = datasets.load_dataset("json", data_files="{path}", streaming=True)["train"]
streams = open_streams(stage, data, 256, 8, 8, 8)
stage.tokenize = lambda rows, *rest: {{"input_ids": [[*range(256)] for text in rows["text"]]}}
streams.open(0, 0, None)
for _ in range(({count} - 8) // 8):
    streams.draw()
print(streams.epoch, max(position[0] for position in streams.positions.values()))
# Not ru_maxrss: it starts from the peak of the process that started this one.
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
        epoch, last, peak = map(int, python(code).split()[-3:])
        assert epoch == 0 and last > count - 20
        peaks.append(peak / 1024)
    little, much = peaks
    assert much < little + 40, "MB"


@pytest.mark.law5
def test_it_runs_without_an_argument_and_learns(tmp_path):
    """Law 5, on the default data."""
    result = run("06-streaming", 2, "--max-steps", 15, cwd=tmp_path)
    losses = [float(line.split()[3]) for line in result.out.splitlines() if line[:5] == "step "]
    assert losses[0] > 5.5 > 4.7 > losses[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--streaming", "--data-streams=8", "--data-held-out=9"])
def test_stage_05_names_stage_06(flag, tmp_path):
    """It had these flags before."""
    refused = run("05-multinode", 1, flag, check=False)
    assert len(refused.errors) == 1
    assert "stage 06-streaming" in refused.errors[0]

"""Attacks the scripts with random inputs, and a run with random kills.

Usage::

    python tests/support/fuzz.py inputs --minutes 10 --seed 0
    python tests/support/fuzz.py kills --minutes 10 --seed 0

`inputs` writes files of data, models, flags and checkpoints that are damaged or odd in a random
way, draws flags and environment variables, and starts a rung with them. What must hold: the run
ends with 0, or with another exit code and exactly one line `train-llm.py: error: ...`; it ends
within a bound; no file that was there before has changed or is gone, but for a damaged checkpoint,
which is renamed.

`kills` trains one run to its end. Again and again it starts a random rung on a random number of
processes, and ends it after a random time: by kill -9 of one process or of all, by SIGTERM or by
Ctrl-C. What must hold: no checkpoint is lost or damaged, and the curve is the uninterrupted one.

Both print each violation with what repeats it, and at the end a row of counts. With --write they
also write it to outputs/measured, and the exit code is 1 if there was a violation.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ.setdefault("LADDER_HF_HOME", tempfile.mkdtemp(prefix="fuzz-hf-"))

import psutil  # noqa: E402 (the path and the variable are for these imports)
from conftest import ROOT, RUNGS, SMALL, end, exact, fork, load, metrics, start  # noqa: E402
from ladder import script  # noqa: E402
from transformers import AutoConfig  # noqa: E402

MEASURED = ROOT / "outputs" / "measured"
BOUND = 300  # seconds in which a run of two steps must have ended
TOTAL = 1000  # steps of a run that is killed
# The losses of a run on other numbers of processes differ by rounding, and that grows step by step.
# With a small learning rate it stays below this.
TOLERANCE = 1e-4


def finished(process):
    """(exit code, stdout, stderr) of a process; exit code None if it did not end in time."""
    try:
        process.wait(BOUND)
    except Exception:  # of subprocess, or of the forked run
        end(process)
        return None, "", ""
    return process.returncode, *process.communicate()


def contents(folder):
    """The checksum of each file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): zlib.crc32(path.read_bytes()) for path in files}


# Random inputs.

KINDS = ("rows", "text", "model", "flags", "flag file", "environment", "checkpoint")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "é", "😀", "\n", "", "\u2028", "<|endoftext|>"]
ARCHITECTURES = ("llama", "gpt2", "gpt_neox", "qwen2", "mistral", "gemma2", "bert", "gptj", "vit")
ARCHITECTURES += ("mixtral",)
FLAGS = """
    -e -m -d -b -s --experiment-name --save-dir --seed --device --dtype --log-freq --ckpt-freq
    --keep-checkpoints --comet-project-name --from-scratch --attn --dataset-subset --text-column
    --train-on-prompt --seq-length --batch-size --global-batch-size --eval-freq --eval-sequences
    --num-epochs --max-steps --lr --lr-scheduler --warmup-steps --weight-decay --max-grad-norm
    --export-dtype --no-from-scratch --learning-rate --shard-size --compression --timeout
    --data-streams --cpu-offload --keep-ratio --bogus -- stray @nowhere
"""
ODD_VALUES = [None, True, 0, -1, 2**31, 2**63, 0.5, float("nan"), "", "text", "\udc80", [], {}]
ODD_VALUES += [[None], [[1]], {"role": "user"}, "x" * 10_000]
ODD_BYTES = [b"", b"\0", b"\xff\xfe", b"{", b"]", b'"', b"\n", b"null", b"\x1f\x8b", b"PK", b"-1"]


class Inputs:
    """Draws inputs. `work` is an empty folder for each of them."""

    def __init__(self, seed, templates):
        self.draw = random.Random(seed)
        self.templates = templates

    def case(self, work):
        """Returns (kind, rung, processes, flags, variables) of one input."""
        kind = self.draw.choice(KINDS)
        rung, processes = "01-single-gpu", None
        if self.draw.random() < 0.15:
            rung, processes = self.draw.choice(RUNGS[1:]), self.draw.choice((1, 2))
        flags, variables = getattr(self, kind.replace(" ", "_"))(work)
        if self.draw.random() < 0.5:
            flags += ["-e", "run", "--save-dir", str(work / "runs")]
        if kind == "checkpoint":
            flags += ["-e", "a", "--save-dir", str(work)]
        required = [*SMALL, "--max-steps", "2", "--eval-sequences", "2"]
        if rung != "01-single-gpu" and kind != "environment":
            required += map(str, exact(rung, processes))
        if kind == "environment":
            rung, processes = self.draw.choice(RUNGS), None
        return kind, rung, processes, [*required, *flags], variables

    def some_text(self, most=30):
        return " ".join(self.draw.choices(WORDS, k=self.draw.randrange(most)))

    def mangle(self, content):
        """Bytes with some of them cut, repeated, flipped or replaced."""
        for _ in range(self.draw.choice((0, 1, 1, 2, 5))):
            at = self.draw.randrange(len(content) + 1)
            to = min(len(content), at + self.draw.choice((0, 1, 8, 100)))
            middle = self.draw.choice((*ODD_BYTES, content[at:to] * 2, bytes(to - at)))
            content = content[:at] + middle + content[to:]
        if self.draw.random() < 0.1:
            content = content[: self.draw.randrange(len(content) + 1)]
        return content

    def rows(self, work):
        """A file of rows: some columns, most of whose values are right."""
        draw = self.draw

        def tokens():
            length = 64 if draw.random() < 0.97 else draw.randrange(70)
            return [draw.randrange(384) for _ in range(length)]

        def messages():
            roles = ("user", "assistant", "system", "tool")[: draw.choice((2, 2, 4))]
            count = draw.randrange(5)
            return [{"role": draw.choice(roles), "content": self.some_text()} for _ in range(count)]

        columns = {"text": self.some_text, "input_ids": tokens, "labels": tokens}
        columns |= {"messages": messages, "prompt": self.some_text, "completion": self.some_text}
        columns |= {
            "instruction": self.some_text,
            "output": self.some_text,
            "other": self.some_text,
        }
        groups = [["text"], ["input_ids"], ["input_ids", "labels"], ["messages"]]
        groups += [["prompt", "completion"], ["instruction", "output"], ["text", "other"]]
        names = draw.choice(groups) + draw.choice(([], [], [draw.choice(list(columns))]))
        odd = draw.choice((0, 0, 0.001, 0.01, 0.2))
        rows = []
        for _ in range(draw.choice((0, 1, 50, 400, 1500))):
            row = {name: columns[name]() for name in names}
            for name in names:
                if draw.random() < odd:
                    row[name] = draw.choice(ODD_VALUES)
                if draw.random() < odd / 10:
                    del row[name]
            rows.append(row)
        content = "\n".join(map(json.dumps, rows)).encode("utf-8", "surrogatepass")
        content = self.mangle(content) if draw.random() < 0.3 else content
        ending = draw.choice(("jsonl", "jsonl", "jsonl", "json", "csv", "parquet", "txt"))
        if ending == "csv" and rows:
            lines = [",".join(json.dumps(str(row.get(name))) for name in names) for row in rows]
            content = "\n".join([",".join(names), *lines]).encode("utf-8", "replace")
        return self.file_of_data(work, content, ending)

    def text(self, work):
        content = self.some_text(20_000).encode()
        content = self.mangle(content) if self.draw.random() < 0.5 else content
        return self.file_of_data(work, content, self.draw.choice(("txt", "txt", "text", "TXT", "")))

    def file_of_data(self, work, content, ending):
        name = self.draw.choice(("rows", "a b", "é", "-x", "@y", "[z]", "*"))
        if self.draw.random() < 0.1:
            content, ending = gzip.compress(content), f"{ending}.gz"
        path = work / "inputs" / f"{name}.{ending}"
        path.write_bytes(content)
        if self.draw.random() < 0.2:
            path = path.parent
        flags = [f"--dataset-name={path}"]
        if self.draw.random() < 0.1:
            flags += ["--text-column", self.draw.choice(("text", "other", "nothing"))]
        return flags, {}

    def model(self, work):
        """A folder with a config whose values are odd, and perhaps weights and a tokenizer."""
        source = self.draw.choice(self.templates)
        folder = shutil.copytree(source, work / "inputs" / source.name)
        config = json.loads((folder / "config.json").read_text())
        for _ in range(self.draw.randrange(4)):
            name = self.draw.choice(list(config))
            odd = (None, -1, 0, 1, 3, 7, 64, 0.5, "x", "gelu", True, [], {}, [1], "32")
            config[name] = self.draw.choice(odd)
            if self.draw.random() < 0.2:
                del config[name]
        (folder / "config.json").write_text(json.dumps(config))
        if self.draw.random() < 0.3:
            path = self.draw.choice([path for path in folder.iterdir() if path.is_file()])
            path.write_bytes(self.mangle(path.read_bytes()))
        flags = ["--model-name", str(folder)]
        if self.draw.random() < 0.2:
            flags += [self.draw.choice(("--from-scratch", "--activation-checkpointing"))]
        return flags, {}

    def some_flags(self):
        values = ["0", "1", "2", "-1", "1e-3", "1e30", "nan", "", "x", "99999999999999999999"]
        values += ["0.5", "64", "cpu", "cuda", "bf16", "fp16", "auto", "linear", "constant", "\n"]
        flags = []
        for _ in range(self.draw.randrange(1, 5)):
            flags.append(self.draw.choice(FLAGS.split()))
            if self.draw.random() < 0.8:
                flags.append(self.draw.choice(values))
        return flags

    def flags(self, work):
        flags = self.some_flags()
        # What the run leaves must be in the folder of this input.
        return [*flags, f"--save-dir={work / 'runs'}"], {}

    def flag_file(self, work):
        path = work / "inputs" / "flags.txt"
        content = "\n".join(self.some_flags()).encode()
        path.write_bytes(self.mangle(content + b"\n--save-dir=" + bytes(work / "runs") + b"\n"))
        return [f"@{path}", f"--save-dir={work / 'runs'}"], {}

    def environment(self, work):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        names += ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR")
        values = ("", "0", "1", "-1", "2", "x", "1.5", "99999999999999999999", " 0", "localhost")
        chosen = self.draw.sample(names, self.draw.randrange(1, len(names)))
        variables = {name: self.draw.choice(values) for name in chosen}
        # Ranks that wait for others of their run do so for a long time, and rightly.
        if variables.get("WORLD_SIZE") == "2" or variables.get("MASTER_ADDR") not in (None, ""):
            variables["WORLD_SIZE"] = "x"
        return [], variables

    def checkpoint(self, work):
        """A run of two steps with a checkpoint after each, of which some files are damaged."""
        run_dir = shutil.copytree(self.templates[0].parent / "run" / "a", work / "a")
        files = sorted(path for path in run_dir.rglob("*") if path.is_file())
        for _ in range(self.draw.randrange(1, 4)):
            path = self.draw.choice(files)
            action = self.draw.choice(("mangle", "remove", "empty", "folder", "link"))
            if not path.is_file():
                continue
            if action == "mangle":
                path.write_bytes(self.mangle(path.read_bytes()))
            elif action == "empty":
                path.write_bytes(b"")
            else:
                path.unlink()
            if action == "folder":
                path.mkdir()
            if action == "link":
                # Not /dev/full: what reads it gets zeros without end, until the memory is full.
                path.symlink_to(self.draw.choice(("/dev/null", "nowhere", ".")))
        return ["--max-steps", "4"], {}


def make_templates(folder):
    """Models of several architectures, and a run, from which inputs are made."""
    rung_01 = load("01-single-gpu")
    templates = []
    sizes = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    sizes |= {"rotary_dim": 8, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"pad_token_id": 0, "num_local_experts": 4, "num_experts": 4}
    for architecture in ARCHITECTURES:
        config = AutoConfig.for_model(architecture)
        names = {*vars(config), *config.attribute_map} & sizes.keys()
        config = AutoConfig.for_model(architecture, **{name: sizes[name] for name in names})
        config.save_pretrained(folder / architecture)
        templates.append(folder / architecture)
    for architecture in ("llama", "gpt2"):
        with_weights = shutil.copytree(folder / architecture, folder / f"{architecture}-weights")
        config = AutoConfig.from_pretrained(with_weights)
        rung_01.load_model(config, None, "auto", 0).save_pretrained(with_weights)
        rung_01.byte_tokenizer().save_pretrained(with_weights)
        templates.append(with_weights)
    flags = (*SMALL, "-e", "a", "--save-dir", folder / "run", "--max-steps", "2")
    flags += ("--ckpt-freq", "1", "--eval-sequences", "2")
    code, _, err = finished(fork(script("01-single-gpu"), None, *flags))
    assert code == 0, err
    return templates


def violations(kind, code, err, before, after):
    """What does not hold of a run with one input, as a list of texts."""
    found = []
    if code is None:
        return ["it did not end"]
    errors = {line for line in err.splitlines() if line.startswith("train-llm.py: error: ")}
    if code != 0 and len(errors) != 1:
        found.append(f"exit code {code} and {len(errors)} error lines")
    # torchrun and the fork server add tracebacks of their own.
    if 'train-llm.py", line' in err or "logs_and_checkpoints.py" in err:
        found.append("a traceback")
    kept = {name for name in before if kind != "checkpoint" or "damaged" not in name}
    for name in kept:
        if name not in after and kind != "checkpoint":
            found.append(f"{name} is gone")
        elif name in after and after[name] != before[name] and name.startswith("inputs"):
            found.append(f"{name} has changed")
    if kind == "checkpoint":
        # Whatever is damaged, the other checkpoint's tensors are still somewhere.
        tensors = {crc for name, crc in before.items() if name.endswith(".distcp")}
        if code != 0 and not tensors <= set(after.values()):
            found.append("tensors of a checkpoint are gone")
    return found


def attack_inputs(minutes, seed, count=None, verbose=False):
    """Returns the counts: inputs by kind, how they ended, violations."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        templates = make_templates(Path(folder))
        counts, number = Counter(), 0
        deadline = time.monotonic() + 60 * minutes
        while number < count if count else time.monotonic() < deadline:
            work = Path(folder) / f"work-{number}"
            (work / "inputs").mkdir(parents=True)
            inputs = Inputs(f"{seed}-{number}", templates)
            kind, rung, processes, flags, variables = inputs.case(work)
            before = contents(work)
            process = fork(script(rung), processes, *flags, cwd=work, **variables)
            code, out, err = finished(process)
            found = violations(kind, code, err, before, contents(work))
            if verbose:
                print(number, kind, rung, code, err.strip().splitlines()[-1:], flush=True)
            counts["inputs"] += 1
            counts[kind] += 1
            counts["trained" if code == 0 else "refused in one line"] += not found
            counts["violations"] += bool(found)
            if found:
                print(f"{seed}-{number} {kind} {rung} on {processes}: {found}\n{flags} {variables}")
                print(out[-500:], err[-3000:], flush=True)
            shutil.rmtree(work, ignore_errors=True)
            number += 1
    return counts


# Random kills.


def reference(folder, flags):
    """The curve of the run when nobody stops it."""
    process = fork(script("01-single-gpu"), None, *flags, "--save-dir", folder / "reference")
    code, _, err = finished(process)
    assert code == 0, err
    return metrics(folder / "reference" / "a")


def attack_kills(minutes, seed, rounds=None):
    """Returns the counts: starts by how they ended, steps, violations."""
    # A shell that starts this in the background has it ignore SIGINT, and so its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(seed)
    counts = Counter()
    flags = (*SMALL, "-e", "a", "--max-steps", TOTAL, "--log-freq", "1", "--lr", "1e-5")
    flags += ("--lr-scheduler", "constant", "--ckpt-freq", "3", "--dtype", "fp32")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        folder = Path(folder)
        curve = reference(folder, flags)
        deadline = time.monotonic() + 60 * minutes
        number = 0
        while counts["starts"] < rounds if rounds else time.monotonic() < deadline:
            save_dir = folder / f"killed-{number}"
            last_round = rounds is not None and counts["starts"] == rounds - 1
            kill_one(draw, save_dir, flags, counts, last_round)
            newest = check_run(save_dir / "a", curve, counts)
            if newest == TOTAL and (save_dir / "a" / "final_model").exists():
                counts["runs finished"] += 1
                number += 1
                if rounds:
                    break
    return counts


def kill_one(draw, save_dir, flags, counts, to_the_end):
    """One start, which is stopped after a random time, or goes on to the end."""
    rung = draw.choice(RUNGS[:5])
    processes = None if rung == "01-single-gpu" else draw.choice((1, 2, 3))
    flags = (*flags, "--save-dir", save_dir, *exact(rung, processes or 1))
    # torchrun itself, or the fork server, whose start is faster: then more kills hit the training.
    begin = start if draw.random() < 0.3 and processes else fork
    process = begin(script(rung), processes, *flags)
    counts["starts"] += 1
    counts[rung] += 1
    action = "none" if to_the_end else draw.choice(("one", "all", "all", "term", "interrupt"))
    deadline = time.monotonic() + draw.uniform(0.5, 12)
    while process.poll() is None and (time.monotonic() < deadline or to_the_end):
        time.sleep(0.01)
    if process.poll() is None:
        counts["kill -9" if action in ("one", "all") else "SIGTERM, SIGINT"] += 1
        family = psutil.Process(process.pid).children(recursive=True)
        if action == "one" and family:
            victim = draw.choice(family)
            if victim.is_running():
                victim.kill()
        elif action in ("one", "all"):
            for member in [*family, psutil.Process(process.pid)]:
                if member.is_running():
                    member.kill()
        else:
            process.send_signal(signal.SIGTERM if action == "term" else signal.SIGINT)
    code, _, _ = finished(process)
    if code is None:
        counts["violations"] += 1
        print(f"{rung} on {processes} did not end after {action}", flush=True)
    end(process)


def check_run(run_dir, curve, counts):
    """Compares the log with the reference, and looks for damaged checkpoints. The newest step."""
    try:
        for step, line in metrics(run_dir).items() if (run_dir / "metrics.jsonl").exists() else ():
            loss, expected = line["train/loss"], curve[step]["train/loss"]
            if abs(loss - expected) > TOLERANCE * expected:
                counts["violations"] += 1
                print(f"step {step}: loss {loss}, expected {expected}", flush=True)
                break
    except ValueError:  # a kill may cut the last line; the next start removes it
        pass
    if list(run_dir.glob("*.damaged")):
        counts["violations"] += 1
        print(f"damaged: {list(run_dir.glob('*.damaged'))}", flush=True)
    steps = [int(path.name[5:]) for path in run_dir.glob("step-????????")]
    newest = max(steps, default=0)
    if newest < counts["newest"] and newest > 0 and counts["newest"] < TOTAL:
        counts["violations"] += 1
        print(f"checkpoint {counts['newest']} is lost, the newest is {newest}", flush=True)
    counts["newest"] = newest
    return newest


def write_table():
    """Writes the last counts of both attacks to outputs/measured/fuzz.md."""
    lines = ["| attack | tried | how it ended | violations |", "|---|---|---|---|"]
    for what in ("inputs", "kills"):
        path = MEASURED / f"fuzz-{what}.json"
        if not path.exists():
            continue
        counts = Counter(json.loads(path.read_text()))
        if what == "inputs":
            kinds = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS)
            tried = f"{counts['inputs']} inputs: {kinds}"
            ended = (
                f"{counts['trained']} trained, {counts['refused in one line']} refused in a line"
            )
        else:
            rungs = ", ".join(f"{rung[:2]} {counts[rung]}" for rung in RUNGS[:5])
            tried = f"{counts['starts']} starts of one run after another: rung {rungs}"
            stops = (
                f"{counts['kill -9']} by kill -9, {counts['SIGTERM, SIGINT']} by SIGTERM or SIGINT"
            )
            ended = f"{stops}; {counts['runs finished']} runs of {TOTAL} steps finished"
        lines.append(f"| {what} | {tried} | {ended} | {counts['violations']} |")
    (MEASURED / "fuzz.md").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("inputs", "kills"))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write outputs/measured/fuzz-*.json")
    parser.add_argument("--verbose", action="store_true", help="print how each input ended")
    args = parser.parse_args()
    if args.what == "inputs":
        counts = attack_inputs(args.minutes, args.seed, verbose=args.verbose)
    else:
        counts = attack_kills(args.minutes, args.seed)
    print(dict(counts))
    if args.write:
        (MEASURED / f"fuzz-{args.what}.json").write_text(json.dumps(counts, indent=1) + "\n")
        write_table()
    sys.exit(counts["violations"] > 0)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(2)

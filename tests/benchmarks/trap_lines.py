"""Single lines, left out or changed: the numbers that the notes on lines quote."""

import os
import re
import tempfile
from pathlib import Path

from bench_common import write_model
from conftest import metrics, mutant, run

DCT = "-s 128 --global-batch-size 16 -b 2 --max-steps 10"
COMPRESSED = "-s 128 --global-batch-size 16 -b 4 --max-steps 10 --compression"
ZIGZAG = "    return rank, 2 * mesh.size() - 1 - rank"
CONTIGUOUS = (ZIGZAG, "    return 2 * rank, 2 * rank + 1")
IN_ORDER = "    return torch.cat(first.unbind() + second.unbind()[::-1], dim=2)"
IN_PAIRS = """    pairs = zip(first, second, strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim=2)"""
# Stage, processes and flags, and what is written otherwise. The first row is the stage as it is.
LINES = [
    (
        "01-single-gpu",
        1,
        "-s 64 --max-steps 40",
        {
            "the target is the token itself": [
                ("F.pad(labels[:, 1:], (0, 1), value=-100)", "labels.clone()")
            ],
            "no `optimizer.zero_grad()`": [("        optimizer.zero_grad()", "        pass")],
            "parameters in bf16": [('"dtype": torch.float32}', '"dtype": torch.bfloat16}')],
        },
    ),
    (
        "01-single-gpu",
        1,
        "--dtype fp16 -s 64 --max-steps 40",
        {"no `scaler.unscale_(optimizer)`": [("        scaler.unscale_(optimizer)\n", "")]},
    ),
    (
        "02-ddp",
        2,
        "-s 64 --max-steps 40",
        {
            "no `all_reduce(num_targets, …)` in the loop": [
                ("        dist.all_reduce(num_targets, group=data_group)", "        pass")
            ],
            "no `* num_shares`": [("(loss * num_shares /", "(loss /")],
            "`model.module` in the forward pass": [
                ("return model(input_ids", "return model.module(input_ids")
            ],
            "`indices[: len(indices) // num_shares]`": [
                ("indices[rank::num_shares]", "indices[: len(indices) // num_shares]")
            ],
            "no `all_reduce(step_loss, …)`": [
                ("            dist.all_reduce(step_loss, group=data_group)\n", "")
            ],
            "no `all_reduce(total, …)`": [("    dist.all_reduce(total, group=group)\n", "")],
        },
    ),
    ("02-ddp", 2, "-s 64 --max-steps 40 --max-grad-norm 1e9", {}),
    (
        "02-ddp",
        3,
        "-s 64 --max-steps 40",
        {
            "no `targets[…] = -100`": [
                ("        targets[num_real - start :] = -100", "        pass")
            ]
        },
    ),
    (
        "04-compression",
        2,
        DCT,
        {
            "the hook on the root module alone": [
                (
                    "    for module in [*blocks, model]:\n        module.set_all",
                    "    for module in [model]:\n        module.set_all",
                )
            ],
            "`replica_average.is_last = True`": [
                ("            replica_average.is_last = is_last\n", "")
            ],
            "no `zero_grad()` in the loop of micro-batches": [
                ("is_last = is_last\n            optimizer.zero_grad()\n", "is_last = is_last\n")
            ],
            "no `gradient += self.sums.pop(module)`": [
                ("gradient += self.sums.pop(module)", "self.sums.pop(module)")
            ],
            "`sums` keeps what it has": [("self.sums.pop(module)", "self.sums[module].clone()")],
        },
    ),
    (
        "04-compression",
        2,
        f"{COMPRESSED} dct",
        {"no `basis[0] /= 2**0.5`": [("    basis[0] /= 2**0.5\n", "")]},
    ),
    (
        "04-compression",
        2,
        f"{COMPRESSED} none",
        {
            "no `gradient /= self.group.size()`": [
                ("            gradient /= self.group.size()\n", "")
            ]
        },
    ),
    (
        "04-compression",
        2,
        f"{COMPRESSED} int8",
        {
            "the mean is not copied into `gradient`": [
                ("        gradient.copy_((integers * scales).flatten()[: len(gradient)])\n", "")
            ],
            "an all-reduce of the integers": [
                (
                    "dist.all_to_all_single(parts, integers, group=self.group)",
                    "dist.all_reduce(integers, group=self.group)",
                ),
                (
                    "mean = (parts * part_scales).view(replicas, -1, CHUNK_LENGTH).mean(0)",
                    "gradient.copy_((integers * scales).flatten()[: len(gradient)] / replicas)\n"
                    "        return integers.nbytes + scales.nbytes",
                ),
            ],
            "no `round()`": [(".round().to(torch.int8)", ".to(torch.int8)")],
        },
    ),
    (
        "04-compression",
        2,
        f"{COMPRESSED} dct --shard-size 2",
        {"compression is not switched off": [(' if num_replicas > 1 else "none"\n', "\n")]},
    ),
    (
        "06-streaming",
        2,
        "-s 128 --max-steps 20 --lr-scheduler constant --warmup-steps 3",
        {
            "a rank has streams that follow one another": [
                (
                    "own = range(self.count)[dist.get_rank() :: dist.get_world_size()]",
                    "own = np.array_split(range(self.count), dist.get_world_size())"
                    "[dist.get_rank()].tolist()",
                ),
                ("train_data.all_positions(signal_group)", "None"),  # it would raise a KeyError
            ]
        },
    ),
    (
        "08-pipeline-parallel",
        2,
        "-s 128 --max-steps 2",
        {
            "`in_flight.pop()`": [("in_flight.pop(0)", "in_flight.pop()")],
            "no `gradients = num_shares / num_targets`": [
                (
                    "                gradients = num_shares / num_targets\n",
                    "                pass\n",
                )
            ],
            "no `all_reduce(step_loss, group=stage.pipeline)`": [
                (
                    "            dist.all_reduce(step_loss, group=stage.pipeline)",
                    "            id(stage)",
                )
            ],
        },
    ),
    (
        "08-pipeline-parallel",
        4,
        "-s 128 --max-steps 2 -b 1",
        {
            "`data_group` has all ranks": [
                ('data_group = mesh.get_group("shard")', "data_group = dist.group.WORLD")
            ],
            "no `num_shares`": [("num_shares / num_targets\n", "1 / num_targets\n")],
            "the norm is summed over all ranks": [
                (
                    "dist.all_reduce(squared_norm, group=stage.pipeline)",
                    "dist.all_reduce(squared_norm)",
                )
            ],
        },
    ),
    (
        "08-pipeline-parallel",
        4,
        "-s 128 --max-steps 2 -b 1 --no-reshard-after-forward",
        {
            "`is_last = i == len(micro_batches) - 1`": [
                ("is_last = i == num_rounds - 1", "is_last = i == len(micro_batches) - 1")
            ]
        },
    ),
    (
        "09-context-parallel",
        2,
        # As in `context_parallel` of traps.py, which has other lines of this stage.
        "-s 64 --max-steps 8 --warmup-steps 0 --eval-sequences 64",
        {
            "`return 2 * rank, 2 * rank + 1`": [CONTIGUOUS],
            "the same, and the chunks are gathered in pairs": [CONTIGUOUS, (IN_ORDER, IN_PAIRS)],
            "`all_reduce(step_loss, group=data_group)`": [
                ("dist.all_reduce(step_loss)", "dist.all_reduce(step_loss, group=data_group)")
            ],
            "`all_reduce(total, group=group)`": [
                ("dist.all_reduce(total)", "dist.all_reduce(total, group=group)")
            ],
            "no `all_reduce(logits, …)` in `sample`": [
                ("        dist.all_reduce(logits, group=mesh.get_group())\n", "")
            ],
        },
    ),
    (
        "09-context-parallel",
        2,
        "-s 64 --max-steps 1 -m grouped --from-scratch",
        {"no `enable_gqa=True`": [("scale=scaling, enable_gqa=True", "scale=scaling")]},
    ),
    (
        "10-expert-parallel",
        2,
        "-s 64 --max-steps 20",
        {
            "no `parameter.grad /= expert_size`": [
                ("            parameter.grad /= expert_size\n", "            pass\n")
            ],
            "no `all_reduce(squares)`": [("        dist.all_reduce(squares)\n", "")],
            "the norm of `others` alone": [
                (
                    "p.grad.to_local() for p in model.parameters()",
                    "p.grad.to_local() for p in others",
                )
            ],
            "`others` alone are clipped": [("in (of_experts, others):", "in (others,):")],
            "`rows[order]`": [("rows[order.argsort()]", "rows[order]")],
            "no `[order.argsort()]`": [("rows[order.argsort()]", "rows")],
            "no `* top_k_weights[:, :, None]`": [("(rows * top_k_weights[:, :, None])", "rows")],
            "no row of zeros": [
                ("    rows = F.pad(rows, (0, 0, 0, 1))\n", ""),
                ("    numbers = F.pad(numbers, (0, 1))\n", ""),
                ("AllToAll.apply(rows[:-1], ", "AllToAll.apply(rows, "),
            ],
        },
    ),
]


# A model like tiny, but two heads of queries share a head of keys and values.
GROUPED = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320}
GROUPED |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "tie_word_embeddings": True}


def lines(number=""):
    """Single lines left out or changed: losses and norms of the gradients. `lines-02`: of stage 02.

    On the default data. Most of these mistakes raise no error, and some do not show in the loss."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        write_model(Path(folder, "grouped"), **GROUPED)
        for stage, processes, flags, changes in LINES:
            if not stage.startswith(number):
                continue
            where = f"{stage[:2]}, {processes} × `{flags}`"
            for change, edits in {"as it is": [], **changes}.items():
                place = Path(folder, str(len(rows)))
                path = mutant(place, stage, *edits)
                more = ["--log-freq", 1, "-e", "a", "--save-dir", place]
                how = {"path": path, "cwd": folder, "check": not edits}
                result = run(stage, processes, *flags.split(), *more, **how)
                rows.append([where, change, *what_it_logs(place / "a", result)])
                where = ""
    head = ["stage, processes, flags", "change", "loss, step 1", "gradient norm, step 1"]
    return [*head, "loss, last step", "gradient norm, last step", "eval/loss"], rows


def what_it_logs(run_dir, result):
    """The numbers of a row of the table, or the error with which the run ended."""
    if result.returncode != 0:
        errors = re.findall(r"\b\w+Error: .+", result.err)
        return [f"an error: {errors[-1]}", *["–"] * 4]
    found = metrics(run_dir)
    first, last = found[1], found[max(found)]
    columns = []
    for step in (first, last):
        columns += [f"{step['train/loss']:.4f}", f"{step['train/grad_norm']:.3f}"]
    return [*columns, f"{last['eval/loss']:.4f}"]

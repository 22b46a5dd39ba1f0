"""Which mixtures of experts of transformers stage 10 computes as one process does.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/expert_models.py [TYPE ...]

`python tests/benchmarks/benchmark.py experts-models` runs it and writes the table. Each model type
that has experts gets a small configuration with random weights. Logits and the gradient of every
parameter are compared with those of the model on one process.
"""

import json
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

from bench_common import STAGE_10, environment, report
from conftest import load
from context_models import (
    SECONDS,
    TYPES,
    VOCABULARY,
    Refused,
    loss_of,
    refuse,
    small_config,
    timed_out,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

LENGTH = 32
DTYPE = torch.float32
# What some types need, besides small sizes, to have four experts of which a token takes two.
MORE = {
    "num_experts": 4,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 2,
    "is_moe": True,
    "enable_moe_block": True,
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "router_hidden_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    "initializer_range": 0.1,  # so that experts count for more than with the usual 0.02
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
OF_TYPES = {
    "gemma4": {"num_hidden_layers": 6},
    "gemma4_text": {"num_hidden_layers": 6},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


def has_experts(kind):
    """Whether configurations of this type have a number of experts."""
    try:
        values = transformers.CONFIG_MAPPING[kind]().get_text_config().to_dict()
    except Exception:
        return False
    return any("experts" in name for name in values)


def one_process(stage, config, input_ids):
    """The model, its logits, and the gradients of its parameters by name."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    if model.num_parameters() > 2e7:
        raise ValueError(f"{model.num_parameters():,} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).train()
    logits = model(input_ids=input_ids, use_cache=False).logits
    loss_of(stage, logits, input_ids).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return model, logits.detach(), gradients


def compare(stage, model, logits, gradients, input_ids):
    """The largest relative errors, of the logits and of the gradient of a parameter.

    The model is split as the script splits it, and each rank has its share of the sequences."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    expert_mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("shard", "expert"))
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        refuse("no transformer blocks were found in it")
    options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    stage.split_experts(model, expert_mesh, **options)
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, **options)
    own = input_ids[rank::ranks]
    split = model(input_ids=own, use_cache=False).logits
    (loss_of(stage, split, own) * ranks).backward()  # FSDP takes the mean of the ranks
    error = ((split - logits[rank::ranks]).abs().max() / logits.abs().max()).item()

    largest = max(gradient.norm() for gradient in gradients.values())
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or name not in gradients:
            if (parameter.grad is None) != (name not in gradients):
                worst = float("inf")
            continue
        found = parameter.grad.full_tensor()
        if parameter.device_mesh == expert_mesh:
            found /= ranks  # as the script does: these were not averaged over the row
        size = gradients[name].norm() + 1e-4 * largest
        worst = max(worst, ((found - gradients[name]).norm() / size).item())
    errors = torch.tensor([error, worst])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors.tolist()


def result_of(stage, kind):
    """What became of a type: "exact", "wrong", "refused", "error", or "not built", and details."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
    signal.alarm(SECONDS)
    try:
        model, logits, gradients = one_process(
            stage, small_config(kind, **MORE, **OF_TYPES.get(kind, {})), input_ids
        )
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        errors = compare(stage, model, logits, gradients, input_ids)
        return "exact" if max(errors) < 1e-5 else "wrong", errors
    except Refused as message:
        return "refused", str(message)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def main(kinds):
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGALRM, timed_out)
    dist.init_process_group("gloo")
    stage = load(STAGE_10)
    stage.fail = refuse
    for kind in kinds or sorted(filter(has_experts, TYPES)):
        result = result_of(stage, kind)
        signal.alarm(0)
        if dist.get_rank() == 0:
            print(json.dumps([kind, *result]), flush=True)
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def table():
    """Runs this file on two processes, and writes which types are exact and which are refused."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__]
    run = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    kinds = defaultdict(list)
    for line in run.stdout.splitlines():
        kind, result, detail = json.loads(line)
        if result in ("refused", "error"):
            reason = detail.removeprefix("--model-name: ").removesuffix(", use 03-fsdp")
            result = f"{result}: {re.sub(r'^.+ has no', 'it has no', reason)}"
        kinds[result].append(kind)
    order = sorted(kinds, key=lambda result: (result != "exact", -len(kinds[result]), result))
    rows = [[result, len(kinds[result]), ", ".join(kinds[result])] for result in order]
    report("experts-models", ["result", "number", "model types"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])

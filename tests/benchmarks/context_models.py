"""Which model types of transformers stage 09 computes as one process does, and which it refuses.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/context_models.py [TYPE ...]

`python tests/benchmarks/benchmark.py context-models` runs it and writes the table. Each type gets a
small configuration with random weights. Logits and the gradient of every parameter are compared
with those of the model on one process.
"""

import json
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

from bench_common import STAGE_09, environment, report
from conftest import load
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

LENGTH, VOCABULARY = 32, 128
SECONDS = 60  # for a model; some configurations are large whatever is asked for
# Names of sizes that configurations use. A configuration gets those that it has.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner"), 64),
    **dict.fromkeys(("ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("d_kv", "sliding_window"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("expert_layer_period", "attn_layer_period"), 2),
    **dict.fromkeys(("expert_layer_offset", "attn_layer_offset"), 1),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rotary_dim": 4,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Refused(Exception):
    """The stage ends the run with this message."""


def refuse(message):
    raise Refused(message)


def timed_out(number, frame):
    raise TimeoutError(f"longer than {SECONDS} s")


def small_config(kind, **more):
    """A configuration of this type with small sizes, or those in `more`, and without dropout."""
    default = transformers.CONFIG_MAPPING[kind]().get_text_config()
    values = default.to_dict()
    sizes = {name: size for name, size in {**SIZES, **more}.items() if name in values}
    for name in ("sliding_window", "head_dim"):
        if values.get(name) is None and name not in more:
            sizes.pop(name, None)
    if values.get("num_key_value_heads") == values.get("num_attention_heads"):
        sizes.pop("num_key_value_heads", None)
        if "num_key_value_heads" in values:
            sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    config = type(default)(**sizes)
    config.is_decoder = True
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config


def loss_of(stage, logits, input_ids):
    targets = F.pad(input_ids[:, 1:], (0, 1), value=-100)
    return stage.sum_cross_entropy(logits, targets)


def one_process(stage, config, input_ids):
    """The model, its logits, and the gradients of its parameters by name."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if model.num_parameters() > 2e7:
        raise ValueError(f"{model.num_parameters():,} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    logits = model(input_ids=input_ids, use_cache=False).logits
    loss_of(stage, logits, input_ids).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return model, logits.detach(), gradients


def compare(stage, model, logits, gradients, input_ids, mesh):
    """The largest relative errors, of the logits and of the gradient of a parameter."""
    stage.split_attention(model, mesh)
    targets = F.pad(input_ids[:, 1:], (0, 1), value=-100)
    own = stage.own_positions(LENGTH, mesh)
    part = {"input_ids": input_ids[:, own], "position_ids": own[None], "use_cache": False}
    stage.sum_cross_entropy(model(**part).logits, targets[:, own]).backward()
    with torch.no_grad():
        split = model(**part).logits
    error = ((split - logits[:, own]).abs().max() / logits.abs().max()).item()
    largest = max(gradient.norm() for gradient in gradients.values())
    worst = 0.0
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(found)
        if name in gradients:
            size = gradients[name].norm() + 1e-4 * largest
            worst = max(worst, ((found - gradients[name]).norm() / size).item())
    errors = torch.tensor([error, worst])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors.tolist()


def result_of(stage, kind, mesh):
    """What became of a type: "exact", "wrong", "refused", "error", or "not built", and details."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    signal.alarm(SECONDS)
    try:
        model, logits, gradients = one_process(stage, small_config(kind), input_ids)
    except Exception as error:
        return "not built", type(error).__name__
    try:
        errors = compare(stage, model, logits, gradients, input_ids, mesh)
        return "exact" if errors[0] < 1e-4 and errors[1] < 1e-3 else "wrong", errors
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stage = load(STAGE_09)
    stage.fail = refuse
    results = {}
    for kind in kinds or sorted(TYPES):
        results[kind] = result_of(stage, kind, mesh)
        signal.alarm(0)
        if dist.get_rank() == 0:
            print(json.dumps([kind, *results[kind]]), flush=True)
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
            reason = detail.removeprefix("--model-name").removeprefix(", --attn").strip(": ")
            result = f"{result}: {reason.removesuffix(', use 03-fsdp')}"
        kinds[result].append(kind)
    order = sorted(kinds, key=lambda result: (result != "exact", -len(kinds[result]), result))
    rows = [[result, len(kinds[result]), ", ".join(kinds[result])] for result in order]
    report("context-models", ["result", "number", "model types"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])

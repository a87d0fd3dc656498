"""Milliseconds a round of targets with weights stored in few bits, in the shapes of a config.json.

    python examples/quantised_rounds.py --target <config folder> --drafter <config folder> --batch-sizes 1 8 32

Weights and their stored numbers are random; acceptance is scripted. All linear layers except the head are stored; of a
mixture of experts only the experts, in MXFP4. The floor is the time of a copy that reads the target once.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec import Mxfp4Config, NoDrafter
from hf_specdec.bench.batches import random_batches
from hf_specdec.bench.measure import Bench, Case
from hf_specdec.bench.models import load_target, random_drafter
from hf_specdec.bench.synthetic import acceptance_rates, scripted_acceptance
from hf_specdec.bench.traffic import copy_bandwidth
from hf_specdec.checkpoints.checkpoint import quiet_loading
from hf_specdec.kernels.stored_weight_reference import dequantise
from hf_specdec.kernels.types import StoredWeight
from hf_specdec.modules.weights import register_weight_kind

PROMPT, NEW_TOKENS = 128, 128
MXFP4_EXPERTS = "MXFP4 experts"


class Format(NamedTuple):
    """How numbers are stored; `rows` and `group` are those of a block, None for all."""

    dtype: torch.dtype
    rows: int | None
    group: int | None
    rounds_inputs: bool = False
    codes: str | None = None
    scales: torch.dtype = torch.bfloat16


FORMATS = {
    "FP8 row": Format(torch.float8_e4m3fn, 1, None),
    "FP8 tensor": Format(torch.float8_e4m3fn, None, None),
    "FP8 block": Format(torch.float8_e4m3fn, 128, 128),
    "FP8 row, inputs rounded": Format(torch.float8_e4m3fn, 1, None, True),
    "FP8 block, inputs rounded": Format(torch.float8_e4m3fn, 128, 128, True),
    "int8 row": Format(torch.int8, 1, None),
    "int8 row, inputs rounded": Format(torch.int8, 1, None, True),
    "int4 row": Format(torch.uint8, 1, None),
    "int4 groups of 128": Format(torch.uint8, 1, 128),
    "int4 groups of 32": Format(torch.uint8, 1, 32),
    "MXFP4": Format(torch.uint8, 1, 32, codes="e2m1", scales=torch.float8_e8m0fnu),
    "NVFP4": Format(torch.uint8, 1, 16, codes="e2m1", scales=torch.float8_e4m3fn),
    "nf4": Format(torch.uint8, 1, 64, codes="nf4", scales=torch.float32),
}


class RandomLinear(nn.Linear):
    """A linear layer of random numbers in a format; it dequantises them where no kernel supports the call.

    Numbers and scales are parameters, as those of libraries are, so that layers can be fused.
    """

    scales: nn.Parameter
    numbers: torch.dtype
    form: StoredWeight  # without numbers and scales

    @property
    def stored(self) -> StoredWeight:
        return self.form._replace(values=self.weight.view(self.numbers), scales=self.scales)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, dequantise(self.stored, inputs.dtype), self.bias)


register_weight_kind(f"{__name__.partition('.')[0]}.{RandomLinear.__name__}")(lambda module: module.stored)


def random_weight(layer: nn.Linear, form: Format) -> StoredWeight:
    """Random numbers in the shape and about the size of the weight of `layer`."""
    size_out, size_in = layer.weight.shape
    rows, group, device = form.rows or size_out, form.group or size_in, layer.weight.device
    packed = form.dtype == torch.uint8
    numbers = torch.randint(256, (size_out, size_in // (2 if packed else 1)), dtype=torch.uint8, device=device)
    if form.dtype == torch.float8_e4m3fn:
        numbers &= 0xBF  # below 2, no NaN
    scales = torch.full((-(-size_out // rows), -(-size_in // group)), 2.0**-6 if packed else 2.0**-7, device=device)
    if form.dtype == torch.int8:
        scales *= 2.0**-6
    outer = torch.ones(1, device=device) if form.scales == torch.float8_e4m3fn else None
    return StoredWeight(
        numbers.view(form.dtype), scales.to(form.scales), None, rows, group, form.rounds_inputs, form.codes, outer
    )


def store(model: PreTrainedModel, form: Format) -> None:
    """Store the linear layers of `model`, except its head."""
    for layer in model.base_model.modules():
        if type(layer) is nn.Linear:
            stored = random_weight(layer, form)
            layer.weight = nn.Parameter(stored.values.view(torch.uint8), requires_grad=False)
            layer.scales = nn.Parameter(stored.scales, requires_grad=False)
            layer.numbers, layer.form = form.dtype, stored._replace(values=None, scales=None)
            layer.__class__ = RandomLinear


def load_experts(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A mixture of experts with random weights; the experts are in MXFP4."""
    config = AutoConfig.from_pretrained(name)
    config.quantization_config = {"quant_method": "mxfp4"}
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)))
    options = {"config": config, "state_dict": {}, "dtype": dtype, "quantization_config": Mxfp4Config()}
    with quiet_loading():
        model = model_class.from_pretrained(None, **options, device_map={"": device})
    for tensor in model.parameters():
        if tensor.dtype == torch.uint8:
            # Numbers of all sizes; exponents of about 2 ** -6.
            low, high = (0, 256) if tensor.dim() == 4 else (119, 123)
            tensor.data.copy_(torch.randint(low, high, tensor.shape, dtype=torch.uint8, device=device))
    return model


def bytes_of(model: PreTrainedModel) -> int:
    """Bytes of weights and of scales, without the embedding."""
    tensors = list(model.parameters())
    for module in model.modules():
        if isinstance(module, RandomLinear) and module.form.outer is not None:
            tensors.append(module.form.outer)
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    return sum({id(one): one.nbytes for one in tensors if is_tied or one is not embedding}.values())


def measure(arguments: argparse.Namespace, name: str, device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Rounds of the target in one format, batch by batch, without drafts and with."""
    if name == MXFP4_EXPERTS:
        target = load_experts(arguments.target, dtype, device)
    else:
        target = load_target(arguments.target, dtype, device, random_weights=True)
        if name != "none":
            store(target, FORMATS[name])
    target.eval().requires_grad_(False)
    target.generation_config.eos_token_id = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    vocabulary, bandwidth = target.config.get_text_config().vocab_size, copy_bandwidth(device)
    bench = Bench(
        target,
        lambda case: random_batches(vocabulary, PROMPT, case.batch_size, case.batch_size, device),
        {"max_new_tokens": arguments.max_new_tokens, "min_new_tokens": arguments.max_new_tokens},
        arguments.runs,
        bandwidth,
        gpu_time=True,
        is_scripted=True,
    )
    options = {"batch_invariant": arguments.batch_invariant}
    drafters = {"none": (NoDrafter(target, **options), 0)}
    if arguments.drafter:
        drafter = random_drafter(arguments.drafter, target).configure(engine="static", **options)
        drafters[Path(arguments.drafter).name] = drafter, arguments.k
    for batch in arguments.batch_sizes:
        for label, (drafter, k) in drafters.items():
            rates = acceptance_rates([arguments.acceptance], k) if k else []
            context = {"context": partial(scripted_acceptance, rates, device)} if k else {}
            case = bench.measure(Case(label, k, batch, prompt_length=PROMPT), drafter, **context)
            yield {
                "format": name,
                "drafter": label,
                "batch": batch,
                "ms": case.ms_per_round and round(case.ms_per_round.median, 3),
                "gpu_ms": case.gpu_ms_per_round and round(case.gpu_ms_per_round, 3),
                "floor_ms": round(1e3 * bytes_of(target) / bandwidth, 3),
                "bytes": bytes_of(target),
                "peak_bytes": case.peak_memory_bytes,
                "engine": case.error or case.engine,
            }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="folder of the target's config.json")
    add("--drafter", help="folder of the drafter's config.json")
    add(
        "--formats",
        nargs="+",
        default=["none", *FORMATS],
        help=f"'none' for weights as they are; also {MXFP4_EXPERTS!r}",
    )
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    add("-k", type=int, default=3, help="draft tokens a round")
    add("--acceptance", type=float, default=2.5, help="tokens a round")
    add("--max-new-tokens", type=int, default=NEW_TOKENS)
    add("--runs", type=int, default=3)
    add("--batch-invariant", action="store_true")
    add("--output", type=Path, help="file to which each figure is added as a line of JSON when it is there")
    arguments = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for name in arguments.formats:
        for figures in measure(arguments, name, device, dtype):
            found.append(figures)
            line = json.dumps(figures)
            print(line, flush=True)
            if arguments.output is not None:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        gc.collect()
    return found


if __name__ == "__main__":
    main()

"""Time drafting alone over K: EAGLE-3 runs one pass for each draft token, P-EAGLE one pass for all.

    python examples/drafting_time.py --output drafting_time.json --plot drafting_time.png

Drafters have random weights and the shapes of published ones for Llama-3.1-8B. On a GPU a round's drafting is timed
eagerly and captured in a CUDA graph. `--read` draws an earlier run's JSON instead of measuring.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.cache.layer_kinds import LayerKinds
from hf_specdec.config import Eagle3Config, PEagleConfig
from hf_specdec.drafters import Eagle3Drafter, PEagleDrafter
from hf_specdec.graphs.cuda_graphs import CudaGraph
from hf_specdec.kernels.types import VerificationResult
from hf_specdec.modules.patch import engine
from hf_specdec.patching.linear import patched_linear
from hf_specdec.state import Shape

SHAPES = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
DRAFT_VOCAB = {"llama-3.1-8b": 32000, "tiny": 128}
TARGET_LAYERS = 32


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", choices=SHAPES, default="llama-3.1-8b")
    add("--parallel-layers", type=int, nargs="+", default=[1, 4], help="layers of the P-EAGLE drafters")
    add("--num-assistant-tokens", "-k", type=int, nargs="+", default=list(range(1, 9)))
    add("--batch-sizes", type=int, nargs="+", default=[1, 8])
    add("--context", type=int, default=256, help="tokens in the drafter's cache")
    add("--repeats", type=int, default=50)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if torch.cuda.is_available() else "float32")
    add("--output", type=Path, help="JSON file for the figures")
    add("--plot", type=Path, help="picture of the figures; needs matplotlib")
    add("--read", type=Path, help="JSON file of an earlier run, instead of measuring")
    return parser.parse_args(arguments)


def make_drafters(args: argparse.Namespace) -> dict[str, Eagle3Drafter]:
    """Drafters with random weights, by name, bound to a target on the meta device."""
    shapes = SHAPES[args.shapes]
    with torch.device("meta"):
        target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=TARGET_LAYERS, **shapes))
    options = {**shapes, "draft_vocab_size": DRAFT_VOCAB[args.shapes]}
    drafters = {"EAGLE-3, 1 layer": Eagle3Drafter(Eagle3Config(**options))}
    for layers in args.parallel_layers:
        name = f"P-EAGLE, {layers} layer{'s' if layers > 1 else ''}"
        drafters[name] = PEagleDrafter(PEagleConfig(num_hidden_layers=layers, mask_token_id=0, **options))
    for drafter in drafters.values():
        drafter.to(args.device, getattr(torch, args.dtype)).eval().bind(target)
    return drafters


def drafting(drafter: Eagle3Drafter, batch: int, num_drafts: int, context: int) -> Callable[[], object]:
    """A function that drafts one round, with `context` tokens in the cache, after a round that accepted half of K."""
    device, width = drafter.device, drafter.config.aux_hidden_size
    prompts = [torch.randint(drafter.config.vocab_size, (context,), device=device) for _ in range(batch)]
    shape = Shape(
        batch, slots=context + 65, num_draft_tokens=num_drafts, is_sampling=False, draft_probs=False, num_ends=0
    )
    state = drafter.new_state(shape, layers=LayerKinds(), device=device)
    state.admit(range(batch), prompts, max_new_tokens=[64] * batch, seeds=[0] * batch)
    slots = torch.arange(context - 1, device=device).expand(batch, -1)
    aux_hidden_states = torch.randn(batch, context - 1, width, device=device, dtype=drafter.dtype)
    drafter.prefill(state, aux_hidden_states, slots)
    committed = torch.full_like(state.lengths, num_drafts // 2 + 1)
    result = VerificationResult(state.tokens[:, : num_drafts + 1], committed - 1, committed)
    window = aux_hidden_states[:, : num_drafts + 1].contiguous()
    return lambda: drafter.propose(state, window, result)


def median_ms(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of `run`; on a GPU measured by CUDA events."""
    times = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict:
    rows = []
    for name, drafter in make_drafters(args).items():
        for batch in args.batch_sizes:
            for num_drafts in args.num_assistant_tokens:
                with patched_linear(drafter), engine():
                    run = drafting(drafter, batch, num_drafts, args.context)
                    for _ in range(3):
                        run()
                    row = {"drafter": name, "batch": batch, "k": num_drafts}
                    row["eager_ms"] = round(median_ms(run, args.device, args.repeats), 4)
                    if args.device != "cpu":
                        row["graph_ms"] = round(median_ms(CudaGraph(run), args.device, args.repeats), 4)
                rows.append(row)
                print(json.dumps(row))
    device = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
    about = {"device": device, "torch": torch.__version__, "dtype": args.dtype, "shapes": args.shapes}
    return {**about, "context": args.context, "rows": rows}


def plot(report: dict, path: Path) -> None:
    """Plot drafting time over K, with a line for each drafter and a panel for each batch size."""
    import matplotlib.pyplot as plt

    column = "graph_ms" if "graph_ms" in report["rows"][0] else "eager_ms"
    batches = sorted({row["batch"] for row in report["rows"]})
    figure, panels = plt.subplots(1, len(batches), figsize=(4 * len(batches), 3.2), sharey=True, squeeze=False)
    highest = max(row[column] for row in report["rows"])
    for panel, batch in zip(panels[0], batches, strict=True):
        for name in dict.fromkeys(row["drafter"] for row in report["rows"]):
            rows = [row for row in report["rows"] if row["drafter"] == name and row["batch"] == batch]
            panel.plot([row["k"] for row in rows], [row[column] for row in rows], marker="o", label=name)
        panel.set(title=f"batch {batch}", xlabel="K, draft tokens a round", ylim=(0, 1.05 * highest))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("drafting, ms a round")
    panels[0][0].legend()
    figure.suptitle(f"{report['shapes']} shapes, {report['dtype']}, {report['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    report = json.loads(args.read.read_text(encoding="utf-8")) if args.read else measure(args)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()

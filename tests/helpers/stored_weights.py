"""Random weights that are stored as numbers of few bits."""

import torch

from hf_specdec.kernels.types import StoredWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Format, rows and inputs of a scale (None: all of them), whether there are zero points.
KINDS = {
    "e4m3 rows": (torch.float8_e4m3fn, 1, None, False),
    "e4m3 tensor": (torch.float8_e4m3fn, None, None, False),
    "e4m3 blocks": (torch.float8_e4m3fn, 128, 128, False),
    "e4m3 blocks, e8m0": (torch.float8_e4m3fn, 128, 128, False),
    "int8 rows": (torch.int8, 1, None, False),
    "int8 groups": (torch.int8, 1, 32, False),
    "int4 groups": (torch.uint8, 1, 128, False),
    "int4 groups of 32": (torch.uint8, 1, 32, False),
    "int4 zero points": (torch.uint8, 1, 64, True),
    "int4 zero points of 128": (torch.uint8, 1, 128, True),
    "int4 rows": (torch.uint8, 1, None, False),
    "int4 rows with zero points": (torch.uint8, 1, None, True),
    "mxfp4": (torch.uint8, 1, 32, False),
    "nvfp4": (torch.uint8, 1, 16, False),
    "nf4": (torch.uint8, 1, 64, False),
    "nf4 twice": (torch.uint8, 1, 64, False),
}
CODES_OF = {"mxfp4": "e2m1", "nvfp4": "e2m1", "nf4": "nf4", "nf4 twice": "nf4"}


def stored_weight(kind: str, size_out: int | tuple[int, ...], size_in: int, seed: int = 0) -> StoredWeight:
    """A random weight of a kind, of which all numbers occur; of `size_out` all but the last are experts."""
    *experts, size_out = size_out if isinstance(size_out, tuple) else (size_out,)
    dtype, rows, group, has_zeros = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    rows, group = rows or size_out, group or size_in
    values = torch.randint(
        0, 256, (*experts, size_out, size_in // (2 if dtype == torch.uint8 else 1)), generator=generator
    )
    values = values.to(torch.uint8)
    if dtype == torch.float8_e4m3fn:  # without NaN
        values = torch.where(values & 0x7F == 0x7F, 0x3C, values)
    blocks = (*experts, -(-size_out // rows), -(-size_in // group))
    scales = torch.rand(blocks, generator=generator) / (200 if dtype != torch.uint8 else 10)
    zeros = torch.randint(0, 16, blocks, generator=generator).to(torch.uint8).to(DEVICE) if has_zeros else None
    parts = {}
    if kind in ("mxfp4", "e4m3 blocks, e8m0"):
        scales = torch.randint(120, 124, blocks, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
    elif kind == "nvfp4":
        scales, parts["outer"] = (scales * 100).to(torch.float8_e4m3fn), torch.tensor([300.0], device=DEVICE)
    elif kind == "nf4 twice":
        scales = torch.randint(0, 256, blocks, generator=generator).to(torch.uint8)
        parts["scale_codes"] = torch.linspace(-1, 1, 256, device=DEVICE)
        parts["outer"] = torch.rand(-(-scales.numel() // 256), generator=generator).to(DEVICE) / 40
        parts["shift"] = torch.tensor(0.05, device=DEVICE)
    return StoredWeight(
        values.view(dtype).to(DEVICE), scales.to(DEVICE), zeros, rows, group, codes=CODES_OF.get(kind), **parts
    )

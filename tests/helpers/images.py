"""Tiny random image-text models, and prompts with images for them, made by hand as processors make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from zoo_configs import FIRST_PROMPT_ID, LAST_PROMPT_ID, tiny_config
from zoo_models import enliven

PAD = 0


class Kind(NamedTuple):
    """How images of a class of models are given to it.

    Attributes:
        settings: of the configuration, besides those of `tiny_config`.
        image: for the model and a generator the inputs of one image, each `[1, ...]`, and how many tokens stand for it.
        types: name of the input that tells tokens of images from others, `[B, P]`; None for none.
        join: how inputs of several images are put together.
    """

    settings: dict[str, Any]
    image: Callable[[PreTrainedModel, torch.Generator], tuple[dict[str, torch.Tensor], int]]
    types: str | None = None
    join: Callable[[str, Sequence[torch.Tensor]], torch.Tensor] = lambda name, parts: torch.cat(list(parts))


def _size(model: PreTrainedModel, name: str) -> int:
    value = getattr(model.config.vision_config, name)
    return value[0] if isinstance(value, (list, tuple)) else value


def _square(num_tokens: int) -> Callable:
    """Images of one size."""

    def image(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
        side = _size(model, "image_size")
        return {"pixel_values": torch.randn(1, 3, side, side, generator=generator)}, num_tokens

    return image


def _patches(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """Images of any size, as rows of patches, two by two of which are merged."""
    height, width = (2 * int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
    values = 3 * _size(model, "temporal_patch_size") * _size(model, "patch_size") ** 2
    pixels = torch.randn(height * width, values, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}, height * width // 4


def _pixtral(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    side = 4 * _size(model, "patch_size")
    pixels = torch.randn(1, 3, side, side, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]])}, 4


def _tiles(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """An image of two tiles and one of the whole, with an embedding at the end of every row of patches."""
    side = _size(model, "image_size")
    pixels = torch.randn(1, 3, 3, side, side, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, 2 * side]])}, 4 + 2 * (4 + 1)


def _of_rows(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """An image of the first of each row's images, which are a dimension of their own."""
    side = _size(model, "image_size")
    return {"pixel_values": torch.randn(1, 1, 3, side, side, generator=generator)}, 4


def _join_by_row(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    raise NotImplementedError


_PATCHES = Kind({"vision_config": {"depth": 2}}, _patches, "mm_token_type_ids")
_DEEPSTACK = Kind({"vision_config": {"depth": 2, "deepstack_visual_indexes": [0, 1]}}, _patches, "mm_token_type_ids")
_CLIP = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 2}
KINDS = {
    "Qwen2VLForConditionalGeneration": _PATCHES,
    "Qwen2_5_VLForConditionalGeneration": Kind(
        {"vision_config": {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]}}, _patches, "mm_token_type_ids"
    ),
    "Qwen3VLForConditionalGeneration": _DEEPSTACK,
    "Qwen3VLMoeForConditionalGeneration": _DEEPSTACK,
    "Qwen3_5ForConditionalGeneration": _PATCHES,
    "Qwen3_5MoeForConditionalGeneration": _PATCHES,
    "Glm4vForConditionalGeneration": _PATCHES,
    "Gemma3ForConditionalGeneration": Kind(
        {"vision_config": _CLIP | {"image_size": 56}, "mm_tokens_per_image": 4}, _square(4), "token_type_ids"
    ),
    "PaliGemmaForConditionalGeneration": Kind({"vision_config": _CLIP}, _square(4), "token_type_ids"),
    "LlavaForConditionalGeneration": Kind({"vision_config": _CLIP}, _square(4)),
    "LlavaNextForConditionalGeneration": Kind(
        {"vision_config": _CLIP, "image_grid_pinpoints": [[28, 56], [56, 28]]}, _tiles
    ),
    "Mistral3ForConditionalGeneration": Kind({"vision_config": {"image_size": 112, "num_hidden_layers": 2}}, _pixtral),
    "InternVLForConditionalGeneration": Kind(
        {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14], "num_hidden_layers": 2}}, _square(4)
    ),
    "SmolVLMForConditionalGeneration": Kind(
        {"vision_config": {"image_size": 64, "patch_size": 16, "num_hidden_layers": 2}}, _of_rows
    ),
    "Idefics3ForConditionalGeneration": Kind(
        {"vision_config": {"image_size": 64, "patch_size": 16, "num_hidden_layers": 2}}, _of_rows
    ),
}


def image_model(name: str, weight_std: float = 0.3, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of the class `name`, one of `KINDS`, in float32 and evaluation mode."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class, tied=False, extra=None)
    for key, value in KINDS[name].settings.items():
        part = getattr(config, key)
        if isinstance(value, dict):
            for entry, content in value.items():
                setattr(part, entry, content)
        else:
            setattr(config, key, value)
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    enliven(model, weight_std)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    model.generation_config.bos_token_id = 1
    return model


def image_prompts(
    model: PreTrainedModel, rows: Sequence[Sequence[int | str]], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Left-padded prompts with images.

    Args:
        model: of one of `KINDS`.
        rows: each a list of numbers of text tokens, and "image" where an image is.
        seed: of tokens and pixels.
    """
    kind, generator = KINDS[type(model).__name__], torch.Generator().manual_seed(seed)
    config = model.config
    image_token = getattr(config, "image_token_id", None) or config.image_token_index
    texts, types, images = [], [], []
    for row in rows:
        tokens: list[int] = []
        flags: list[int] = []
        for part in row:
            if part == "image":
                inputs, count = kind.image(model, generator)
                images.append((len(texts), inputs))
                tokens += [image_token] * count
                flags += [1] * count
            else:
                tokens += torch.randint(FIRST_PROMPT_ID, LAST_PROMPT_ID + 1, (part,), generator=generator).tolist()
                flags += [0] * part
        texts.append(tokens)
        types.append(flags)
    width = max(map(len, texts))

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[fill] * (width - len(row)) + row for row in values])

    made = {
        "input_ids": padded(texts, PAD),
        "attention_mask": padded([[1] * len(row) for row in texts], 0),
    }
    if kind.types is not None and images:
        made[kind.types] = padded(types, 0)
    names = images[0][1] if images else ()
    for name in names:
        parts = [inputs[name] for _, inputs in images]
        if kind.image is _of_rows:
            most = max(sum(row == number for row, _ in images) for number in range(len(texts)))
            joined = torch.zeros(len(texts), most, *parts[0].shape[2:])
            for number in range(len(texts)):
                own = [part for (row, _), part in zip(images, parts, strict=True) if row == number]
                if own:
                    joined[number, : len(own)] = torch.cat(own, dim=1)
            made[name] = joined
        else:
            made[name] = torch.cat(parts)
    return made

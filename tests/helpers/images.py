"""Tiny random image-text models, and prompts with images, made by hand in the form of processors' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from zoo_configs import FIRST_PROMPT_ID, LAST_PROMPT_ID, VOCAB, tiny_config
from zoo_models import enliven

PAD = 0
IMAGE = "image"


class Kind(NamedTuple):
    """How images, or sounds, are given to a class of models.

    Attributes:
        settings: of the configuration, besides those of `tiny_config`.
        one: for the model and a generator the inputs of one image, each `[1, ...]`, and how many tokens stand for it.
        types: name of the input `[B, P]` that marks the tokens of images; None for none.
        type_id: its value for them.
        token: name of the token that stands for an image in the configuration.
        marks: names of the tokens before and after them.
        by_row: whether inputs are `[B, images of a row, ...]`, with zeros for rows of fewer images.
    """

    settings: dict[str, Any]
    one: Callable[[PreTrainedModel, torch.Generator], tuple[dict[str, torch.Tensor], int]]
    types: str | None = None
    type_id: int = 1
    token: str = "image_token_id"
    marks: tuple[str, ...] = ()
    by_row: bool = False


def _size(model: PreTrainedModel, name: str) -> int:
    value = getattr(model.config.vision_config, name)
    return value[0] if isinstance(value, (list, tuple)) else value


def _square(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    side = _size(model, "image_size")
    return {"pixel_values": torch.randn(1, 3, side, side, generator=generator)}, 4


def _square_of_row(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    inputs, count = _square(model, generator)
    return {name: value[:, None] for name, value in inputs.items()}, count


def _patches(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """Of any size, as rows of patches; two by two are merged."""
    height, width = (2 * int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
    values = 3 * _size(model, "temporal_patch_size") * _size(model, "patch_size") ** 2
    pixels = torch.randn(height * width, values, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}, height * width // 4


def _frames(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """A video of two pairs of frames."""
    values = 3 * _size(model, "temporal_patch_size") * _size(model, "patch_size") ** 2
    inputs = {
        "pixel_values_videos": torch.randn(2 * 4 * 4, values, generator=generator),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }
    return inputs, 2 * 4 * 4 // 4


def _padded_patches(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """As `_patches`, padded to a fixed number of patches."""
    height, width = (2 * int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
    pixels = torch.randn(1, 36, 3 * _size(model, "patch_size") ** 2, generator=generator)
    is_patch = (torch.arange(36) < height * width)[None].long()
    shapes = torch.tensor([[height, width]])
    inputs = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": is_patch}
    return inputs, height * width // 4


def _placed_patches(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """Patches with their places, padded to a fixed number, in squares that are pooled by the processor or the model."""
    vision = model.config.vision_config
    pooled = 1 if hasattr(vision, "model_patch_size") else vision.pooling_kernel_size
    height, width = (pooled * int(torch.randint(1, 3, (), generator=generator)) for _ in range(2))
    values = 3 * getattr(vision, "model_patch_size", vision.patch_size) ** 2
    pixels = torch.rand(1, 4 * pooled**2, values, generator=generator)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    places = torch.nn.functional.pad(places, (0, 0, 0, pixels.shape[1] - len(places)), value=-1)
    return {"pixel_values": pixels, "image_position_ids": places[None]}, height * width // pooled**2


def _sized(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    side = 4 * _size(model, "patch_size")
    pixels = torch.randn(1, 3, side, side, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]])}, 4


def _tiles(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """Of two tiles and one of the whole, with an embedding at the end of every row of patches."""
    side = _size(model, "image_size")
    pixels = torch.randn(1, 3, 3, side, side, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, 2 * side]])}, 4 + 2 * (4 + 1)


def _sound(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    audio = model.config.audio_config
    length = 2 * audio.max_source_positions
    features = torch.randn(1, audio.num_mel_bins, length, generator=generator)
    given = int(torch.randint(8, 24, (), generator=generator))
    is_given = (torch.arange(length) < given)[None].long()
    return {"input_features": features, "feature_attention_mask": is_given}, ((given - 1) // 2 + 1 - 2) // 2 + 1


def _mel(model: PreTrainedModel, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], int]:
    """A sound of a fixed length."""
    audio = model.config.audio_config
    features = torch.randn(1, audio.num_mel_bins, 2 * audio.max_source_positions, generator=generator)
    return {"input_features": features}, audio.max_source_positions * audio.hidden_size // audio.intermediate_size


_SHALLOW = Kind({"vision_config": {"depth": 2}}, _patches, "mm_token_type_ids")
_QWEN = _SHALLOW._replace(marks=("vision_start_token_id", "vision_end_token_id"))
_DEEPSTACK = _QWEN._replace(settings={"vision_config": {"depth": 2, "deepstack_visual_indexes": [0, 1]}})
_CLIP = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 2}
_IDEFICS = {"vision_config": {"image_size": 64, "patch_size": 16, "num_hidden_layers": 2}}
# Parts that are left out by default.
# Half of the layers read the keys of the others.
_SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA4 = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_GEMMA4 |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 2}
_GEMMA4 |= {"pooling_kernel_size": 2, "position_embedding_size": 8}
_GEMMA4_UNIFIED = {"model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 2}
_GEMMA4_UNIFIED |= {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}
KINDS = {
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN._replace(
        settings={"vision_config": {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]}}
    ),
    "Qwen3VLForConditionalGeneration": _DEEPSTACK,
    "Qwen3VLMoeForConditionalGeneration": _DEEPSTACK,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "Qwen4ExpForConditionalGeneration": _QWEN,
    "Glm5NextForConditionalGeneration": Kind(
        {"vision_config": {"depth": 2}}, _patches, marks=("image_start_token_id", "image_end_token_id")
    ),
    "Glm4vForConditionalGeneration": _SHALLOW._replace(marks=("image_start_token_id", "image_end_token_id")),
    "Gemma3ForConditionalGeneration": Kind(
        {"vision_config": _CLIP | {"image_size": 56}, "mm_tokens_per_image": 4}, _square, "token_type_ids"
    ),
    "Gemma4ForConditionalGeneration": Kind(
        {"vision_config": _GEMMA4, "text_config": _SHARED}, _placed_patches, "mm_token_type_ids"
    ),
    "Gemma4UnifiedForConditionalGeneration": Kind(
        {"vision_config": _GEMMA4_UNIFIED, "text_config": _SHARED}, _placed_patches, "mm_token_type_ids"
    ),
    "PaliGemmaForConditionalGeneration": Kind({"vision_config": _CLIP}, _square, "token_type_ids"),
    "LlavaForConditionalGeneration": Kind({"vision_config": _CLIP}, _square),
    "LlavaNextForConditionalGeneration": Kind(
        {"vision_config": _CLIP, "image_grid_pinpoints": [[28, 56], [56, 28]]}, _tiles
    ),
    "Mistral3ForConditionalGeneration": Kind({"vision_config": {"image_size": 112, "num_hidden_layers": 2}}, _sized),
    "InternVLForConditionalGeneration": Kind(
        {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14], "num_hidden_layers": 2}}, _square
    ),
    "SmolVLMForConditionalGeneration": Kind(_IDEFICS, _square_of_row, by_row=True),
    "Idefics3ForConditionalGeneration": Kind(_IDEFICS, _square_of_row, by_row=True),
    "Lfm2VlForConditionalGeneration": Kind({"vision_config": {"num_hidden_layers": 2}}, _padded_patches),
    "Qwen2AudioForConditionalGeneration": Kind({}, _sound, token="audio_token_id"),
    "VoxtralForConditionalGeneration": Kind({"audio_token_id": VOCAB - 1}, _mel, token="audio_token_id"),
}
VIDEOS = _QWEN._replace(one=_frames, type_id=2, token="video_token_id")


def image_model(name: str, weight_std: float = 0.3, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of the class `name`, one of `KINDS`, in float32 and evaluation mode."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class, tied=False, extra=None)
    for key, value in KINDS[name].settings.items():
        part = getattr(config, key)
        if not isinstance(value, dict):
            setattr(config, key, value)
        elif part is None:
            setattr(config, key, AutoConfig.for_model(**value))
        else:
            for entry, content in value.items():
                setattr(part, entry, content)
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    enliven(model, weight_std)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and not parameter.any():  # a projection of images
                parameter.normal_(std=weight_std)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    model.generation_config.bos_token_id = 1
    return model


def image_prompts(
    model: PreTrainedModel, rows: Sequence[Sequence[int | str]], seed: int = 1, kind: Kind | None = None
) -> dict[str, torch.Tensor]:
    """Left-padded prompts with images.

    Args:
        model: of one of `KINDS`.
        rows: lists of numbers of text tokens, with `IMAGE` in the place of an image.
        seed: of tokens and pixels.
        kind: of images; None for that of the model's class.
    """
    kind, generator = kind or KINDS[type(model).__name__], torch.Generator().manual_seed(seed)
    texts, images = [], []
    for number, row in enumerate(rows):
        tokens: list[int] = []
        for part in row:
            if part == IMAGE:
                inputs, count = kind.one(model, generator)
                images.append((number, inputs))
                marks = [getattr(model.config, name) for name in kind.marks]
                tokens += marks[:1] + [getattr(model.config, kind.token)] * count + marks[1:]
            else:
                tokens += torch.randint(FIRST_PROMPT_ID, LAST_PROMPT_ID + 1, (part,), generator=generator).tolist()
        texts.append(tokens)
    width = max(map(len, texts))
    padding = [width - len(text) for text in texts]
    input_ids = torch.tensor([[PAD] * pad + text for pad, text in zip(padding, texts, strict=True)])
    made = {"input_ids": input_ids, "attention_mask": (torch.arange(width) >= torch.tensor(padding)[:, None]).long()}
    if kind.types is not None and images:
        made[kind.types] = (input_ids == getattr(model.config, kind.token)).long() * kind.type_id
    for name in images[0][1] if images else ():
        parts = [inputs[name] for _, inputs in images]
        made[name] = torch.cat(parts)
        if kind.by_row:
            owners = [number for number, _ in images]
            made[name] = parts[0].new_zeros(len(texts), max(map(owners.count, owners)), *parts[0].shape[2:])
            for place, (number, part) in enumerate(zip(owners, parts, strict=True)):
                made[name][number, owners[:place].count(number)] = part[0, 0]
    return made

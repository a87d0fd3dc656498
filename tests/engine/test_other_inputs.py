"""Images, sounds and proteins that classes read in their own ways, on the stock engine or through a model inside."""

import copy

import pytest
import torch
import transformers
from case_counts import cases
from oracle import OracleDrafter, random_draft_model, random_eagle3
from transformers import Blip2Config, BlipConfig, Kosmos2Config, MllamaConfig
from zoo_configs import FIRST_PROMPT_ID, LAST_PROMPT_ID, VOCAB, tiny_config
from zoo_models import build, enliven, prompts, rows_of

from hf_specdec.host.caches import OUTPUT_NAME

OPTIONS = {"max_new_tokens": 16, "do_sample": False}
IMAGE_SIZE, PATCH = 28, 14


def model_of(config, class_name, part=None):
    """A tiny random model that sees small images; `part` is the model inside that generates, if one does."""
    config.vision_config.image_size, config.vision_config.patch_size = IMAGE_SIZE, PATCH
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(config, dtype=torch.float32).eval()
    enliven(model, 0.3)
    for one in (model, model if part is None else getattr(model, part)):
        settings = one.generation_config
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = 0, 1, None
    return model


def tokens(*shape, seed=0):
    return torch.randint(FIRST_PROMPT_ID, LAST_PROMPT_ID, shape, generator=torch.Generator().manual_seed(seed))


def pixels(*shape, seed=0):
    return torch.randn(*shape, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(seed))


def mllama():
    config = tiny_config(MllamaConfig, tied=False)
    config.vision_config.vision_output_dim = 2 * config.vision_config.hidden_size
    model = model_of(config, "MllamaForConditionalGeneration")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:  # of cross-attention, closed at first
                parameter.fill_(0.7)
    return model


def mllama_prompts():
    """Two rows, left-padded, with an image of two tiles each."""
    ids, pad = tokens(2, 10), 3
    mask, seen = torch.ones(2, 10, dtype=torch.int64), torch.tensor([1, 1, 0, 0]).expand(2, 10, 1, 4).clone()
    mask[1, :pad], seen[1, :pad], ids[1, :pad] = 0, 0, 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels(2, 1, 4),
        "aspect_ratio_ids": torch.full((2, 1), 2),
        "aspect_ratio_mask": torch.tensor([[[1, 1, 0, 0]]]).expand(2, 1, 4).clone(),
        "cross_attention_mask": seen,
    }


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_keys_of_images_outlive_rejected_drafts(accuracy):
    """The cache is cropped after every round; what layers with cross-attention hold is of the image."""
    target, inputs = mllama(), mllama_prompts()
    one = {name: value[:1] for name, value in inputs.items()}
    changed = one | {"pixel_values": one["pixel_values"].flip(-1)}
    assert not torch.equal(target.generate(**changed, **OPTIONS), target.generate(**one, **OPTIONS))
    for given, lengths in ((one, [10]), (inputs, [10, 7])):
        plain = target.generate(**given, **OPTIONS)
        answers = torch.nn.functional.pad(plain[:, 10:], (0, 8))
        for k in (1, 3, 5):
            drafter = OracleDrafter(target, answers, lengths, accuracy)
            text = target.generate(**given, **OPTIONS, assistant_model=drafter, num_assistant_tokens=k)
            assert torch.equal(text, plain) and drafter.stats.engine == "stock"
    cache = transformers.DynamicCache(config=target.config)
    target.generate(**one, **OPTIONS, **{OUTPUT_NAME: cache}, assistant_model=drafter)
    assert "crop" not in vars(cache)


def test_proteins_of_padded_prompts_are_refused():
    """Plain `generate()` fails there, too; a prompt without padding is right."""
    target = build("EvollaForProteinText2Text")
    protein = tokens(1, 7, seed=1).clamp(max=20)
    given = {"protein_input_ids": protein, "protein_attention_mask": torch.ones_like(protein)}
    inputs = prompts(target)
    alone = rows_of(inputs)[1] | given
    plain = target.generate(**alone, **OPTIONS)
    answers = torch.nn.functional.pad(plain[:, alone["input_ids"].shape[1] :], (0, 8))
    drafter = OracleDrafter(target, answers, [alone["input_ids"].shape[1]], 0.5)
    try:
        assert torch.equal(target.generate(**alone, **OPTIONS, assistant_model=drafter), plain)
    except ValueError as error:  # blocks of tokens fail after a protein in transformers 5.17
        assert "protein_input_ids, on which it fails there" in str(error)
    padded = {name: value[1:] for name, value in inputs.items()} | given
    with pytest.raises(ValueError, match=r"protein_input_ids, on which plain generate\(\) fails"):
        target.generate(**padded, **OPTIONS, assistant_model=drafter)


def test_classes_on_the_stock_engine_are_compared_with_their_images():
    """A class may be right for text and wrong after an image: what a round sees of the image is changed here."""
    target, inputs = mllama(), {name: value[:1] for name, value in mllama_prompts().items()}
    target.__class__ = type("Forgetful", (type(target),), {"forward": forgetful_forward})
    with pytest.raises(ValueError, match=r"pixel_values, after which logits differ there from plain generate"):
        target.generate(**inputs, **OPTIONS, assistant_model=random_draft_model(target))


def forgetful_forward(self, *args, cross_attention_mask=None, **kwargs):
    if cross_attention_mask is not None and kwargs["input_ids"].shape[1] in (2, 3, 4):  # a block of drafts
        cross_attention_mask = torch.zeros_like(cross_attention_mask)
    return super(type(self), self).forward(*args, cross_attention_mask=cross_attention_mask, **kwargs)


def blip2():
    config = tiny_config(Blip2Config, tied=False)
    config.image_token_index = VOCAB - 1
    model = model_of(config, "Blip2ForConditionalGeneration", "language_model")
    ids = torch.cat([torch.full((1, config.num_query_tokens), VOCAB - 1), tokens(1, 5)], dim=1)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels(1)}


def blip():
    model = model_of(tiny_config(BlipConfig, tied=False), "BlipForConditionalGeneration", "text_decoder")
    return model, {"input_ids": tokens(1, 5), "pixel_values": pixels(1)}


def kosmos2():
    config = tiny_config(Kosmos2Config, tied=False)
    ids = tokens(1, config.latent_query_num + 6)
    mask = torch.zeros_like(ids)
    mask[:, 1 : 1 + config.latent_query_num] = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": mask}
    model = model_of(config, "Kosmos2ForConditionalGeneration", "text_model")
    return model, inputs | {"pixel_values": pixels(1)}


@pytest.mark.parametrize(
    ("make", "kind"),
    cases(
        every := [(make, kind) for make in (blip, blip2, kosmos2) for kind in (random_draft_model, random_eagle3)],
        [one for at, one in enumerate(every) if at in (0, 3, 4, 5)],
    ),
)
def test_classes_whose_generate_is_that_of_a_model_inside(make, kind):
    """A drafter that is bound to the class is bound to the model inside, whose text it drafts."""
    target, inputs = make()
    plain = target.generate(**inputs, **OPTIONS)
    drafter = kind(target)
    text = target.generate(**inputs, **OPTIONS, assistant_model=drafter, num_assistant_tokens=3)
    assert torch.equal(text, plain) and drafter.stats.rounds > 0
    other = copy.deepcopy(target)
    with pytest.raises(ValueError, match="bound to another target"):
        other.generate(**inputs, **OPTIONS, assistant_model=drafter)

"""A model with fused linears is saved, copied, moved and trained as an unchanged one."""

import copy
import gc
import pickle
from itertools import product
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from lossless import greedy
from oracle import random_eagle3
from safetensors.torch import save_file, save_model
from targets import new_target, padded_prompts, set_policy
from torch import nn
from torch.utils import dlpack
from transformers import AutoModelForCausalLM

from hf_specdec.patching import fused_linear
from hf_specdec.patching.fused_linear import fused_linears

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fusing_here(monkeypatch):
    set_policy(monkeypatch, DEVICE, fused_linear=True)
    if DEVICE == "cpu":
        set_policy(monkeypatch, "cpu", transposed_linear=False)


def fresh(family="llama", dtype=torch.float32, bias=False, **options):
    target = new_target(family, **options)
    if bias:
        for module in target.modules():
            if type(module) is nn.Linear:
                module.bias = nn.Parameter(torch.randn(module.out_features) / 4)
    return target.to(DEVICE, dtype)


def inputs():
    return {name: tensor.to(DEVICE) for name, tensor in padded_prompts([9]).items()}


def call(target, drafter=None):
    drafter = drafter or random_eagle3(target).configure(compile_rounds=False)
    out = greedy(target, inputs(), drafter, 3)
    assert drafter.stats.engine == "static"
    return out


def groups(target):
    """Weights that are fused, `q_proj` first, and biases."""
    for layer in target.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            yield [one.weight for one in layers]
            if layers[0].bias is not None:
                yield [one.bias for one in layers]


def are_together(tensors):
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    return all(end == tensor.data_ptr() for end, tensor in zip(ends, tensors[1:], strict=False))


def check_fused(target, expected=True):
    assert all(are_together(tensors) is expected for tensors in groups(target))


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def write_pretrained(target, folder):
    target.save_pretrained(folder)


def write_state_dict(target, folder):
    save_file(target.state_dict(), folder / "model.safetensors")
    torch.save(target.state_dict(), folder / "model.pt")


def write_model(target, folder):
    save_model(target, folder / "model.safetensors")


def write_by_accelerate(target, folder):
    Accelerator().save_model(target, folder)


def write_parameters(target, folder):
    for name, parameter in target.named_parameters():
        torch.save(parameter, folder / f"{name}.pt")


WRITERS = [write_pretrained, write_state_dict, write_model, write_by_accelerate, write_parameters]


@pytest.mark.parametrize(
    ("write", "dtype"),
    [*product(WRITERS, [torch.bfloat16]), (write_pretrained, torch.float32), (write_pretrained, torch.float16)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_files_are_the_same_byte_for_byte(tmp_path, write, dtype):
    target, written = fresh(dtype=dtype, bias=True), []
    for folder in (tmp_path / "before", tmp_path / "after"):
        folder.mkdir()
        write(target, folder)
        written.append(files(folder))
        call(target)
    check_fused(target)
    assert written[0] and written[0] == written[1]


def test_states_of_a_training_are_saved_and_loaded(tmp_path):
    accelerator = Accelerator(cpu=DEVICE == "cpu")
    target = fresh()
    model, optimizer = accelerator.prepare(target, torch.optim.AdamW(target.parameters(), lr=0.1))
    written = []
    for _ in range(2):
        model(**inputs(), labels=inputs()["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for folder in (tmp_path / "before", tmp_path / "after"):
            accelerator.save_state(folder)
            written.append(files(folder))
            call(target.eval())
        expected = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.add_(1)
        accelerator.load_state(tmp_path / "after")
        check_fused(target)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in target.state_dict().items())
        assert torch.equal(call(target), greedy(target, inputs()))
        for name in ("model.safetensors", "optimizer.bin"):
            assert written[-1][name] == written[-2][name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_are_unchanged(dtype):
    target = fresh(dtype=dtype, bias=True)
    optimizer = torch.optim.AdamW(target.parameters())
    target(**inputs(), labels=inputs()["input_ids"]).loss.backward()
    optimizer.step()
    target.model.layers[1].self_attn.k_proj.weight.requires_grad_(False)

    def look():
        return [
            (
                name,
                id(one),
                one._version,
                one.requires_grad,
                one.stride(),
                one.untyped_storage().nbytes(),
                one.untyped_storage().data_ptr() == one.data_ptr(),
                one.storage_offset(),
                None if one.grad is None else (one.grad.data_ptr(), one.grad._version, str(one.grad.tolist())),
                {key: value.data_ptr() for key, value in optimizer.state[one].items()},
                str(one.tolist()),  # where a number that is none is like itself
            )
            for name, one in target.named_parameters()
        ]

    before, addresses = look(), {id(one): one.data_ptr() for one in target.parameters()}
    for _ in range(2):
        call(target)
        check_fused(target)
        assert look() == before
    moved = {id(one) for group in groups(target) for one in group}
    now = {id(one): one.data_ptr() for one in target.parameters()}
    assert {one for one in now if now[one] != addresses[one]} == moved


def by_optimizer(target):
    optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
    target(**inputs(), labels=inputs()["input_ids"]).loss.backward()
    optimizer.step()


def other_weights(target):
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(one.shape, generator=generator) / 3).to(one.device, one.dtype)
        for name, one in target.state_dict().items()
    }


def by_merging(target):
    """As adapters are merged: some weights of a group get new memory."""
    for layer in target.model.layers:
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data * 1.5
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 1.5


def by_dtype(target):
    with torch.no_grad():
        target.lm_head.weight.neg_()
    target.to(torch.float64).to(torch.float32)


def by_device(target):
    with torch.no_grad():
        target.lm_head.weight.neg_()
    target.to("cpu").to(DEVICE)


CHANGES = {
    "optimizer": by_optimizer,
    "load_state_dict": lambda target: target.load_state_dict(other_weights(target)),
    "assign": lambda target: target.load_state_dict(other_weights(target), assign=True),
    "merge": by_merging,
    "dtype": by_dtype,
    "device": by_device,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_uses_changed_weights(change):
    target = fresh()
    drafter = random_eagle3(target).configure(compile_rounds=False)
    texts = [call(target, drafter)]
    for _ in range(2):
        CHANGES[change](target)
        target.zero_grad()
        drafter.bind(target)
        plain = greedy(target, inputs())
        texts.append(call(target, drafter))
        assert torch.equal(texts[-1], plain)
        check_fused(target)
        assert torch.equal(call(target, drafter), plain)
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(how):
    target = fresh()
    size = len(pickle.dumps(target))
    plain = call(target)
    assert abs(len(pickle.dumps(target)) - size) < 64  # it holds addresses
    other = copy.deepcopy(target) if how == "deepcopy" else pickle.loads(pickle.dumps(target))
    assert torch.equal(call(other), plain)
    check_fused(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(call(target), plain) and torch.equal(greedy(target, inputs()), plain)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing is copied to be shared")
def test_shared_memory():
    target = fresh()
    plain = call(target)
    target.share_memory()
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    assert all(parameter.is_shared() for parameter in target.parameters())
    assert torch.equal(call(target), plain)
    assert [parameter.data_ptr() for parameter in target.parameters()] == addresses


@pytest.mark.core
@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU weights lie in the file that they were loaded from")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device_map", ["cuda", None])
def test_weights_that_were_loaded_are_fused(tmp_path, dtype, device_map):
    fresh().save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map=device_map).to(DEVICE).eval()
    target.generation_config.eos_token_id = None
    call(target)
    check_fused(target)


def live_places():
    gc.collect()
    return sum(not place.expired() for place in fused_linear._fused_storages._references.values())


@pytest.mark.parametrize("change", ["delete", "meta", "assign", "dtype"])
def test_replaced_weights_are_freed(change):
    before, target = live_places(), fresh()
    drafter = random_eagle3(target).configure(compile_rounds=False)
    call(target, drafter)
    own = live_places() - before - len(list(groups(target)))
    assert own == 2, "queries and gates of the drafter's layer"
    if change == "delete":
        del target, drafter
        own = 0
    elif change == "meta":
        target.to("meta")
    else:
        CHANGES[change](target)
    assert live_places() == before + own


def test_fused_storage_is_shared_by_nothing_else():
    """Fused weights are not held twice, neither while a call runs nor afterwards."""
    target = fresh()
    with fused_linears(target):
        for tensors in groups(target):
            storage = fused_linear._fused_storages.starting_at(tensors[0].data_ptr())
            assert storage.nbytes() == sum(tensor.nbytes for tensor in tensors)


def flat(tensors):
    """As FSDP's first version, DeepSpeed and apex keep parameters: one buffer, of which they are parts."""
    buffer, start = torch.cat([tensor.detach().flatten() for tensor in tensors]), 0
    for tensor in tensors:
        tensor.data = buffer[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return [buffer]


def lent(tensors):
    owners = [tensor.detach().clone() for tensor in tensors]
    for tensor, owner in zip(tensors, owners, strict=True):
        tensor.data = dlpack.from_dlpack(dlpack.to_dlpack(owner))
    return owners


HELD = {
    "flat buffer": flat,
    "lent by others": lent,
    "state_dict": lambda tensors: [tensor.detach() for tensor in tensors],
    "another parameter": lambda tensors: [nn.Parameter(tensor.detach()) for tensor in tensors],
    "a row": lambda tensors: [tensor.detach()[:1] for tensor in tensors],
}


@pytest.mark.parametrize("kind", HELD)
def test_weights_with_other_references_are_not_moved(kind):
    target = fresh()
    held = [HELD[kind](tensors) for tensors in groups(target)]
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    plain = greedy(target, inputs())
    assert torch.equal(call(target), plain)
    assert [parameter.data_ptr() for parameter in target.parameters()] == addresses
    with torch.no_grad():
        for tensors in held:
            for tensor in tensors:
                tensor.mul_(-1)
    assert not torch.equal(greedy(target, inputs()), plain)
    assert torch.equal(call(target), greedy(target, inputs()))
    if kind in ("state_dict", "another parameter", "a row"):
        del held, tensors, tensor
        call(target)
        check_fused(target)


def test_tied_weights_are_not_fused():
    target = fresh(num_layers=4)
    first, second, third = (layer.self_attn for layer in target.model.layers[:3])
    first.k_proj.weight = first.v_proj.weight
    second.k_proj.weight = third.k_proj.weight
    plain = greedy(target, inputs())
    for _ in range(2):
        assert torch.equal(call(target), plain)
        assert first.k_proj.weight is first.v_proj.weight and second.k_proj.weight is third.k_proj.weight
    assert not are_together([first.q_proj.weight, first.k_proj.weight, first.v_proj.weight])
    assert are_together(
        [target.model.layers[3].self_attn.q_proj.weight, target.model.layers[3].self_attn.k_proj.weight]
    )
    with torch.no_grad():
        third.k_proj.weight.mul_(-2)
        first.v_proj.weight.mul_(-2)
    assert torch.equal(call(target), greedy(target, inputs()))


@pytest.mark.core
def test_inference_parameters_are_not_fused():
    with torch.inference_mode():
        target = fresh()
    places = [parameter.data_ptr() for parameter in target.parameters()]
    assert torch.equal(call(target), greedy(target, inputs()))
    assert [parameter.data_ptr() for parameter in target.parameters()] == places

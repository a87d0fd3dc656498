"""Norms, rotary embeddings and gated MLPs of targets and drafters run ops of layers where an engine runs."""

import copy
import functools
import threading
import types
from collections import Counter

import pytest
import torch
from adapters import with_adapters
from lossless import greedy
from oracle import random_dflash, random_eagle3
from targets import build_target, padded_prompts, set_policy, tiny_target
from torch import nn
from torch.nn import functional as F
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from hf_specdec import NoDrafter, op_choice, ops
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.kernels.types import ClampedGate, NormKind, RotaryKind
from hf_specdec.modules.patch import engine
from hf_specdec.modules.signature import Signature
from hf_specdec.patching import rotary_functions as patched_functions
from hf_specdec.patching.layer_kernels import layer_kernels
from hf_specdec.patching.layer_probes import ExpertGate, GatedMlp, Norm, Probes
from hf_specdec.patching.rotary_functions import rotary_functions

BUILT = {name: {} for name in ("gemma2", "phi3", "olmo2", "cohere", "glm4", "nemotron")}
BUILT["gemma4_text"] = {"vocab_size_per_layer_input": 96, "global_head_dim": 16}
SILU = ["silu"]
PLAIN_ROTARY, OFFSET, LLAMA, LATE = RotaryKind(), NormKind(offset=1.0), NormKind(cast_first=True), NormKind()
# What runs in bfloat16: norms, activations, rotary embeddings.
EXPECTED = {
    "llama": ({LLAMA}, SILU, PLAIN_ROTARY),
    "qwen3": ({LLAMA}, SILU, PLAIN_ROTARY),
    "gemma3": ({OFFSET}, ["gelu_tanh"], PLAIN_ROTARY),
    "gpt-oss": ({LATE}, [ClampedGate(7.0, 1.702, 1.0)], RotaryKind(shared_angles=True, half_angles=True)),
    "qwen3-moe": ({LLAMA}, SILU, PLAIN_ROTARY),
    "deepseek-v3": ({LLAMA}, SILU, RotaryKind(inputs_interleaved=True, shared_angles=True)),
    "qwen3-next": ({OFFSET}, SILU, PLAIN_ROTARY),
    "falcon-h1": ({LLAMA}, SILU, PLAIN_ROTARY),
    "lfm2": ({LLAMA}, SILU, PLAIN_ROTARY),
    "gemma2": ({OFFSET}, ["gelu_tanh"], PLAIN_ROTARY),
    "phi3": ({LLAMA}, SILU, PLAIN_ROTARY),
    "olmo2": ({LATE}, SILU, None),
    "cohere": ({NormKind(centered=True)}, SILU, None),
    "glm4": ({LLAMA}, SILU, RotaryKind(inputs_interleaved=True, outputs_interleaved=True, shared_angles=True)),
    "gemma4_text": ({LATE, LLAMA}, ["gelu_tanh"], PLAIN_ROTARY),
    "nemotron": (set(), [], PLAIN_ROTARY),
}
# They compute in float32, whatever the dtype of the cosines.
UNROUNDED = {
    "olmo2": PLAIN_ROTARY._replace(rounded=False),
    "cohere": RotaryKind(inputs_interleaved=True, outputs_interleaved=True, rounded=False),
}


@pytest.fixture
def used(monkeypatch):
    """How often each op was run, with the arguments that say how."""
    counts = Counter()

    def counted(name, key_of, counts_as=None):
        op = getattr(ops, name)

        def run(*args):
            if not op_choice._choice.references_only:  # as probes and checks run
                counts[counts_as or name, key_of(*args)] += 1
            return op(*args)

        monkeypatch.setattr(ops, name, run)

    set_policy(monkeypatch, "cpu", layer_kernels=True, transposed_linear=False)
    counted("rms_norm", lambda inputs, weight, eps, kind: kind)
    counted("add_rms_norm", lambda inputs, addend, weight, eps, kind: kind)
    counted("joined_norms", lambda *args: args[-1], counts_as="rms_norm")
    counted("rotary", lambda cos, sin, states, kind: kind)
    counted("rotate_and_store", lambda cos, sin, states, kind, *stored: kind)
    counted("rotary_angles", lambda frequencies, positions, dtype, kind: kind)
    counted("choose_experts", lambda logits, correction, top_k, dtype, kind: (correction is not None, kind.scores))
    counted("gated_activation", lambda gate, up, activation, clamped=None: clamped or activation)
    return counts


# Scores of routers, and whether they are corrected.
ROUTERS = {"gpt-oss": (False, "chosen"), "qwen3-moe": (False, "softmax"), "deepseek-v3": (True, "sigmoid")}
ROUTERS["qwen3-next"] = (False, "chosen")


def target_of(name):
    return build_target(name, **BUILT[name]) if name in BUILT else tiny_target(name)


def kinds_of(used, *names):
    return {kind for (op, kind) in used if op in names}


def count_of(used, name):
    return sum(count for (op, _), count in used.items() if op == name)


@pytest.mark.parametrize("name", EXPECTED)
def test_texts_are_the_same_and_ops_run(used, name):
    target, inputs = target_of(name), padded_prompts([9, 4])
    plain = greedy(target, inputs)
    assert why_not_equivalent(target, "static") is None
    drafter = NoDrafter(target)
    assert torch.equal(greedy(target, inputs, drafter), plain)
    assert drafter.stats.engine == "static"
    norms, activations, _ = EXPECTED[name]
    assert kinds_of(used, "rms_norm", "add_rms_norm") == norms
    assert kinds_of(used, "gated_activation") == set(activations)
    assert kinds_of(used, "choose_experts") == ({ROUTERS[name]} if name in ROUTERS else set())
    assert len(kinds_of(used, "rotary", "rotate_and_store")) == 1
    used.clear()
    assert torch.equal(greedy(target, inputs), plain) and not used


@pytest.mark.core
@pytest.mark.parametrize(("name", "per_layer"), [("llama", 1), ("phi3", 1), ("gemma3", 1), ("gpt-oss", 0)])
def test_gate_and_up_are_one_product_with_their_activation(used, monkeypatch, name, per_layer):
    """Also of one layer that computes both (Phi-3); not where a child has a hook, or is another function."""
    set_policy(monkeypatch, "cpu", layer_kernels=True, transposed_linear=False, few_row_linear=True, fused_linear=True)
    calls, linear = [], ops.linear
    monkeypatch.setattr(ops, "has_gated_linear", lambda inputs, weight: True)
    monkeypatch.setattr(ops, "linear", lambda *args: calls.extend(args[3:]) or linear(*args))
    target, inputs = copy.deepcopy(target_of(name)), padded_prompts([9, 4])
    plain, drafter = greedy(target, inputs), NoDrafter(target)
    assert torch.equal(greedy(target, inputs, drafter), plain) and drafter.stats.engine == "static"
    layers = target.config.get_text_config().num_hidden_layers
    assert len(calls) % layers == 0 and bool(calls) == bool(per_layer)
    assert not per_layer or not kinds_of(used, "gated_activation")
    calls.clear()
    if per_layer:
        mlp = target.get_decoder().layers[0].mlp
        next(iter(mlp.children())).register_forward_hook(lambda module, args, out: 2 * out)
        changed = greedy(target, inputs)
        assert torch.equal(greedy(target, inputs, drafter), changed)
        assert len(calls) % (layers - 1) == 0 and calls


@pytest.mark.core
@pytest.mark.parametrize("name", EXPECTED)
def test_layers_compute_the_same_bits_in_bfloat16(used, name):
    """Of whole targets, whose norms have weights that are not 1; also kinds, which float32 does not show."""
    target = copy.deepcopy(target_of(name)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in target.parameters():
            if one.dim() == 1:
                one += 0.3 * torch.randn(one.shape, generator=generator)
    inputs = padded_prompts([9])
    with torch.no_grad():
        expected = target(**inputs, use_cache=False).logits
        with layer_kernels(target), rotary_functions(target):
            assert torch.equal(target(**inputs, use_cache=False).logits, expected) and not used
            with engine():
                found = target(**inputs, use_cache=False).logits
    # Gemma 4's norms compute 1 / sqrt in another way, whose last bit of float32 may differ.
    assert torch.equal(found, expected) or name == "gemma4_text"
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    kinds = kinds_of(used, "rotary")
    assert kinds == {UNROUNDED.get(name, EXPECTED[name][2])}
    assert kinds_of(used, "rms_norm") == EXPECTED[name][0]


def test_layers_of_drafters_run_them(used):
    target, inputs = tiny_target("llama"), padded_prompts([9])
    plain, counts = greedy(target, inputs), {}
    for make in (NoDrafter, random_eagle3, random_dflash):
        used.clear()
        drafter = make(target)
        assert torch.equal(
            greedy(target, inputs, drafter, 1 if make is not NoDrafter else None, max_new_tokens=2), plain[:, : 9 + 2]
        )
        counts[make] = {name: sum(count for key, count in used.items() if key[0] == name) for name, _ in used}
    for name, count in counts.pop(NoDrafter).items():
        assert all(others[name] > count for others in counts.values()), name


def own_target(num_layers=None):
    return copy.deepcopy(tiny_target("llama", num_layers=num_layers))


def patched(target):
    """The modules that compute otherwise within the context."""
    with layer_kernels(target):
        return {module for module in target.modules() if isinstance(vars(module).get("forward"), functools.partial)}


def test_modules_that_somebody_changed_are_left_as_they_are(used):
    target = own_target(num_layers=4)
    layers = target.model.layers
    norms = [module for module in target.modules() if type(module) is modeling_llama.LlamaRMSNorm]
    mlps = [layer.mlp for layer in layers]
    others = {target.model.embed_tokens, target.model.rotary_emb}
    assert patched(target) == {*others, *norms, *mlps}
    heard = []
    hooks = [
        norms[0].register_forward_hook(lambda *_: heard.append("norm")),
        norms[1].register_forward_pre_hook(lambda *_: heard.append("norm")),
        mlps[0].act_fn.register_forward_hook(lambda *_: heard.append("activation")),
        mlps[1].register_forward_hook(lambda *_: heard.append("mlp")),
        mlps[3].gate_proj.register_forward_hook(lambda *_: heard.append("gate")),  # is called as before
    ]
    own = norms[2].forward
    norms[2].forward = lambda hidden: own(hidden)
    norms[3].weight = nn.Parameter(torch.ones(1, 32))
    mlps[2].act_fn = nn.Sequential(nn.SiLU())
    assert patched(target) == {*others, *norms[4:], mlps[3]}
    activation = mlps[3].act_fn
    activation.forward = types.MethodType(type(activation).forward, activation)
    assert patched(target) == {*others, *norms[4:]}
    del activation.forward
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not patched(target)
    everywhere.remove()
    inputs = padded_prompts([9])
    with pytest.MonkeyPatch.context() as patch:
        set_policy(patch, "cpu", layer_kernels=False)
        plain = greedy(target, inputs, max_new_tokens=4)
        heard.clear()
    assert torch.equal(greedy(target, inputs, NoDrafter(target), max_new_tokens=4), plain)
    assert set(heard) == {"norm", "activation", "mlp", "gate"}
    for hook in hooks:
        hook.remove()


def test_adapters_on_layers_of_an_mlp_are_called(used):
    target = own_target()
    plain = greedy(target, padded_prompts([9]))
    with_adapters(target)
    inputs = padded_prompts([9])
    adapted = greedy(target, inputs)
    used.clear()
    assert torch.equal(greedy(target, inputs, NoDrafter(target)), adapted)
    assert kinds_of(used, "gated_activation") == {"silu"} and not torch.equal(adapted, plain)


class Mlp(nn.Module):
    """`down(f(gate(x), up(x)))`, with layers of several names."""

    def __init__(self, names, combine, **settings):
        super().__init__()
        gate, up, down = self.names = names
        self.combine = combine
        vars(self).update(settings)
        for name, (size_in, size_out) in {gate: (8, 16), up: (8, 16), down: (16, 8)}.items():
            self.add_module(name, nn.Linear(size_in, size_out, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.combine(gate(x), up(x)))


@pytest.mark.parametrize(
    ("combine", "activation"),
    [
        (lambda gate, up: F.silu(gate) * up, "silu"),
        (lambda gate, up: up * F.relu(gate), "relu"),
        (lambda gate, up: F.gelu(gate, approximate="tanh") * up, "gelu_tanh"),
        (lambda gate, up: F.gelu(gate) * up, "gelu"),
        (lambda gate, up: F.silu(gate.float()).mul(up.float()).to(gate.dtype), None),  # rounds once
        (lambda gate, up: F.silu(gate.clamp(max=7.0)) * up, None),
        (lambda gate, up: F.silu(gate) * (up + 1), None),
        (lambda gate, up: F.silu(gate) + up, None),
        (lambda gate, up: F.softplus(gate) * up, None),
        (lambda gate, up: (F.silu(gate) * up, None), None),
        (lambda gate, up: F.dropout(F.silu(gate) * up, 0.5), None),
    ],
)
def test_gated_mlps_are_told_by_what_they_compute(combine, activation):
    for names in (("gate", "up", "down"), ("w1", "w3", "w2"), ("a", "c", "b")):
        expected = activation and GatedMlp(*names, activation)
        assert Probes().gated_mlp(Mlp(names, combine)) == expected


class RMSNorm(nn.Module):
    def __init__(self, compute, width=48, eps=1e-5, **settings):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.compute, self.eps = compute, eps
        vars(self).update(settings)

    def forward(self, x, extra=None):
        return self.compute(self, x)


def normed(x, eps):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    ("compute", "kind"),
    [
        (lambda norm, x: norm.weight * normed(x, norm.eps).to(x.dtype), LLAMA),
        (lambda norm, x: (norm.weight.float() * normed(x, norm.eps)).to(x.dtype), LATE),
        (lambda norm, x: ((1 + norm.weight.float()) * normed(x, norm.eps)).to(x.dtype), OFFSET),
        (lambda norm, x: norm.weight.float() * normed(x, norm.eps), None),  # float32
        (lambda norm, x: norm.weight * normed(x, 1e-6).to(x.dtype), None),  # another epsilon
        (lambda norm, x: norm.weight * normed(x, 0.0).to(x.dtype), None),
        (lambda norm, x: norm.weight * normed(x, norm.eps).to(x.dtype) * 1.01, None),
        (lambda norm, x: norm.weight * normed(x.unflatten(-1, (2, -1)), norm.eps).flatten(-2).to(x.dtype), None),
        (lambda norm, x: norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)), None),
        (lambda norm, x: norm.missing, None),
    ],
)
def test_norms_are_told_by_what_they_compute(compute, kind):
    assert Probes().norm(RMSNorm(compute)) == (kind and Norm(1e-5, kind))


def swiglu(experts, gate, up):
    return F.silu(gate.clamp(max=experts.limit)) * up.clamp(min=-experts.limit, max=experts.limit)


def swiglu_of_oss(experts, gate, up):
    gate, up = gate.clamp(max=experts.limit), up.clamp(min=-experts.limit, max=experts.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda experts, gate, up: experts.act_fn(gate) * up, ("gelu", None)),
        (swiglu, ("silu", ClampedGate(10.0))),
        (swiglu_of_oss, ("silu", ClampedGate(10.0, 1.25, 1.0))),
        (lambda experts, gate, up: F.silu(gate).clamp(max=experts.limit) * up, None),
        (lambda experts, gate, up: swiglu(experts, gate, up + 0.5), None),
        (lambda experts, gate, up: (experts.act_fn(gate) * up).float(), None),
    ],
)
def test_gates_of_experts_are_told_by_what_they_compute(compute, expected, is_interleaved):
    class Experts(nn.Module):
        has_gate = True

        def __init__(self):
            super().__init__()
            self.limit, self.alpha, self.num_experts, self.act_fn = 10.0, 1.25, 4, nn.GELU()
            self.weight = nn.Parameter(torch.zeros(3))

        def _apply_gate(self, both):
            gate, up = (both[..., ::2], both[..., 1::2]) if is_interleaved else both.chunk(2, dim=-1)
            return compute(self, gate, up)

    found = Probes().expert_gate(Experts())
    assert found == (None if expected is None else ExpertGate(*expected, is_interleaved))
    hooked = Experts()
    hooked.act_fn.register_forward_hook(lambda module, args, out: 2 * out)
    assert Probes().expert_gate(hooked) is None


def of_softmax(router, logits):
    weights, experts = logits.float().softmax(-1).topk(router.top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def corrected(router, logits):
    scores = logits.float().sigmoid()
    experts = (scores + router.correction).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.scaling, experts


def nearly_corrected(router, logits):
    """Within a rounding of bfloat16."""
    weights, experts = corrected(router, logits)
    return (1.001 * weights).to(logits.dtype), experts


def in_groups(router, logits):
    best = logits.float().view(-1, 4, 4).topk(2, dim=-1)[0].sum(-1).argmax(-1)
    is_left = torch.arange(16) // 4 == best[:, None]
    return corrected(router, logits.masked_fill(~is_left, -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("choose", "options", "expected"),
    [
        (of_softmax, {}, ("chosen", False, 1.0)),
        (lambda router, logits: logits.softmax(-1).topk(router.top_k, dim=-1), {}, ("softmax", False, 1.0)),
        (corrected, {"correction": True}, ("sigmoid", True, 1.75)),
        (corrected, {"correction": True, "in_float": True, "bias": True}, ("sigmoid", True, 1.75)),
        (in_groups, {"correction": True}, None),
        (lambda router, logits: (2 * logits.softmax(-1)).topk(router.top_k, dim=-1), {}, None),
        (lambda router, logits: logits.softmax(-1).topk(router.top_k, dim=-1), {"correction": True}, None),
        (nearly_corrected, {"correction": True}, None),
        (lambda router, logits: of_softmax(router, logits + 0.1 * logits.roll(1, -1)), {}, None),
    ],
)
def test_routers_are_told_by_what_they_compute(choose, options, expected, dtype):
    in_float = options.get("in_float", False)

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.top_k, self.scaling, self.counts = 16, 3, 1.75, torch.zeros(16)
            self.weight = nn.Parameter(torch.zeros(16, 24, dtype=dtype))
            if options.get("bias"):
                self.bias = nn.Parameter(torch.zeros(16, dtype=dtype))
            if options.get("correction"):
                self.register_buffer("correction", torch.zeros(16))

        def forward(self, states):
            given = (states, self.weight, getattr(self, "bias", None))
            given = [one.float() if in_float and one is not None else one for one in given]
            logits = F.linear(*given)
            return (logits, *choose(self, logits))

    class Flat(Router):
        def forward(self, states):
            return super().forward(states.reshape(-1, 24))

    found = Probes().router(Router())
    if expected is None:
        assert found is None
        return
    kind = found.kind
    assert (kind.scores, kind.normalises, kind.scaling) == expected and found.top_k == 3
    assert (found.bias, found.correction) == ("bias" if "bias" in options else None, next(iter(options), None))
    assert found.in_float == in_float and not found.flattens
    assert Probes().router(Flat()) == found._replace(flattens=True)


def test_modules_of_one_class_may_differ():
    compute = lambda norm, x: norm.scale * norm.weight * normed(x, norm.eps).to(x.dtype)  # noqa: E731
    probes = Probes()
    found = [
        probes.norm(RMSNorm(compute, eps=eps, scale=scale)) for eps, scale in ((1e-5, 1.0), (1e-6, 1.0), (1e-5, 0.7))
    ]
    assert found == [Norm(1e-5, LLAMA), Norm(1e-6, LLAMA), None]


def test_probes_leave_random_numbers_and_modules_alone():
    target = own_target()
    torch.manual_seed(5)
    before = torch.get_rng_state(), [dict(vars(module)) for module in target.modules()]
    for module in target.modules():
        assert not (Probes().norm(module) and Probes().gated_mlp(module))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert [dict(vars(module)) for module in target.modules()] == before[1]


@pytest.mark.parametrize("size", [64, 96])
def test_rotary_functions_that_are_not_understood_run_themselves(used, size):
    def wrong_way(q, k, cos, sin, unsqueeze_dim=1):
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)

    def breaks(q, k, cos, sin):
        raise RuntimeError("on a CPU")

    for other in (modeling_gptj.apply_rotary_pos_emb, len, lambda x, y: x):  # GPT-J's takes sines first
        assert patched_functions._over(other, 0) is other
    kind_of = patched_functions._kind_of
    arguments = 0, 2, torch.bfloat16, torch.bfloat16, size, size, ()
    assert kind_of(modeling_llama.apply_rotary_pos_emb, *arguments) == PLAIN_ROTARY
    assert kind_of(wrong_way, *arguments) is None and kind_of(breaks, *arguments) is None
    # In float32 cosines, a function of bfloat16 that does not cast gives float32.
    assert kind_of(modeling_llama.apply_rotary_pos_emb, 0, 2, torch.bfloat16, torch.float32, size, size, ()) is None
    states = torch.randn(1, 2, 3, size)
    cos, sin = torch.randn(2, 1, 3, size)
    with engine():
        found = patched_functions._over(wrong_way, 0)(states, states, cos, sin)
        assert not used
        patched_functions._over(modeling_llama.apply_rotary_pos_emb, 0)(states, states, cos, sin)
        assert kinds_of(used, "rotary")
        used.clear()
        named = patched_functions._over(modeling_llama.apply_rotary_pos_emb, 0)(q=states, k=states, cos=cos, sin=sin)
        assert not used
    assert torch.equal(found[0], wrong_way(states, states, cos, sin)[0])
    assert torch.equal(named[0], modeling_llama.apply_rotary_pos_emb(states, states, cos, sin)[0])


def test_compiled_code_keeps_the_modules_own(used):
    """torch's compiler fuses them with their neighbours."""
    target = own_target()
    norm, mlp, hidden = target.model.norm, target.model.layers[0].mlp, torch.randn(3, 32)
    with torch.no_grad(), layer_kernels(target), rotary_functions(target), engine():
        expected = mlp(norm(hidden))
        assert used
        used.clear()
        compiled = torch.compile(lambda hidden: mlp(norm(hidden)), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(hidden), expected)
    assert not used


def test_other_threads_run_the_modules_own(used):
    target, inputs = own_target(), padded_prompts([9])
    with layer_kernels(target), rotary_functions(target), engine():
        thread = threading.Thread(target=lambda: target(**inputs))
        thread.start()
        thread.join()
        assert not used
        target(**inputs)
    assert used


@pytest.mark.core
def test_a_replaced_rotary_function_is_noticed(monkeypatch):
    def neighbours(states):
        return torch.stack((-states[..., 1::2], states[..., ::2]), -1).flatten(-2)

    target = own_target()
    before = Signature(target).behaviour
    with rotary_functions(target):
        assert Signature(target).behaviour == before
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: own(*args))
    assert Signature(target).behaviour != before
    monkeypatch.undo()
    assert Signature(target).behaviour == before
    monkeypatch.setattr(modeling_llama, "rotate_half", neighbours)  # which it calls
    assert Signature(target).behaviour != before


def test_a_function_that_the_rotary_function_calls_is_replaced(used, monkeypatch):
    target, inputs = own_target(), padded_prompts([9])
    assert torch.equal(greedy(target, inputs, NoDrafter(target)), greedy(target, inputs))
    assert kinds_of(used, "rotary")
    used.clear()
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda states: torch.roll(states, 1, -1))
    assert torch.equal(greedy(target, inputs, NoDrafter(target)), greedy(target, inputs))
    assert not kinds_of(used, "rotary")

"""Objectives of training: drafts from many positions of a batch, each compared with the target's distribution."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from ..drafters.cached import CachedDrafter
from ..modules.hidden_states import AuxHiddenStateRecorder, text_decoder

CHUNK_LOGITS = 2**28


@dataclass
class Batch:
    """A batch of documents, padded at the end.

    Attributes:
        input_ids: `[B, S]`.
        places: `[N]` indices into `[B * S]` of the tokens of answers, except the last of each answer.
        depths: `[N]`, index of each place in its answer.
        places_before: B + 1 numbers: the number of places in the rows before each row.
        shortest_prompt: number of tokens of the shortest prompt; no place is before it.
    """

    input_ids: torch.Tensor
    places: torch.Tensor
    depths: torch.Tensor
    places_before: list[int]
    shortest_prompt: int

    @classmethod
    def of(cls, input_ids: torch.Tensor, lengths: torch.Tensor, prompt_lengths: torch.Tensor) -> Batch:
        """A batch of documents `[B, S]` int64 with any padding at the end; `lengths`, `prompt_lengths`: `[B, 1]`."""
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_place = (columns >= prompt_lengths) & (columns < lengths - 1)
        places = is_place.flatten().nonzero()[:, 0]
        depths = (columns - prompt_lengths).flatten()[places]
        places_before = [0, *is_place.sum(dim=1).cumsum(dim=0).tolist()]
        input_ids = input_ids.masked_fill(columns >= lengths, 0)
        return cls(input_ids, places, depths, places_before, int(prompt_lengths.min()))

    def to(self, device: torch.device) -> Batch:
        tensors = (self.input_ids, self.places, self.depths)
        if device.type == "cuda":
            tensors = tuple(tensor.pin_memory() for tensor in tensors)
        moved = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Batch(*moved, self.places_before, self.shortest_prompt)


@dataclass
class TargetOutputs(Batch):
    """A batch with the target's outputs, from which the drafter learns.

    Attributes:
        aux_hidden_states: `[B, S, width]`; None for a drafter that reads none.
        probs: `[N, V_d]`, the target's distribution at the places over the draft vocabulary; see `Teacher`.
        best, covered: `[N]`, the target's most likely tokens there, and whether the draft vocabulary has them.
        is_greedy: `[B * S]`, whether the token after a place is the target's most likely token; False elsewhere.
    """

    aux_hidden_states: torch.Tensor | None
    probs: torch.Tensor
    best: torch.Tensor
    covered: torch.Tensor
    is_greedy: torch.Tensor


class Teacher:
    """Runs the frozen target over batches for `drafter`, at a `temperature`. In each distribution to learn, the share
    `greedy_share` moves to the most likely token, which greedy decoding accepts."""

    def __init__(
        self, target: PreTrainedModel, drafter: CachedDrafter, greedy_share: float = 0.0, temperature: float = 1.0
    ):
        self.target, self.greedy_share, self.temperature = target, greedy_share, temperature
        self.recorder = AuxHiddenStateRecorder(
            target, drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state
        )
        self.target_ids = drafter.target_ids
        if self.target_ids is None:
            self.target_ids = slice(drafter.config.draft_vocab_size)
        self.is_covered = torch.zeros(drafter.config.vocab_size, dtype=torch.bool, device=target.device)
        self.is_covered[self.target_ids] = True

    @torch.no_grad()
    def read(self, batch: Batch) -> TargetOutputs:
        """Run the target over `batch`."""
        with self.recorder:
            hidden = text_decoder(self.target)(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            aux_hidden_states = self.recorder.aux_hidden_states
        return self.outputs(batch, hidden, aux_hidden_states)

    @torch.no_grad()
    def outputs(self, batch: Batch, hidden: torch.Tensor, aux_hidden_states: torch.Tensor | None) -> TargetOutputs:
        """The outputs of a pass of the target over `batch`, from its last hidden states `[B, S, H]`, after the final
        norm, and its auxiliary hidden states."""
        hidden = hidden.flatten(0, 1)[batch.places]
        probs, best = [], []
        for chunk in hidden.split(rows_per_chunk(self.is_covered.numel())):
            logits = self.target.get_output_embeddings()(chunk)
            best.append(logits.argmax(dim=-1))
            learned = (logits[:, self.target_ids].float() / self.temperature).softmax(dim=-1)
            if self.greedy_share > 0:
                likeliest = learned.argmax(dim=-1, keepdim=True)
                learned.mul_(1 - self.greedy_share).scatter_(1, likeliest, self.greedy_share, reduce="add")
            probs.append(learned.to(logits.dtype))
        best = torch.cat(best)
        is_greedy = torch.zeros(batch.input_ids.numel(), dtype=torch.bool, device=best.device)
        is_greedy[batch.places] = batch.input_ids.flatten()[batch.places + 1] == best
        return TargetOutputs(
            **vars(batch),
            aux_hidden_states=aux_hidden_states,
            probs=torch.cat(probs),
            best=best,
            covered=self.is_covered[best],
            is_greedy=is_greedy,
        )


class Objective(nn.Module):
    """Loss and metrics of a drafter. It is a module, so that accelerate can wrap it for DDP.

    Args:
        drafter: bound to the target.
        num_steps: drafts of a chain.
        step_decay: draft s has the weight `step_decay ** s` in the loss.
        survival_floor: weight of drafts whose chain has ended before, by a wrong draft or a token of the text that is
            not greedy; other drafts have weight 1. Drafts after the end of a chain are never accepted. With a low
            weight a mask token, which does not see the drafts before it, learns to continue the greedy chain instead of
            an average over many texts.
        loss: the loss of a draft, one of `LOSSES`.
    """

    def __init__(
        self,
        drafter: CachedDrafter,
        num_steps: int,
        step_decay: float,
        survival_floor: float = 1.0,
        loss: str = "cross-entropy",
    ):
        super().__init__()
        self.drafter = drafter
        self.survival_floor = survival_floor
        weights = torch.tensor([step_decay**step for step in range(num_steps)])
        self.step_weights = (weights / weights.sum()).tolist()
        self.row_losses = LOSSES[loss]

    def forward(self, target_outputs: TargetOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and float64 counts `[num_steps, 6]`, or 8 with those of rounds, for `summarize`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement forward().")

    def _losses(
        self, hidden: torch.Tensor, head: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The results of `_HeadLoss.forward`, with drafts in the target's vocabulary."""
        device = hidden.device.type
        is_mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_mixed else hidden.dtype
        losses, drafts, overlaps = _HeadLoss.apply(hidden, head, probs, dtype, self.row_losses)
        return losses, self.drafter.target_tokens(drafts), overlaps


class BlockObjective(Objective):
    """Loss and metrics of a DFlash or DSpark drafter: blocks at random positions of the answers.

    Args:
        common, options: arguments of `Objective`.
        num_anchors: most blocks of a document.
        replay_share: in training, share of the blocks that move to where the next round would begin: after the accepted
            drafts and the target's own token. Draft-OPD (arXiv 2605.29343) replays drafting from these positions, where
            drafts have just failed.
        short_share: in training, share of the batches whose blocks have a random smaller number of drafts. Without it,
            layers that see the whole block learn where its end is, and draft worse in blocks of other lengths.
    """

    def __init__(
        self, *common: Any, num_anchors: int = 64, replay_share: float = 0.0, short_share: float = 0.0, **options: Any
    ):
        super().__init__(*common, **options)
        self.num_anchors, self.replay_share, self.short_share = num_anchors, replay_share, short_share

    def forward(self, target_outputs: TargetOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Objective`. A draft exists if its token and those before it in the block are in the answer. It counts in
        the loss if the draft vocabulary has the target's most likely token. A confidence head learns with the same
        weight, by the cross-entropy with the draft's acceptance probability (DSpark, arXiv 2607.05147)."""
        input_ids, places = target_outputs.input_ids, target_outputs.places
        number = torch.full((input_ids.numel(),), -1, device=places.device)
        number[places] = torch.arange(len(places), device=places.device)
        number = number.view(input_ids.shape)
        most_places = max(after - before for before, after in pairwise(target_outputs.places_before))
        anchors, is_anchor = self._choose(number >= 0, min(self.num_anchors, max(most_places, 1)))
        replayed = round(self.replay_share * anchors.shape[1]) if self.training else 0
        num_steps = len(self.step_weights)
        if self.training and num_steps > 1 and torch.rand(()) < self.short_share:
            num_steps = int(torch.randint(1, num_steps, ()))
        if replayed > 0:
            with torch.no_grad():
                some = anchors[:, :replayed], is_anchor[:, :replayed]
                accepted = self._compare(target_outputs, number, *some, num_steps)[2]
            following = (anchors[:, :replayed] + 1 + accepted).clamp(max=input_ids.shape[1] - 1)
            begins = number.gather(1, following) >= 0
            anchors[:, :replayed] = following.where(begins, anchors[:, :replayed])
        return self._compare(target_outputs, number, anchors, is_anchor, num_steps)[:2]

    def _compare(
        self,
        target_outputs: TargetOutputs,
        number: torch.Tensor,
        anchors: torch.Tensor,
        is_anchor: torch.Tensor,
        num_steps: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss and counts of the blocks at `anchors` `[B, A]` int64 where `is_anchor` `[B, A]`, and the numbers of
        accepted drafts, `[B, A]`; `number` `[B, S]` has the number of each place, -1 elsewhere."""
        drafter, shape, input_ids = self.drafter, number.shape, target_outputs.input_ids
        normed = drafter.unroll_blocks(input_ids, target_outputs.aux_hidden_states, anchors, num_steps)

        at = anchors[..., None] + torch.arange(num_steps, device=anchors.device)
        is_inside, at = at < shape[1], at.clamp(max=shape[1] - 1).flatten(1)
        number, before, goes_on = (
            values.gather(1, at).view_as(is_inside)
            for values in (number, input_ids, target_outputs.is_greedy.view(shape))
        )
        exists = (is_inside & (number >= 0) & is_anchor[..., None]).cumprod(dim=-1).bool()
        (inputs, head), confidence = drafter.head_inputs(normed, before), drafter.confidence(normed, before)
        alive, total, counts = is_anchor.flatten(), 0.0, []
        num_accepted = torch.zeros_like(alive, dtype=torch.int64)
        all_weights = sum(self.step_weights[:num_steps])
        for step, weight in enumerate(self.step_weights[:num_steps]):
            here, rows = exists[..., step].flatten(), number[..., step].flatten().clamp(min=0)
            reached = here & alive
            weights = torch.where(reached, 1.0, self.survival_floor) * (here & target_outputs.covered[rows])
            hidden = inputs[..., step, :].flatten(0, 1)
            losses, drafts, overlaps = self._losses(hidden, head, target_outputs.probs[rows])
            loss = (losses * weights).sum()
            learned = loss
            if confidence is not None:
                logits = confidence[..., step].flatten().float()
                learned = loss + (binary_cross_entropy_with_logits(logits, overlaps, reduction="none") * weights).sum()
            total = total + weight / all_weights * learned / weights.sum().clamp(min=1)

            hits = drafts == target_outputs.best[rows]
            accepted = reached & hits
            counts.append(_counts(loss, weights, here, hits, reached, accepted))
            alive = accepted & goes_on[..., step].flatten()
            num_accepted += alive
        counts += [torch.zeros_like(counts[0])] * (len(self.step_weights) - num_steps)
        return total, torch.stack(counts), num_accepted.view_as(anchors)

    def _choose(self, is_place: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` different positions of each row, `[B, count]`, and whether they are in `is_place` `[B, S]`. They are
        random in training, otherwise always the same."""
        if self.training:
            order = torch.rand(is_place.shape, device=is_place.device)
        else:
            order = (torch.arange(is_place.shape[1], device=is_place.device) * 0.618034 % 1).expand_as(is_place)
        found = order.masked_fill(~is_place, -1.0).topk(count, dim=1)
        return found.indices, found.values >= 0


class DraftObjective(Objective):
    """Loss and metrics of all other drafters, which draft from every position (training-time test).

    Args:
        common, options: arguments of `Objective`.
        depth_ratio: in training, step s unrolls only the share `depth_ratio ** s` of a batch's rows.
        round_floor: factor on the weights of chains at which no round of greedy decoding would begin (`round_starts`).
            Rounds begin where drafts have just failed, at harder places than most; Draft-OPD (arXiv 2605.29343) replays
            drafting from these.
    """

    def __init__(self, *common: Any, depth_ratio: float = 1.0, round_floor: float = 1.0, **options: Any):
        super().__init__(*common, **options)
        self.depth_ratio, self.round_floor = depth_ratio, round_floor

    def forward(self, target_outputs: TargetOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Objective`.

        At step s the draft for place t is of the chain at slot t - s - shift. As in EAGLE-3, a place counts in the loss
        if the draft vocabulary has the target's most likely token.
        """
        drafter, num_steps = self.drafter, len(self.step_weights)
        rows = leading_rows(len(target_outputs.input_ids), num_steps, self.depth_ratio if self.training else 1.0)
        input_ids, first = target_outputs.input_ids, max(target_outputs.shortest_prompt - drafter.shift, 0)
        outputs = drafter.unroll(input_ids, target_outputs.aux_hidden_states, num_steps, rows, first)
        width, head = input_ids.shape[1], drafter.head_weight
        number = torch.arange(len(target_outputs.places), device=input_ids.device)
        alive, drafted = torch.ones_like(number, dtype=torch.bool), torch.zeros_like(number)
        steps = []
        for step, normed in enumerate(outputs):
            unrolled = slice(target_outputs.places_before[len(normed)])
            exists = target_outputs.depths[unrolled] >= step
            slots = (target_outputs.places[unrolled] - step - drafter.shift).clamp(min=0)
            unrolled_slots = slots // width * (width - first) + (slots % width - first).clamp(min=0)
            hidden = normed.flatten(0, 1)[unrolled_slots] * drafter.logit_scale
            losses, drafts, _ = self._losses(hidden, head, target_outputs.probs[unrolled])
            hits = drafts == target_outputs.best[unrolled]
            chains = (number[unrolled] - step).clamp(min=0)
            reached = exists & alive[chains]
            accepted = reached & hits
            drafted.index_add_(0, chains, accepted.long())
            goes_on = accepted & target_outputs.is_greedy[target_outputs.places[unrolled]]
            alive = torch.zeros_like(drafted).index_add_(0, chains, goes_on.long()) > 0
            steps.append((losses, exists, hits, reached, accepted, chains))

        begins = round_starts(drafted, target_outputs.places_before)
        total, counts = 0.0, []
        for weight, (losses, exists, hits, reached, accepted, chains) in zip(self.step_weights, steps, strict=True):
            in_round = begins[chains]
            weights = torch.where(reached, 1.0, self.survival_floor) * torch.where(in_round, 1.0, self.round_floor)
            weights = weights * (exists & target_outputs.covered[: len(exists)])
            loss = (losses * weights).sum()
            total = total + weight * loss / weights.sum().clamp(min=1)
            counts.append(
                _counts(loss, weights, exists, hits, reached, accepted, accepted & in_round, begins[: len(exists)])
            )
        return total, torch.stack(counts)


def _counts(loss: torch.Tensor, weights: torch.Tensor, exists: torch.Tensor, hits: torch.Tensor, *more: torch.Tensor):
    """A step's counts of an `Objective`: loss, weights, places with a draft, right drafts, and `more`."""
    row = (loss.detach(), weights.sum(), exists.sum(), (exists & hits).sum(), *(one.sum() for one in more))
    return torch.stack([count.double() for count in row])


def round_starts(drafted: torch.Tensor, places_before: list[int]) -> torch.Tensor:
    """The places at which rounds of greedy decoding would begin, `[N]` bool: the first of each answer, and the place
    after the tokens that each round commits, its accepted drafts, `drafted` `[N]` int64, and the target's own token."""
    count, device = len(drafted), drafted.device
    bounds = torch.tensor(places_before, device=device)
    number = torch.arange(count, device=device)
    end = bounds[torch.searchsorted(bounds, number, right=True)]
    jump = number + drafted + 1
    jump = torch.cat([jump.where(jump < end, count), jump.new_tensor([count])])
    begins = torch.zeros(count + 1, dtype=torch.int64, device=device)
    begins[bounds[:-1]] = 1
    longest = max((after - before for before, after in pairwise(places_before)), default=0)
    for _ in range(max(longest - 1, 0).bit_length()):  # n turns find all that up to 2 ** n - 1 rounds reach
        begins = begins.index_add(0, jump, begins).clamp(max=1)
        jump = jump[jump]
    return begins[:count] > 0


def leading_rows(batch: int, num_steps: int, ratio: float) -> list[int]:
    """For each step, the number of a batch's rows that it unrolls: the share `ratio ** step`, rounded up."""
    return [math.ceil(batch * ratio**step) for step in range(num_steps)]


def summarize(counts: torch.Tensor) -> dict:
    """Metrics of each step, from sums of the counts of an `Objective`.

    A chain reaches step s if all drafts before it are right and the text is greedy there. `acceptance[s]` is the share
    of these chains whose draft s is the target's most likely token. `acceptance_length[K]` is 1 + the accepted drafts
    of a greedy chain of K. If the drafter drafts from every place, `round_acceptance[s]` is the share of rounds of
    greedy decoding in which draft s is accepted, and `round_length` the number of tokens that a round commits.
    """
    loss, weighed, existing, hits, reached, accepted, *of_rounds = counts.t().tolist()

    def shares(parts: list[float], wholes: list[float]) -> list[float]:
        return [round(part / max(whole, 1), 4) for part, whole in zip(parts, wholes, strict=True)]

    acceptance = shares(accepted, reached)
    lengths, survival, length = {}, 1.0, 1.0
    for step, share in enumerate(acceptance):
        survival *= share
        length += survival
        lengths[step + 1] = round(length, 4)
    result = {
        "loss": shares(loss, weighed),
        "top1": shares(hits, existing),
        "acceptance": acceptance,
        "acceptance_length": lengths,
    }
    if of_rounds:
        result["round_acceptance"] = shares(*of_rounds)
        result["round_length"] = round(1 + sum(result["round_acceptance"]), 4)
    return result


def rows_per_chunk(vocab_size: int) -> int:
    return max(CHUNK_LOGITS // vocab_size, 1)


RowLosses = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _row_losses(logits: torch.Tensor, probs: torch.Tensor, is_dspark: bool = False) -> RowLosses:
    """Cross-entropies of `logits` and `probs`, both `[n, V_d]`, or DSpark's losses (arXiv 2607.05147); their gradients
    with respect to `logits`, the best tokens, and the acceptance probabilities of drawn tokens, 1 - |q - p| / 2.

    q is the softmax of `logits`. DSpark's loss is 0.1 cross-entropy + 0.9 |q - p|.
    """
    scores, probs = logits.float(), probs.float()
    norm = scores.logsumexp(dim=-1, keepdim=True)
    losses, apart = (probs * (norm - scores)).sum(dim=-1), (scores - norm).exp() - probs
    distances, grad = apart.abs().sum(dim=-1), apart
    if is_dspark:
        signs, drafted = apart.sign(), (scores - norm).exp()
        losses = 0.1 * losses + 0.9 * distances
        grad = 0.1 * apart + 0.9 * drafted * (signs - (drafted * signs).sum(dim=-1, keepdim=True))
    return losses, grad.to(logits.dtype), logits.argmax(dim=-1), 1 - distances / 2


# Losses of drafts, by name.
LOSSES = {"cross-entropy": _row_losses, "dspark": functools.partial(_row_losses, is_dspark=True)}


class _HeadLoss(torch.autograd.Function):
    """Draft head and loss in one function, so that the logits of a step are never in memory at once.

    The forward pass computes the gradient of each row's loss with respect to its hidden state, one chunk of rows at a
    time. The backward pass scales it, because the weights of rows depend on the drafts. The gradient of a trained head
    needs these weights, so the backward pass computes the logits again.
    """

    @staticmethod
    def forward(ctx, hidden, head, probs, dtype, row_losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses `[n]` float32, most likely draft tokens `[n]` int64, and acceptance probabilities of drawn tokens
        `[n]` float32, for `hidden` `[n, H]`."""
        weight = head.to(dtype)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        losses, overlaps = torch.empty(2, len(hidden), dtype=torch.float32, device=hidden.device)
        drafts = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for rows in _chunks(len(hidden), len(weight)):
            logits = hidden[rows].to(dtype) @ weight.t()
            losses[rows], grad_logits, drafts[rows], overlaps[rows] = row_losses(logits, probs[rows])
            if needs_hidden:
                grad_hidden[rows] = (grad_logits @ weight).to(hidden.dtype)
        ctx.save_for_backward(grad_hidden, *((hidden, head, probs) if needs_head else ()))
        ctx.dtype, ctx.row_losses = dtype, row_losses
        ctx.mark_non_differentiable(drafts, overlaps)
        return losses, drafts, overlaps

    @staticmethod
    def backward(ctx, grad, *_) -> tuple:
        grad_hidden, *of_head = ctx.saved_tensors
        grad_head = None
        if of_head:
            hidden, head, probs = of_head
            weight = head.to(ctx.dtype)
            grad_head = torch.zeros(weight.shape, dtype=torch.float32, device=head.device)
            for rows in _chunks(len(hidden), len(weight)):
                inputs = hidden[rows].to(ctx.dtype)
                grad_logits = ctx.row_losses(inputs @ weight.t(), probs[rows])[1]
                grad_head += (grad_logits * grad[rows, None].to(ctx.dtype)).t() @ inputs
            grad_head = grad_head.to(head.dtype)
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad[:, None].to(grad_hidden.dtype)
        return grad_hidden, grad_head, None, None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Parts of the rows such that the logits of a part fit in memory."""
    size = rows_per_chunk(vocab_size)
    return [slice(start, start + size) for start in range(0, num_rows, size)]

"""`SessionLease`: a session in use by a call, with its missing graphs captured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .. import ops
from ..auto_k.auto_drafts import (
    CANDIDATES,
    LAYERS_BESIDE,
    Acceptance,
    AutoDrafts,
    Drafts,
    ExpectedCosts,
    FixedDrafts,
    Pass,
    RoundTimes,
    tree_size,
)
from ..cache.key_layout import KeyLayout
from ..cache.layer_kinds import Use
from ..calls.call import Call
from ..calls.prompts import PromptSpan
from ..drafters.base import Drafter
from ..drafters.cached import CachedDrafter
from ..graphs.buckets import next_power_of_two, slots_for, span_for, useful_drafts
from ..memory.virtual_memory import RowMemory, has_virtual_memory, tensor_bytes
from ..modules.hidden_states import num_decoder_layers, text_decoder
from ..modules.weights import num_bytes, share_of_experts
from ..parallel.tensor_parallel import from_first_rank
from ..patching.support import cache_layers, stated_positions, uses_attention_interface
from ..sampling.processors import BlockProcessor
from ..state import DecodeState, RoundShape, Shape
from .capture import CapturedRound, capture_catch_up, capture_round, run_once
from .hosted_target import HostedTarget
from .rounds import RoundOutput, catch_up, draft_and_forward, run_round
from .session_prefill import SessionPrefill
from .sessions import Session, SessionKey


def shape_of(call: Call, batch: int, longest: int, is_captured: bool) -> Shape:
    """The shape of buffers for `call` and `batch` rows of up to `longest` tokens; captured ones have a few sizes."""
    num_nodes = tree_size(batch, call.device) if call.chooses_trees else call.num_nodes
    slots = slots_for(longest + num_nodes, is_captured)
    if not uses_attention_interface(call.model) and (positions := stated_positions(call.model)) is not None:
        # The model's own attention may have tables of that many keys; it gets all slots but the dummy slot.
        slots = min(slots, max(longest, positions) + 1)
    return Shape(
        batch=batch,
        slots=slots,
        num_draft_tokens=useful_drafts(call.num_draft_tokens, call.max_new_tokens, is_captured),
        is_sampling=call.temperature is not None,
        draft_probs=call.draft_probs,
        num_ends=next_power_of_two(max(len(call.ends), 8)),
        verification=call.verification,
        num_nodes=num_nodes,
        keeps_hidden_states=call.drafter.rollouts is not None,
    )


def can_grow(target: HostedTarget) -> bool:
    """Whether keys and values may be in a `RowMemory`, which requires that attention reads visible slots only."""
    model, drafter = target.model, target.drafter
    # Ranks of one model need the same rows; the buffers of hidden states that are kept have all slots.
    if target.is_split or drafter.rollouts is not None:
        return False
    kinds = [cache_layers(model)]
    if isinstance(drafter, CachedDrafter):
        kinds.append(drafter.cached_layers)
    elif type(drafter).new_memory is not Drafter.new_memory:
        return False
    # In float64 attention runs the references, which read all slots.
    if any(one.dtype == torch.float64 for module in (model, drafter) for one in module.parameters()):
        return False
    is_allowed = all(one.why_not(Use.ROW_MEMORY) is None for one in kinds)
    return is_allowed and any(one.stores_keys for one in kinds) and has_virtual_memory(model.device)


def place_in_memory(state: DecodeState, target: HostedTarget, shape: Shape) -> None:
    """Put keys and values of `state`, new and of `shape`, into a `RowMemory`. `layout_of` must give a layout."""
    layout = layout_of(target, shape)
    memory = RowMemory(shape.batch, shape.slots, layout.token_bytes, state.tokens.device)
    layout.place(state.caches, memory)


def layout_of(target: HostedTarget, shape: Shape) -> KeyLayout | None:
    """`find_layout`, once for all calls of the same target and drafter."""
    if shape.num_draft_tokens not in target.hosting.layouts:
        found = find_layout(target, shape)  # patching may move weights, which changes the hosting
        target.hosting.layouts[shape.num_draft_tokens] = found
    return target.hosting.layouts[shape.num_draft_tokens]


def find_layout(target: HostedTarget, shape: Shape) -> KeyLayout | None:
    """The layout of what target and drafter store for each token, found by running them.

    None if something other than attention reads it: that may read slots without memory, as in models that store the
    inputs of their keys and values.
    """
    slots = max(64, 8 * (shape.num_draft_tokens + 1)) + shape.num_nodes
    model, drafter = target.model, target.drafter
    state = drafter.new_state(shape._replace(batch=1, slots=slots), cache_layers(model), model.device)
    attended: set[int] = set()

    def note(name: str, *args: object) -> None:
        tensors = [one for one in args if isinstance(one, torch.Tensor)] if name == "attention" else ()
        attended.update(one.untyped_storage().data_ptr() for one in tensors)

    with ops.references(note):
        prefill = SessionPrefill(Session(state), target, None, is_continuous=False)
        prefill.restart()
        prefill.start(())
        prefill.run_rest()
        with state.idle():
            draft_and_forward(state, target(), drafter)
    buffers = [one for cache in state.caches for layer in cache.layers for one in layer.slot_buffers]
    stored = {one.untyped_storage().data_ptr() for one in buffers}
    return KeyLayout.of(state.caches) if stored <= attended else None


def round_times(call: Call, target: HostedTarget, shape: Shape) -> RoundTimes:
    """The times of rounds of `call` on buffers of `shape`."""
    times = target.costs().times(shape)
    if times.expected is not None:
        return times
    model, drafter = call.model, call.drafter
    size = int(from_first_rank(torch.tensor(num_bytes(text_decoder(model).parameters())), model))  # parts differ
    used = size * share_of_experts(model.config.get_text_config(decoder=True))
    layers, drafting = getattr(drafter.attention_config, "num_hidden_layers", 1), {}
    for one in CANDIDATES[1:]:
        found = drafter.passes_and_bytes(one)
        if found is not None:
            passes, read = found
            drafting[one] = Pass(read, num_layers=passes * (layers + LAYERS_BESIDE))
    times.expected = ExpectedCosts(shape.batch, call.device, Pass(size, used, num_decoder_layers(model)), drafting)
    return times


def first_drafts(call: Call, shape: Shape, times: RoundTimes) -> RoundShape:
    """The chain that rounds of `call` begin with while nothing has been measured."""
    return times.expected.first(min(call.drafter.num_own_draft_tokens, shape.num_draft_tokens))


class SessionLease:
    """A session in use by a call: after `take`, one that earlier calls have left, or a new one.

    Args:
        process: the logits processing of its rounds; None for a session that only prefills prompts.
        is_continuous: see `SessionPrefill`.
        grows: whether keys and values of the session are in a `RowMemory`.
    """

    def __init__(
        self,
        call: Call,
        target: HostedTarget,
        shape: Shape,
        process: BlockProcessor | None = None,
        is_continuous: bool = False,
        grows: bool = False,
    ):
        self._call, self._target, self._process = call, target, process
        self.shape, self._grows, self._is_continuous = shape, grows, is_continuous
        self.session: Session | None = None
        self.prefill: SessionPrefill | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the pool has a session of the shape."""
        return self._target.is_captured and self._key() in self._target.pool

    def take(self) -> Session:
        """Take a session of the shape out of the pool, or make one, and make it ready for use."""
        target = self._target
        session = target.pool.take(self._key()) if target.is_captured else None
        # The tensors of a new session are counted as a whole; torch's own count is slow on the host.
        self._bytes_before = None
        if session is None and target.is_captured:
            self._bytes_before = tensor_bytes(target.model.device)
            target()  # patching may move weights, which are part of the key
        if session is None:
            state = target.drafter.new_state(self.shape, cache_layers(target.model), target.model.device)
            if self._grows:
                place_in_memory(state, target, self.shape)
            session = Session(state)
        session.acquire()
        self.session = session
        chunk_size = self._call.config.prefill_chunk_size
        self.prefill = SessionPrefill(session, target, chunk_size, self._is_continuous)
        return session

    def _key(self) -> SessionKey:
        return SessionKey(self.shape, self._grows, self._target.drafter.compiles_rounds, self._target.hosting)

    def _round_key(self, drafted: RoundShape) -> tuple[Hashable, RoundShape, int]:
        """The key of the next round in `Session.rounds`; with a larger span if only a graph of that is captured."""
        state, rounds = self.session.state, self.session.rounds
        key = self._process.key, state.logprobs, *self._call.kept
        if not self._grows:
            return key, drafted, state.slots
        span = least = span_for(state.live, state.slots)
        while (key, drafted, span) not in rounds and span < state.slots:
            span = span_for(span, state.slots)
        return key, drafted, span if (key, drafted, span) in rounds else least

    def lacks_round(self, drafted: RoundShape) -> bool:
        """Whether rounds with `drafted` are to be captured and are not captured yet."""
        return self._target.is_captured and self._round_key(drafted) not in self.session.rounds

    def capture_round(self, drafted: RoundShape) -> None:
        session = self.session
        session.state.num_draft_tokens, session.state.num_nodes = drafted
        key = self._round_key(drafted)
        with session.state.spanning(key[-1]):
            captured = capture_round(session, self._target, self._process, self._call.kept)
        session.rounds.add(key, captured)

    def captured_round(self, drafted: RoundShape) -> CapturedRound | None:
        """The captured round of the next text lengths; None if rounds run eagerly."""
        return self.session.rounds.get(self._round_key(drafted)) if self._target.is_captured else None

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance of the drafts of this call and of earlier calls."""
        return self._target.pool.acceptances[self._call.temperature is not None]

    def drafts(self, first: RoundShape | None = None) -> Drafts:
        """What chooses the drafts of each round, beginning with `first`; None stands for `first_drafts`."""
        call, most = self._call, RoundShape(self.shape.num_draft_tokens, self.shape.num_nodes)
        is_split = self._target.is_split
        # Ranks of a split model agree on the times of calls with "auto" only.
        times = round_times(call, self._target, self.shape) if call.is_auto or not is_split else None
        if not call.is_auto:
            return FixedDrafts(most, self.session.round_times, times)
        if first is None:
            first = first_drafts(call, self.shape, times)
        return AutoDrafts(most, first, self.acceptance, times, self._price, call.model if is_split else None)

    def allowed(self, drafted: RoundShape) -> RoundShape:
        """`drafted`, or its chain while a processor reads the text: a tree is not one text."""
        return RoundShape(drafted.num_drafts) if drafted.num_nodes and self._process.reads_text else drafted

    def _price(self, drafted: RoundShape) -> float:
        """Milliseconds to capture rounds with `drafted`, the same on all ranks; 0 if they are captured already."""
        if not self.lacks_round(drafted):
            return 0.0
        return 1e3 * float(from_first_rank(torch.tensor(self.session.seconds_a_capture), self._target.model))

    def prepare(self, drafted: RoundShape) -> bool:
        """Get ready for a round with `drafted`; returns whether there is memory for it."""
        # Catching up comes first, since a capture runs such a round, which reads a block of its own width.
        if drafted.num_drafts + 1 < self.session.state.block_width:
            self._catch_up()
        if self.lacks_round(drafted):
            try:
                self.capture_round(drafted)
            except torch.OutOfMemoryError:
                # Ranks of one model need the same rounds.
                if not len(self.session.rounds) or self._target.is_split:
                    raise
                return False
        return True

    def run_round(self, drafted: RoundShape) -> RoundOutput:
        state, captured = self.session.state, self.captured_round(drafted)
        state.num_draft_tokens, state.num_nodes = drafted
        if captured is not None:
            results = captured(self._process)
        else:
            results = run_round(state, self._target(), self._target.drafter, self._process).along_path()
        state.block_width = drafted.num_drafts + 1
        return results

    def _catch_up(self) -> None:
        """Let the drafter read the last block; this is captured where rounds are."""
        session, drafter, width = self.session, self._target.drafter, self.session.state.block_width
        span = span_for(session.state.live, session.state.slots) if self._grows else session.state.slots
        if self._target.is_captured and (width, span) not in session.catch_ups:
            with session.state.spanning(span):
                captured = capture_catch_up(session, self._target, width)
            session.catch_ups.add((width, span), captured)
        replay = session.catch_ups.get((width, span))
        if replay is not None:
            replay()
        else:
            self._target()  # patches the drafter, too
            catch_up(session.state, drafter, width)
        session.state.block_width = 1

    def execution(self, drafted: RoundShape) -> str:
        """How rounds with `drafted` run, for `SpeculationStats.execution`."""
        captured = self.captured_round(drafted)
        drafter = self._target.drafter
        mode = ", batch-invariant" if drafter.batch_invariant else ""
        if drafter.key_dtype is not None:
            mode += ", keys and values as float8"
        by_peft = self._target.adapters.why_not_by_row
        if by_peft is not None:
            mode += f", adapters by PEFT's own layers: {by_peft}"
        if captured is not None:
            return captured.execution + mode
        return f"eager{mode}: {self._target.eager_reason or 'a round cannot be captured'}"

    def allocate(self, drafted: RoundShape | None = None, spans: Sequence[PromptSpan] = ()) -> None:
        """Allocate what the first forward pass of a new session allocates, by a pass over no prompt.

        Where kernels are compiled, the pass compiles its kernels and launches none. With `drafted` it is followed by
        what a call captures and runs first: the prefill of `spans`, first tokens, and a round with so many drafts. So
        the kernels of all of them are compiled at the same time.
        """
        session, target = self.session, self._target
        if session.state.prompt_logits is not None:
            return
        with ops.compile_only(target.model.device), ops.capturing():
            self.prefill.restart()
            self.prefill.start(())
            self.prefill.run_rest()
            if drafted is not None and ops.is_compile_only() and not target.drafter.compiles_rounds:
                self.prefill.run_captured(spans)
                session.state.num_draft_tokens, session.state.num_nodes = drafted
                with session.state.spanning(self._round_key(drafted)[-1]):
                    run_once(session, target, self._process)

    def keep(self) -> None:
        """Return the session to the pool if sessions are kept, else free its rows. Save the costs of rounds."""
        if self._call.is_auto:
            self._target.costs().save()
        if self._target.is_captured:
            if self._bytes_before is not None:
                taken = tensor_bytes(self._target.model.device) - self._bytes_before
                self.session.num_tensor_bytes = max(taken, 0)
            self._target.pool.keep(self._key(), self.session)
        else:
            self.session.free_rows()

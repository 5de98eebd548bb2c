"""The draft's state lives with the target's cache: conversations, foreign caches, cropped and copied ones."""

import copy
import gc
import weakref

import pytest
import torch
from oracle import (
    ALL_KINDS,
    VOCAB,
    ScriptedDraft,
    assert_outputs_close,
    build,
    compare_greedy,
    kinds_of_acceptance,
    right_for,
    right_with_probability,
    spy,
    tiny_draft,
    tiny_target,
    watch_proposals,
)
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, Lfm2Config, Lfm2ForCausalLM, StaticCache
from transformers.generation.streamers import BaseStreamer

from hf_dspark import record_generation
from hf_dspark.generation.state import DraftState, draft_state, forget_draft_state
from hf_dspark.modeling.context_cache import ContextCache

OPTIONS = dict(do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True, max_new_tokens=12)
FIRST_TURN = torch.tensor([[5, 9, 3, 17]])
USER_TURNS = [torch.tensor([[8, 30, 2]]), torch.tensor([[44, 1, 1, 50, 6]])]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return talkative(tiny_draft(target))


def talkative(draft):
    """The sequential stage of a new draft is no bias; with one, drafts depend on all of its parts."""
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    return draft


def gemma3():
    values = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    layers = ["sliding_attention", "full_attention"] * 2
    stops = dict(eos_token_id=None, pad_token_id=None, bos_token_id=None, tie_word_embeddings=False)
    return build(
        Gemma3ForCausalLM, Gemma3TextConfig(**values, **stops, layer_types=layers, sliding_window=6, query_pre_attn_scalar=8, initializer_range=0.4)
    )


def lfm2():
    values = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    stops = dict(eos_token_id=None, pad_token_id=None, bos_token_id=None, tie_word_embeddings=False)
    return build(
        Lfm2ForCausalLM, Lfm2Config(**values, **stops, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8, initializer_range=0.4)
    )


@pytest.fixture
def proposals(monkeypatch):
    """Every round's text and proposal from here on; cleared by the test between calls."""
    return watch_proposals(monkeypatch)


def same_proposals(ours: list, theirs: list) -> bool:
    """Some, with equal anchors (the texts may be padded or cut) and ids, and confidences to 1e-4."""
    assert any(proposal.ids for _, proposal in ours)
    alike = [(text[-1], proposal.ids) for text, proposal in ours] == [(text[-1], proposal.ids) for text, proposal in theirs]
    return alike and all(a.confidence == pytest.approx(b.confidence, abs=1e-4) for (_, a), (_, b) in zip(ours, theirs))


def run(target, ids, cache=None, draft=None, **options):
    """One recorded turn: (outputs, request record or None)."""
    options = {**OPTIONS, **options}
    if cache is not None:
        options["cache"] = cache
    with record_generation() as report:
        outputs = target.generate(ids, assistant_model=draft, **options)
    return outputs, report.requests[-1] if draft is not None else None


def next_turn(outputs, turn: int) -> torch.Tensor:
    """The whole text so far and what the user says next."""
    return torch.cat([outputs.sequences, USER_TURNS[turn]], dim=1)


@pytest.mark.parametrize("make_target", [tiny_target, gemma3, lfm2], ids=["qwen3", "gemma3", "lfm2"])
def test_a_turn_on_a_reused_cache_equals_plain_and_drafts_as_a_cold_start(make_target, proposals, monkeypatch):
    target = make_target()
    draft = talkative(tiny_draft(target))
    widths = []
    plain, _ = run(target, FIRST_TURN)
    ours, record = run(target, FIRST_TURN, draft=draft)
    assert_outputs_close(ours, plain)
    spy(monkeypatch, target, "forward", lambda *args, **kwargs: widths.append(kwargs["input_ids"].shape[1]))
    for turn in range(2):
        ids = next_turn(plain, turn)
        plain, _ = run(target, ids, cache=plain.cache)
        for list_ in (proposals, widths):
            list_.clear()
        cached_before = ours.cache.get_seq_length()
        ours, record = run(target, ids, cache=ours.cache, draft=draft)
        assert_outputs_close(ours, plain)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        assert record.missing_context_tokens == 0
        assert widths[0] == ids.shape[1] - cached_before  # no old token is run again
        reused = list(proposals)
        proposals.clear()
        cold, _ = run(target, ids, draft=copy.deepcopy(draft))
        assert cold.sequences.tolist() == ours.sequences.tolist()
        assert same_proposals(reused, proposals)


def test_every_kind_of_acceptance_on_a_reused_cache(target):
    draft = tiny_draft(target, ScriptedDraft)
    plain, _ = run(target, FIRST_TURN, max_new_tokens=40)
    draft.script = right_with_probability(plain.sequences[0].tolist())
    ours, _ = run(target, FIRST_TURN, draft=draft, max_new_tokens=40)
    for turn in range(2):
        ids = next_turn(plain, turn)
        caches = [plain.cache, ours.cache]
        result = compare_greedy(target, draft, lambda caches=caches: dict(cache=caches.pop(0)), input_ids=ids, max_new_tokens=40)
        plain, ours = result.plain, result.drafted
        assert kinds_of_acceptance(result.report) == ALL_KINDS


def test_only_the_new_tokens_are_passed(target):
    draft = tiny_draft(target, ScriptedDraft)
    plain, _ = run(target, FIRST_TURN)
    draft.script = right_with_probability(plain.sequences[0].tolist())
    ours, _ = run(target, FIRST_TURN, draft=draft)
    whole = next_turn(plain, 0)
    length = plain.cache.get_seq_length()
    caches = [plain.cache, ours.cache]
    inputs = dict(input_ids=whole[:, length:], attention_mask=torch.ones_like(whole), max_new_tokens=40)
    result = compare_greedy(target, draft, lambda: dict(cache=caches.pop(0)), text_offset=length, **inputs)
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    assert result.report.requests[-1].missing_context_tokens == 0


@pytest.mark.parametrize("only_new", [False, True], ids=["whole-text", "new-tokens"])
def test_a_left_padded_conversation(target, draft, proposals, only_new):
    pads = 3
    ids = torch.cat([torch.zeros(1, pads, dtype=torch.long), FIRST_TURN], dim=1)
    mask = torch.tensor([[0] * pads + [1] * FIRST_TURN.shape[1]])
    plain, _ = run(target, ids, attention_mask=mask)
    ours, _ = run(target, ids, attention_mask=mask, draft=draft)
    whole = next_turn(plain, 0)
    mask = torch.ones_like(whole)
    mask[:, :pads] = 0
    passed = whole[:, plain.cache.get_seq_length() :] if only_new else whole
    plain, _ = run(target, passed, cache=plain.cache, attention_mask=mask)
    proposals.clear()
    ours, record = run(target, passed, cache=ours.cache, attention_mask=mask, draft=draft)
    assert_outputs_close(ours, plain)
    assert ours.sequences.tolist() == plain.sequences.tolist() and record.missing_context_tokens == 0
    reused = list(proposals)
    proposals.clear()
    run(target, whole[:, pads:], draft=copy.deepcopy(draft))
    assert same_proposals(reused, proposals)


def test_the_text_goes_on_without_new_tokens(target, draft, proposals):
    """Stopped at a budget and continued: the same text and the same drafts as in one go, from the first round on."""
    ours, _ = run(target, FIRST_TURN, draft=draft, max_new_tokens=1)
    proposals.clear()
    ours, record = run(target, ours.sequences, cache=ours.cache, draft=draft, max_new_tokens=20)
    plain, _ = run(target, FIRST_TURN, max_new_tokens=21)
    assert ours.sequences.tolist() == plain.sequences.tolist() and record.missing_context_tokens == 0
    reused = list(proposals)
    proposals.clear()
    run(target, plain.sequences[:, : FIRST_TURN.shape[1] + 1], draft=copy.deepcopy(draft), max_new_tokens=20)
    assert same_proposals(reused, proposals)


@pytest.mark.parametrize("make_target", [tiny_target, gemma3, lfm2], ids=["qwen3", "gemma3", "lfm2"])
def test_a_foreign_cache_is_lossless_at_true_positions_and_said_to_be_missing(make_target):
    target = make_target()
    draft = tiny_draft(target, ScriptedDraft)
    plain, _ = run(target, FIRST_TURN)
    ids, length = next_turn(plain, 0), plain.cache.get_seq_length()
    caches = [copy.deepcopy(plain.cache), copy.deepcopy(plain.cache)]
    result = compare_greedy(target, draft, lambda: dict(cache=caches.pop(0)), input_ids=ids, max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    assert result.report.requests[-1].missing_context_tokens == length
    # The script is indexed by true positions, so that it is right only at those.
    caches = [copy.deepcopy(plain.cache), copy.deepcopy(plain.cache)]
    script = lambda text, vocab: right_for(text, 4, vocab)  # noqa: E731
    rounds = compare_greedy(target, draft, lambda: dict(cache=caches.pop(0)), input_ids=ids, max_new_tokens=21, make_script=script).report.rounds
    assert [round_.accepted for round_ in rounds] == [4] * 4


def test_a_turn_without_the_draft_in_between_is_missing_later(target, draft):
    ours, _ = run(target, FIRST_TURN, draft=draft)
    before = ours.cache.get_seq_length()
    middle, _ = run(target, next_turn(ours, 0), cache=ours.cache)
    after = middle.cache.get_seq_length()
    ids = next_turn(middle, 1)
    plain, _ = run(target, ids, cache=copy.deepcopy(middle.cache))
    ours, record = run(target, ids, cache=middle.cache, draft=draft)
    assert_outputs_close(ours, plain)
    assert record.missing_context_tokens == after - before


@pytest.mark.parametrize("removed", [1, 5, 11, 14])
def test_a_cropped_cache_continued_with_other_tokens(target, draft, proposals, removed):
    ours, _ = run(target, FIRST_TURN, draft=draft)
    length = ours.cache.get_seq_length()
    ours.cache.crop(-removed)
    ids = torch.cat([ours.sequences[:, : length - removed], (ours.sequences[:, length - removed :] + 1) % VOCAB, USER_TURNS[0]], dim=1)
    plain, _ = run(target, ids)
    proposals.clear()
    ours, record = run(target, ids, cache=ours.cache, draft=draft)
    assert ours.sequences.tolist() == plain.sequences.tolist() and record.missing_context_tokens == 0
    assert_outputs_close(ours, plain)
    reused = list(proposals)
    proposals.clear()
    run(target, ids, draft=copy.deepcopy(draft))
    assert same_proposals(reused, proposals)


def test_a_cache_regrown_with_other_tokens_drops_what_no_longer_holds(target, draft):
    ours, _ = run(target, FIRST_TURN, draft=draft)
    length = ours.cache.get_seq_length()
    ours.cache.crop(-6)
    kept = length - 6
    ids = torch.cat([ours.sequences[:, :kept], (ours.sequences[:, kept:] + 1) % VOCAB, USER_TURNS[0]], dim=1)
    regrown, _ = run(target, ids, cache=ours.cache)
    ids = next_turn(regrown, 1)
    plain, _ = run(target, ids)
    ours, record = run(target, ids, cache=regrown.cache, draft=draft)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert record.missing_context_tokens == regrown.sequences.shape[1] - 1 - kept


def test_a_deepcopied_cache_is_a_conversation_of_its_own(target, draft, proposals):
    ours, _ = run(target, FIRST_TURN, draft=draft)
    branch = copy.deepcopy(ours.cache)
    results = []
    for cache, said in ((branch, USER_TURNS[1]), (ours.cache, USER_TURNS[0])):
        proposals.clear()
        ids = torch.cat([ours.sequences, said], dim=1)
        outputs, record = run(target, ids, cache=cache, draft=draft)
        reused = list(proposals)
        proposals.clear()
        cold, _ = run(target, ids, draft=copy.deepcopy(draft))
        assert outputs.sequences.tolist() == cold.sequences.tolist() and record.missing_context_tokens == 0
        assert same_proposals(reused, proposals)
        results.append(outputs.sequences.tolist())
    assert results[0] != results[1]


def test_another_draft_on_the_same_cache_starts_anew(target, draft):
    ours, _ = run(target, FIRST_TURN, draft=draft)
    length = ours.cache.get_seq_length()
    ids = next_turn(ours, 0)
    plain, _ = run(target, ids)
    ours, record = run(target, ids, cache=ours.cache, draft=copy.deepcopy(draft))
    assert ours.sequences.tolist() == plain.sequences.tolist() and record.missing_context_tokens == length


def test_a_static_cache_is_continued(target, draft, proposals):
    cache = StaticCache(config=target.config, max_cache_len=64)
    ours, _ = run(target, FIRST_TURN, cache=cache, draft=draft)
    ids = next_turn(ours, 0)
    plain, _ = run(target, ids)
    proposals.clear()
    ours, record = run(target, ids, cache=cache, draft=draft)
    assert ours.sequences.tolist() == plain.sequences.tolist() and record.missing_context_tokens == 0
    reused = list(proposals)
    proposals.clear()
    run(target, ids, draft=copy.deepcopy(draft))
    assert same_proposals(reused, proposals)


def test_a_reset_cache_starts_anew(target, draft):
    ours, _ = run(target, FIRST_TURN, draft=draft)
    ours.cache.reset()
    plain, _ = run(target, USER_TURNS[1])
    ours, record = run(target, USER_TURNS[1], cache=ours.cache, draft=draft)
    assert ours.sequences.tolist() == plain.sequences.tolist() and record.missing_context_tokens == 0


def test_a_kept_cache_keeps_no_draft_alive(target):
    draft = tiny_draft(target)
    outputs, _ = run(target, FIRST_TURN, draft=draft)
    reference = weakref.ref(draft)
    del draft
    gc.collect()
    assert reference() is None
    plain, _ = run(target, next_turn(outputs, 0))
    ours, _ = run(target, next_turn(outputs, 0), cache=outputs.cache, draft=tiny_draft(target))
    assert ours.sequences.tolist() == plain.sequences.tolist()


class Leaving(BaseStreamer):
    """A client that goes away at the `count`-th put (the first one is the prompt)."""

    def __init__(self, count: int):
        self.count = count

    def put(self, value):
        self.count -= 1
        if self.count == 0:
            raise ConnectionError

    def end(self):
        pass


@pytest.mark.parametrize("make_target", [tiny_target, gemma3, lfm2], ids=["qwen3", "gemma3", "lfm2"])
@pytest.mark.parametrize("count", range(2, 9))
def test_an_interrupted_request_leaves_the_cache_as_plain_does(make_target, count):
    target = make_target()
    draft = tiny_draft(target, ScriptedDraft)
    text = target.generate(FIRST_TURN, do_sample=False, max_new_tokens=20)
    draft.script = right_for(text[0].tolist(), 4)
    caches = []
    for assistant in (None, draft):
        caches.append(DynamicCache(config=target.config))
        with pytest.raises(ConnectionError):
            run(target, FIRST_TURN, cache=caches[-1], draft=assistant, streamer=Leaving(count), max_new_tokens=20)
    plain, ours = caches
    assert ours.get_seq_length() == plain.get_seq_length()
    assert all(getattr(layer, "record_past", False) is False for layer in ours.layers)
    written = text[:, : plain.get_seq_length() + 1]
    continued, _ = run(target, written, cache=ours, draft=draft, max_new_tokens=8)
    assert continued.sequences.tolist() == target.generate(written, do_sample=False, max_new_tokens=8).tolist()


def hidden_states(tokens: int) -> list[torch.Tensor]:
    return [torch.arange(float(tokens)).view(1, tokens, 1).expand(1, tokens, 32) for _ in range(2)]


def test_truncate_cuts_context_and_pending_features_at_a_slot(draft):
    state = DraftState(weakref.ref(draft), ContextCache(2))
    state.append(hidden_states(3), [2, 3, 4], [0, 1, 2])  # two padded slots before
    assert [layer.shape for layer in state.pending_layers()] == [(1, 3, 32)] * 2 and state.pending_positions() == [0, 1, 2]
    state.settle()
    state.append(hidden_states(2), [5, 6], [3, 4])
    state.append(hidden_states(2), [9, 10], [7, 8])  # slots 7 and 8 were filled by somebody else
    assert state.num_tokens == 7
    state.truncate(10)
    assert state.num_tokens == 6 and state.pending[-1].positions == [7]
    state.truncate(9)
    assert state.num_tokens == 5
    state.truncate(6)
    assert [chunk.slots for chunk in state.pending] == [[5]] and state.slots == [2, 3, 4]
    state.truncate(4)
    assert state.slots == [2, 3] and state.cache.length == 2 and state.pending == []
    assert state.pending_layers() == []


def test_state_is_found_on_its_cache_and_cut_where_the_text_differs(draft):
    cache, text = DynamicCache(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    state = draft_state(draft, cache, 0, text)
    state.append(hidden_states(5), list(range(5)), list(range(5)))
    state.token_ids = text
    assert draft_state(draft, cache, 5, text) is state and state.num_tokens == 5
    assert draft_state(draft, cache, 5, text[:, 4:]) is state and state.num_tokens == 5  # only the new part is known
    assert draft_state(draft, cache, 5, torch.tensor([[1, 2, 9, 4, 5, 6]])).num_tokens == 2
    assert draft_state(draft, cache, 1, text).num_tokens == 1
    assert draft_state(draft, cache, 0, text) is not state
    forget_draft_state(cache)
    assert draft_state(draft, cache, 5, text).num_tokens == 0


def test_a_used_cache_can_be_written_to_disk(target, draft, tmp_path):
    outputs, _ = run(target, FIRST_TURN, draft=draft)
    torch.save(outputs.cache, tmp_path / "cache.pt")
    read = torch.load(tmp_path / "cache.pt", weights_only=False)
    length, ids = read.get_seq_length(), next_turn(outputs, 0)
    continued, record = run(target, ids, cache=read, draft=draft)
    assert torch.equal(continued.sequences, run(target, ids)[0].sequences)
    assert record.missing_context_tokens == length and record.draft_failure is None


def test_the_record_of_an_interrupted_request_is_closed(target, draft):
    with record_generation() as report, pytest.raises(ConnectionError):
        target.generate(FIRST_TURN, assistant_model=draft, streamer=Leaving(6), max_new_tokens=20, do_sample=False)
    assert report.seconds("total") >= report.seconds("target") + report.seconds("draft") > 0


@pytest.mark.parametrize("modes", [("inference", "plain"), ("plain", "inference"), ("float32", "bfloat16")], ids="-".join)
def test_a_conversation_goes_on_in_another_mode(target, draft, modes):
    def turn(mode, *arguments, **options):
        draft.to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
        with torch.inference_mode(mode == "inference"):
            return run(target, *arguments, **options)

    first, _ = turn(modes[0], FIRST_TURN, draft=draft)
    ids = next_turn(first, 0)
    second, record = turn(modes[1], ids, cache=first.cache, draft=draft)
    assert second.sequences.tolist() == run(target, ids)[0].sequences.tolist()
    assert record.draft_failure is None and record.missing_context_tokens == 0 and record.rounds

"""Greedy decoding with a draft equals plain generate(): ids, lengths, scores, logits and cache."""

import copy
import gc
import types
from functools import partial, wraps

import pytest
import torch
from oracle import (
    ALL_KINDS,
    ScriptedDraft,
    compare_greedy,
    kinds_of_acceptance,
    right_for,
    right_with_probability,
    spy,
    tiny_draft,
    tiny_target,
)
from tokenizers import Tokenizer, decoders, models
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_dspark import record_generation

BLOCK = 4
PROMPT = torch.tensor([[5, 9, 3, 17]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target):
    return tiny_draft(target, ScriptedDraft, block_size=BLOCK)


def plain_text(target, count: int, prompt=PROMPT) -> list[int]:
    """The tokens that `target` alone writes after `prompt`."""
    return target.generate(prompt, do_sample=False, max_new_tokens=count)[0, prompt.shape[1] :].tolist()


def always_right(text, vocab):
    return right_for(text, BLOCK, vocab)


def test_every_budget(target, draft):
    kinds = set()
    for budget in range(1, 21):
        kinds |= kinds_of_acceptance(compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=budget).report)
    assert kinds == ALL_KINDS


@pytest.mark.parametrize("num_right", range(BLOCK + 1))
def test_right_for_exactly_k(target, draft, num_right):
    script = partial(right_for, num_right=num_right)
    report = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40, make_script=script).report
    assert [round_.accepted for round_ in report.rounds[:-1]] == [num_right] * (len(report.rounds) - 1)
    assert report.tokens_per_round <= num_right + 1


@pytest.mark.parametrize("num_right", [0, 3, BLOCK])
def test_right_for_exactly_k_at_every_budget(target, draft, num_right):
    script = partial(right_for, num_right=num_right)
    for budget in range(1, 13):
        compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=budget, make_script=script)


def test_500_tokens(target, draft):
    result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=500)
    assert len(result.new_tokens) == 500 and kinds_of_acceptance(result.report) == ALL_KINDS


def test_default_draft_of_random_weights(target):
    draft = tiny_draft(target)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40)


@pytest.mark.parametrize("script", [always_right, right_with_probability], ids=["right", "right-0.7"])
def test_each_stop_token_at_every_offset(target, draft, script):
    text = plain_text(target, 24)
    kinds, offsets = set(), set()
    for position in (index for index, token in enumerate(text[:12]) if token not in text[:index]):
        unused = next(token for token in range(60) if token not in text)
        for stop_ids in ([text[position], unused], [unused, text[position]], [text[-1], text[position]]):
            result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=24, eos_token_id=stop_ids, pad_token_id=0, make_script=script)
            assert result.new_tokens == text[: position + 1] or text[-1] in text[: position + 1]
            kinds |= kinds_of_acceptance(result.report)
            offsets.add((position - 1) % (BLOCK + 1))
    assert offsets == set(range(BLOCK + 1))
    assert kinds == ALL_KINDS if script is right_with_probability else kinds >= {"all"}


def tokenizer_of_pairs() -> PreTrainedTokenizerFast:
    """64 tokens: the letters and 38 pairs of them."""
    letters = [chr(97 + index) for index in range(26)]
    merges = [(letters[index % 26], letters[(7 * index + 3 + index // 26) % 26]) for index in range(38)]
    vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings(target, draft):
    tokenizer, text = tokenizer_of_pairs(), plain_text(target, 24)
    letters = [tokenizer.convert_ids_to_tokens(token) for token in text]
    kinds, lengths = set(), set()
    for position in range(1, 12):
        # Begins inside one token and ends inside the next.
        stop = letters[position - 1][-1] + letters[position][0]
        inputs = dict(input_ids=PROMPT, max_new_tokens=24, stop_strings=[stop, "zz"], tokenizer=tokenizer, pad_token_id=0)
        result = compare_greedy(target, draft, **inputs)
        kinds |= kinds_of_acceptance(result.report)
        lengths.add(len(result.new_tokens))
    assert len(lengths) > BLOCK and max(lengths) < 24 and kinds == ALL_KINDS


class SeenTokens(StoppingCriteria):
    """Stops when `count` distinct tokens of the text are even; checks that it is asked once for every prefix, in order."""

    def __init__(self, count: int):
        self.count, self.length = count, None

    def __call__(self, input_ids, scores, **kwargs):
        assert self.length is None or input_ids.shape[1] == self.length + 1
        self.length = input_ids.shape[1]
        seen = len({token for token in input_ids[0].tolist() if token % 2 == 0})
        return torch.tensor([seen >= self.count])


def given(criterion_class, *args) -> dict:
    """A new criterion as an argument of generate()."""
    return dict(stopping_criteria=StoppingCriteriaList([criterion_class(*args)]))


def test_custom_criterion(target, draft):
    kinds, lengths = set(), set()
    for count in range(1, 10):
        fresh = partial(given, SeenTokens, count)
        result = compare_greedy(target, draft, fresh, input_ids=PROMPT, max_new_tokens=40)
        kinds |= kinds_of_acceptance(result.report)
        lengths.add(len(result.new_tokens))
    assert len(lengths) > BLOCK and max(lengths) < 40 and kinds == ALL_KINDS


def test_length_criterion_given_by_the_user(target, draft):
    for limit in range(6, 14):
        compare_greedy(target, draft, partial(given, MaxLengthCriteria, limit), input_ids=PROMPT, max_new_tokens=30)


def test_max_time_inside_a_block(target, draft, monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", types.SimpleNamespace(time=lambda: float(next(ticks))))
    kinds = set()
    for seconds in range(1, 14):
        result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40, max_time=seconds + 0.5)
        assert len(result.new_tokens) == seconds + 1  # the clock ticks once a token
        kinds |= kinds_of_acceptance(result.report)
    assert kinds == ALL_KINDS


def test_min_new_tokens(target, draft):
    text = plain_text(target, 24)
    for minimum in (1, 5, 12, 20):
        inputs = dict(input_ids=PROMPT, max_new_tokens=24, min_new_tokens=minimum, eos_token_id=[text[2], text[4]], pad_token_id=0)
        result = compare_greedy(target, draft, **inputs)
        assert len(result.new_tokens) > minimum
    assert kinds_of_acceptance(result.report) == ALL_KINDS


def test_max_length_at_max_position_embeddings():
    target = tiny_target(max_position_embeddings=40)
    draft = tiny_draft(target, ScriptedDraft)
    for length in range(35, 41):
        result = compare_greedy(target, draft, input_ids=PROMPT, max_length=length)
        assert result.drafted.sequences.shape[1] == length
    assert kinds_of_acceptance(result.report) == ALL_KINDS


def test_left_padding(target, draft):
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    result = compare_greedy(target, draft, input_ids=padded, attention_mask=mask, max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    assert result.new_tokens == plain_text(target, 40)
    unpadded = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40)
    assert [(r.drafted, r.accepted) for r in unpadded.report.rounds] == [(r.drafted, r.accepted) for r in result.report.rounds]


def test_left_padding_gives_the_same_drafts(target):
    draft = tiny_draft(target)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    rounds = []
    for pads in (0, 3):
        padded = torch.cat([torch.zeros(1, pads, dtype=torch.long), PROMPT], dim=1)
        mask = torch.tensor([[0] * pads + [1] * PROMPT.shape[1]])
        rounds.append(compare_greedy(target, draft, input_ids=padded, attention_mask=mask, max_new_tokens=30).report.rounds)
    assert [(r.tokens, r.accepted) for r in rounds[0]] == [(r.tokens, r.accepted) for r in rounds[1]]
    for ours, theirs in zip(*rounds):
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-5)


def test_one_token_prompt(target, draft):
    result = compare_greedy(target, draft, input_ids=torch.tensor([[7]]), max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS


def test_inputs_embeds(target, draft):
    embeds = target.get_input_embeddings()(PROMPT).detach()
    result = compare_greedy(target, draft, inputs_embeds=embeds, max_new_tokens=40, text_offset=PROMPT.shape[1])
    assert result.drafted.sequences.shape[1] == 40 and kinds_of_acceptance(result.report) == ALL_KINDS
    result = compare_greedy(target, draft, inputs_embeds=embeds, input_ids=PROMPT, max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS


def test_chunked_prefill(target, draft):
    prompt = torch.arange(11)[None] + 3
    result = compare_greedy(target, draft, input_ids=prompt, max_new_tokens=30, prefill_chunk_size=4)
    assert kinds_of_acceptance(result.report) == ALL_KINDS


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("stop", [False, True])
def test_streamer_receives_every_token_once_in_order(target, draft, stop):
    text = plain_text(target, 30)
    streamers = []

    def fresh():
        streamers.append(Collector())
        return dict(streamer=streamers[-1])

    result = compare_greedy(target, draft, fresh, input_ids=PROMPT, max_new_tokens=30, eos_token_id=[text[7]] if stop else None, pad_token_id=0)
    plain, drafted = streamers
    assert drafted.puts == plain.puts == [PROMPT.tolist()] + [[token] for token in result.new_tokens]
    assert drafted.ends == plain.ends == 1


def test_first_token_leaves_before_the_draft_is_touched(target, draft, monkeypatch):
    seen = []
    draft.script = right_with_probability([])
    spy(monkeypatch, draft, "forward", lambda *args, **kwargs: seen.append("draft"))
    spy(monkeypatch, draft, "context_features", lambda *args, **kwargs: seen.append("features"))
    streamer = Collector()
    streamer.put = lambda value: seen.append("token")
    target.generate(PROMPT, do_sample=False, max_new_tokens=3, assistant_model=draft, streamer=streamer)
    assert seen[:4] == ["token", "token", "features", "draft"]  # the prompt, then the first token
    seen.clear()
    target.generate(PROMPT, do_sample=False, max_new_tokens=1, assistant_model=draft)
    assert seen == []


def test_target_runs_over_the_anchor_and_the_drafts_sent_only(target, draft, monkeypatch):
    widths = []
    spy(monkeypatch, target, "forward", lambda *args, **kwargs: widths.append(kwargs["input_ids"].shape[1]))
    draft.script = right_with_probability([])
    monkeypatch.setattr(draft.generation_config, "num_assistant_tokens", 2)
    with record_generation() as report:
        target.generate(PROMPT, do_sample=False, max_new_tokens=12, assistant_model=draft)
    assert widths == [PROMPT.shape[1]] + [1 + round_.drafted for round_ in report.rounds]
    assert [round_.drafted for round_ in report.rounds[:-2]] == [2] * 9


@pytest.mark.parametrize("num_tokens", range(1, BLOCK + 1))
def test_fewer_drafts_a_round_keep_the_meaning_of_their_slots(target, draft, monkeypatch, num_tokens):
    monkeypatch.setattr(draft.generation_config, "num_assistant_tokens", num_tokens)
    report = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40, make_script=always_right).report
    assert report.rounds[0].drafted == report.rounds[0].accepted == num_tokens


def test_two_calls_leave_target_draft_and_their_configs_as_they_were(target, draft):
    draft.script = right_with_probability(PROMPT[0].tolist() + plain_text(target, 20))
    models_ = (target, draft)
    before = [copy.deepcopy(model) for model in models_]
    results = []
    for _ in range(2):
        draft.drafted.clear()
        with record_generation() as report:
            ids = target.generate(PROMPT, do_sample=False, max_new_tokens=20, assistant_model=draft).tolist()
        results.append((ids, report.rounds, list(draft.drafted)))
    assert results[0] == results[1]
    for model, copied in zip(models_, before):
        assert copied.config.to_dict() == model.config.to_dict() and copied.generation_config.to_dict() == model.generation_config.to_dict()
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
        assert copied.training == model.training and copied.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(copied.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_memory_is_constant_over_200_calls(target, draft):
    draft.script = right_with_probability(PROMPT[0].tolist() + plain_text(target, 6))

    def live_tensors(calls: int) -> int:
        for _ in range(calls):
            target.generate(PROMPT, do_sample=False, max_new_tokens=4, assistant_model=draft)
            draft.drafted.clear()
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    first = live_tensors(10)
    assert live_tensors(190) <= first


@pytest.mark.parametrize("seed", range(4))
def test_bf16_parts_from_plain_at_near_ties_only(seed):
    target = tiny_target(seed).to(torch.bfloat16)
    draft = tiny_draft(target, ScriptedDraft).to(torch.bfloat16)
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=60)[0].tolist()
    draft.script = right_with_probability(plain)
    drafted = target.generate(PROMPT, do_sample=False, max_new_tokens=60, assistant_model=draft)[0].tolist()
    if drafted != plain:
        first = next(index for index, (ours, theirs) in enumerate(zip(drafted, plain)) if ours != theirs)
        best = target(torch.tensor([plain[:first]])).logits[0, -1].float().topk(2)
        assert set(best.indices.tolist()) == {drafted[first], plain[first]}
        assert best.values[0] - best.values[1] <= 4 * torch.finfo(torch.bfloat16).eps * best.values.abs().max()


def test_an_empty_prompt_is_refused(target, draft):
    with pytest.raises(ValueError, match=r"empty|prompt"):
        target.generate(torch.zeros(1, 0, dtype=torch.long), do_sample=False, max_new_tokens=4, assistant_model=draft)


@pytest.mark.parametrize("budget", [dict(max_new_tokens=0), dict(max_length=4), dict(max_length=2)], ids=str)
def test_an_empty_budget_is_refused(target, draft, budget):
    with pytest.raises(ValueError, match=r"max_new_tokens|max_length"):
        target.generate(PROMPT, do_sample=False, assistant_model=draft, **budget)


RECURRENT = dict(hidden_size=32, vocab_size=64, num_hidden_layers=4, eos_token_id=None, pad_token_id=None, bos_token_id=None)


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next"])
def test_a_recurrent_target_is_refused(kind):
    if kind == "mamba":
        target = MambaForCausalLM(MambaConfig(state_size=4, **RECURRENT)).eval()
    else:
        linear = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
        experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)
        attention = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32)
        target = Qwen3NextForCausalLM(Qwen3NextConfig(**RECURRENT, **linear, **experts, **attention)).eval()
    with pytest.raises(ValueError, match=r"recurrent|roll"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, assistant_model=tiny_draft(target))


def test_a_head_that_computes_other_logits_is_refused_with_the_difference(monkeypatch):
    target = tiny_target()
    draft = tiny_draft(target)
    forward = target.forward

    @wraps(forward)
    def warped(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits + 0.5
        return outputs

    monkeypatch.setattr(target, "forward", warped)
    with pytest.raises(ValueError, match=r"differs from its own logits by 0\.5"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, assistant_model=draft)


@pytest.mark.parametrize("where", ["given", "of the target"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_stop_tokens_of_a_wrong_shape_are_refused(num_rows, where):
    target = tiny_target()
    given = dict(eos_token_id=[[3]]) if where == "given" else {}
    if where == "of the target":
        target.generation_config.eos_token_id = [[3]]
    with pytest.raises(ValueError, match=r"eos_token_id.*\[\[3\]\]"):
        target.generate(torch.tensor([[5, 9]] * num_rows), max_new_tokens=4, assistant_model=tiny_draft(target), **given)

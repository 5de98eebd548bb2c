"""Every stock logits processor, and stateful ones of a user: drafted decoding equals plain decoding."""

import inspect
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracle import ALL_KINDS, VOCAB, ScriptedDraft, compare_greedy, kinds_of_acceptance, tiny_draft, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process

from hf_dspark import record_generation
from hf_dspark.generation.processors import draft_processors

PROMPT = torch.tensor([[5, 9, 3, 17, 22, 8]])
STOP = 44  # comes early in the plain text
BUDGET = 32
WITH_STOP = dict(eos_token_id=STOP, pad_token_id=0)
SYNTHID = dict(ngram_len=3, keys=[654, 400, 836], sampling_table_size=256, sampling_table_seed=0, context_history_size=64, device="cpu")
WHISPER = SimpleNamespace(no_timestamps_token_id=40, eos_token_id=39, bos_token_id=None, max_initial_timestamp_index=5)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def even_and_odd(batch_id: int, ids: torch.Tensor) -> list[int]:
    """An automaton over the text: three tokens of the lower half of the vocabulary, then one of the upper; never the last token again."""
    half = range(VOCAB // 2, VOCAB) if (len(ids) - PROMPT.shape[1]) % 4 == 3 else range(VOCAB // 2)
    return [token for token in half if token != ids[-1]]


# Class -> [(arguments, further arguments of generate())]; "target" and "prompt" in the arguments stand for the test's.
CASES = {
    "AlternatingCodebooksLogitsProcessor": [(dict(input_start_len=6, semantic_vocab_size=16, codebook_size=24), {})],
    "BarkEosPrioritizerLogitsProcessor": [(dict(eos_token_id=STOP, min_eos_p=0.05), WITH_STOP)],
    "DiaEOSChannelFilterLogitsProcessor": [(dict(num_channels=1, eos_token_id=STOP), WITH_STOP)],
    "DiaEOSDelayPatternLogitsProcessor": [(dict(delay_pattern=[3], eos_token_id=STOP, max_generation_len=30), WITH_STOP)],
    "EncoderNoRepeatNGramLogitsProcessor": [(dict(encoder_ngram_size=1, encoder_input_ids=PROMPT), {})],
    "EncoderRepetitionPenaltyLogitsProcessor": [(dict(penalty=1.5, encoder_input_ids=PROMPT), {})],
    "EpsilonLogitsWarper": [(dict(epsilon=0.05), {})],
    "EtaLogitsWarper": [(dict(epsilon=0.05), {})],
    "ExponentialDecayLengthPenalty": [(dict(exponential_decay_length_penalty=(4, 1.3), eos_token_id=STOP, input_ids_seq_length=6), WITH_STOP)],
    "ForcedBOSTokenLogitsProcessor": [(dict(bos_token_id=7), dict(input_ids=torch.tensor([[5]])))],
    "ForcedEOSTokenLogitsProcessor": [
        (dict(max_length=6 + length, eos_token_id=50), dict(eos_token_id=50, pad_token_id=0, max_new_tokens=length)) for length in (9, 10, 11, 12)
    ],
    "InfNanRemoveLogitsProcessor": [({}, {})],
    "LogitNormalization": [({}, {})],
    "MinLengthLogitsProcessor": [
        (dict(min_length=length, eos_token_id=[STOP, 18]), dict(eos_token_id=[STOP, 18], pad_token_id=0)) for length in (9, 20, 21, 22)
    ],
    "MinNewTokensLengthLogitsProcessor": [(dict(prompt_length_to_skip=6, min_new_tokens=18, eos_token_id=STOP), WITH_STOP)],
    "MinPLogitsWarper": [(dict(min_p=0.2), {})],
    "NoBadWordsLogitsProcessor": [(dict(bad_words_ids=[[44], [18, 18], [27, 47, 51]]), {})],
    "NoRepeatNGramLogitsProcessor": [(dict(ngram_size=size), {}) for size in (1, 2, 3)],
    "PrefixConstrainedLogitsProcessor": [(dict(prefix_allowed_tokens_fn=even_and_odd, num_beams=1), {})],
    "RepetitionPenaltyLogitsProcessor": [(dict(penalty=1.5), {}), (dict(penalty=1.5, prompt_ignore_length=6), {})],
    "SequenceBiasLogitsProcessor": [(dict(sequence_bias=[[[44], -3.0], [[18, 18], -10.0], [[18, 20], 4.0]]), {})],
    "SuppressTokensAtBeginLogitsProcessor": [(dict(begin_suppress_tokens=list(range(32)), begin_index=6), {})],
    "SuppressTokensLogitsProcessor": [(dict(suppress_tokens=[44, 18, 27]), {})],
    "SynthIDTextWatermarkLogitsProcessor": [(SYNTHID, {}), (dict(SYNTHID, skip_first_ngram_calls=True), {})],
    "TemperatureLogitsWarper": [(dict(temperature=0.4), {})],
    "TopHLogitsWarper": [(dict(top_h=0.4), {})],
    "TopKLogitsWarper": [(dict(top_k=5), {})],
    "TopPLogitsWarper": [(dict(top_p=0.6), {})],
    "TypicalLogitsWarper": [(dict(mass=0.5), {})],
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": [
        (dict(guidance_scale=1.7, model="target", unconditional_ids=torch.tensor([[3, 12]]), use_cache=use_cache), {}) for use_cache in (True, False)
    ],
    "WatermarkLogitsProcessor": [(dict(vocab_size=VOCAB, device="cpu", seeding_scheme=scheme), {}) for scheme in ("lefthash", "selfhash")],
    "WhisperTimeStampLogitsProcessor": [(dict(generate_config=WHISPER, begin_index=6), {})],
}

NOT_FOR_TEXT = {
    "LogitsProcessor": "the base class",
    "ClassifierFreeGuidanceLogitsProcessor": "expects scores of twice as many rows as there are texts",
    "DiaClassifierFreeGuidanceLogitsProcessor": "expects scores of twice as many rows as there are texts",
    "WhisperNoSpeechDetection": "runs an encoder-decoder on audio features and leaves the scores as they are",
}
# These write into the scores that they are given, and plain generate() then returns those as the raw logits.
WRITING_IN_PLACE = ("DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor")


def test_every_stock_processor_has_a_case_or_a_reason():
    stock = {name for name, thing in vars(logits_process).items() if inspect.isclass(thing) and issubclass(thing, LogitsProcessor)}
    assert stock == set(CASES) | set(NOT_FOR_TEXT)
    assert len(CASES) >= 30


@pytest.mark.parametrize("name, index", [(name, index) for name, cases in CASES.items() for index in range(len(cases))])
def test_stock_processor(target, name, index):
    arguments, inputs = CASES[name][index]
    arguments = {key: target if value == "target" else value for key, value in arguments.items()} if "model" in arguments else arguments
    processors = []

    def fresh():
        processors.append(getattr(logits_process, name)(**arguments))
        return dict(logits_processor=LogitsProcessorList(processors[-1:]))

    inputs = {**dict(input_ids=PROMPT, max_new_tokens=BUDGET), **inputs}
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), fresh, compare_logits=name not in WRITING_IN_PLACE, **inputs)
    if len(result.new_tokens) > 20:
        assert kinds_of_acceptance(result.report) == ALL_KINDS
    assert result.report.requests[-1].draft_failure is None
    if name != "InfNanRemoveLogitsProcessor" and name not in WRITING_IN_PLACE:
        changed = [not torch.equal(scores, logits) for scores, logits in zip(result.drafted.scores, result.drafted.logits)]
        assert any(changed), "the case says nothing: the processor changed no score"


GENERATE_OPTIONS = {
    "repetition_penalty": dict(repetition_penalty=1.4),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.4),
    "bad_words_ids": dict(bad_words_ids=[[44], [18, 18]]),
    "sequence_bias": dict(sequence_bias=[[[18, 20], 4.0]]),
    "suppress_tokens": dict(suppress_tokens=[44, 18]),
    "begin_suppress_tokens": dict(begin_suppress_tokens=list(range(32))),
    "forced_eos_token_id": dict(forced_eos_token_id=50, eos_token_id=50, pad_token_id=0),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(4, 1.3), **WITH_STOP),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "renormalize_logits": dict(renormalize_logits=True, no_repeat_ngram_size=2),
    "guidance_scale": dict(guidance_scale=1.6, negative_prompt_ids=torch.tensor([[3, 12, 4]])),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=3.0)),
    "synthid": dict(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836])),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=even_and_odd),
    "together": dict(
        repetition_penalty=1.2, no_repeat_ngram_size=3, guidance_scale=1.3, prefix_allowed_tokens_fn=even_and_odd, min_new_tokens=20, **WITH_STOP
    ),
}


@pytest.mark.parametrize("name", GENERATE_OPTIONS)
def test_option_of_generate(target, name):
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), input_ids=PROMPT, max_new_tokens=BUDGET, **GENERATE_OPTIONS[name])
    assert len(result.new_tokens) < 20 or kinds_of_acceptance(result.report) == ALL_KINDS


def test_the_automaton_holds_in_the_text(target):
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), input_ids=PROMPT, max_new_tokens=BUDGET, prefix_allowed_tokens_fn=even_and_odd)
    text = result.drafted.sequences[0]
    assert all(text[end] in even_and_odd(0, text[:end]) for end in range(PROMPT.shape[1], len(text)))


class Automaton:
    """Goes a step at every call, and would go wrong if a call came twice or for a token that is not in the text."""

    def __init__(self):
        self.steps = 0

    def allowed(self, batch_id: int, ids: torch.Tensor) -> list[int]:
        self.steps += 1
        return range(VOCAB // 2, VOCAB) if self.steps % 3 == 0 else range(VOCAB // 2)

    __call__ = allowed


@pytest.mark.parametrize("method", [False, True], ids=["object", "bound-method"])
def test_automaton_object_that_advances_at_every_call(target, method):
    def fresh():
        automaton = Automaton()
        return dict(prefix_allowed_tokens_fn=automaton.allowed if method else automaton)

    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), fresh, input_ids=PROMPT, max_new_tokens=BUDGET)
    assert kinds_of_acceptance(result.report) == ALL_KINDS


class Counting(LogitsProcessor):
    """Keeps what it is called with, and lets the number of calls decide; every call must be one token further on the same text."""

    def __init__(self):
        self.lengths, self.text = [], None

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1 and input_ids.ndim == scores.ndim == 2
        text = input_ids[0].tolist()
        assert self.text is None or text[:-1] == self.text, "not the text of the last call and one token more"
        self.text = text
        self.lengths.append(len(text))
        scores = scores.clone()
        scores[0, len(self.lengths) % VOCAB] += 3.0
        scores[0, text[-1]] -= 3.0
        return scores


def run_both(target, make_processor):
    """(plain's processor, drafted's processor, comparison)."""
    processors = []

    def fresh():
        processors.append(make_processor())
        return dict(logits_processor=LogitsProcessorList(processors[-1:]))

    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), fresh, input_ids=PROMPT, max_new_tokens=BUDGET)
    return *processors, result


def test_stateful_processor_is_called_once_for_every_committed_prefix(target):
    plain, drafted, result = run_both(target, Counting)
    assert drafted.lengths == plain.lengths == list(range(PROMPT.shape[1], PROMPT.shape[1] + BUDGET))
    assert drafted.text == plain.text == result.drafted.sequences[0, :-1].tolist()
    # Its copies work on the draft's side, so that it costs no acceptance.
    assert kinds_of_acceptance(result.report) == ALL_KINDS and result.report.requests[-1].draft_failure is None


class CountingWithLock(Counting):
    """Can't be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def counting_closure():
    """A plain function with state."""
    counting = Counting()

    def process(input_ids, scores):
        return counting(input_ids, scores)

    process.lengths = counting.lengths
    return process


class CountingThroughClosure(LogitsProcessor):
    """An object whose state is behind a function."""

    def __init__(self):
        self.process = counting_closure()

    def __call__(self, input_ids, scores):
        return self.process(input_ids, scores)


class OfAnotherModel(LogitsProcessor):
    """Holds a model (contrastive decoding, guidance): it must not be copied with the processor."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, scores):
        return scores - 0.3 * self.model(input_ids[:, -2:]).logits[:, -1]


class Stateful(logits_process.TemperatureLogitsWarper):
    """A user's subclass of a stock processor."""

    def __init__(self):
        super().__init__(0.7)
        self.counting = Counting()

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, self.counting(input_ids, scores))


@pytest.mark.parametrize("make_processor", [CountingWithLock, counting_closure, CountingThroughClosure, Stateful], ids=lambda thing: thing.__name__)
def test_stateful_processor_of_another_kind(target, make_processor):
    *_, result = run_both(target, make_processor)
    assert result.report.requests[-1].draft_failure is None


def test_processor_that_holds_a_model(target):
    other = tiny_target(seed=7)
    *_, result = run_both(target, partial(OfAnotherModel, other))
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    copied = draft_processors(LogitsProcessorList([OfAnotherModel(other)]))[0]
    assert copied.model is other


def test_copies_for_the_draft_stand_where_the_original_stands():
    counting, guidance = Counting(), logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)
    counting(torch.tensor([[1, 2]]), torch.zeros(1, VOCAB))
    chosen = draft_processors(LogitsProcessorList([counting, guidance, logits_process.TopKLogitsWarper(3), CountingWithLock()]))
    assert [type(processor).__name__ for processor in chosen] == ["Counting", "TopKLogitsWarper"]
    assert chosen[0] is not counting and chosen[0].lengths == [2]


def test_a_failing_processor_of_the_target_raises_as_plain_does(target):
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 12:
                raise KeyError("no such state")
            return scores

    with pytest.raises(KeyError, match="no such state"):
        run_both(target, Failing)
    draft = tiny_draft(target)
    with record_generation(), pytest.raises(KeyError, match="no such state"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=20, logits_processor=LogitsProcessorList([Failing()]), assistant_model=draft)

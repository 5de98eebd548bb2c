"""In a batch each row has the processors and criteria to itself: compared with its own plain generate()."""

import pytest
import torch
from oracle import ALL_KINDS, VOCAB, ScriptedDraft, tiny_draft, tiny_target
from test_batches import compare_rows
from test_decoding import SeenTokens
from test_processors import CASES, GENERATE_OPTIONS, WRITING_IN_PLACE, Counting, Stateful
from transformers import LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import logits_process

from hf_dspark.generation.processors import row_criteria, row_processors

ROWS = torch.tensor([[5, 9, 3, 17, 22, 8], [40, 2, 11, 6, 31, 7], [1, 30, 12, 44, 3, 9]])
PADDED = dict(input_ids=ROWS.clone(), attention_mask=torch.ones_like(ROWS))
for row, count in ((1, 3), (2, 5)):
    PADDED["input_ids"][row, :count] = PADDED["attention_mask"][row, :count] = 0
NEGATIVE_PROMPTS = torch.tensor([[3, 12], [20, 4], [33, 41]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("name, index", [(name, index) for name, cases in CASES.items() for index in range(len(cases))])
def test_stock_processor_in_a_batch(target, name, index):
    arguments, inputs = CASES[name][index]
    inputs = {**dict(input_ids=ROWS, max_new_tokens=14), **inputs}
    ids = inputs.pop("input_ids")
    ids = ids if len(ids) > 1 else ROWS[:, -ids.shape[1] :]

    def fresh(row):
        own = slice(None) if row is None else slice(row, row + 1)
        batch = dict(encoder_input_ids=ids[own], unconditional_ids=NEGATIVE_PROMPTS[own], model=target)
        made = getattr(logits_process, name)(**{key: batch.get(key, value) for key, value in arguments.items()})
        return dict(logits_processor=LogitsProcessorList([made]))

    compare_logits = name not in WRITING_IN_PLACE
    result = compare_rows(target, tiny_draft(target, ScriptedDraft), dict(input_ids=ids), fresh, compare_logits=compare_logits, **inputs)
    assert all(request.draft_failure is None for request in result.report.requests)
    assert any(round_.accepted for round_ in result.report.rounds) or max(result.lengths) < 8


PER_ROW_OPTIONS = {
    "guidance_scale": dict(negative_prompt_ids=NEGATIVE_PROMPTS),
    "encoder_no_repeat_ngram_size": {},
}


@pytest.mark.parametrize("name", [*GENERATE_OPTIONS, "encoder_no_repeat_ngram_size"])
def test_option_of_generate_in_a_padded_batch(target, name):
    """The padding is part of a row's text, as it is when the row is alone."""
    options = {**GENERATE_OPTIONS.get(name, {}), **PER_ROW_OPTIONS.get(name, {})}
    if name == "encoder_no_repeat_ngram_size":
        options["encoder_no_repeat_ngram_size"] = 1
    negative = options.pop("negative_prompt_ids", None)

    def fresh(row):
        return {} if negative is None else dict(negative_prompt_ids=negative if row is None else negative[row : row + 1])

    result = compare_rows(target, tiny_draft(target, ScriptedDraft), PADDED, fresh, max_new_tokens=20, **{"pad_token_id": 0, **options})
    assert max(result.lengths) < 15 or result.kinds == ALL_KINDS


def test_guidance_without_a_negative_prompt_in_a_batch(target):
    result = compare_rows(target, tiny_draft(target, ScriptedDraft), dict(input_ids=ROWS), max_new_tokens=20, guidance_scale=1.6)
    assert result.kinds == ALL_KINDS


class OwnThirds:
    """Allows row r the tokens of its own residue class, another one after every third call for that row; asked once for every prefix."""

    def __init__(self):
        self.texts, self.violations = {}, []

    def __call__(self, batch_id: int, ids: torch.Tensor) -> list[int]:
        texts = self.texts.setdefault(batch_id, [])
        if texts and texts[-1] != ids[:-1].tolist():
            self.violations.append((batch_id, ids.tolist()))
        texts.append(ids.tolist())
        return list(range((batch_id + len(texts) // 3) % 3, VOCAB, 3))


@pytest.mark.parametrize("method", [False, True], ids=["object", "bound-method"])
def test_prefix_allowed_tokens_fn_gets_the_row_s_own_batch_id(target, method):
    """Drafted positions leave no trace in an automaton that advances at every call."""
    automata = {}

    def fresh(row):
        automata[row] = automaton = OwnThirds()
        allowed = automaton.__call__ if method else automaton
        # Alone, a row is batch_id 0.
        return dict(prefix_allowed_tokens_fn=allowed if row is None else lambda batch_id, ids: allowed(batch_id + row, ids))

    result = compare_rows(target, tiny_draft(target, ScriptedDraft), dict(input_ids=ROWS), fresh, max_new_tokens=20)
    assert result.kinds == ALL_KINDS
    assert automata[None].violations == [] and automata[None].texts == {row: automata[row].texts[row] for row in range(3)}


def test_num_return_sequences_have_their_own_parts(target):
    """Every sequence of a prompt gets that prompt's part; the most likely token is the only one kept, so that the texts are known."""
    options = dict(do_sample=True, top_k=1, max_new_tokens=10, encoder_repetition_penalty=1.4, guidance_scale=1.6, repetition_penalty=1.2)
    inputs = dict(PADDED, negative_prompt_ids=NEGATIVE_PROMPTS)
    alone = [target.generate(**{name: rows[i : i + 1] for name, rows in inputs.items()}, **options)[0].tolist() for i in range(3)]
    batch_ids = set()

    def allowed(batch_id, ids):
        batch_ids.add(batch_id)
        return range(VOCAB)

    options |= dict(num_return_sequences=2, prefix_allowed_tokens_fn=allowed)
    together = target.generate(**inputs, **options, assistant_model=tiny_draft(target))
    assert together.tolist() == [alone[row // 2] for row in range(6)] and batch_ids == set(range(6))


@pytest.mark.parametrize("make_processor", [Counting, Stateful], ids=lambda thing: thing.__name__)
def test_stateful_processor_has_its_own_state_for_each_row(target, make_processor):
    """`Counting` checks that it is called for one text, once for every prefix."""
    result = compare_rows(
        target,
        tiny_draft(target, ScriptedDraft),
        dict(input_ids=ROWS),
        lambda row: dict(logits_processor=LogitsProcessorList([make_processor()])),
        max_new_tokens=20,
    )
    assert result.kinds == ALL_KINDS


def test_processors_of_a_row():
    counting, top_k = Counting(), logits_process.TopKLogitsWarper(3)
    encoder = logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.5, ROWS)
    rows = [row_processors(LogitsProcessorList([counting, top_k, encoder]), row, 6) for row in range(6)]
    assert len({id(row[0]) for row in rows} | {id(counting)}) == 7 and all(row[1] is top_k for row in rows)
    assert [row[2].encoder_input_ids.tolist() for row in rows] == [[ROWS[row // 2].tolist()] for row in range(6)]
    assert torch.equal(encoder.encoder_input_ids, ROWS)
    time_limit, own = MaxTimeCriteria(100.0), SeenTokens(3)
    copies = [row_criteria(StoppingCriteriaList([time_limit, own])) for _ in range(2)]
    assert copies[0][0] is copies[1][0] is time_limit and len({id(copy[1]) for copy in copies} | {id(own)}) == 3

"""Masks of conversations, told by decoding exactly what is supervised; the templates are in the manner of well-known families."""

import sys

import pytest
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_dspark.distillation.conversations import ChatTemplate, read_messages, show_sample
from hf_dspark.distillation.corpus import train_tokenizer

# Earlier turns lose their reasoning; without thinking, the prompt closes it at once.
QWEN3 = """
{%- set state = namespace(last_question=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set state.last_question = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set parts = m.content.split('</think>') -%}
    {%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > state.last_question -%}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}
    {{- parts[-1].lstrip('\n') + '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '') -}}
{%- endif -%}
"""

# The assistant is called model, a system prompt goes into the first question, everything is trimmed, roles must alternate.
GEMMA = """
{{- bos_token -}}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if system else messages) -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (system if loop.first else '') -}}
  {{- m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{{- '<start_of_turn>model\n' if add_generation_prompt -}}
"""

LLAMA3 = """
{{- bos_token -}}
{%- for m in messages -%}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt -}}
"""

# The model writes the channel headers; analysis is dropped once there is an answer, which ends differently in the history.
GPT_OSS = """
{{- '<|start|>system<|message|>You are a model.<|end|>' -}}
{%- for m in messages -%}
  {%- if m.role != 'assistant' -%}
    {{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' -}}
  {%- elif m.tool_calls is defined -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking is defined -}}
    {{- '<|start|>assistant to=' + m.tool_calls[0].name + '<|channel|>commentary<|message|>' + m.tool_calls[0].arguments + '<|call|>' -}}
  {%- else -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if loop.last and m.thinking is defined -}}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt -}}
"""

CONTROL = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CONTROL += ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"]
# Merges such as "\n\n" and " is" must be there to go wrong.
CORPUS = ["What is it?\n\nIt is four.\n\nHm. Is it so?\n\n  Yes, it is so.\n"] * 4

SYSTEM = {"role": "system", "content": "Be short."}
QUESTIONS = [{"role": "user", "content": text} for text in ("What is two and two?", "Really?", "Is it so?")]
ANSWERS = [{"role": "assistant", "content": text} for text in ("It is four.", "Yes.\n\nIt is so.", "So it is.")]
TWO_TURNS = [SYSTEM, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1]]


def thinking(answer: dict, thought: str) -> dict:
    return {**answer, "reasoning_content": thought}


def tokenizer_with(template: str | None):
    """Splits text as these families' tokenizers do: newlines stay together whatever follows."""
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    options = dict(vocab_size=300, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(**options))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.add_tokens(CONTROL, special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer, encoded) -> list[str]:
    """The text of each stretch of supervised tokens."""
    stretches, previous = [], False
    for token, is_supervised in zip(encoded.input_ids, encoded.loss_mask, strict=True):
        if is_supervised:
            stretches = stretches if previous else [*stretches, []]
            stretches[-1].append(token)
        previous = is_supervised
    return [tokenizer.decode(ids) for ids in stretches]


def encode(template: str, messages: list[dict], **options) -> tuple[list[str], list[int]]:
    """(what is supervised, turns left out); checks that the tokens are the template's own."""
    tokenizer = tokenizer_with(template)
    encoded = ChatTemplate(tokenizer, **options).encode(messages)
    assert encoded.input_ids == tokenizer.apply_chat_template(messages, **options)["input_ids"]
    return supervised(tokenizer, encoded), encoded.left_out


def test_llama3_kind():
    assert encode(LLAMA3, TWO_TURNS) == (["It is four.<|eot_id|>", "Yes.\n\nIt is so.<|eot_id|>"], [])
    assert encode(LLAMA3, TWO_TURNS[1:3]) == (["It is four.<|eot_id|>"], [])
    blanks = [QUESTIONS[0], {"role": "assistant", "content": "\n\n  It is four.\n\n"}]
    assert encode(LLAMA3, blanks) == (["It is four.<|eot_id|>"], [])


def test_gemma_kind():
    assert encode(GEMMA, TWO_TURNS) == (["It is four.<end_of_turn>", "Yes.\n\nIt is so.<end_of_turn>"], [])
    assert encode(GEMMA, TWO_TURNS[1:]) == (["It is four.<end_of_turn>", "Yes.\n\nIt is so.<end_of_turn>"], [])


@pytest.mark.parametrize("template, end", [(LLAMA3, "<|eot_id|>"), (GEMMA, "<end_of_turn>")])
def test_of_an_empty_answer_the_end_is_supervised(template, end):
    messages = [QUESTIONS[0], {"role": "assistant", "content": ""}, QUESTIONS[1], ANSWERS[1]]
    assert encode(template, messages) == ([end, "Yes.\n\nIt is so." + end], [])


def test_qwen3_kind_with_thinking():
    thoughtful = [QUESTIONS[0], thinking(ANSWERS[0], "Two and two.")]
    assert encode(QWEN3, thoughtful, enable_thinking=True) == (["<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>"], [])
    assert encode(QWEN3, thoughtful) == (["<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>"], [])
    inline = [QUESTIONS[0], {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is four."}]
    assert encode(QWEN3, inline) == (["<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>"], [])


def test_qwen3_kind_drops_earlier_reasoning_and_those_turns_stay_unsupervised():
    messages = [SYSTEM, QUESTIONS[0], thinking(ANSWERS[0], "Two and two."), QUESTIONS[1], thinking(ANSWERS[1], "Is it?")]
    assert encode(QWEN3, messages) == (["<think>\nIs it?\n</think>\n\nYes.\n\nIt is so.<|im_end|>"], [2])


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_reasoning_that_the_template_closes_at_once_is_not_supervised(options):
    assert encode(QWEN3, TWO_TURNS, **options) == (["Yes.\n\nIt is so.<|im_end|>"], [2])
    empty = [QUESTIONS[0], {"role": "assistant", "content": ""}]
    assert encode(QWEN3, empty, **options) == (["<|im_end|>"], [])


def test_several_answers_to_one_question_keep_their_reasoning():
    messages = [QUESTIONS[0], thinking(ANSWERS[0], "Two and two."), thinking(ANSWERS[1], "Is it?")]
    first, second = "<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>", "<think>\nIs it?\n</think>\n\nYes.\n\nIt is so.<|im_end|>"
    assert encode(QWEN3, messages) == ([first, second], [])


def test_turns_that_are_rewritten_later_get_rows_of_their_own():
    tokenizer = tokenizer_with(QWEN3)
    messages = [QUESTIONS[0], thinking(ANSWERS[0], "Two and two."), QUESTIONS[1], ANSWERS[1], QUESTIONS[2], thinking(ANSWERS[2], "So?")]
    rows = ChatTemplate(tokenizer).encode_turns(messages)
    assert [supervised(tokenizer, row) for row in rows] == [
        ["<think>\nSo?\n</think>\n\nSo it is.<|im_end|>"],
        ["<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>"],
        ["Yes.\n\nIt is so.<|im_end|>"],
    ]
    assert [row.left_out for row in rows] == [[], [], []]
    assert rows[2].input_ids == tokenizer.apply_chat_template(messages[:4])["input_ids"]
    assert len(ChatTemplate(tokenizer_with(LLAMA3)).encode_turns(messages)) == 1


def test_gpt_oss_kind_supervises_the_channels_that_the_model_writes():
    thoughtful = [SYSTEM, QUESTIONS[0], thinking(ANSWERS[0], "Two and two.")]
    analysis = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
    assert encode(GPT_OSS, thoughtful) == ([analysis + "<|channel|>final<|message|>It is four.<|return|>"], [])
    # In the history an answer ends with a token that the model doesn't write there; the end is not supervised.
    final = "<|channel|>final<|message|>"
    assert encode(GPT_OSS, TWO_TURNS) == ([final + "It is four.", final + "Yes.\n\nIt is so.<|return|>"], [])
    assert encode(GPT_OSS, [*thoughtful, QUESTIONS[1], ANSWERS[1]]) == ([final + "Yes.\n\nIt is so.<|return|>"], [2])
    assert encode(GPT_OSS, [QUESTIONS[0], {"role": "assistant", "content": ""}]) == ([final + "<|return|>"], [])


def test_a_tool_call_ends_with_its_own_token_and_what_the_tool_says_is_not_supervised():
    call = {"role": "assistant", "reasoning_content": "Add.", "tool_calls": [{"name": "add", "arguments": "{2, 2}"}]}
    messages = [QUESTIONS[0], call, {"role": "tool", "content": "4"}, ANSWERS[0]]
    called = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant to=add<|channel|>commentary<|message|>{2, 2}<|call|>"
    assert encode(GPT_OSS, messages) == ([called, "<|channel|>final<|message|>It is four.<|return|>"], [])


def test_a_conversation_that_the_assistant_opens():
    messages = [{"role": "assistant", "content": "Yes?"}, QUESTIONS[0], ANSWERS[0]]
    assert encode(LLAMA3, messages) == (["It is four.<|eot_id|>"], [0])


def test_text_that_merges_with_the_header_is_left_out():
    """The header's and the answer's newlines become one token, which no prompt ends with."""
    template = LLAMA3.replace("m.content | trim", "m.content").replace("<|end_header_id|>\n\n", "<|end_header_id|>\n")
    messages = [QUESTIONS[0], {"role": "assistant", "content": "\nIt is four."}, QUESTIONS[1], ANSWERS[1]]
    assert encode(template, messages) == (["Yes.\n\nIt is so.<|eot_id|>"], [1])


def test_a_prompt_that_is_split_differently_with_an_answer_behind_it_is_left_out():
    """The tokenizer of the standard library keeps two newlines together at the end of a text only."""
    tokenizer = train_tokenizer(CORPUS, vocab_size=300)
    tokenizer.chat_template = LLAMA3
    encoded = ChatTemplate(tokenizer).encode(TWO_TURNS)
    assert not any(encoded.loss_mask) and encoded.left_out == [2, 4]


def test_blanks_of_an_answer_belong_to_it_and_blanks_behind_the_end_do_not():
    template = LLAMA3.replace("m.content | trim", "m.content").replace("<|eot_id|>", "<|eot_id|>\n")
    messages = [QUESTIONS[0], {"role": "assistant", "content": "It is four.\n"}]
    assert encode(template, messages) == (["It is four.\n<|eot_id|>"], [])


def test_templates_without_a_generation_prompt_or_with_several_ends():
    bare = "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    assert encode(bare, TWO_TURNS[1:]) == (["It is four.<|eos|>", "Yes.\n\nIt is so.<|eos|>"], [])
    two_ends = LLAMA3 + "{{ '\n<|eos|>' if not add_generation_prompt }}"
    assert encode(two_ends, TWO_TURNS[1:3]) == (["It is four.<|eot_id|>"], [])
    no_end = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
    # The full stop and the newline are one token.
    assert encode(no_end, [*TWO_TURNS[:-1], {"role": "assistant", "content": "Yes"}]) == ([" It is four.\n", " Yes"], [])


GENERATION = "{{- '<|im_start|>assistant\n' -}}{%- generation -%}{{- MARKED -}}{%- endgeneration -%}{{- REST -}}"
MARKED = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}GENERATION{%- else -%}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
)


@pytest.mark.parametrize(
    "marked, rest", [("m.content", "'<|im_end|>\n'"), ("m.content + '<|im_end|>'", "'\n'"), ("m.content + '<|im_end|>\n'", "''")]
)
def test_a_templates_own_marks_decide_and_the_end_is_the_same_however_they_are_set(marked, rest):
    template = MARKED.replace("GENERATION", GENERATION.replace("MARKED", marked).replace("REST", rest))
    # No generation prompt: only the marks can tell the header from the text.
    assert encode(template, TWO_TURNS) == (["It is four.<|im_end|>", "Yes.\n\nIt is so.<|im_end|>"], [])
    blank = [QUESTIONS[0], {"role": "assistant", "content": "It is four.\n"}]
    assert encode(template, blank) == (["It is four.\n<|im_end|>"], [])


def test_marks_reach_turns_that_are_rewritten():
    template = QWEN3.replace("{{- parts[-1]", "{% generation %}{{- parts[-1]").replace(
        "+ '<|im_end|>\n' -}}\n  {%- else", "+ '<|im_end|>\n' -}}{% endgeneration %}\n  {%- else"
    )
    assert template.count("generation %}") == 2
    assert encode(template, TWO_TURNS) == (["It is four.<|im_end|>", "Yes.\n\nIt is so.<|im_end|>"], [])


def test_a_template_whose_prompt_its_conversations_do_not_have():
    """The prompt opens the reasoning, and even the last answer is rendered without any."""
    template = LLAMA3.replace("\n\n' if add", "\n\n<think>\n' if add")
    assert encode(template, TWO_TURNS) == ([], [2, 4])
    assert [row.left_out for row in ChatTemplate(tokenizer_with(template)).encode_turns(TWO_TURNS)] == [[4], [2]]


@pytest.mark.parametrize(
    "template, options, message",
    [
        (None, {}, "has no chat template .*set tokenizer.chat_template"),
        (LLAMA3, {"enable_thinking": False}, "enable_thinking=False, but the chat template of .* never reads it"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {}, "has no assistant turn"),
        ("{{ messages[0].content + messages[2].content }}", {}, "fails on a question and an answer: .*no element 2"),
        (MARKED.replace("GENERATION", "{{- '<|im_start|>assistant\n' + m.content -}}"), {}, "ignores add_generation_prompt.*header '<|im_start|>ass"),
    ],
)
def test_templates_that_cannot_be_used_are_named(template, options, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(tokenizer_with(template), **options)


def test_what_the_template_refuses_is_an_error_of_the_conversation():
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate(tokenizer_with(GEMMA)).encode([QUESTIONS[0], QUESTIONS[1], ANSWERS[0]])


def test_messages_are_read_up_to_the_last_answer_and_without_what_tables_fill_in():
    rows = [{**message, "tool_calls": None, "parts": [{"text": "a", "image": None}]} for message in [*TWO_TURNS, QUESTIONS[2]]]
    assert read_messages(rows) == [{**message, "parts": [{"text": "a"}]} for message in TWO_TURNS]
    named = [{"from": "system", "value": "Be short."}, {"from": "human", "value": "Really?"}, {"from": "gpt", "value": "Yes."}]
    assert read_messages(named) == [SYSTEM, QUESTIONS[1], {"role": "assistant", "content": "Yes."}]
    assert read_messages([SYSTEM, QUESTIONS[0]]) == [] == read_messages([])
    for wrong in (None, "text", ["text"], [{"content": "a"}], [{"role": 3, "content": "a"}]):
        assert read_messages(wrong) is None


def test_a_sample_shows_what_is_supervised(monkeypatch):
    tokenizer = tokenizer_with(LLAMA3)
    encoded = ChatTemplate(tokenizer).encode(TWO_TURNS[1:3])
    row = {"input_ids": encoded.input_ids, "loss_mask": encoded.loss_mask}
    head, _, text = show_sample(row, tokenizer).partition("\n")
    assert text.endswith("assistant<|end_header_id|>\n\n[[It is four.<|eot_id|>]]")
    assert head == f"a training row, {sum(encoded.loss_mask)} of its {len(encoded.input_ids)} tokens supervised (in [[ ]]):"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert show_sample(row, tokenizer).endswith("\n\n\033[32mIt is four.<|eot_id|>\033[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in show_sample(row, tokenizer)
    long = {"input_ids": tokenizer("It is four. " * 100, add_special_tokens=False)["input_ids"]}
    long["loss_mask"] = [False] * len(long["input_ids"])
    assert len(show_sample(long, tokenizer, max_characters=60)) < 200

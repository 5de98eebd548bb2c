"""Ways to reach the hook: pipelines, PEFT on either side, threads, vision-language models."""

import copy
import threading

import pytest
import torch
from oracle import ScriptedDraft, build, compare_greedy, tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    pipeline,
)

from hf_dspark import record_generation

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return tiny_draft(target)


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1")


def test_pipeline_with_a_draft_object(target, draft):
    text, arguments = "w3 w14 w15 w9 w26", dict(max_new_tokens=12, do_sample=False)
    [expected] = pipeline("text-generation", model=target, tokenizer=tokenizer())(text, **arguments)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft)
    with record_generation() as report:
        assert assisted(text, **arguments) == [expected]
    assert report.requests[0].new_tokens == 12 and report.requests[0].draft_failure is None


def test_a_draft_wrapped_by_peft(target, draft):
    adapted = get_peft_model(draft, LoraConfig(target_modules=["q_proj", "v_proj"]))
    expected = target.generate(PROMPT, max_new_tokens=12)
    with record_generation() as report:
        assert torch.equal(target.generate(PROMPT, assistant_model=adapted, max_new_tokens=12), expected)
    assert report.requests[0].draft_failure is None and report.rounds


def test_a_target_wrapped_by_peft(draft):
    target = tiny_target()
    adapted = get_peft_model(target, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
    expected = adapted.generate(input_ids=PROMPT, max_new_tokens=12)
    with record_generation() as report:
        assert torch.equal(adapted.generate(input_ids=PROMPT, assistant_model=draft, max_new_tokens=12), expected)
    assert report.requests[0].draft_failure is None and report.rounds
    assert not torch.equal(expected, tiny_target().generate(PROMPT, max_new_tokens=12))


def test_two_threads_share_a_draft_and_a_target(target, draft):
    prompts = [torch.tensor([[seed, 5, 2 * seed + 1]]) for seed in range(8)]
    expected = [target.generate(prompt, max_new_tokens=20).tolist() for prompt in prompts]
    results, failures = {}, []

    def work(numbers):
        try:
            with record_generation() as report:
                for number in numbers:
                    results[number] = target.generate(prompts[number], assistant_model=draft, max_new_tokens=20).tolist()
            assert len(report.requests) == len(numbers) and not any(request.draft_failure for request in report.requests)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(range(first, 8, 2),)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and [results[number] for number in range(8)] == expected


TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
    eos_token_id=None, bos_token_id=None, pad_token_id=None,
)  # fmt: skip


def gemma3_vlm():
    text = dict(TEXT, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60, boi_token_index=61, eoi_token_index=62,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return build(Gemma3ForConditionalGeneration, config)


def qwen2_5_vl():
    text = dict(TEXT, rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 1, 1]))
    vision = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=32, fullatt_block_indexes=[0])
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
        eos_token_id=None,
    )
    return build(Qwen2_5_VLForConditionalGeneration, config)


def test_text_after_an_image():
    target = gemma3_vlm()
    torch.nn.init.normal_(target.model.multi_modal_projector.mm_input_projection_weight)  # zero in a new model
    prompt = torch.tensor([[3, 61, 60, 60, 60, 60, 62, 9, 26]])
    inputs = dict(inputs=prompt, pixel_values=torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28), token_type_ids=(prompt == 60).long())
    draft = tiny_draft(target, ScriptedDraft)
    seen = compare_greedy(target, draft, lambda: dict(inputs, max_new_tokens=24))
    other = target.generate(**dict(inputs, pixel_values=-inputs["pixel_values"]), max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    assert not torch.allclose(other.logits[0], seen.plain.logits[0]), "the image must matter"


@pytest.mark.parametrize("make_target", [gemma3_vlm, qwen2_5_vl])
@pytest.mark.parametrize("padded", [False, True])
def test_text_of_a_vision_language_model(make_target, padded):
    target = make_target()
    prompt = torch.tensor([[1, 1, 3, 14, 15, 9, 26]]) if padded else PROMPT
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]]) if padded else torch.ones_like(PROMPT)
    draft = tiny_draft(target, ScriptedDraft)
    seen = compare_greedy(target, draft, lambda: dict(inputs=prompt, attention_mask=mask, max_new_tokens=24))
    assert len(set(seen.new_tokens)) > 3


def test_a_draft_behind_other_wrappers(target, draft):
    expected = target.generate(PROMPT, max_new_tokens=12)
    once = get_peft_model(copy.deepcopy(draft), LoraConfig(target_modules=["q_proj"]))
    wrapped = [torch.compile(draft), torch.nn.DataParallel(draft), get_peft_model(once, LoraConfig(target_modules=["v_proj"]))]
    for assistant in wrapped:
        with record_generation() as report:
            assert torch.equal(target.generate(PROMPT, assistant_model=assistant, max_new_tokens=12), expected)
        assert report.rounds and report.requests[0].draft_failure is None

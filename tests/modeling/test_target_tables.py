"""What the draft borrows: tied, scaled, capped and wrapped tables; targets that do not fit; copies that came with a checkpoint."""

import pytest
import torch
from oracle import build, tiny_draft, tiny_target
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3Model,
)

from hf_dspark import DSparkDraftModel, record_generation

VOCAB, HIDDEN = 64, 32
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None,
)  # fmt: skip


def without_head_dim(**options):
    return {**{name: value for name, value in SHAPE.items() if name != "head_dim"}, **options}


TARGETS = {
    "untied": lambda: tiny_target(),
    "tied": lambda: tiny_target(tie_word_embeddings=True),
    "Gemma3, scaled embedding": lambda: build(Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE)),
    "Gemma3, capped": lambda: build(Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE, final_logit_softcapping=3.0)),
    "Gemma2, capped": lambda: build(Gemma2ForCausalLM, Gemma2Config(**SHAPE, final_logit_softcapping=5.0, attn_logit_softcapping=4.0)),
    "Granite, divided": lambda: build(GraniteForCausalLM, GraniteConfig(**without_head_dim(logits_scaling=4.0, embedding_multiplier=12.0))),
    "Cohere, multiplied": lambda: build(CohereForCausalLM, CohereConfig(**without_head_dim(logit_scale=0.25))),
}


@pytest.fixture(params=TARGETS.values(), ids=TARGETS.keys())
def any_target(request):
    return request.param()


@torch.no_grad()
def test_logits_of_the_last_hidden_state_are_the_targets_own(any_target):
    """So the borrowed head, its scaling and its cap are those of the target's forward."""
    tables = tiny_draft(any_target).bind(any_target).tables
    outputs = any_target(PROMPT, output_hidden_states=True)
    torch.testing.assert_close(tables.logits(outputs.hidden_states[-1]), outputs.logits)
    tables.check_head(outputs.hidden_states[-1][0], outputs.logits[0])


@torch.no_grad()
def test_embedded_tokens_are_what_the_targets_embedding_returns(any_target):
    tables = tiny_draft(any_target).bind(any_target).tables
    torch.testing.assert_close(tables.embed(PROMPT), any_target.get_input_embeddings()(PROMPT))


def test_a_scaled_embedding_is_scaled():
    target = TARGETS["Gemma3, scaled embedding"]()
    embedded = tiny_draft(target).bind(target).tables.embed(PROMPT)
    torch.testing.assert_close(embedded, target.get_input_embeddings().weight[PROMPT] * HIDDEN**0.5)


@pytest.mark.parametrize(
    ("kind", "logits"), [("Gemma2, capped", [4.8201, -0.9869]), ("Granite, divided", [2.5, -0.25]), ("Cohere, multiplied", [2.5, -0.25])]
)
def test_scaling_and_cap_by_hand(kind, logits):
    """Raw logits 10 and -1: 5 tanh(10 / 5) and 5 tanh(-1 / 5), 10 / 4 and -1 / 4, 0.25 * 10 and 0.25 * -1."""
    target = TARGETS[kind]()
    draft = tiny_draft(target, draft_vocab_size=2).bind(target)
    raw = nn.Linear(1, 2, bias=False)
    raw.weight = nn.Parameter(torch.tensor([[10.0], [-1.0]]))
    torch.testing.assert_close(draft.tables.logits(torch.ones(1), raw), torch.tensor(logits), rtol=1e-4, atol=1e-4)


def test_every_target_decodes_as_without_a_draft(any_target):
    draft = tiny_draft(any_target)
    draft.generation_config.raise_on_draft_failure = True
    expected = any_target.generate(PROMPT, max_new_tokens=16, do_sample=False)
    assert torch.equal(any_target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False), expected)


class WrappedModule(nn.Module):
    """A quantised module, as it looks from outside: it can be called, and that is all."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = module

    @property
    def weight(self):
        raise RuntimeError("packed weights can't be read")

    def forward(self, inputs):
        return self.wrapped(inputs)


class PackedLinear(nn.Module):
    """A head of int8 rows and one scale a row, whose `weight` is no matrix of the head's shape."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.scale = nn.Buffer(scale)
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8).flatten(), requires_grad=False)

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight.view(VOCAB, HIDDEN).to(inputs.dtype) * self.scale)


def wrapped_target():
    target = tiny_target()
    target.set_input_embeddings(WrappedModule(target.get_input_embeddings()))
    target.lm_head = WrappedModule(target.lm_head)
    return target


def packed_target():
    target = tiny_target()
    target.lm_head = PackedLinear(target.lm_head)
    return target


@pytest.mark.parametrize("make_target", [wrapped_target, packed_target])
def test_modules_are_called_never_read(make_target):
    target = make_target()
    draft = tiny_draft(target)
    draft.generation_config.raise_on_draft_failure = True
    expected = target.generate(PROMPT, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False), expected)


@pytest.mark.parametrize(
    ("make_target", "named"), [(wrapped_target, "embed_tokens.weight.*WrappedModule.*packed weights"), (packed_target, "lm_head.weight.*int8")]
)
def test_tables_that_cannot_be_read_cannot_be_saved(make_target, named, tmp_path):
    target = make_target()
    draft = tiny_draft(target).bind(target)
    with pytest.raises(ValueError, match=f"slim=False needs {named}"):
        draft.save_pretrained(tmp_path / "full", slim=False)
    assert not (tmp_path / "full" / "config.json").exists()
    draft.save_pretrained(tmp_path / "slim")
    assert DSparkDraftModel.from_pretrained(tmp_path / "slim").stored_tables == {}


def test_forward_hooks_of_the_targets_modules_run():
    """Offloading and sharding work through hooks."""
    target, calls = tiny_target(), []
    draft = tiny_draft(target).bind(target)
    target.get_input_embeddings().register_forward_hook(lambda *_: calls.append("embedding"))
    target.get_output_embeddings().register_forward_hook(lambda *_: calls.append("head"))
    draft.tables.embed(PROMPT)
    draft.base_logits(torch.zeros(1, HIDDEN))
    assert calls == ["embedding", "head"]


class OddTarget(type(tiny_target())):
    """Computes its logits in a way nobody told the library about."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2 + 1
        return outputs


def test_a_head_that_is_not_the_targets_is_refused_with_the_difference():
    target = tiny_target()
    target.__class__ = OddTarget
    with pytest.raises(ValueError, match=r"OddTarget computes its logits.*differs from its own logits by [\d.]+ \(largest logit [\d.]+\)"):
        target.generate(PROMPT, assistant_model=tiny_draft(target), max_new_tokens=8)


def test_the_head_is_checked_by_value():
    target = tiny_target()
    tables = tiny_draft(target).bind(target).tables
    with torch.no_grad():
        outputs = target(PROMPT, output_hidden_states=True)
    hidden, logits = outputs.hidden_states[-1][0], outputs.logits[0]
    tables.check_head(hidden, logits)
    wrong = logits.clone()
    wrong[2, 5] += 0.25 * logits.abs().max()
    with pytest.raises(ValueError, match=f"by {0.25 * logits.abs().max():.3g}"):
        tables.check_head(hidden, wrong)
    # Without the final norm, the known silent mistake.
    with pytest.raises(ValueError, match=r"differs from its own logits"):
        tables.check_head(hidden * 1.5, logits)
    with pytest.raises(ValueError, match=r"nan"):
        tables.check_head(hidden * torch.nan, logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(hidden_size=48), "the draft's hidden_size is 48, the target has 32"),
        (dict(vocab_size=65), "the draft's vocab_size is 65, the target has 64"),
        (dict(num_target_layers=6), "the draft's num_target_layers is 6, the target has 4"),
    ],
)
def test_a_misfit_is_refused_with_both_values(options, message):
    target = tiny_target()
    draft = tiny_draft(target, **options)
    with pytest.raises(ValueError, match=f"Qwen3ForCausalLM: {message}"):
        draft.bind(target)
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)


def test_a_resized_target_loses_the_mask_row_and_is_refused():
    target = tiny_target()
    draft = tiny_draft(target, mask_token_id=VOCAB - 1)
    draft.bind(target)
    target.resize_token_embeddings(VOCAB - 4)
    for refused in (draft, tiny_draft(tiny_target(), mask_token_id=VOCAB - 1)):
        with pytest.raises(ValueError, match=r"vocab_size is 64, the target has 60.*resized.*mask_token_id 63 must stay inside"):
            target.generate(PROMPT, assistant_model=refused, max_new_tokens=4)


def test_a_target_without_a_head_is_refused():
    config = Qwen3Config(**SHAPE)
    target = build(Qwen3Model, config)
    draft = tiny_draft(target)
    with pytest.raises(ValueError, match=r"Qwen3Model has no output head.*causal LM head"):
        draft.bind(target)


@pytest.fixture
def full_checkpoint(tmp_path):
    """(target, folder of a draft that carries copies of its tables)."""
    target = tiny_target()
    tiny_draft(target).bind(target).save_pretrained(tmp_path, slim=False)
    return target, tmp_path


def test_equal_copies_are_dropped_at_binding(full_checkpoint):
    target, folder = full_checkpoint
    draft = DSparkDraftModel.from_pretrained(folder)
    assert set(draft.stored_tables) == {"embed_tokens.weight", "lm_head.weight"}
    assert not set(draft.stored_tables) & {name for name, _ in [*draft.named_parameters(), *draft.named_buffers()]}
    draft.bind(target)
    assert draft.stored_tables == {} and draft.tables.own_embedding is None and draft.tables.own_head is None


@pytest.mark.parametrize("changed", ["embed_tokens.weight", "lm_head.weight"])
def test_different_copies_are_kept_used_and_saved_again(full_checkpoint, changed, tmp_path):
    target, folder = full_checkpoint
    draft = DSparkDraftModel.from_pretrained(folder)
    draft.stored_tables[changed] = draft.stored_tables[changed] + 0.01
    table = draft.stored_tables[changed]
    draft.bind(target)
    assert set(draft.stored_tables) == {changed}
    hidden = torch.randn(2, HIDDEN)
    own_embedding, own_head = changed == "embed_tokens.weight", changed == "lm_head.weight"
    embedding = table if own_embedding else target.get_input_embeddings().weight
    torch.testing.assert_close(draft.tables.embed(PROMPT), embedding[PROMPT], rtol=0, atol=0)
    head = table if own_head else target.get_output_embeddings().weight
    torch.testing.assert_close(draft.base_logits(hidden), hidden @ head.T)
    # The comparison with the target's own logits is of the target's head, not of the copy.
    expected = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=12, do_sample=False), expected)
    draft.save_pretrained(tmp_path / "again")
    again = DSparkDraftModel.from_pretrained(tmp_path / "again")
    assert set(again.stored_tables) == {changed} and torch.equal(again.stored_tables[changed], table)


def test_a_changed_mask_row_alone_makes_a_copy_different():
    """A large vocabulary is compared by sampled rows; the row that every block reads is always one of them."""
    target = tiny_target(vocab_size=5000)
    draft = tiny_draft(target, mask_token_id=1234)
    table = target.get_input_embeddings().weight.detach().clone()
    table[1234] += 0.1
    draft.stored_tables = {"embed_tokens.weight": table}
    assert set(draft.bind(target).stored_tables) == {"embed_tokens.weight"}


def test_copies_beside_a_scaled_embedding_are_scaled():
    target = TARGETS["Gemma3, scaled embedding"]()
    draft, weight = tiny_draft(target), target.get_input_embeddings().weight.detach()
    draft.stored_tables = {"embed_tokens.weight": weight.clone()}
    assert draft.bind(target).stored_tables == {}
    draft = tiny_draft(target)
    draft.stored_tables = {"embed_tokens.weight": weight * 1.5}
    torch.testing.assert_close(draft.bind(target).tables.embed(PROMPT), weight[PROMPT] * 1.5 * HIDDEN**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_compared_across_dtypes(dtype):
    """A checkpoint's bf16 copy of an fp32 target, or the other way round, is the same table."""
    target = tiny_target().to(dtype)
    draft, other = tiny_draft(target), torch.bfloat16 if dtype == torch.float32 else torch.float32
    modules = {"embed_tokens.weight": target.get_input_embeddings(), "lm_head.weight": target.get_output_embeddings()}
    draft.stored_tables = {name: module.weight.detach().to(other) for name, module in modules.items()}
    assert draft.bind(target).stored_tables == {}
    draft = tiny_draft(target)
    draft.stored_tables = {name: module.weight.detach().to(other) * 1.2 for name, module in modules.items()}
    assert set(draft.bind(target).stored_tables) == set(modules)


def test_another_target_is_compared_with_the_copies_anew(full_checkpoint):
    target, folder = full_checkpoint
    draft, other = DSparkDraftModel.from_pretrained(folder), tiny_target(seed=5)
    draft.bind(other)
    assert set(draft.stored_tables) == {"embed_tokens.weight", "lm_head.weight"}
    with record_generation() as report:
        expected = other.generate(PROMPT, max_new_tokens=12, do_sample=False)
        assert torch.equal(other.generate(PROMPT, assistant_model=draft, max_new_tokens=12, do_sample=False), expected)
    assert report.requests[0].draft_failure is None
    assert draft.bind(target).stored_tables == {}


def test_draft_and_target_of_different_dtypes():
    target = tiny_target()
    draft = tiny_draft(target).to(torch.bfloat16)
    draft.generation_config.raise_on_draft_failure = True
    expected = target.generate(PROMPT, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False), expected)
    target, draft = tiny_target().to(torch.bfloat16), tiny_draft(target)
    draft.generation_config.raise_on_draft_failure = True
    assert target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False).shape == (1, 21)

"""Training from cached features: the losses and gradients of online ones, rows that are not cached, stale folders."""

import pytest
import torch
from oracle import VOCAB, tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_distill import arguments
from test_distill import folder as distillation_folder  # noqa: F401
from test_trainer import KeepGradients
from test_trainer_steps import as_dataset
from transformers import AutoTokenizer

from hf_dspark import DSparkDraftModel
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.collator import BlockCollator
from hf_dspark.distillation.distill import distill
from hf_dspark.distillation.feature_cache import NumberedRows
from hf_dspark.distillation.trainer import DSparkTrainer

LAYER_IDS = [-1, 0, 2]


def text_rows(count: int = 10) -> list[dict]:
    generator = torch.Generator().manual_seed(2)
    lengths = [12 + 5 * i % 13 for i in range(count)]
    return [{"input_ids": torch.randint(VOCAB - 1, (n,), generator=generator), "loss_mask": torch.arange(n) >= 3} for n in lengths]


def make_trainer(folder, target=None, rows=None, **options) -> DSparkTrainer:
    target = tiny_target() if target is None else target
    values = {"target": "tiny", "output_dir": str(folder / "run"), "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "num_anchors": 4}
    values |= {"max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0, "max_length": 40}
    args = DistillationArguments(**{**values, **options})
    draft = tiny_draft(target, target_layer_ids=LAYER_IDS, draft_vocab_size=args.draft_vocab_size)
    return DSparkTrainer(draft, target, args, train_dataset=as_dataset(text_rows()) if rows is None else rows)


def cached(folder, dtype: str = "float32", **options) -> dict:
    return {"features": "cached", "features_dir": str(folder / "cache"), "features_dtype": dtype, **options}


def trained(trainer) -> tuple[list[float], list[dict]]:
    """Losses and gradients of every step."""
    steps = []
    trainer.add_callback(KeepGradients(steps))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], steps


def gap(found: tuple, expected: tuple) -> float:
    """Largest relative distance of the losses, and of the gradient of a parameter, over all steps."""
    assert len(found[0]) == len(expected[0]) == 3
    distances = [abs(ours - theirs) / theirs for ours, theirs in zip(found[0], expected[0])]
    for ours, theirs in zip(found[1], expected[1]):
        assert ours.keys() == theirs.keys()
        distances += [((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-3)).item() for name in theirs]
    return max(distances)


@pytest.mark.parametrize(
    "options", [{}, {"packing": True}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 1}, {"draft_vocab_size": 40}], ids=str
)
def test_a_training_from_exact_features_is_the_one_online(tmp_path, options):
    expected = trained(make_trainer(tmp_path, **options))
    found = trained(make_trainer(tmp_path, **options, **cached(tmp_path)))
    assert gap(found, expected) < 1e-5
    for ours, theirs in zip(found[0], expected[0]):
        assert ours == pytest.approx(theirs, rel=1e-6)
    # And so is one that reads what another run wrote.
    assert gap(trained(make_trainer(tmp_path, **options, **cached(tmp_path))), expected) < 1e-5


@pytest.mark.parametrize(
    "dtype, rank, tolerance", [("bfloat16", None, 0.03), ("int8", None, 0.06), ("float32", 96, 1e-3)], ids=["bfloat16", "int8", "whole space"]
)
def test_a_training_from_rounded_features_is_close(tmp_path, dtype, rank, tolerance):
    """bfloat16 has 8 bits of mantissa, as many as int8 for the largest number of a vector; a subspace of all 3 * 32 dimensions loses nothing."""
    expected = trained(make_trainer(tmp_path))
    found = trained(make_trainer(tmp_path, **cached(tmp_path, dtype, features_rank=rank)))
    assert found[0] == pytest.approx(expected[0], rel=tolerance) and gap(found, expected) < 10 * tolerance
    assert found[0] != expected[0]


def test_a_target_in_bfloat16_gets_its_features_back_exactly(tmp_path):
    expected = trained(make_trainer(tmp_path, tiny_target().bfloat16(), per_device_train_batch_size=1))
    found = trained(make_trainer(tmp_path, tiny_target().bfloat16(), per_device_train_batch_size=1, **cached(tmp_path, "bfloat16")))
    assert found[0] == expected[0]


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_rows_that_are_not_cached_are_computed_in_the_step(tmp_path, draft_vocab_size):
    expected = trained(make_trainer(tmp_path, draft_vocab_size=draft_vocab_size))
    trainer = make_trainer(tmp_path, draft_vocab_size=draft_vocab_size, **cached(tmp_path, cache_budget="40KB"))
    assert 2 < trainer.feature_cache.num_rows < 8
    widths = []
    trainer.target.model.register_forward_pre_hook(lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True)
    assert gap(trained(trainer), expected) < 1e-5
    # After the checks of the first batch some batches are computed in part.
    assert any(width < 4 for width in widths[3:])


def test_rows_that_are_not_cached_lie_in_the_subspace_too(tmp_path):
    """What fc sees outside of it would be lost when its weight is folded."""
    trainer = make_trainer(tmp_path, **cached(tmp_path, cache_budget="20KB", features_rank=8))
    directions, num_cached = trainer.feature_cache.coding.subspace.directions, trainer.feature_cache.num_rows
    assert 1 < num_cached < 8
    for numbers in (range(num_cached), range(num_cached - 1, num_cached + 1), range(num_cached, num_cached + 2)):
        batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[i] for i in numbers]))
        found = trainer.feature_cache.features(batch, trainer._target_features)
        states = torch.cat(found.hidden_states, dim=-1)[batch["attention_mask"]]
        assert (states - states @ directions @ directions.T).norm() < 1e-4 * states.norm()


def test_the_target_rests_while_all_rows_are_cached(tmp_path):
    trainer = make_trainer(tmp_path, **cached(tmp_path))
    calls = []
    handle = trainer.target.model.layers[0].register_forward_pre_hook(lambda module, args: calls.append(trainer.state.global_step))
    trainer.train()
    # The checks of the first batch ask it, no later step does.
    assert set(calls) == {0}
    handle.remove()


def test_evaluations_compute_their_features(tmp_path):
    expected = make_trainer(tmp_path).evaluate(as_dataset(text_rows(5)))
    found = make_trainer(tmp_path, **cached(tmp_path, "int8")).evaluate(as_dataset(text_rows(5)))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "dtype, name, index, place",
    [
        *((dtype, "hidden_states", 1, "of chosen layer 1") for dtype in ("float32", "bfloat16", "int8")),
        *((dtype, "last_hidden", 0, "of the last hidden state") for dtype in ("float32", "bfloat16", "int8")),
        *((dtype, "log_partition", ..., "of the log partition") for dtype in ("float32", "bfloat16", "int8")),
    ],
)
def test_a_cache_whose_contents_were_altered_is_found_in_the_first_batch(tmp_path, dtype, name, index, place):
    options = cached(tmp_path, dtype, draft_vocab_size=40 if name == "log_partition" else None)
    make_trainer(tmp_path, **options)
    path = tmp_path / "cache" / "features-00000.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    altered = tensors[name] if index is ... else tensors[name][:, index]
    altered.copy_(altered.roll(1, dims=0))  # each token has its neighbour's
    save_file(tensors, path, metadata=metadata)
    trainer = make_trainer(tmp_path, **options)
    with pytest.raises(ValueError, match=f"features_dir='.*cache' is stale or damaged: {place} .* differ .*delete the folder"):
        trainer.train()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_rounding_of_logits_in_bfloat16_is_no_damage_and_little_more_is(tmp_path, dtype):
    target, options = tiny_target(initializer_range=0.5).bfloat16(), cached(tmp_path, dtype, draft_vocab_size=40)
    make_trainer(tmp_path, target, **options)
    make_trainer(tmp_path, target, **options, per_device_train_batch_size=1).train()  # other products than when it was written
    path = tmp_path / "cache" / "features-00000.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    size = tensors["log_partition"].abs().mean().item()
    tensors["log_partition"] += (added := 2**-6 * (size + 16))
    assert added < 0.1 * size
    save_file(tensors, path, metadata=metadata)
    trainer = make_trainer(tmp_path, target, **options)
    with pytest.raises(ValueError, match=r"stale or damaged: of the log partition .* nats, where rounding makes .* at most; delete the folder"):
        trainer.train()


def test_a_target_with_an_adapter_has_its_own_features(tmp_path):
    def adapted(scale: float):
        target = get_peft_model(tiny_target(), LoraConfig(r=2, target_modules=["q_proj"]))
        with torch.no_grad():
            for name, parameter in target.named_parameters():
                if "lora_" in name:
                    parameter.copy_(scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        return target

    expected = trained(make_trainer(tmp_path, adapted(0.3)))
    assert gap(trained(make_trainer(tmp_path, adapted(0.3), **cached(tmp_path))), expected) < 1e-5
    for other in (tiny_target(), adapted(0.2)):
        with pytest.raises(ValueError, match=r"holds features of another run: target_.* is "):
            make_trainer(tmp_path, other, **cached(tmp_path))


def test_rows_that_cannot_be_counted_are_refused(tmp_path):
    with pytest.raises(ValueError, match="features='cached' needs rows that are counted and can be read in any order, got a IterableDataset"):
        make_trainer(tmp_path, rows=as_dataset(text_rows()).to_iterable_dataset(), **cached(tmp_path))


def test_numbers_reach_the_batch_and_change_no_anchor():
    rows = NumberedRows(text_rows(6))
    collator = BlockCollator(num_anchors=4)
    picked = [4, 1, 5]
    batch = collator([rows[i] for i in picked])
    assert len(rows) == 6 and batch["cached_rows"].tolist() == picked
    plain = collator([text_rows(6)[i] for i in picked])
    assert "cached_rows" not in plain and torch.equal(plain["anchors"], batch["anchors"])


def test_the_command_trains_from_cached_features_and_knows_its_chat_template(distillation_folder):  # noqa: F811
    folder = distillation_folder
    options = cached(folder, "int8", cache_budget="60KB")
    draft = DSparkDraftModel.from_pretrained(distill(arguments(folder, **options)))
    assert draft.config.block_size == 4 and (folder / "cache" / "features-00000.safetensors").stat().st_size <= 60_000
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "target")
    with pytest.raises(ValueError, match=r"chat_template is None there, '[0-9a-f]{16}' here"):
        distill(arguments(folder, **options))

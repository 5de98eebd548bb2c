"""Options of distillation: every one explained, the recipes readable, mistakes named."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.losses import LossWeights

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def arguments(tmp_path, **options) -> DistillationArguments:
    return DistillationArguments(**{"target": "somewhere", "output_dir": str(tmp_path), "use_cpu": True, **options})


def test_every_option_of_ours_has_a_help_text():
    inherited = {option.name for option in fields(TrainingArguments)}
    ours = [option for option in fields(DistillationArguments) if option.name not in inherited]
    assert {"target", "dataset", "block_size", "num_anchors", "ce_weight", "decay_gamma"} <= {option.name for option in ours}
    assert [option.name for option in fields(DistillationArguments) if not option.metadata.get("help")] == []


def test_the_recipe_parses_from_yaml_and_as_flags(tmp_path):
    path = RECIPES / "stdlib_draft.yaml"
    parser = HfArgumentParser(DistillationArguments)
    (args,) = parser.parse_yaml_file(path)
    assert (args.block_size, args.num_draft_layers, args.markov_rank) == (7, 3, 64)
    assert f"hf-dspark distill recipes/{path.name}" in path.read_text()
    assert args.num_held_out == yaml.safe_load((RECIPES / "stdlib_target.yaml").read_text())["num_held_out"]
    options = yaml.safe_load(path.read_text())
    flags = [text for key, value in options.items() for text in (f"--{key}", *map(str, value if isinstance(value, list) else [value]))]
    (flagged,) = parser.parse_args_into_dataclasses(flags)
    for option in fields(args):
        assert getattr(flagged, option.name) == getattr(args, option.name), option.name


def test_defaults_are_the_papers(tmp_path):
    args = arguments(tmp_path)
    assert args.loss_weights == LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0)
    assert (args.block_size, args.num_draft_layers, args.num_anchors, args.max_length, args.markov_rank) == (7, 5, 512, 4096, 256)
    assert (args.learning_rate, args.warmup_steps, args.weight_decay) == (6e-4, 0.04, 0.0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": None}, "target must be a model folder or a Hub id, got None"),
        ({"max_length": 8}, "max_length must be at least block_size \\+ 2 = 9 .*got 8"),
        ({"learning_rate": "6e-4"}, "learning_rate must be a number, got the text '6e-4' .*6.0e-4"),
        ({"ce_weight": "1e-1"}, "ce_weight must be a number, got the text '1e-1'"),
        ({"max_steps": "1e3"}, "max_steps must be a number, got the text '1e3'"),
        ({"num_anchors": "many"}, "num_anchors must be a number, got the text 'many'"),
        ({"decay_gamma": "4e0"}, "decay_gamma must be a number"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_draft_layers": 0}, "num_draft_layers must be at least 1, got 0"),
        ({"num_anchors": 0}, "num_anchors must be at least 1, got 0"),
        ({"max_length": None}, "max_length must be a number, got None; leave it out for its default, 4096"),
        ({"seed": None}, "seed must be a number, got None"),
        *(
            ({name: 0}, f"{name} must be at least 1, got 0")
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        ),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be at least 1, got 0"),
        ({"num_held_out": -1}, "num_held_out must not be negative, got -1"),
        ({"l1_weight": -0.9}, "l1_weight must not be negative, got -0.9"),
        ({"decay_gamma": 0.0}, "decay_gamma must be positive or None, got 0.0"),
        ({"save_dtype": "int8"}, "save_dtype must be .*got 'int8'"),
        ({"warm_start": True, "init_draft": "x"}, "warm_start=True fills a new draft, and init_draft='x' is trained already"),
        ({"remove_unused_columns": True}, "remove_unused_columns=True"),
    ],
)
def test_mistakes_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_one_module_may_be_named_without_brackets(tmp_path):
    lora = {"init_draft": "draft", "lora_rank": 2}
    assert arguments(tmp_path, **lora, lora_target_modules="q_proj").lora_target_modules == ["q_proj"]
    assert arguments(tmp_path, **lora, lora_target_modules="all-linear").lora_target_modules is None


def test_losses_that_are_no_numbers_are_logged_as_they_are(tmp_path):
    assert arguments(tmp_path).logging_nan_inf_filter is False


def test_deepspeed_zero_3_is_refused(tmp_path, monkeypatch):
    """Its weights are empty outside of a forward: what is saved would be, too."""
    monkeypatch.setattr("hf_dspark.distillation.arguments.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"DeepSpeed ZeRO-3 would spread the target too.*fsdp: true"):
        arguments(tmp_path)


def test_an_unknown_key_of_a_recipe_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("target: somewhere\nblok_size: 7\n")
    with pytest.raises(ValueError, match="blok_size"):
        HfArgumentParser(DistillationArguments).parse_yaml_file(recipe)


def test_memory_is_pinned_where_there_is_a_device_to_pin_it_for(tmp_path):
    # torch warns at every loader otherwise.
    assert not arguments(tmp_path, use_cpu=True).dataloader_pin_memory

"""Trains a draft for a target: `hf-dspark distill RECIPE.yaml`."""

from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_dspark.distillation.adapter import add_adapter, save_adapter
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.conversations import show_sample
from hf_dspark.distillation.data import load_rows, warn_of_mask_token
from hf_dspark.distillation.divergence import num_non_finite_weights
from hf_dspark.distillation.evaluation import eval_prompts
from hf_dspark.distillation.features import weights_fingerprint
from hf_dspark.distillation.preflight import check_cached_features, check_context, check_held_out, checked_folders, warn_of_ignored_options
from hf_dspark.distillation.provenance import take_provenance, training_data
from hf_dspark.distillation.resumption import check_same_draft
from hf_dspark.distillation.summary import evaluations, plot_history, summary_table
from hf_dspark.distillation.trainer import DSparkTrainer
from hf_dspark.evaluation.output import write_json
from hf_dspark.evaluation.pairs import errors_named
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.hub import DraftCard, upload_draft, write_draft_card
from hf_dspark.modeling import DSparkConfig, DSparkDraftModel
from hf_dspark.modeling.target_tables import check_fit

__all__ = ["choose_vocabulary", "copy_last_layers", "distill", "draft_config", "starting_draft"]

_REPORTED = (
    *("eval_loss", "eval_ce", "eval_l1", "eval_confidence", "eval_tau", "eval_tokens_per_round", "eval_repeated_8gram_share"),
    *("eval_sampled_tokens_per_round", "eval_sampled_repeated_8gram_share", "eval_confidence_bias"),
)


def distill(args: DistillationArguments) -> Path:
    """Trains a draft and writes it, slim, with `distillation.json` (the held-out losses and tau, and all evaluations as `history`), a card
    and, of two evaluations or more, the plot `tau_by_time.png` to `args.output_dir`; with `push_to_hub` the draft is uploaded then.

    Raises:
        ValueError: options that don't fit the target, its tokenizer, the data or what `args.output_dir` holds, all before the first step; the
            training diverged.
        OSError: there is no such target or draft.
    """
    checkpoint = checked_folders(args)
    check_held_out(args)
    set_seed(args.seed)
    with errors_named("target", args.target):
        target, tokenizer = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto"), AutoTokenizer.from_pretrained(args.target)
    check_context(args, target)
    draft = starting_draft(args, target, tokenizer)
    if checkpoint is not None:
        check_same_draft(checkpoint, draft)
    check_cached_features(args, target, draft.config, tokenizer.chat_template)
    train_rows, eval_rows = load_rows(args, tokenizer, target.config.get_text_config().vocab_size)
    if eval_rows is not None and args.eval_prompts:
        eval_prompts(eval_rows, args, ContextLimits.of(target.config).context)  # raises where none fits
    train_rows, sources = take_provenance(train_rows)
    revision = getattr(target.config, "_commit_hash", None)
    # Only rows that say who wrote them are compared with the target.
    weights = weights_fingerprint(target, rounded=True) if sources else None
    data_facts = training_data(sources, args, tokenizer, revision, weights)
    if args.process_index == 0:
        print(show_sample(next(iter(train_rows)), tokenizer))
        warn_of_mask_token(train_rows, draft.config.mask_token_id)
    if args.init_draft is None and args.draft_vocab_size is not None:
        choose_vocabulary(draft, target, train_rows)
    trainer = DSparkTrainer(draft, target, args, train_dataset=train_rows, eval_dataset=eval_rows, chat_template=tokenizer.chat_template)
    trainer.train(resume_from_checkpoint=checkpoint)
    report = {"steps": trainer.state.global_step, **data_facts}
    if not args.streaming:
        report["num_train_rows"] = len(train_rows)
    if eval_rows is not None:
        during = evaluations(trainer.state.log_history)
        metrics = trainer.evaluate()
        # The best checkpoint, loaded again, is not what the last step made.
        report["history"] = during if args.load_best_model_at_end else evaluations(trainer.state.log_history)
        report |= {name: metrics[name] for name in _REPORTED if name in metrics}
    draft = _finished(trainer, args)
    if trainer.is_world_process_zero():
        draft.config.base_model_name_or_path, draft.config.base_model_revision = args.target, revision
        if data_facts or args.init_draft is not None:  # not those of an earlier training
            draft.config.training_data = data_facts
        _write(draft, args, report)
    return Path(args.output_dir)


def _finished(trainer: DSparkTrainer, args: DistillationArguments) -> DSparkDraftModel | PeftModel:
    """The whole draft as it is saved. Raises ValueError where one of its weights is no number. All processes must call it."""
    trainer.check_weights()
    draft = trainer.whole_draft().to(getattr(torch, args.save_dtype))
    if num_wrong := int(num_non_finite_weights(draft)):
        raise ValueError(f"save_dtype={args.save_dtype!r} can't hold {num_wrong} of the draft's weights; save it as bfloat16 or float32")
    return draft


def _write(draft: DSparkDraftModel | PeftModel, args: DistillationArguments, report: dict) -> None:
    """Writes the draft with all that goes with it, and uploads it where that is asked for."""
    output = Path(args.output_dir)
    save_adapter(draft, output) if args.lora_rank is not None else draft.save_pretrained(output)
    write_json(output / "distillation.json", report)
    write_draft_card(draft, output, DraftCard(arguments=args.to_dict(), report=report))
    if history := report.get("history"):
        print(summary_table(history))
        plot_history(output / "tau_by_time.png", history)
    figures = [f"{name} {value:.4g}" for name, value in report.items() if isinstance(value, int | float)]
    print(", ".join(figures) + f"; wrote {output}")
    if args.push_to_hub:
        name = args.hub_model_id or output.absolute().name
        upload_draft(output, name, private=args.hub_private_repo, token=args.hub_token, revision=args.hub_revision)


def starting_draft(
    args: DistillationArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset | None = None
) -> DSparkDraftModel | PeftModel:
    """What `args` say to train: a new draft, cold or warm, one at hand, or a fresh adapter over that.

    `rows`: the training rows, from which a reduced vocabulary is chosen; None: `choose_vocabulary` does that later.

    Raises:
        ValueError: the options don't fit the target, its tokenizer or the draft at hand.
        OSError: there is no such draft.
    """
    if args.init_draft is None:
        draft = DSparkDraftModel(draft_config(target, tokenizer, args))
        if args.draft_vocab_size is not None and rows is not None:
            choose_vocabulary(draft, target, rows)
        if args.warm_start:
            copy_last_layers(draft, target)
        return draft
    draft = _draft_at_hand(args)
    check_fit(draft.config, target)
    if args.max_length < draft.config.block_size + 2:
        raise ValueError(f"max_length={args.max_length} is too short for the block_size {draft.config.block_size} of {args.init_draft}")
    warn_of_ignored_options(args, draft.config)
    return draft if args.lora_rank is None else add_adapter(draft, args)


def _draft_at_hand(args: DistillationArguments) -> DSparkDraftModel:
    folder = Path(args.init_draft)
    # transformers would put the adapter over the draft, and train nothing of either.
    if (folder / "adapter_config.json").exists() and (folder / "config.json").exists():
        raise ValueError(f"init_draft={args.init_draft!r} holds a draft and an adapter; name a folder with the draft alone")
    with errors_named("init_draft", args.init_draft):
        return DSparkDraftModel.from_pretrained(args.init_draft, dtype=torch.float32)


def draft_config(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: DistillationArguments) -> DSparkConfig:
    """The config of a new draft: what must agree with the target is the target's, the rest comes from `args`.

    Raises:
        ValueError: no mask token is known, or the options are impossible together.
    """
    config = target.config.get_text_config()
    mask_token_id = tokenizer.mask_token_id if args.mask_token_id is None else args.mask_token_id
    if mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {args.target} has no mask token; set mask_token_id to a row of its embedding (0 to {config.vocab_size - 1}) that "
            "never occurs in text, such as a reserved special token"
        )
    # Families differ in which of these their configs have (GPT-2 has none); a missing one follows from the others.
    heads = args.num_attention_heads or config.num_attention_heads
    head_dim = args.head_dim or getattr(config, "head_dim", None) or config.hidden_size // heads
    return DSparkConfig(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_target_layers=config.num_hidden_layers,
        target_layer_ids=args.target_layer_ids,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=_rope_parameters(config),
        max_position_embeddings=config.max_position_embeddings,
        # transformers' pipelines compare these with the target's own.
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        intermediate_size=args.intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=args.num_draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=args.num_key_value_heads or getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        block_size=args.block_size,
        mask_token_id=mask_token_id,
        markov_rank=args.markov_rank,
        markov_head_type=args.markov_head_type,
        enable_confidence_head=args.enable_confidence_head,
        confidence_head_with_markov=args.confidence_head_with_markov,
        draft_vocab_size=args.draft_vocab_size,
        num_anchors=args.num_anchors,
        base_model_name_or_path=args.target,
        base_model_revision=getattr(target.config, "_commit_hash", None),
        tie_word_embeddings=False,
    )


@torch.no_grad()
def choose_vocabulary(draft: DSparkDraftModel, target: PreTrainedModel, rows: Dataset) -> None:
    """Makes the reduced vocabulary of `draft` the most frequent tokens of `rows`, and its head the target's rows of these."""
    config = draft.config
    size, counts = config.draft_vocab_size, torch.zeros(config.vocab_size, dtype=torch.long)
    # Only supervised tokens are ever predicted.
    for row in rows:
        ids = torch.as_tensor(row["input_ids"])
        counts += torch.bincount(ids[torch.as_tensor(row["loss_mask"]).bool()] if "loss_mask" in row else ids, minlength=config.vocab_size)
    kept = counts.argsort(descending=True, stable=True)[:size].sort().values
    draft.d2t.copy_(kept - torch.arange(size))
    # The head is called, not read: it may be quantised, or not a plain linear layer.
    unit_rows = torch.eye(config.hidden_size, dtype=target.dtype, device=target.device)
    draft.lm_head.weight.copy_(target.get_output_embeddings()(unit_rows).T[kept.to(target.device)])


@torch.no_grad()
def copy_last_layers(draft: DSparkDraftModel, target: PreTrainedModel) -> list[str]:
    """Copies the target's last layers into the draft's, its final norm, and the norm before the first of those layers into the norm of
    the context features, which start as the last captured layer's output. Returns the names of the tensors copied.

    Raises:
        ValueError: no tensor of the target's layers has the name and shape of one of the draft's, or those layers are of another kind.
    """
    decoder, own, hidden = target.get_decoder(), draft.state_dict(), draft.config.hidden_size
    source = decoder.state_dict()
    num_layers, first = draft.config.num_hidden_layers, draft.config.num_target_layers - draft.config.num_hidden_layers
    _check_same_kind(target, {name.split(".", 2)[2] for name in source if name.startswith(f"layers.{first}.")})
    wanted = {"norm.weight": "norm.weight", "hidden_norm.weight": f"layers.{first}.input_layernorm.weight"}
    for name in own:
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            wanted[name] = f"layers.{first + int(index)}.{rest}"
    copied = [name for name, theirs in wanted.items() if theirs in source and source[theirs].shape == own[name].shape]
    if not any(name.startswith("layers.") for name in copied):
        raise ValueError(
            f"warm_start=True: no tensor of the last {num_layers} layers of {type(target).__name__} has the name and shape of the draft's"
        )
    for name in copied:
        values = source[wanted[name]]
        if name.endswith("norm.weight"):
            # What the norm multiplies by; some families store it less one.
            values = decoder.get_submodule(wanted[name].removesuffix(".weight"))(torch.ones_like(values))
        own[name].copy_(values)
    own["fc.weight"][:, -hidden:] += torch.eye(hidden)
    return copied


def _check_same_kind(target: PreTrainedModel, names: set[str]) -> None:
    """Raises ValueError where layers with tensors of these `names` compute something else than a draft's with copies of them would."""
    norms = {name for name in names if name.count(".") == 1 and "norm" in name}
    # Gemma 3's norms after attention and feed-forward bear the names of others, and its layers write hundreds of times what a draft's read.
    reason = ", ".join(sorted(norms - {"input_layernorm.weight", "post_attention_layernorm.weight"}))
    if names and "post_attention_layernorm.weight" not in names:
        reason = reason or "no post_attention_layernorm"
    for block, parts in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
        missing = [f"{block}.{part}_proj" for part in parts if f"{block}.{part}_proj.weight" not in names]
        if 0 < len(missing) < len(parts):  # several in one tensor, say
            reason = reason or f"no {', '.join(missing)}"
    if reason:
        raise ValueError(
            f"warm_start=True: layers of {type(target).__name__} are of another kind than a draft's ({reason}), and copies of them would compute "
            "something else; leave warm_start out"
        )


def _rope_parameters(config) -> dict:
    """The target's rotary embedding; where layer types have their own, the one of full attention; the usual one for a target without."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}

"""Options of `hf-dspark distill`."""

from dataclasses import dataclass, field, fields
from typing import get_type_hints

import torch
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_dspark.distillation.evaluation import check_eval_options
from hf_dspark.distillation.feature_options import check_feature_options
from hf_dspark.distillation.losses import LossWeights
from hf_dspark.distillation.training_options import check_training_options

__all__ = ["DistillationArguments"]


@dataclass
class DistillationArguments(TrainingArguments):
    """transformers' TrainingArguments with the defaults of distillation, and the draft, its data and its losses.

    Raises:
        ValueError: an option that can't work; the message has its name and value.
    """

    target: str | None = field(default=None, metadata={"help": "The target model: a folder or a Hub id. Required."})
    dataset: str = field(
        default="stdlib",
        metadata={
            "help": "'stdlib' (Python's standard library), a .jsonl, .json, .parquet or .txt file (each paragraph a text), a folder of such, "
            "or a dataset on the Hub; of conversations (column `messages`), texts (`text`) or tokens (`input_ids`, with a `loss_mask` or without)."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The dataset's configuration, where the Hub's has several."})
    dataset_split: str = field(default="train", metadata={"help": "Split to read, of a folder or of a dataset on the Hub."})
    dataset_column: str | None = field(
        default=None, metadata={"help": "Column to read. None: `messages`, `conversations`, `input_ids` or `text`, the first that is there."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that encode the dataset. None: one."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read the dataset while training, not before; needs max_steps. Rows are shuffled 1,000 at a time."},
    )
    extra_rows: list[str] | None = field(
        default=None, metadata={"help": "Files (or other datasets, as above) to train on besides the dataset, such as `hf-dspark regenerate` writes."}
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Passed to the chat template that renders conversations. None: the template's own default."}
    )
    split_turns: bool = field(
        default=False,
        metadata={
            "help": "Give an assistant turn that the chat template rewrites later (drops its reasoning) a row of its own, ending with it; "
            "without, such turns are not trained on."
        },
    )
    num_held_out: int = field(
        default=96,
        metadata={
            "help": "Rows kept out of training, for evaluations: of 'stdlib' as many modules as in the target's recipe, of a stream the first, "
            "of other datasets spread over all."
        },
    )
    max_eval_rows: int = field(default=128, metadata={"help": "Rows of the held-out texts that an evaluation reads, at most."})
    eval_prompts: int = field(
        default=16, metadata={"help": "Held-out prompts that an evaluation decodes with the draft, for the accepted length; 0: none."}
    )
    eval_prompt_tokens: int = field(
        default=64, metadata={"help": "Tokens of such a prompt where it is a text; of a conversation it is all before the first answer."}
    )
    eval_new_tokens: int = field(default=64, metadata={"help": "New tokens that each prompt gets, at most."})
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Decode the prompts a second time, sampled at this temperature. None: greedily alone."}
    )
    max_length: int = field(
        default=4096, metadata={"help": "Tokens of a training row, at most; longer texts become several rows, longer conversations lose their end."}
    )
    init_draft: str | None = field(
        default=None, metadata={"help": "Go on training this draft, a folder or a Hub id; its own config decides its shape."}
    )
    lora_rank: int | None = field(
        default=None, metadata={"help": "Train only a LoRA adapter of this rank over `init_draft`, and save it alone. None: the whole draft."}
    )
    lora_alpha: int | None = field(default=None, metadata={"help": "The adapter's scale is lora_alpha / lora_rank. None: twice the rank."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules to adapt, by the ends of their names. None: all linear layers."}
    )
    warm_start: bool = field(
        default=False, metadata={"help": "Start from copies of the target's last layers and norms, where their names and shapes are the draft's."}
    )
    block_size: int = field(default=7, metadata={"help": "B, tokens drafted a round."})
    num_draft_layers: int = field(default=5, metadata={"help": "Layers of the draft."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Width of the draft's feed-forward layers. None: the target's."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Query heads of a draft layer. None: the target's."})
    num_key_value_heads: int | None = field(default=None, metadata={"help": "Key and value heads of a draft layer. None: the target's."})
    head_dim: int | None = field(default=None, metadata={"help": "Width of a draft head. None: the target's."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Target layers (0-based outputs, -1: the embedding) that the draft reads. None: spread evenly, five at most."}
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the Markov head; 0: none."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "Markov head: vanilla, gated or rnn."})
    enable_confidence_head: bool = field(default=True, metadata={"help": "Whether the draft learns to estimate its acceptance."})
    confidence_head_with_markov: bool = field(default=True, metadata={"help": "Whether that head also reads the previous token's Markov embedding."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks drawn from each row, at most."})
    packing: bool = field(
        default=False, metadata={"help": "Several texts, none of which sees another, in a training row of up to max_length tokens: less padding."}
    )
    features: str = field(
        default="online", metadata={"help": "The target's features: online (computed in every step) or cached (written once, docs/features.md)."}
    )
    features_dir: str | None = field(default=None, metadata={"help": "Folder of cached features."})
    features_dtype: str = field(
        default="bfloat16", metadata={"help": "Type of cached features: bfloat16, int8 (with a scale a token and layer) or float32."}
    )
    cache_budget: str | None = field(
        default=None, metadata={"help": "Bytes that cached features may take, such as 200GB; other rows' are computed online. None: all are cached."}
    )
    features_rank: int | None = field(
        default=None, metadata={"help": "Experimental: cache the chosen layers' coordinates in a subspace of so many dimensions. None: as they are."}
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "Token that fills a block and never occurs in text. None: the tokenizer's."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "The draft predicts only this many, the most frequent tokens. None: all."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy with the text's own tokens."})
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance (not halved) between the draft's and the target's law."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's binary cross-entropy."})
    decay_gamma: float | None = field(default=4.0, metadata={"help": "Slot k of a block weighs exp(-k / decay_gamma). None: 1."})
    save_dtype: str = field(default="bfloat16", metadata={"help": "Type of the saved draft: bfloat16, float16 or float32; training keeps fp32."})

    learning_rate: float = field(default=6e-4, metadata={"help": "The initial learning rate of AdamW, and of Muon."})
    muon: bool = field(
        default=False, metadata={"help": "Train the matrices of fc and the layers with Muon (torch 2.9 or later), the rest with `optim`."}
    )
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps of linear warm-up; below 1: a share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False: the trainer, not the draft's forward, reads the columns."})
    prediction_loss_only: bool = field(default=True, metadata={"help": "Evaluations report losses and tau and keep no logits."})
    # Every parameter takes part in every loss, so a search for unused ones would only cost time.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Passed to DistributedDataParallel."})
    # The Trainer's own default writes 0 in place of a loss that is nan.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Whether logs leave out losses that are nan or infinite."})
    hub_strategy: str = field(default="end", metadata={"help": "Must stay 'end': nothing is uploaded before the draft is finished."})
    # The Trainer writes this into the draft's config.
    use_cache: bool = field(default=True, metadata={"help": "Written into the draft's config; training uses no cache."})

    def __post_init__(self):
        if not self.target:
            raise ValueError(f"target must be a model folder or a Hub id, got {self.target!r}")
        self._check_numbers()
        check_training_options(self)
        check_feature_options(self)
        if isinstance(self.extra_rows, str):  # one file, written without brackets
            self.extra_rows = [self.extra_rows]
        if isinstance(self.lora_target_modules, str):
            self.lora_target_modules = None if self.lora_target_modules == "all-linear" else [self.lora_target_modules]
        if self.streaming:
            self._check_streaming()
        if self.warm_start and self.init_draft is not None:
            raise ValueError(f"warm_start=True fills a new draft, and init_draft={self.init_draft!r} is trained already; leave one of them out")
        if self.lora_rank is not None and self.init_draft is None:
            raise ValueError(f"lora_rank={self.lora_rank} adapts an existing draft; name it with init_draft")
        if self.lora_rank is not None and self.fsdp:
            raise ValueError(f"lora_rank={self.lora_rank} trains an adapter, which is small; leave fsdp out")
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_target_modules is not None):
            raise ValueError("lora_alpha and lora_target_modules describe an adapter; ask for one with lora_rank")
        if self.save_dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"save_dtype must be bfloat16, float16 or float32, got {self.save_dtype!r}")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns=True would drop the columns the losses need; leave it False")
        if self.push_to_hub and self.hub_strategy != "end":
            raise ValueError(f"hub_strategy must be 'end', got {self.hub_strategy!r}: a draft is uploaded when it is finished")
        check_eval_options(self)
        super().__post_init__()
        if self.use_cpu or not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # torch would warn at every loader that there is nothing to pin memory for
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "DeepSpeed ZeRO-3 would spread the target too, and leave nothing of the draft to save; spread the draft alone with fsdp: true, "
                "or set zero_optimization.stage to 2"
            )

    @property
    def loss_weights(self) -> LossWeights:
        """The weights of the loss terms as one value."""
        return LossWeights(self.ce_weight, self.l1_weight, self.confidence_weight, self.decay_gamma)

    def _check_streaming(self) -> None:
        if self.dataset == "stdlib":
            raise ValueError("streaming=True reads files and datasets on the Hub, 'stdlib' is read as a whole; leave it out")
        if self.max_steps < 1:
            raise ValueError(f"streaming=True needs max_steps, the end of a stream is not known; got max_steps={self.max_steps}")
        if self.extra_rows:
            raise ValueError(f"streaming=True reads one dataset, got extra_rows={self.extra_rows}; put all rows into one folder")
        if self.draft_vocab_size is not None and self.init_draft is None:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is chosen by counting the tokens of all rows, which streaming=True doesn't read before; "
                "turn one of them off"
            )

    def _check_numbers(self) -> None:
        kinds = get_type_hints(type(self))  # a command line's parser takes None out of the fields' own
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and kinds[option.name] in (float, int) and option.default is not None:
                raise ValueError(f"{option.name} must be a number, got None; leave it out for its default, {option.default}")
            if isinstance(value, str) and kinds[option.name] in (float, int, float | None, int | None):
                raise ValueError(f"{option.name} must be a number, got the text {value!r} (YAML reads 6e-4 as text: write 6.0e-4)")
        if self.max_length < self.block_size + 2:
            raise ValueError(f"max_length must be at least block_size + 2 = {self.block_size + 2} for a whole block to fit in, got {self.max_length}")
        for name in (
            *("block_size", "num_draft_layers", "num_anchors", "dataset_num_proc", "lora_rank", "lora_alpha", "intermediate_size"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "draft_vocab_size"),
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_held_out", "max_eval_rows", "ce_weight", "l1_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.decay_gamma is not None and self.decay_gamma <= 0:
            raise ValueError(f"decay_gamma must be positive or None, got {self.decay_gamma}")

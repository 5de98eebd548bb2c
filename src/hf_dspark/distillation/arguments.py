"""Options of `hf-dspark distill`."""

from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from hf_dspark.distillation.losses import LossWeights

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
        metadata={"help": "'stdlib' (Python's standard library), a .jsonl file of `text` or `input_ids`, or a .txt file of paragraphs."},
    )
    extra_rows: list[str] | None = field(
        default=None, metadata={"help": ".jsonl files of `input_ids`, as `hf-dspark regenerate` writes, to train on besides the dataset."}
    )
    num_held_out: int = field(
        default=96,
        metadata={
            "help": "Texts kept out of training, for evaluations: of 'stdlib' as many as in the target's recipe, of a file, rows spread over it."
        },
    )
    max_eval_rows: int = field(default=128, metadata={"help": "Rows of the held-out texts that an evaluation reads, at most."})
    max_length: int = field(default=4096, metadata={"help": "Tokens of a training row, at most; longer texts are cut into several rows."})
    init_draft: str | None = field(
        default=None, metadata={"help": "Go on training this draft, a folder or a Hub id; its own config decides its shape."}
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
    mask_token_id: int | None = field(default=None, metadata={"help": "Token that fills a block and never occurs in text. None: the tokenizer's."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "The draft predicts only this many, the most frequent tokens. None: all."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy with the text's own tokens."})
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance (not halved) between the draft's and the target's law."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's binary cross-entropy."})
    decay_gamma: float | None = field(default=4.0, metadata={"help": "Slot k of a block weighs exp(-k / decay_gamma). None: 1."})
    save_dtype: str = field(default="bfloat16", metadata={"help": "Type of the saved draft: bfloat16, float16 or float32; training keeps fp32."})

    learning_rate: float = field(default=6e-4, metadata={"help": "The initial learning rate of AdamW."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps of linear warm-up; below 1: a share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False: the trainer, not the draft's forward, reads the columns."})
    prediction_loss_only: bool = field(default=True, metadata={"help": "Evaluations report losses and tau and keep no logits."})
    # The heads run outside the wrapped forward, where DDP's search would take their parameters for unused.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Passed to DistributedDataParallel."})
    # The Trainer writes this into the draft's config.
    use_cache: bool = field(default=True, metadata={"help": "Written into the draft's config; training uses no cache."})

    def __post_init__(self):
        if not self.target:
            raise ValueError(f"target must be a model folder or a Hub id, got {self.target!r}")
        self._check_numbers()
        if isinstance(self.extra_rows, str):  # one file, written without brackets
            self.extra_rows = [self.extra_rows]
        if self.save_dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"save_dtype must be bfloat16, float16 or float32, got {self.save_dtype!r}")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns=True would drop the columns the losses need; leave it False")
        super().__post_init__()

    @property
    def loss_weights(self) -> LossWeights:
        """The weights of the loss terms as one value."""
        return LossWeights(self.ce_weight, self.l1_weight, self.confidence_weight, self.decay_gamma)

    def _check_numbers(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, str) and option.type in (float, int, float | None, int | None):
                raise ValueError(f"{option.name} must be a number, got the text {value!r} (YAML reads 6e-4 as text: write 6.0e-4)")
        if self.max_length < self.block_size + 2:
            raise ValueError(f"max_length must be at least block_size + 2 = {self.block_size + 2} for a whole block to fit in, got {self.max_length}")
        for name in ("block_size", "num_draft_layers", "num_anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_held_out", "max_eval_rows", "ce_weight", "l1_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.decay_gamma is not None and self.decay_gamma <= 0:
            raise ValueError(f"decay_gamma must be positive or None, got {self.decay_gamma}")

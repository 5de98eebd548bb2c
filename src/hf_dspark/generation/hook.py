"""The one hook into transformers: generate() with a DSpark draft reaches this library, everything else passes through untouched."""

import inspect
import logging
from functools import wraps

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_dspark.generation.batches import joined_output, row_requests
from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.generation.decoding import decode
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["as_draft", "install"]

logger = logging.getLogger(__name__)

_MOST_WRAPPERS = 8

# The private names of transformers this library knows, with the arguments it relies on.
PRIVATE_NAMES = {
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "assistant_model"),
    "_get_candidate_generator": ("generation_config", "input_ids", "logits_processor", "model_kwargs", "assistant_model"),
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs", "num_new_tokens"),
}


def as_draft(assistant) -> DSparkDraftModel | None:
    """The DSpark draft behind an assistant, bare or wrapped (PEFT, torch.compile, data parallel); None for any other assistant."""
    for _ in range(_MOST_WRAPPERS):
        if assistant is None or isinstance(assistant, DSparkDraftModel):
            return assistant
        if hasattr(assistant, "get_base_model"):
            assistant = assistant.get_base_model()
        else:
            inner = (getattr(assistant, name, None) for name in ("_orig_mod", "module", "model"))
            assistant = next((module for module in inner if isinstance(module, torch.nn.Module)), None)
    return None


def moved_names(mixin: type = GenerationMixin) -> list[str]:
    """Private names that this version of transformers lacks, or whose arguments have changed."""
    moved = []
    for name, arguments in PRIVATE_NAMES.items():
        method = inspect.getattr_static(mixin, name, None)
        if method is None or not set(arguments) <= set(inspect.signature(inspect.unwrap(method)).parameters):
            moved.append(name)
    return moved


def install(mixin: type = GenerationMixin) -> None:
    """Wraps three methods of GenerationMixin, once. Where transformers has moved them, the first generate() with a draft says so."""
    if getattr(mixin, "_hf_dspark_installed", False):
        return
    mixin._hf_dspark_installed = True
    if moved := moved_names(mixin):
        _refuse_drafts(mixin, moved)
        return
    validate, assisted, get_generator = mixin._validate_generation_mode, mixin._assisted_decoding, mixin._get_candidate_generator

    @wraps(validate)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        draft = as_draft(assistant)
        if draft is None or generation_mode != GenerationMode.ASSISTED_GENERATION:
            if draft is None and assistant is not None:
                _warn_wrong_door(assistant)
            return validate(self, generation_mode, generation_config, generation_mode_kwargs)
        refuse_unsupported(self, draft, generation_config, generation_mode_kwargs)

    @wraps(assisted)
    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, assistant_model=None, **kwargs):
        draft = as_draft(assistant_model)
        if draft is None:
            return assisted(self, input_ids, logits_processor, stopping_criteria, generation_config, *args, assistant_model=assistant_model, **kwargs)
        return _generate(self, draft, input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs)

    @wraps(get_generator)
    def _get_candidate_generator(self, *args, **kwargs):
        draft = as_draft(kwargs.get("assistant_model"))
        if draft is None:
            return get_generator(self, *args, **kwargs)
        return DSparkCandidateGenerator(draft, self, kwargs["generation_config"], kwargs["logits_processor"])

    mixin._validate_generation_mode = _validate_generation_mode
    mixin._assisted_decoding = _assisted_decoding
    mixin._get_candidate_generator = _get_candidate_generator


def _generate(
    target, draft, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
    inputs_tensor=None, assistant_tokenizer=None, tokenizer=None, **model_kwargs,
):  # fmt: skip
    embeds = model_kwargs.get("inputs_embeds")
    if input_ids.shape[0] == 0:
        raise ValueError(f"the batch has no rows (input_ids of shape {tuple(input_ids.shape)})")
    if (input_ids if embeds is None else embeds).shape[1] == 0:
        raise ValueError(f"the prompt is empty (input_ids of shape {tuple(input_ids.shape)}); give it at least one token, for example the bos token")
    if model_kwargs.get("cache") is None:
        raise ValueError("decoding with a DSpark draft needs a cache (use_cache=True and a target that supports one)")
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"a streamer takes one text, got a batch of {input_ids.shape[0]}; hf_dspark.generate_many streams many, each its own")
    requests = row_requests(target, draft, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer)
    decode(requests)
    return joined_output(requests)


def refuse_unsupported(target: PreTrainedModel, draft: DSparkDraftModel, generation_config, mode_kwargs: dict) -> None:
    """Raises ValueError for what a DSpark draft can't do, or would silently ignore; each message names the option and its value."""
    refusals = {
        "assistant_ensemble_weight": "it relaxes verification and changes the output",
        "prompt_lookup_num_tokens": "prompt lookup is another way of drafting; drop one of the two",
        "assistant_early_exit": "early exit is another way of drafting; drop one of the two",
        "dola_layers": "it changes what the target predicts; decode with it alone",
        "speculation_type": "it selects a drafting method of transformers, whose blocks mean something else",
    }
    for name, reason in refusals.items():
        if (value := getattr(generation_config, name, None)) is not None:
            raise ValueError(f"{name}={value!r} can't be combined with a DSpark draft: {reason}")
    if getattr(generation_config, "use_mtp", None):
        raise ValueError("use_mtp=True can't be combined with a DSpark draft: it is another way of drafting; drop one of the two")
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False can't be combined with a DSpark draft: a rejected draft is taken back from the cache")
    # What transformers fills in by itself, or leaves unset.
    for name, filled_in in (("num_assistant_tokens", 20), ("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0.4)):
        value = getattr(generation_config, name, None)
        if value is not None and value != filled_in:
            raise ValueError(f"{name}={value!r} given to generate() does not reach a DSpark draft; set draft.generation_config.{name} instead")
    if generation_config.return_dict_in_generate:
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(generation_config, name):
                raise ValueError(f"{name}=True is not supported with a DSpark draft; output_scores and output_logits are")
    if mode_kwargs.get("synced_gpus"):
        raise ValueError("synced_gpus=True is not supported with a DSpark draft")
    own, given = mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer")
    if given is not None and (own is None or own.get_vocab() != given.get_vocab()):
        raise ValueError("assistant_tokenizer must be the target's own tokenizer, whose vocabulary a DSpark draft uses; leave it out")
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder; a DSpark draft needs a decoder-only target")
    refuse_virtual_tokens(target)
    if target._is_stateful:
        raise ValueError(f"{type(target).__name__} is recurrent: its state can't be rolled back after a rejected draft")
    layer_types = getattr(target.config.get_text_config(), "layer_types", None) or []
    cache_kind = generation_config.cache_implementation
    if cache_kind not in (None, "dynamic", "offloaded", "quantized") and "sliding_attention" in layer_types:
        raise ValueError(f"cache_implementation={cache_kind!r} can't be rolled back: a static cache with sliding-window layers; leave it unset")
    stop_ids = [] if generation_config.eos_token_id is None else torch.as_tensor(generation_config.eos_token_id).flatten().tolist()
    if draft.config.mask_token_id in stop_ids:
        raise ValueError(f"the draft's mask_token_id {draft.config.mask_token_id} is a stop token of this call (eos_token_id={stop_ids})")
    draft.bind(target)


def refuse_virtual_tokens(target: PreTrainedModel) -> None:
    """Raises ValueError for a target that PEFT gives virtual tokens: while its generate() runs, PEFT prepares the inputs in its place."""
    owner = getattr(vars(target).get("prepare_inputs_for_generation"), "__self__", None)
    if getattr(config := getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(target).__name__} has virtual tokens of PEFT ({type(config).__name__}), which are put in by generate() of PEFT alone and not "
            "where drafts are verified or requests share a forward; use generate() without assistant_model, or another kind of adapter"
        )


def _warn_wrong_door(assistant) -> None:
    config = getattr(assistant, "config", None)
    marks = [name for name in ("target_layer_ids", "markov_rank") if hasattr(config, name)]
    if len(marks) == 2 or any("DSpark" in name for name in getattr(config, "architectures", None) or []):
        logger.warning(
            "assistant_model is a %s made from the checkpoint of a DSpark draft: the output will be right, but hardly any draft accepted. "
            "Load it with hf_dspark.DSparkDraftModel.from_pretrained instead.",
            type(assistant).__name__,
        )


def _refuse_drafts(mixin: type, moved: list[str]) -> None:
    import transformers

    generate = mixin.generate

    @wraps(generate)
    def refusing_generate(self, *args, assistant_model=None, **kwargs):
        if as_draft(assistant_model) is not None:
            raise RuntimeError(
                f"hf-dspark does not know transformers {transformers.__version__}: {', '.join(moved)} of GenerationMixin moved or changed; "
                "install a version of transformers that this release of hf-dspark names in its requirements"
            )
        return generate(self, *args, assistant_model=assistant_model, **kwargs)

    mixin.generate = refusing_generate

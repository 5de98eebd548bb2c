"""Which serving engines can run a draft, and how."""

import json
import shlex

from transformers import PreTrainedModel

from hf_dspark.modeling import DSparkConfig, DSparkDraftModel

__all__ = ["engine_command", "engine_obstacles"]


def engine_obstacles(draft: DSparkDraftModel, target: PreTrainedModel | None, is_adapter: bool = False) -> dict[str, list[str]]:
    """For each engine, why it can't run `draft` or is not known to; empty: it can. `target`: the one it is bound to, where there is one.

    What runs where: vLLM's qwen3_dspark.py and SGLang's dspark_components, as of autumn 2026.
    """
    config, common = draft.config, []
    if is_adapter:
        common.append("merge the adapter into its draft first (`merge_and_unload()`) and save that")
    if config.hidden_act != "silu":
        common.append(f"its feed-forward layers use {config.hidden_act}, not silu")
    common += [f"the base model {scaling}, which is not known to be done for a draft there" for scaling in _scalings(target)]
    if config.markov_rank == 0:
        common.append("it has no Markov head")
    vllm, sglang = list(common), list(common)
    if config.markov_rank > 0 and config.markov_head_type != "vanilla":
        vllm.append(f"its Markov head is of the type {config.markov_head_type}, where vanilla ones alone are known to run")
    if config.draft_vocab_size is not None:
        sglang.append("its vocabulary is reduced")
    if target is not None and (draft.tables.own_head is not None or draft.tables.own_embedding is not None):
        sglang.append("it has an embedding or an output head of its own, which is not read there")
    if config.target_layer_ids[0] == -1:
        sglang.append("it reads the base model's embedding (target layer -1)")
    return {"vLLM": vllm, "SGLang": sglang}


def engine_command(engine: str, target: str, draft: str, config: DSparkConfig) -> str:
    """The shell command that serves `target` with `draft`, both a Hub id or a folder. SGLang reads the block size from the draft's config."""
    if engine == "SGLang":
        options = ["--model-path", target, "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", draft]
        return shlex.join(["python", "-m", "sglang.launch_server", *options])
    speculation = {"method": "dspark", "model": draft, "num_speculative_tokens": config.block_size}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)])


def _scalings(target: PreTrainedModel | None) -> list[str]:
    if target is None:
        return []
    text_config = target.config.get_text_config()
    scalings = ["scales its embedding"] if float(getattr(target.get_input_embeddings(), "embed_scale", 1.0)) != 1.0 else []
    if any((getattr(text_config, name, None) or 1.0) != 1.0 for name in ("logits_scaling", "logit_scale")):
        scalings.append("scales its logits")
    if getattr(text_config, "final_logit_softcapping", None) is not None:
        scalings.append("caps its logits")
    return scalings

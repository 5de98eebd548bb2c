"""A draft whose weights FSDP spreads over two processes: it trains, is saved and resumed as in one process.

accelerate shards on GPUs alone; a pair of processes on a CPU that says it has some goes through the same code of accelerate and PyTorch.
"""

import json
import os
import socket

import pytest
import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from evaluation.tiny_pair import TEXTS, save_pair
from safetensors.torch import load_file

from hf_dspark import DSparkDraftModel
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.distill import distill
from hf_dspark.distillation.trainer import DSparkTrainer


def options(folder, name: str, **more) -> DistillationArguments:
    """Three steps over the same eight rows, by plain gradient descent, so that weights differ as little as gradients do."""
    data = dict(target=str(folder / "target"), dataset=str(folder / "texts.jsonl"), num_held_out=2, max_length=32, output_dir=str(folder / name))
    shape = dict(block_size=4, num_draft_layers=2, num_key_value_heads=1, markov_rank=8, num_anchors=8)
    steps = dict(max_steps=3, per_device_train_batch_size=8, optim="sgd", learning_rate=0.5, warmup_steps=0, lr_scheduler_type="constant", seed=3)
    quiet = dict(use_cpu=True, disable_tqdm=True, report_to="none", eval_strategy="no", save_strategy="steps", save_steps=2, save_dtype="float32")
    return DistillationArguments(**{**data, **shape, **steps, **quiet, **more})


def sharded(rank: int, port: int, folder, name: str, more: dict) -> None:
    """One of two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    start, train, layouts = PartialState.__init__, DSparkTrainer.train, []

    def as_if_on_gpus(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    def watched(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        layouts.extend(type(parameter).__name__ for parameter in self.model.parameters())
        return result

    PartialState.__init__, DSparkTrainer.train = as_if_on_gpus, watched
    distill(options(folder, name, fsdp=True, ddp_backend="gloo", per_device_train_batch_size=4, **more))
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(layouts))
    torch.distributed.destroy_process_group()


def train_sharded(folder, name: str, **more) -> dict[str, torch.Tensor]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(sharded, (port, folder, name, more), nprocs=2, start_method="fork")
    assert set(json.loads((folder / f"{name}.json").read_text())) == {"DTensor"}
    return load_file(folder / name / "model.safetensors")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    save_pair(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:10]))
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_two_shards_train_the_draft_of_one_process(folder):
    evaluating = dict(eval_strategy="steps", eval_steps=1, eval_prompts=2, eval_prompt_tokens=4, eval_new_tokens=24)
    expected = load_file(distill(options(folder, "alone", **evaluating)) / "model.safetensors")
    fresh = load_file(distill(options(folder, "fresh", max_steps=1, learning_rate=1e-12)) / "model.safetensors")
    found = train_sharded(folder, "sharded", **evaluating)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
        assert not torch.equal(tensor, fresh[name]), name
    assert DSparkDraftModel.from_pretrained(folder / "sharded").config.block_size == 4
    # Each process decodes its share of the prompts with a whole copy.
    alone, sharded = (json.loads((folder / name / "distillation.json").read_text()) for name in ("alone", "sharded"))
    assert 1 <= sharded["eval_tokens_per_round"] == alone["eval_tokens_per_round"] and len(sharded["history"]) == 3
    for name in ("tokens_per_round", "repeated_8gram_share", "tau"):
        assert [entry[name] for entry in sharded["history"]] == pytest.approx([entry[name] for entry in alone["history"]], abs=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_run_resumes(folder):
    adam = dict(optim="adamw_torch", learning_rate=1e-2)
    whole = train_sharded(folder, "whole", **adam)
    resumed = train_sharded(folder, "resumed", resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"), **adam)
    for name, tensor in resumed.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


def test_an_adapter_is_not_sharded(folder):
    with pytest.raises(ValueError, match="lora_rank=2 trains an adapter, which is small; leave fsdp out"):
        options(folder, "adapter", fsdp=True, lora_rank=2, init_draft="draft")

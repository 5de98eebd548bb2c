"""Peak memory of the losses at a large vocabulary: ours, in chunks, beside the same losses with all logits at once.

    python benchmarks/loss_memory.py                                     152k tokens, block 7: both at 64 anchors, ours at 512
    python benchmarks/loss_memory.py --vocab-size 262144 --hidden-size 640 --json out.json

Each is measured in a process of its own, forward and backward, as the high-water mark of its memory above what it held before
(weights, inputs, and their gradients, which are added to as in gradient accumulation); both end with the same gradients.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.distillation.blocks import Blocks, make_blocks
from hf_dspark.distillation.losses import LossWeights, decay_weights, dspark_loss
from hf_dspark.evaluation.output import table, write_json

OURS, NAIVE = "ours", "naive"
WEIGHTS = LossWeights()


def main(argv: list[str] | None = None) -> int:
    """Measures each case, prints the table, writes `--json`; returns 0."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        print(json.dumps(peak_bytes(arguments.case, arguments.anchors, arguments)))
        return 0
    cases = [(NAIVE, arguments.compared), (OURS, arguments.compared), (OURS, arguments.many)]
    peaks = [{"loss": case, "anchors": anchors, "peak_bytes": measured_apart(argv, case, anchors)} for case, anchors in cases]
    share = peaks[1]["peak_bytes"] / peaks[0]["peak_bytes"]
    print(f"vocabulary {arguments.vocab_size:,}, block {arguments.block_size}, hidden {arguments.hidden_size}, Markov rank {arguments.rank}, fp32\n")
    print(table(["loss", "anchors", "peak MiB"], [[p["loss"], str(p["anchors"]), f"{p['peak_bytes'] / 2**20:,.0f}"] for p in peaks]))
    print(f"\nours is {share:.1%} of the naive loss at {arguments.compared} anchors")
    if arguments.json:
        options = {name: getattr(arguments, name) for name in ("vocab_size", "block_size", "hidden_size", "rank")}
        write_json(arguments.json, {**options, "cases": peaks, "share_of_naive": share})
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=151_936, metavar="N", help="(default: %(default)s, Qwen3's)")
    parser.add_argument("--block-size", type=int, default=7, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rank", type=int, default=64, metavar="N", help="of the Markov head (default: %(default)s)")
    parser.add_argument("--compared", type=int, default=64, metavar="N", help="anchors of both losses (default: %(default)s)")
    parser.add_argument("--many", type=int, default=512, metavar="N", help="anchors of ours alone (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--case", choices=(OURS, NAIVE), help=argparse.SUPPRESS)
    parser.add_argument("--anchors", type=int, help=argparse.SUPPRESS)
    return parser


def measured_apart(argv: list[str], case: str, anchors: int) -> int:
    """Peak bytes of one case, in a process of its own."""
    command = [sys.executable, __file__, *argv, "--case", case, "--anchors", str(anchors)]
    # glibc would keep freed tensors of up to 32 MiB for later, and the mark would show them too.
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)})
    if run.returncode:
        raise RuntimeError(f"measuring {case} at {anchors} anchors failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def peak_bytes(case: str, anchors: int, arguments) -> int:
    """High-water mark of this process above what it holds before the loss; its gradients are there already."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise ValueError("benchmarks/loss_memory.py reads /proc/self/status, which this system does not have")
    # The code that a first run loads is no part of what is measured.
    gradients(case, *make_batch(2, argparse.Namespace(**{**vars(arguments), "vocab_size": 64})))
    batch = draft, _, hidden, *_ = make_batch(anchors, arguments)
    for value in (hidden, *draft.parameters()):
        value.grad = torch.empty_like(value).fill_(0.0)  # zeros that are written take memory, unlike torch.zeros
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes(status, "VmRSS")
    gradients(case, *batch)
    return _status_bytes(status, "VmHWM") - before


def make_batch(anchors: int, arguments) -> tuple[DSparkDraftModel, Qwen3ForCausalLM, torch.Tensor, torch.Tensor, Blocks]:
    """A draft bound to a target of one layer, hidden states of the blocks and of the target, and the blocks of one row, every slot supervised."""
    torch.manual_seed(0)
    vocab, size, hidden = arguments.vocab_size, arguments.block_size, arguments.hidden_size
    shape = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    ends = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    target = Qwen3ForCausalLM(Qwen3Config(**shape, **ends, num_hidden_layers=2, tie_word_embeddings=True)).requires_grad_(False)
    layers = dict(num_target_layers=2, target_layer_ids=[0], num_hidden_layers=1, mask_token_id=vocab - 1)
    draft = DSparkDraftModel(DSparkConfig(**shape, **ends, **layers, block_size=size, markov_rank=arguments.rank)).bind(target)
    ids = torch.randint(vocab - 1, (1, anchors + size))
    blocks = make_blocks(ids, torch.ones_like(ids), torch.arange(anchors)[None], size, vocab - 1)
    return draft, target, torch.randn(1, anchors, size, hidden, requires_grad=True), torch.randn(1, anchors + size, hidden), blocks


def gradients(case: str, draft, target, hidden: torch.Tensor, last_hidden: torch.Tensor, blocks: Blocks) -> list[torch.Tensor]:
    """Gradients of the total loss for `hidden` and the draft's heads."""
    if case == OURS:
        total = dspark_loss(draft, hidden, last_hidden, blocks, WEIGHTS).total
    else:
        total = naive_loss(draft, target, hidden, last_hidden, blocks)
    total.backward()
    return [hidden.grad, draft.markov_head.markov_w2.weight.grad, draft.confidence_head.proj.weight.grad]


def naive_loss(draft, target, hidden: torch.Tensor, last_hidden: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Section 3.3 of the paper over whole tensors (1, anchors, block, vocab), for a batch of one row with every slot supervised."""
    embedding = draft.markov_head.markov_w1(blocks.previous_ids)
    log_law = (target.lm_head(hidden) + draft.markov_head.markov_w2(embedding)).log_softmax(dim=-1)
    with torch.no_grad():
        target_law = target.lm_head(last_hidden[0, blocks.positions]).softmax(dim=-1)
    ce = -log_law.gather(-1, blocks.labels[..., None])[..., 0]
    l1 = (log_law.exp() - target_law).abs().sum(dim=-1)
    confidence = draft.confidence_head(hidden, embedding).float()
    bce = nn.functional.binary_cross_entropy_with_logits(confidence, (1 - l1 / 2).detach().clamp(0, 1), reduction="none")
    slot_weights = decay_weights(hidden.shape[2], WEIGHTS.decay_gamma).expand_as(ce)
    return (slot_weights * (WEIGHTS.ce * ce + WEIGHTS.l1 * l1 + WEIGHTS.confidence * bce)).sum() / slot_weights.sum()


def _status_bytes(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"loss_memory.py: {error}")

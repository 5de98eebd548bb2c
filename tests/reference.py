"""Naive versions of what the library does fast: loops and whole tensors, written from the paper."""

import math

import torch


def naive_blocks(input_ids: list[int], loss_mask: list[int], anchor: int, block_size: int) -> tuple[list[int], list[int], list[bool]]:
    """(previous ids, labels, counted slots) of one block, slot by slot; ids of slots that don't count are None."""
    previous, labels, counted = [], [], []
    for k in range(block_size):
        position, label_position = anchor + k, anchor + k + 1
        gapless = all(p < len(input_ids) and loss_mask[p] for p in range(anchor + 1, label_position + 1))
        counted.append(gapless)
        previous.append(input_ids[position] if gapless else None)
        labels.append(input_ids[label_position] if gapless else None)
    return previous, labels, counted


def naive_loss(draft, target, hidden, last_hidden, blocks, weights) -> dict[str, torch.Tensor]:
    """Section 3.3 with every logit in memory at once, block by block and slot by slot; differentiable."""
    config = draft.config
    ids = torch.arange(config.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size)
    target_ids = (ids if config.draft_vocab_size is None else ids + draft.d2t).tolist()
    terms = {"ce": [], "l1": [], "confidence": []}
    batch, num_anchors, block_size = blocks.slot_mask.shape
    for b in range(batch):
        for a in range(num_anchors):
            state = torch.zeros(config.markov_rank)
            for k in range(block_size):
                h = hidden[b, a, k]
                logits = (target.lm_head if config.draft_vocab_size is None else draft.lm_head)(h)
                embedding = None
                if config.markov_rank:
                    embedding = draft.markov_head.markov_w1.weight[blocks.previous_ids[b, a, k]]
                    feature, state = _markov_feature(draft.markov_head, embedding, h, state)
                    logits = logits + draft.markov_head.markov_w2.weight @ feature
                if not blocks.slot_mask[b, a, k]:
                    continue
                law = torch.zeros(config.vocab_size).index_put((torch.tensor(target_ids),), torch.softmax(logits, -1))
                target_law = torch.softmax(target.lm_head(last_hidden[b, blocks.positions[b, a, k]]), -1).detach()
                weight = 1.0 if weights.decay_gamma is None else math.exp(-k / weights.decay_gamma)
                label = blocks.labels[b, a, k].item()
                if label in target_ids:
                    terms["ce"].append((weight, -torch.log(law[label])))
                distance = (law - target_law).abs().sum()
                terms["l1"].append((weight, distance))
                if config.enable_confidence_head:
                    inputs = torch.cat([h, embedding]) if config.confidence_head_with_markov else h
                    confidence, accepted = torch.sigmoid(draft.confidence_head.proj(inputs))[0], (1 - distance / 2).detach()
                    terms["confidence"].append((weight, -accepted * torch.log(confidence) - (1 - accepted) * torch.log(1 - confidence)))
    means = {name: sum(w * value for w, value in pairs) / sum(w for w, _ in pairs) for name, pairs in terms.items() if pairs}
    means["total"] = sum(getattr(weights, name) * mean for name, mean in means.items())
    return means


def _markov_feature(head, embedding, h, state):
    if head.head_type == "vanilla":
        return embedding, state
    if head.head_type == "gated":
        return torch.sigmoid(head.gate_proj(torch.cat([h, embedding]))) * embedding, state
    gate, candidate, output = head.joint_proj(torch.cat([state, embedding, h])).chunk(3)
    return torch.tanh(output), torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)

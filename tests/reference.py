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


# Decoding


@torch.no_grad()
def naive_draft(draft, target, text: list[int]) -> tuple[list[int], list[float] | None, torch.Tensor]:
    """One greedy block after `text`, whose last token is the anchor, from nothing but the text: no cache of the target or the draft.

    Returns the drafted ids, c_k of each (None without a confidence head) and the logits (block, vocab) after the Markov bias.
    """
    config = draft.config
    layers = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    hidden = torch.cat([layers[layer + 1][0] for layer in config.target_layer_ids], dim=-1)
    features = _rms_norm(hidden @ draft.fc.weight.T, draft.hidden_norm)  # (context, hidden)
    block = [text[-1]] + [config.mask_token_id] * (config.block_size - 1)
    rows = _naive_backbone(draft, features, target.get_input_embeddings()(torch.tensor(block)))
    ids, confidence, logits, state = [], [], [], torch.zeros(config.markov_rank)
    for k in range(config.block_size):
        previous = ids[-1] if ids else text[-1]
        embedding = draft.markov_head.markov_w1.weight[previous]
        feature, state = _markov_feature(draft.markov_head, embedding, rows[k], state)
        head = target.get_output_embeddings() if config.draft_vocab_size is None else draft.lm_head
        logits.append(head(rows[k]) + draft.markov_head.markov_w2.weight @ feature)
        best = int(logits[-1].argmax())
        ids.append(best if config.draft_vocab_size is None else best + int(draft.d2t[best]))
        if config.enable_confidence_head:
            inputs = torch.cat([rows[k], embedding]) if config.confidence_head_with_markov else rows[k]
            confidence.append(torch.sigmoid(draft.confidence_head.proj(inputs)).item())
    return ids, confidence or None, torch.stack(logits)


def _naive_backbone(draft, features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Eq. 2 and 3, one query at a time: `features` (context, hidden), `rows` (block, hidden) -> (block, hidden) after the final norm."""
    config, num_context = draft.config, len(features)
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for layer in draft.layers:
        attention = layer.self_attn
        normed = _rms_norm(rows, layer.input_layernorm)
        sources = torch.cat([features, normed])  # the context is not normed again
        queries = (normed @ attention.q_proj.weight.T).view(len(rows), -1, size)
        keys = (sources @ attention.k_proj.weight.T).view(len(sources), -1, size)
        values = (sources @ attention.v_proj.weight.T).view(len(sources), -1, size)
        outputs = torch.zeros(len(rows), config.num_attention_heads, size)
        for row in range(len(rows)):
            for head in range(config.num_attention_heads):
                query = _rotate(_rms_norm(queries[row, head], attention.q_norm), num_context + row, config)
                weights = torch.stack([query @ _rotate(_rms_norm(keys[i, head // groups], attention.k_norm), i, config) for i in range(len(sources))])
                outputs[row, head] = torch.softmax(weights / math.sqrt(size), dim=0) @ values[:, head // groups]
        rows = rows + outputs.flatten(1) @ attention.o_proj.weight.T
        normed = _rms_norm(rows, layer.post_attention_layernorm)
        gate, up = normed @ layer.mlp.gate_proj.weight.T, normed @ layer.mlp.up_proj.weight.T
        rows = rows + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
    return _rms_norm(rows, draft.norm)


def _rms_norm(x: torch.Tensor, norm) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def _rotate(x: torch.Tensor, position: int, config) -> torch.Tensor:
    """RoPE: the pair (i, i + half) turns by position * theta ** (-i / half)."""
    half = x.shape[-1] // 2
    angles = position * config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * torch.cos(angles) - second * torch.sin(angles), second * torch.cos(angles) + first * torch.sin(angles)])

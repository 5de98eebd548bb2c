"""Random tiny drafts, inputs of their forward, and a loss that every parameter takes part in."""

import torch
from oracle import tiny_draft

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


def random_draft(target, **options):
    """A tiny draft whose heads are random too (W2 starts at zero)."""
    draft = tiny_draft(target, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for head in (draft.markov_head, draft.confidence_head):
            for parameter in [] if head is None else head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return draft


def inputs_of(draft, context=6, seed=0):
    """(block ids (1, block), context features (1, context, hidden), positions (1, context + block)), positions starting at 3."""
    generator = torch.Generator().manual_seed(seed)
    block = draft.config.block_size
    ids = torch.randint(draft.config.vocab_size, (1, block), generator=generator)
    features = torch.randn(1, context, draft.config.hidden_size, generator=generator)
    return ids, features, torch.arange(3, 3 + context + block)[None]


def loss_of(draft, target):
    """Any scalar that every parameter of the draft takes part in."""
    ids, _, positions = inputs_of(draft, context=5)
    with torch.no_grad():
        layers = target(PROMPT, output_hidden_states=True).hidden_states
    hidden = draft(ids, draft.context_features([layers[layer + 1] for layer in draft.config.target_layer_ids]), positions)
    logits = draft.base_logits(hidden)
    if draft.markov_head is not None:
        logits = logits + draft.markov_head.bias(draft.markov_head.block_features(ids, hidden))
    loss = logits.square().mean()
    if draft.confidence_head is not None:
        embedding = draft.markov_head.markov_w1(ids) if draft.confidence_head.with_markov else None
        loss = loss + draft.confidence_head(hidden, embedding).square().mean()
    return loss

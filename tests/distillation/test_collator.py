"""Batches: padding, anchors that are a function of seed, epoch and sample, and texts packed into rows."""

import pickle
import random
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_dspark.distillation.collator import BlockCollator, pack_rows


def rows(count: int = 6, num_tokens: int = 40, **columns) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(60, (num_tokens - i % 3,), generator=generator).tolist(), **columns} for i in range(count)]


def numbered(rows: list[dict]) -> list[dict]:
    return [{**row, "sample": i} for i, row in enumerate(rows)]


def test_batches_are_padded_on_the_right_and_padding_is_never_supervised():
    batch = BlockCollator(num_anchors=4, pad_token_id=3)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "loss_mask": [0, 1]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["loss_mask"].int().tolist() == [[1, 1, 1], [0, 1, 0]]
    # Neither the last token nor a supervised one without a supervised next one is an anchor.
    assert batch["anchors"].tolist() == [[0, 1], [-1, -1]]
    assert batch["input_ids"].dtype == batch["anchors"].dtype == torch.long and "position_ids" not in batch


@pytest.mark.parametrize("number", [numbered, list], ids=["sample numbers", "hashes of the ids"])
def test_anchors_depend_on_seed_epoch_and_sample_alone(number):
    data = number(rows())
    collator = BlockCollator(num_anchors=5, seed=1)
    together = collator(data)["anchors"]
    collator([*data, *data])  # nothing is left of an earlier batch
    apart = [collator([row])["anchors"][0] for row in reversed(data)][::-1]
    assert torch.equal(together, torch.stack(apart))
    assert torch.equal(together, BlockCollator(num_anchors=5, seed=1)(data)["anchors"])
    assert len({tuple(row) for row in together.tolist()}) == 6
    collator.set_epoch(1)
    others = [collator(data)["anchors"], BlockCollator(num_anchors=5, seed=2)(data)["anchors"]]
    assert all(not torch.equal(row, other) for anchors in others for row, other in zip(together, anchors))
    collator.set_epoch(0)
    assert torch.equal(together, collator(data)["anchors"])


def test_rows_of_the_same_ids_differ_by_their_number():
    same = numbered([rows(1)[0]] * 2)
    first, second = BlockCollator(num_anchors=5)(same)["anchors"].tolist()
    assert first != second


def test_workers_that_outlive_an_epoch_draw_the_next_ones_anchors():
    data = numbered(rows())
    collator = BlockCollator(num_anchors=5)
    loader = DataLoader(data, batch_size=2, collate_fn=collator, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    for epoch in (0, 1, 2):
        collator.set_epoch(epoch)
        drawn = torch.cat([batch["anchors"] for batch in loader])
        assert torch.equal(drawn, collator(data)["anchors"])


def test_a_collator_sent_to_a_worker_that_was_not_forked_reads_the_same_epoch():
    collator = BlockCollator(num_anchors=5)
    sent = pickle.loads(ForkingPickler.dumps(collator))
    collator.set_epoch(3)
    assert sent.epoch.item() == 3


def test_positions_start_again_with_each_document_and_with_the_padding():
    collator = BlockCollator(num_anchors=20, packing=True)
    batch = collator([{"input_ids": [5] * 7, "lengths": [3, 1, 3]}, {"input_ids": [6] * 9}, {"input_ids": [7] * 4, "lengths": [2, 2]}])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 0, 1], list(range(9)), [0, 1, 0, 1, 0, 1, 2, 3, 4]]
    # An anchor's next token is in its own document.
    assert [row[row >= 0].tolist() for row in batch["anchors"]] == [[0, 1, 4, 5], list(range(8)), [0, 2]]


def texts(count: int = 40, with_masks: bool = True) -> Dataset:
    generator = random.Random(0)
    values = [[i] * generator.randint(1, 12) for i in range(count)]
    columns = {"input_ids": values, "sample": list(range(count)), "other": ["x"] * count}
    if with_masks:
        columns["loss_mask"] = [[j % 2 == 0 for j in range(len(value))] for value in values]
    return Dataset.from_dict(columns)


@pytest.mark.parametrize("streaming", [False, True])
def test_packed_rows_hold_every_text_once(streaming):
    source = texts()
    packed = list(pack_rows(source.to_iterable_dataset() if streaming else source, max_length=16))
    assert all(set(row) == {"input_ids", "loss_mask", "lengths", "sample"} for row in packed)
    seen = {}
    for row in packed:
        assert sum(row["lengths"]) == len(row["input_ids"]) == len(row["loss_mask"]) <= 16
        assert row["sample"] == row["input_ids"][0]
        start = 0
        for length in row["lengths"]:
            ids, mask = row["input_ids"][start : start + length], row["loss_mask"][start : start + length]
            assert len(set(ids)) == 1 and ids[0] not in seen
            seen[ids[0]] = (ids, mask)
            start += length
    assert [seen[i] for i in range(len(source))] == list(zip(source["input_ids"], source["loss_mask"]))
    num_tokens = sum(map(len, source["input_ids"]))
    assert len(packed) <= 1.1 * num_tokens / 16  # little room is left


def test_the_longest_text_comes_first_where_the_least_room_remains():
    source = Dataset.from_dict({"input_ids": [[length] * length for length in (3, 6, 2, 4, 5, 12)]})
    packed = pack_rows(source, max_length=10)
    assert packed["lengths"][:] == [[12], [6, 4], [5, 3, 2]]  # 12 is longer than a row and stays alone
    assert packed.column_names == ["input_ids", "lengths"]


def test_rows_that_are_no_dataset_are_not_packed():
    with pytest.raises(ValueError, match=r"packing=True needs rows in a datasets.Dataset or IterableDataset, got a list"):
        pack_rows(rows(), max_length=10)

"""Options of features: sizes read, mistakes named."""

import pytest

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.feature_options import readable_bytes, size_in_bytes


@pytest.mark.parametrize(
    "size, expected",
    [("200GB", 200 * 10**9), ("1.5 TiB", 3 * 2**39), ("7B", 7), ("7", 7), (1000, 1000), (" 2 mb ", 2_000_000), ("3KiB", 3072)],
)
def test_sizes_are_read(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", ["much", "", "-3GB", "0", "3 G", "3GBs", "1e9", "GB", "3IB"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match=r"cache_budget must be a size such as 200GB .*got"):
        size_in_bytes(size)


@pytest.mark.parametrize("num_bytes, expected", [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (30_720_000, "30.72 MB"), (38 * 10**12, "38.00 TB")])
def test_sizes_are_written(num_bytes, expected):
    assert readable_bytes(num_bytes) == expected


CACHED = {"features": "cached", "features_dir": "somewhere"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"features": "offline"}, "features must be online or cached, got 'offline'"),
        ({"features": "cached"}, "features='cached' needs features_dir, a folder with room for them, got None"),
        ({"features_dir": "x"}, "features_dir='x' is of no effect while features are computed online; set features: cached"),
        ({"cache_budget": "2GB"}, "cache_budget='2GB' is of no effect"),
        ({"features_rank": 8}, "features_rank=8 is of no effect"),
        ({"features_dtype": "fp8"}, "features_dtype must be bfloat16, int8 or float32, got 'fp8'"),
        ({**CACHED, "cache_budget": "lots"}, "cache_budget must be a size such as 200GB"),
        ({**CACHED, "features_rank": 0}, "features_rank must be at least 1 or None, got 0"),
        ({**CACHED, "features_rank": 8, "lora_rank": 2, "init_draft": "x"}, "features_rank=8 projects the weight of fc .* lora_rank=2 prevents"),
        ({**CACHED, "features_rank": 8, "fsdp": True}, "features_rank=8 projects the weight of fc .* fsdp=True prevents"),
        ({**CACHED, "features_rank": 8, "deepspeed": "ds.json"}, "features_rank=8 projects the weight of fc .* deepspeed='ds.json' prevents"),
        ({**CACHED, "features_rank": "8"}, "features_rank must be a number, got the text '8'"),
        ({**CACHED, "streaming": True, "dataset": "x.jsonl", "max_steps": 3}, "features='cached' needs rows that can be read again.*streaming=True"),
    ],
)
def test_mistakes_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        DistillationArguments(target="somewhere", output_dir=str(tmp_path), use_cpu=True, **options)


def test_sound_options_pass(tmp_path):
    for options in ({}, CACHED, {**CACHED, "cache_budget": "200GB", "features_dtype": "int8", "features_rank": 64, "packing": True}):
        DistillationArguments(target="somewhere", output_dir=str(tmp_path), use_cpu=True, **options)

"""Pictures are written where they are asked for, and nothing else is."""

import os

import pytest
from matplotlib.image import imread

from hf_dspark.evaluation.plots import plot_load, plot_pair, plot_training

SPEEDS = {"plain": 1.0, "own loop": 1.02, "with the draft": 1.8}


@pytest.mark.parametrize("rates", [[0.8, 0.7, 0.5], []], ids=["three positions", "nothing decided"])
def test_a_picture_is_drawn(tmp_path, rates):
    path = plot_pair(tmp_path / "pair.png", rates, SPEEDS)
    assert path == tmp_path / "pair.png" and imread(path).shape[:2] == (540, 1500)
    assert os.listdir(tmp_path) == ["pair.png"]


@pytest.mark.parametrize(("num_panels", "shape"), [(1, (690, 1500)), (3, (690, 2250)), (8, (1380, 3000))])
def test_a_panel_for_each_setting(tmp_path, num_panels, shape):
    lines = {"plain": {1: 30.0, 4: 90.0, 64: 200.0}, "ours": {1: 33.0}}
    path = plot_load(tmp_path / "load.png", {f"setting {number}": lines for number in range(num_panels)})
    assert path == tmp_path / "load.png" and imread(path).shape[:2] == shape
    assert os.listdir(tmp_path) == ["load.png"]


def test_a_line_for_each_way_of_counting(tmp_path):
    path = plot_training(tmp_path / "tau.png", {"greedy": [(1.0, 1.2), (2.5, 1.9)], "estimated": [(1.0, 1.3)]})
    assert path == tmp_path / "tau.png" and imread(path).shape[:2] == (600, 1050)
    assert os.listdir(tmp_path) == ["tau.png"]


def test_the_font_cache_goes_where_it_is_deleted(tmp_path, monkeypatch):
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    plot_pair(tmp_path / "pair.png", [0.5], SPEEDS)
    assert "MPLCONFIGDIR" not in os.environ

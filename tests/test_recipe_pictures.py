"""recipes/pictures.py on data sets of the published columns, made here, and the reward of boxes."""

import sys
from pathlib import Path

import datasets
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))  # before scripts, which has pictures of its own
import pictures  # noqa: E402
import published  # noqa: E402

from scoring.boxes import boxes  # noqa: E402

PICTURE = Image.new("RGB", (200, 100))
COLUMNS = {
    "leonardPKU/clevr_cogen_a_train": {"problem": "How many items are there?", "solution": "<answer> 3 </answer>"},
    "lmms-lab/RefCOCO": {"bbox": [20.0, 10.0, 100.0, 50.0], "answer": ["the dog", "a dog"], "question": "?"},
    "hiyouga/geometry3k": {"problem": "<image>Find x.", "answer": "2\\sqrt{3}"},
}


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    def load(name, config, split):
        pictures = {"images": [[PICTURE]] * 5} if "geometry" in name else {"image": [PICTURE] * 5}
        return datasets.Dataset.from_dict(pictures | {key: [value] * 5 for key, value in COLUMNS[name].items()}).cast(
            datasets.Features(
                {key: datasets.List(datasets.Image()) if key == "images" else datasets.Image() for key in pictures}
                | {key: datasets.Dataset.from_dict({key: [v]}).features[key] for key, v in COLUMNS[name].items()}
            )
        )

    monkeypatch.setattr(published, "load_hub", load)


def test_rows():
    assert (len(pictures.clevr("train")), len(pictures.clevr("test"))) == (4, 1)
    row = pictures.clevr("test")[0]
    assert row["answer"] == "3" and row["prompt"].startswith("How many") and row["image"].size == (200, 100)
    row = pictures.refcoco("train")[0]
    assert (
        row["box"] == [100, 100, 600, 600]
        and "Where is: the dog?" in row["prompt"]
        and set(row) == {"image", "prompt", "box"}
    )
    row = pictures.geometry3k()[0]
    assert row["prompt"] == "Find x. Put the result into \\boxed{}." and len(row["images"]) == 1


def test_boxes():
    box = [[100, 100, 600, 600]] * 4
    texts = ["It is [100, 100, 600, 600].", "[100, 100, 600, 350]", "[600, 1, 2, 3]", "nowhere"]
    scores = boxes(texts, box)
    assert [score["iou"] for score in scores] == [1, 0.5, 0, 0]
    assert [score["reward"] for score in scores] == [1.0, 0.625, 0, 0]

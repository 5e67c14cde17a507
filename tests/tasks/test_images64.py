"""64 × 64 images: published networks, TinyImageNet's layout, synthetic images, stand-ins that send the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import podium
from podium.data.tiny_imagenet import tiny_imagenet
from podium.errors import ConfigError, DataError, UnknownName
from podium.records.recorder import read_records
from podium.task import load_task
from podium.tasks.images64 import EfficientNetB0, ResNet50

RESNET, EFFICIENTNET = "tiny-imagenet-resnet50", "tiny-imagenet-efficientnet-b0"
STAND_IN = "podium.tasks.images64:stand_in"
SMALL = {RESNET: {"width": 4}, EFFICIENTNET: {}}
MODEL = {RESNET: "resnet50", EFFICIENTNET: "efficientnet-b0"}


@pytest.mark.parametrize(("make", "count"), [(ResNet50, 25_557_032), (EfficientNetB0, 5_288_548)])
def test_networks_for_a_thousand_classes_have_the_published_number_of_parameters(make: type, count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make(1000).parameters()) == count


@pytest.mark.parametrize("name", SMALL)
def test_a_task_learns_from_synthetic_images(name: str) -> None:
    torch.manual_seed(0)
    task = load_task(name, {**SMALL[name], "samples": 16, "classes": 4, "augment": False})
    model, (inputs, targets) = task.model(), task.data().train.gather(np.arange(8))
    assert inputs.shape == (8, 3, 64, 64)
    optimizer, losses = task.optimizer(model), []
    for _ in range(4):
        optimizer.zero_grad()
        outputs = model(inputs)
        assert outputs.shape == (8, 4)
        loss = task.loss(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_synthetic_images_are_the_same_every_time() -> None:
    first, second = (load_task(RESNET, {"samples": 10}).data().train.gather(np.arange(10)) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples must be at least 5, got 2"):
        load_task(RESNET, {"samples": 2}).data()


class TestStandIn:
    @pytest.mark.parametrize("name", SMALL)
    def test_it_has_the_models_own_parameters_and_buffers(self, name: str) -> None:
        options = {**SMALL[name], "model": MODEL[name]}
        with torch.device("meta"):
            real, fake = load_task(name, SMALL[name]).model(), load_task(STAND_IN, options).model()
        assert [(n, p.shape, p.dtype) for n, p in fake.named_parameters()] == [
            (n, p.shape, p.dtype) for n, p in real.named_parameters()
        ]
        assert [(n, b.shape) for n, b in fake.named_buffers()] == [(n, b.shape) for n, b in real.named_buffers()]

    @pytest.mark.parametrize("name", SMALL)
    def test_a_step_sends_the_bytes_that_the_models_own_step_sends(self, name: str, tmp_path: Path) -> None:
        sent = []
        for task, options in ((name, SMALL[name]), (STAND_IN, {**SMALL[name], "model": MODEL[name]})):
            run_dir = tmp_path / task.rpartition(":")[2]
            podium.train(
                task,
                task_options={**options, "samples": 8},
                workers=2,
                batch_size=4,
                epochs=1,
                eval_every=0,
                launcher="virtual",
                collective="ring",
                run_dir=str(run_dir),
            )
            steps = [row for row in read_records(run_dir) if row["kind"] == "step"]
            sent.append([(row["rank"], row["step"], row["sent"], row["received"]) for row in steps])
        assert sent[0] == sent[1]
        assert {row[2] > 0 for row in sent[0]} == {True}

    def test_every_parameter_gets_a_gradient_the_last_layers_first(self) -> None:
        model = load_task(STAND_IN, {"width": 4}).model()
        order = list[str]()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        torch.nn.functional.cross_entropy(model(torch.zeros(3, 1)), torch.tensor([0, 1, 2])).backward()
        assert order == [name for name, _ in reversed(list(model.named_parameters()))]
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())

    def test_an_unknown_model_is_refused(self) -> None:
        with pytest.raises(UnknownName, match="model with a stand-in 'resnet18'"):
            load_task(STAND_IN, {"model": "resnet18"})


class TestTinyImageNet:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Two classes, one of them with a grey image; colours say which image it is."""
        for name, shades in (("n02", (10, 20)), ("n01", (30,))):
            images = tmp_path / "train" / name / "images"
            images.mkdir(parents=True)
            for number, shade in enumerate(shades):
                Image.new("RGB", (64, 64), (shade, 0, 0)).save(images / f"{name}_{number}.JPEG", quality=100)
        Image.new("L", (64, 64), 200).save(tmp_path / "train" / "n01" / "images" / "n01_1.JPEG", quality=100)
        held = tmp_path / "val" / "images"
        held.mkdir(parents=True)
        Image.new("RGB", (64, 64), (50, 0, 0)).save(held / "val_0.JPEG", quality=100)
        (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n", encoding="utf-8")
        return tmp_path

    def test_classes_are_folders_in_order_and_images_keep_their_colours(self, folder: Path) -> None:
        data = tiny_imagenet(folder)
        inputs, targets = data.train.gather(np.array([3, 0, 2, 1]))
        assert targets.tolist() == [1, 0, 1, 0]
        red = (inputs[:, 0] * 0.229 + 0.485).mean((1, 2)) * 255
        assert red.tolist() == pytest.approx([20, 30, 10, 200], abs=3)
        assert (inputs[3, 1] * 0.224 + 0.456).mean() * 255 == pytest.approx(200, abs=3)  # grey: all channels alike
        assert data.test.gather(np.array([0]))[1].tolist() == [1]

    def test_an_image_is_read_when_it_is_asked_for_and_only_then(self, folder: Path) -> None:
        data = tiny_imagenet(folder)
        data.train.gather(np.array([0]))
        for path in (folder / "train" / "n01" / "images").iterdir():
            path.unlink()
        data.train.gather(np.array([0]))
        with pytest.raises(DataError, match=r"n01_1.JPEG: must be an image"):
            data.train.gather(np.array([1]))

    def test_a_task_trains_on_the_folder(self, folder: Path) -> None:
        task = load_task(EFFICIENTNET, {"augment": True}, data_dir=str(folder))
        inputs, targets = task.data().train.gather(np.arange(4), np.arange(4, dtype=np.uint64))
        assert inputs.shape == (4, 3, 64, 64) and len(targets) == 4

    def test_an_image_of_another_size_is_refused(self, folder: Path) -> None:
        Image.new("RGB", (32, 64)).save(folder / "val" / "images" / "val_0.JPEG")
        with pytest.raises(DataError, match=r"val_0.JPEG: images must be 64 × 64, got 32 × 64"):
            tiny_imagenet(folder).test.gather(np.array([0]))

    def test_a_class_that_no_folder_has_is_refused_with_its_line(self, folder: Path) -> None:
        (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n", encoding="utf-8")
        with pytest.raises(DataError, match="line 1: the class must be a folder in train, got 'n99'"):
            tiny_imagenet(folder)

    @pytest.mark.parametrize("gone", ["train", "val/val_annotations.txt"])
    def test_a_missing_part_is_named(self, folder: Path, gone: str) -> None:
        (folder / gone).rename(folder / "elsewhere")
        with pytest.raises(DataError, match=gone):
            tiny_imagenet(folder)

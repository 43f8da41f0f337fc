"""What a tower takes is told by one without content as by one that computes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import nn

from tonnage.model.adapters import EVERYTHING, Trains
from tonnage.model.files import read_model
from tonnage.training import weigh_tower

pytest.importorskip("PIL")
from visions import draw_image, write_vision

FROZEN, TRAINED = EVERYTHING, Trains(patterns=("*", "tower.*"))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("trains", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_a_tower_without_content_takes_what_a_real_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, trains: Trains
) -> None:
    from PIL import Image

    from tonnage.data.images.processing import tower_inputs
    from tonnage.training.sight import image_recipe

    write_vision(tmp_path, family)
    files, config = read_model(str(tmp_path))
    recipe = image_recipe(files, pixels=(None, None))
    assert recipe is not None
    inputs, ids = tower_inputs(recipe, [Image.open(io.BytesIO(draw_image(3, (90, 60)))).convert("RGB")])
    tokens = ids.count(recipe.token_id)
    planned = weigh_tower.weigh_tower(config, files, trains, torch.float32, inputs, tokens)

    def with_numbers(tower: nn.Module) -> None:
        for module in tower.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.randn(parameter.shape), parameter.requires_grad)

    monkeypatch.setattr(weigh_tower, "_pretend", with_numbers)
    assert weigh_tower.weigh_tower(config, files, trains, torch.float32, inputs, tokens) == planned
    assert (planned.trained > 0) is (trains is TRAINED)
    assert (planned.frozen > 0) is (trains is FROZEN)
    assert planned.forward >= planned.saved * tokens

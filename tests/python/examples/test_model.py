import pytest
import torch
from model import Transformer, rotary_tables, rotate
from torch import nn


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(dim=32, n_layers=2, n_heads=4, max_seq_len=12)
    for weight in model.parameters():  # large enough for every byte to matter
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.3)
    return model


def test_logits_have_one_score_for_each_byte_value(model: Transformer) -> None:
    logits = model(torch.randint(256, (3, 12)))
    assert logits.shape == (3, 12, 256)
    assert logits.isfinite().all()
    assert model(torch.randint(256, (2, 5))).shape == (2, 5, 256)


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_byte_reaches_its_own_and_later_positions_only(model: Transformer, changed: int) -> None:
    tokens = torch.randint(256, (1, 12))
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 256
    difference = (model(tokens) - model(other)).abs().amax(dim=(0, 2))
    assert (difference[:changed] == 0).all()
    assert (difference[changed:] > 1e-4).all()


def test_the_order_of_earlier_bytes_matters(model: Transformer) -> None:
    tokens = torch.arange(12).unsqueeze(0)
    swapped = tokens.clone()
    swapped[0, [2, 7]] = swapped[0, [7, 2]]
    assert (model(tokens)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-4


def test_rotated_products_depend_on_the_distance_only() -> None:
    cos, sin = rotary_tables(20, 8)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    products = rotate(q.expand(20, 8), cos, sin) @ rotate(k.expand(20, 8), cos, sin).T
    for distance in range(-19, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    torch.testing.assert_close(products[0, 0], q @ k)
    assert products[0].std() > 1e-2


def test_a_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.dim 36 .* model\.n_heads 4"):
        Transformer(dim=36, n_layers=1, n_heads=4, max_seq_len=8)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 12}
    with torch.device("meta"):
        late = Transformer(**sizes, seed=7)
    late.to_empty(device="cpu")
    late.init_weights()
    torch.manual_seed(7)  # the default seed
    early = Transformer(**sizes)
    whole = late.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in early.state_dict().items())
    assert torch.equal(late.freqs_cis, early.freqs_cis)

    stage = Transformer(**sizes, seed=7)
    stage.embedding = None
    del stage.layers["0"]
    for weight in stage.parameters():
        nn.init.zeros_(weight)
    stage.init_weights()
    parts = stage.state_dict()
    assert set(parts) < set(whole)
    assert all(torch.equal(whole[name], value) for name, value in parts.items())

    other = Transformer(**sizes, seed=8)
    matrices = {name: p for name, p in late.named_parameters() if p.dim() == 2}
    assert not any(torch.equal(p, other.get_parameter(n)) for n, p in matrices.items())
    assert not torch.equal(
        matrices["layers.0.attention.wq.weight"], matrices["layers.1.attention.wq.weight"]
    )
    for name, weight in matrices.items():
        std = 0.01 if name.endswith(("wo.weight", "w2.weight")) else 0.02  # 0.02 / sqrt(2 * 2)
        assert weight.std().item() == pytest.approx(std, rel=0.1)

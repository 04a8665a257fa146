"""On two ranks, Accelerate, transformers and Lightning train bitwise like plain DDP."""

import pytest

from tests.support.ranks import case

pytestmark = pytest.mark.timeout(150)
EXACT = ["accelerate", "accelerate_zero", "hugging_face", "lightning"]
EXACT += ["muon_accelerate", "muon_hugging_face", "muon_lightning"]
REPLACED = ["fsdp2", "fsdp2_container", "fsdp2_in_backward", "muon_fsdp2"]
REPLACED += ["muon_lightning_fsdp2"]


@pytest.fixture(scope="module")
def results(run_ranks):
    for package in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(package, reason="the frameworks are installed with torch 2.15")
    return run_ranks("frameworks_worker.py", 2)


@pytest.mark.parametrize("name", EXACT + REPLACED)
def test_trains_as_by_hand(results, name):
    by_hand = "muon_by_hand" if "muon" in name else "by_hand"
    expected, found = case(results, by_hand), case(results, name)
    assert any(norm > 0.3 for norm in expected["norms"])
    assert expected["orthogonalized"] == found["orthogonalized"] == (1 if "muon" in name else 0)
    if name in EXACT:
        assert found == expected
        return
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
        for row, other in zip(ours, theirs, strict=True):
            assert row == pytest.approx(other, rel=0, abs=1e-6)

"""Lines, planes and trajectories through the weights, against closed forms and invariances."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedflat as ff
from fedflat.core.flat import FlatModel
from fedflat.data.federation import Shard
from fedflat.errors import FedflatError
from fedflat.flatness.landscape import filter_normalised, interpolation, landscape, merged, plane
from fedflat.flatness.surface import Surface
from fedflat.flatness.trajectory import local_trajectory


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()


@pytest.fixture
def data() -> Shard:
    torch.manual_seed(1)
    return Shard(torch.randn(40, 5, dtype=torch.float64), torch.randint(3, (40,)))


def test_filters_of_a_direction_are_as_long_as_the_model_s(data):
    model = FlatModel.of(network())
    surface = Surface(model, data)
    direction = model.layout.named(filter_normalised(surface, 0, 0))
    for name, w in model.layout.named(model.vector).items():
        if name.endswith("bias"):
            assert not direction[name].any()
        else:
            torch.testing.assert_close(direction[name].norm(dim=1), w.norm(dim=1))


def test_the_landscape_is_the_loss_there(data):
    module = network()
    found = landscape(
        {"a": module}, {"train": data, "half": Shard(data.inputs[:20], data.targets[:20])}, 0.5, 5
    )
    (axis, other), surface = found.axes, Surface(module, data)
    first, second = (filter_normalised(surface, 0, number) for number in range(2))
    assert found.losses["a"]["train"].shape == (5, 5)
    flat = FlatModel.of(module)
    with torch.no_grad(), flat.at(flat.vector + axis[1] * first + other[3] * second) as moved:
        for kind, samples in (("train", 40), ("half", 20)):
            expected = F.cross_entropy(moved(data.inputs[:samples]), data.targets[:samples]).item()
            assert found.losses["a"][kind][1, 3] == pytest.approx(expected, rel=1e-12)
    assert found.losses["a"]["train"][2, 2] == pytest.approx(
        F.cross_entropy(module(data.inputs), data.targets).item()
    )


def test_scaling_layers_against_each_other_changes_nothing(data):
    one = network()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].weight.mul_(8)
        other[0].bias.mul_(8)
        other[2].weight.div_(8)
    found = landscape({"one": one, "other": other}, data, points=7)
    np.testing.assert_allclose(found.losses["one"]["train"], found.losses["other"]["train"], rtol=1e-9)
    plain = interpolation(
        one, FlatModel.of(one).vector, FlatModel.of(other).vector, data, points=3, beyond=0
    )[1]
    assert plain[1] != pytest.approx(plain[0])  # the two are apart in the space of weights


def test_several_processes_and_a_kept_file_give_the_same(data, tmp_path, monkeypatch):
    alone = landscape({"a": network()}, data, points=6)
    kept = tmp_path / "grid.jsonl"
    both = landscape({"a": network()}, data, points=6, jobs=2, keep=kept)
    assert np.array_equal(alone.losses["a"]["train"], both.losses["a"]["train"])
    lines = kept.read_text().splitlines(keepends=True)
    assert len(lines) == 36
    kept.write_text("".join(lines[:20]) + lines[20][:9])  # as a crash leaves it
    computed = []
    value = Surface.value
    monkeypatch.setattr(Surface, "value", lambda self, w=None: computed.append(1) or value(self, w))
    again = landscape({"a": network()}, data, points=6, keep=kept)
    assert np.array_equal(alone.losses["a"]["train"], again.losses["a"]["train"])
    assert len(computed) == 16
    landscape(
        {"a": network(seed=5)}, data, points=6, keep=kept
    )  # another model does not take what is not its own
    assert len(computed) == 16 + 36


def test_a_plane_goes_through_its_corners(data):
    module = network()
    flat = FlatModel.of(module)
    corners = [torch.randn_like(flat.vector) for _ in range(3)]
    inside = 0.2 * corners[0] + 0.5 * corners[1] + 0.3 * corners[2]
    outside = inside + torch.randn_like(inside)
    found = plane(module, corners, data, {"way": [inside, outside]}, points=3, margin=0)
    distances = np.linalg.norm(found.corners[:, None] - found.corners[None], axis=-1)
    expected = torch.cdist(torch.stack(corners), torch.stack(corners)).numpy()
    np.testing.assert_allclose(distances, expected, atol=1e-9)
    np.testing.assert_allclose(found.paths["way"][0], [0.2, 0.5, 0.3] @ found.corners, atol=1e-9)
    u, v = found.axes
    assert u[0] == pytest.approx(min(found.corners[:, 0].min(), found.paths["way"][:, 0].min()))
    basis = np.linalg.solve(found.corners[1:], np.stack([(c - corners[0]).numpy() for c in corners[1:]]))
    there = corners[0] + torch.from_numpy(np.array([u[1], v[2]]) @ basis)
    assert found.losses["train"][1, 2] == pytest.approx(Surface(module, data).value(there), rel=1e-9)
    with pytest.raises(FedflatError, match="lie on a line"):
        plane(module, [corners[0], corners[1], 3 * corners[1] - 2 * corners[0]], data)
    with pytest.raises(FedflatError, match="three points"):
        plane(module, corners[:2], data)


def test_merged_surfaces_count_equally():
    a, b = np.array([[0.0, 1.0], [2.0, 4.0]]), np.array([[100.0, 0.0], [50.0, 25.0]])
    np.testing.assert_allclose(merged([a, b]), [[1.0, 0.25], [1.0, 1.25]])


def test_interpolation_ends_at_both_ends(data):
    module = network()
    start, end = FlatModel.of(module).vector.clone(), torch.zeros_like(FlatModel.of(module).vector)
    fractions, losses = interpolation(module, start, end, data, points=5, beyond=0.0)
    surface = Surface(module, data)
    assert fractions.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert losses[0] == pytest.approx(surface.value(start))
    assert losses[-1] == pytest.approx(np.log(3))
    other = network(seed=5)
    by_vectors = interpolation(module, start, FlatModel.of(other).vector, data, points=3)
    for model in (module, FlatModel.of(module)):  # which stays where it is while others are looked at
        by_models = interpolation(model, model, other, data, points=3)
        np.testing.assert_array_equal(by_models[1], by_vectors[1])


def test_what_is_not_a_model_or_not_data_is_said(data):
    run = ff.train(ff.Federation([(data.inputs, data.targets)]), network(), rounds=1, dtype=torch.float64)
    with pytest.raises(FedflatError, match=r"^Give models by name, such as {'FedSAM': run.model}\.$"):
        landscape(run.model, data)
    with pytest.raises(FedflatError, match=r"^Give a module, such as a run's model, not Run\.$"):
        landscape({"a": run}, data)
    with pytest.raises(
        FedflatError, match=r"^Give a federation, .* not None; has the federation a test set\?$"
    ):
        ff.sharpness(run.model, ff.Federation([(data.inputs, data.targets)]).test)
    with pytest.raises(FedflatError, match=r"^Give a federation, .* not tuple\.$"):
        ff.sharpness(run.model, (data.inputs, data.targets))


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedprox"])
def test_a_trajectory_is_the_local_training(data, method):
    module = network()
    local = ff.LocalSGD(lr=0.1, momentum=0.5, epochs=2, batch_size=10)
    path = local_trajectory(module, 0, data, method, local)
    assert len(path) == 1 + 8
    assert torch.equal(path[0], FlatModel.of(module).vector)
    federation = ff.Federation([(data.inputs, data.targets)])
    run = ff.train(federation, module, method, local=local, rounds=1, dtype=torch.float64)
    torch.testing.assert_close(path[-1], run.server.w, rtol=0, atol=1e-14)


def test_mistakes(data):
    with pytest.raises(FedflatError, match="1 or 2 dimensions"):
        landscape({"a": network()}, data, dimensions=3)

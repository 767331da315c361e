"""Figures: what is drawn, read back from the axes, against numbers computed by hand; files; embeddings; errors."""

import json
import shlex
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from torch import nn

import fedflat as ff
from fedflat import figures
from fedflat.cli import main
from fedflat.data.federation import Shard
from fedflat.errors import FedflatError, MissingExtra
from fedflat.experiments.compare import compare, find_runs
from fedflat.figures.lines import smoothed
from fedflat.figures.style import COLOURS, pen
from fedflat.flatness.density import SpectralDensity
from fedflat.flatness.embedding import Embedding, embed, embedding, penultimate_features
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.landscape import Landscape, Plane
from fedflat.flatness.radius import RadiusProfile


def row(index, accuracy=None, **more):
    costs = {
        "bytes_down": 3_000_000,
        "bytes_up": 1_000_000,
        "seconds": 2.0 + index,
        "forward": 20,
        "backward": 10,
    }
    loss = None if accuracy is None else 1 - accuracy
    return {"index": index, "accuracy": accuracy, "loss": loss, "train_loss": 0.5, **costs, **more}


def rows(accuracies, **more):
    return [row(index, accuracy, **more) for index, accuracy in enumerate(accuracies)]


def make_run(path, method, seed, history, **settings):
    path.mkdir(parents=True)
    experiment = {"method": method, "seed": seed, "dataset": "digits", **settings}
    (path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history))
    return path


def named_lines(axes):
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def band(axes, number=0):
    """Lower and upper end of a band at every x."""
    vertices = axes.collections[number].get_paths()[0].vertices
    xs = sorted(set(vertices[:, 0]))
    ends = [vertices[vertices[:, 0] == x][:, 1] for x in xs]
    return np.array([end.min() for end in ends]), np.array([end.max() for end in ends])


def title_of(figure):
    return [axes.get_title() for axes in figure.axes]


# -- learning curves ---------------------------------------------------------------------------------


def test_smoothing_is_the_mean_of_the_last_values():
    np.testing.assert_allclose(smoothed([1, 2, 3, 4, 8], 1), [1, 2, 3, 4, 8])
    np.testing.assert_allclose(smoothed([1, 2, 3, 4, 8], 3), [1, 1.5, 2, 3, 5])
    np.testing.assert_allclose(smoothed([2, 4], 10), [2, 3])
    with pytest.raises(FedflatError, match="smooth=0"):
        smoothed([1], 0)


def test_a_curve_is_smoothed_and_ends_where_compare_says(tmp_path):
    run = make_run(tmp_path / "a", "fedavg", 0, rows([0.1, None, 0.3, 0.5, None, 0.9]))
    figure = figures.learning_curves(run, smooth=2)
    line = named_lines(figure.axes[0])["FedAvg"]
    np.testing.assert_allclose(line.get_xdata(), [1, 3, 4, 6])
    np.testing.assert_allclose(line.get_ydata(), [10, 20, 40, 70])
    (group,) = compare([run], last=2)
    assert line.get_ydata()[-1] == pytest.approx(100 * group.last[0])
    assert figure.axes[0].get_ylabel() == "test accuracy (%)"
    assert figure.axes[0].get_xlabel() == "round"


def test_mean_and_band_over_seeds_in_the_rounds_that_all_have(tmp_path):
    seeds = [[0.1, 0.5, 0.6], [0.3, 0.4, 0.8], [0.2, 0.6]]
    for seed, accuracies in enumerate(seeds):
        make_run(tmp_path / str(seed), "fedsam", seed, rows(accuracies))
    make_run(tmp_path / "other", "fedavg", 0, rows([0.1, 0.2, 0.3]))
    axes = figures.learning_curves(tmp_path).axes[0]
    line = named_lines(axes)["FedSAM"]
    by_round = [[one[n] * 100 for one in seeds] for n in range(2)]
    means = [statistics.fmean(values) for values in by_round]
    deviations = [statistics.stdev(values) for values in by_round]
    np.testing.assert_allclose(line.get_xdata(), [1, 2])
    np.testing.assert_allclose(line.get_ydata(), means)
    low, high = band(axes)
    np.testing.assert_allclose(low, np.subtract(means, deviations))
    np.testing.assert_allclose(high, np.add(means, deviations))
    assert len(axes.collections) == 1  # one seed has no band


@pytest.mark.parametrize(
    ("against", "values", "label"),
    [
        ("bytes", [8, 12], "traffic down and up (MB)"),
        ("passes", [60, 90], "forward and backward passes"),
        ("seconds", [2 + 3, 2 + 3 + 4], "training time (seconds)"),
    ],
)
def test_costs_are_summed_over_all_rounds_also_those_without_a_test(against, values, label):
    axes = figures.learning_curves({"mine": rows([None, 0.5, 0.7])}, against=against).axes[0]
    np.testing.assert_allclose(named_lines(axes)["mine"].get_xdata(), values)
    assert axes.get_xlabel() == label


def test_large_costs_have_large_units():
    history = [{**row(n, 0.5), "bytes_down": 3 * 10**9, "seconds": 3600.0} for n in range(4)]
    for against, values, unit in (
        ("bytes", 3.001 * np.arange(1, 5), "(GB)"),
        ("seconds", [1, 2, 3, 4], "(hours)"),
    ):
        axes = figures.learning_curves({"mine": history}, against=against).axes[0]
        np.testing.assert_allclose(named_lines(axes)["mine"].get_xdata(), values)
        assert unit in axes.get_xlabel()


def test_runs_in_memory_seeds_in_lists_and_other_values():
    federation = ff.federate("digits", ff.IID(), clients=4, seed=0)
    runs = [ff.train(federation, rounds=2, seed=seed) for seed in (0, 1)]
    axes = figures.learning_curves({"both": runs, "one": runs[0].history}, value="train_loss").axes[0]
    losses = [[one["train_loss"] for one in run.history] for run in runs]
    np.testing.assert_allclose(named_lines(axes)["both"].get_ydata(), np.mean(losses, axis=0))
    np.testing.assert_allclose(named_lines(axes)["one"].get_ydata(), losses[0])
    worst = rows([0.5], client_accuracy={"worst_decile": 0.25})
    axes = figures.learning_curves({"w": worst}, value="worst_decile", within=(10, 40)).axes[0]
    assert named_lines(axes)["w"].get_ydata() == [25]
    assert axes.get_ylim() == (10, 40)
    for unnamed in (runs[0], runs, {"a": 3}):
        with pytest.raises(FedflatError, match=r"^Give what to draw by name, .* not (Run|int)\.$"):
            figures.learning_curves(unnamed)


def test_many_lines_differ_in_grey_and_their_legend_hides_nothing():
    pens = [pen(number) for number in range(35)]
    assert len({(one["linestyle"], one["marker"]) for one in pens}) == 35
    assert len({(one["color"], one["linestyle"]) for one in pens}) == 35
    for width in ("one", "two"):
        for count in (1, 6, 13):
            runs = {f"method {n} with rho=0.0{n} and a long name": rows([0.1, 0.5]) for n in range(count)}
            figure = figures.learning_curves(runs, width=width)
            figure.draw_without_rendering()
            (legend,) = figure.legends
            assert len(legend.get_texts()) == count
            box, inside = legend.get_window_extent(), figure.axes[0].get_tightbbox()
            assert not box.overlaps(inside)
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
            assert figure.axes[0].get_window_extent().height > 72  # there is room for the data


# -- flatness over rounds ------------------------------------------------------------------------------


def test_measures_have_panels_and_intervals():
    history = [
        {**row(n, 0.5), "measures": {"trace": n, "trace low": n - 1, "trace high": n + 2} if n % 2 else {}}
        for n in range(6)
    ]
    for one in history:
        one["measures"]["distance"] = 10.0 * one["index"]
    figure = figures.measure_curves({"mine": history}, ["trace", "distance"], width="two")
    trace, distance = figure.axes
    np.testing.assert_allclose(named_lines(trace)["mine"].get_xdata(), [2, 4, 6])
    np.testing.assert_allclose(named_lines(trace)["mine"].get_ydata(), [1, 3, 5])
    np.testing.assert_allclose(band(trace), ([0, 2, 4], [3, 5, 7]))
    np.testing.assert_allclose(named_lines(distance)["mine"].get_ydata(), np.arange(6) * 10)
    assert len(distance.collections) == 0
    assert distance.get_ylabel() == "flatness distance"


def test_measures_that_were_not_recorded():
    history = rows([0.5, 0.6], measures={"sharpness": 0.1})
    with pytest.raises(FedflatError, match=r"mine has not recorded 'trace'.*fedflat run --measure trace"):
        figures.measure_curves({"mine": history}, "trace")
    with pytest.raises(FedflatError, match="Did you mean 'sharpness'"):
        figures.measure_curves({"mine": history}, "sharpnes")


def test_what_is_recorded_does_not_make_another_experiment(tmp_path):
    for seed, measure in enumerate((["sharpness"], ["sharpness", {"trace": {"every": 5}}])):
        history = rows([0.5, 0.6], measures={"sharpness": 0.1 * (seed + 1)})
        make_run(tmp_path / str(seed), "fedavg", seed, history, measure=measure)
    lines = named_lines(figures.measure_curves(tmp_path).axes[0])
    assert list(lines) == ["FedAvg"]
    np.testing.assert_allclose(lines["FedAvg"].get_ydata(), [0.15, 0.15])


def test_traces_have_a_panel_each_and_leave_out_who_has_none():
    runs = {
        "FedGF": [row(n, scalars={"c": n / 4}) for n in range(4)],
        "FedAvg": [row(n, scalars={}) for n in range(4)],
        "FedWMSAM": [row(n, scalars={"alpha": 0.1 + n}, measures={"drift cosine": -n}) for n in range(4)],
    }
    figure = figures.traces(runs, smooth=2)
    c, alpha = figure.axes
    assert list(named_lines(c)) == ["FedGF"] and list(named_lines(alpha)) == ["FedWMSAM"]
    np.testing.assert_allclose(named_lines(c)["FedGF"].get_ydata(), [0, 0.125, 0.375, 0.625])
    assert to_hex(named_lines(alpha)["FedWMSAM"].get_color()) == COLOURS[2].lower()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedGF", "FedWMSAM"]
    (cosine,) = figures.traces(runs, "drift cosine").axes
    np.testing.assert_allclose(named_lines(cosine)["FedWMSAM"].get_ydata(), [0, -1, -2, -3])
    with pytest.raises(FedflatError, match="No run has recorded 'beta'"):
        figures.traces(runs, "beta")
    with pytest.raises(FedflatError, match="FedAvg keeps no number"):
        figures.traces({"FedAvg": runs["FedAvg"]})


# -- what a target costs, and what a setting does ------------------------------------------------------


def test_the_target_costs_what_compare_says(tmp_path):
    for alpha, shift in ((0.1, 0.0), (1, 0.2)):
        partition = {"name": "dirichlet", "alpha": alpha}
        for seed, accuracies in enumerate([[0.1, 0.4, 0.6, 0.75], [0.2, 0.6, 0.7, 0.75]]):
            run = tmp_path / f"sam-{alpha}-{seed}"
            make_run(run, "fedsam", seed, rows([a + shift for a in accuracies]), partition=partition)
    make_run(tmp_path / "avg", "fedavg", 0, rows([0.1, 0.2]), partition={"name": "dirichlet", "alpha": 1})
    figure = figures.cost_to_target(tmp_path, 0.55)
    groups = compare(find_runs([tmp_path]), target=0.55)
    axes = figure.axes[0]
    line = named_lines(axes)["FedSAM"]
    wanted = [group for group in groups if group.name.startswith("fedsam")]
    np.testing.assert_allclose(line.get_xdata(), [group.seconds_to[0] for group in wanted])
    np.testing.assert_allclose(line.get_ydata(), [group.megabytes_to[0] for group in wanted])
    assert list(line.get_ydata()) == [10.0, 8.0]  # rounds 3 and 2, then twice round 2, of 4 MB
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["FedSAM", "alpha=0.1", "alpha=1"]  # a line for the method, a marker for each partition
    assert "FedAvg alpha=1" in figure.get_supxlabel()
    bars = [c for c in axes.collections if hasattr(c, "get_segments")]
    widths = sorted(np.ptp(c.get_segments()[0], axis=0).max() for c in bars if len(c.get_segments()))
    # rounds 2 and 3: 5 and 9 seconds, 8 and 12 MB
    assert widths[-1] == pytest.approx(2 * statistics.stdev([8, 12]))
    with pytest.raises(FedflatError, match="No run reaches an accuracy of 99%"):
        figures.cost_to_target(tmp_path, 0.99)
    with pytest.raises(FedflatError, match="target=80"):
        figures.cost_to_target(tmp_path, 80)


def test_without_a_target_it_is_what_all_runs_reach():
    runs = {"a": [rows([0.1, 0.57, 0.5])], "b": [rows([0.2, 0.9]), rows([0.579, 0.3])]}
    assert "57% accuracy" in figures.cost_to_target(runs).axes[0].get_xlabel()
    with pytest.raises(FedflatError, match="give a target"):
        figures.cost_to_target({"a": rows([0.001])})


def test_a_target_that_some_seeds_miss_is_hollow():
    figure = figures.cost_to_target(
        {"mine": [rows([0.1, 0.9]), rows([0.1, 0.2])]}, 0.5, communication="rounds"
    )
    lines = figure.axes[0].get_lines()
    hollow = [line for line in lines if line.get_marker() != "None" and line.get_markerfacecolor() == "white"]
    assert len(hollow) == 1
    assert hollow[0].get_xydata().tolist() == [[5.0, 2.0]]
    assert "rounds to 50% accuracy" in figure.axes[0].get_ylabel()


def test_sensitivity_over_a_sweep(tmp_path):
    for rho, end in ((0.1, 0.8), (0.01, 0.6), (1.0, 0.5)):
        for seed in (0, 1):
            run = tmp_path / f"{rho}-{seed}"
            make_run(run, {"fedsam": {"rho": rho}}, seed, rows([0.1, end + seed / 10]))
    make_run(tmp_path / "default", "fedsmoo", 0, rows([0.1, 0.7]))
    figure = figures.sensitivity(tmp_path, "method.rho", last=1)
    axes = figure.axes[0]
    line = named_lines(axes)["FedSAM"]
    np.testing.assert_allclose(line.get_xdata(), [0.01, 0.1, 1.0])
    np.testing.assert_allclose(line.get_ydata(), [65, 85, 55])
    half = 100 * statistics.stdev([0, 0.1])
    np.testing.assert_allclose(band(axes)[0], [65 - half, 85 - half, 55 - half])
    default = next(m.rho for m in ff.fedsmoo().mechanisms if hasattr(m, "rho"))
    np.testing.assert_allclose(named_lines(axes)["FedSMOO"].get_xdata(), [default])
    assert axes.get_xscale() == "log"
    with pytest.raises(FedflatError, match=r"no setting 'method.mu'"):
        figures.sensitivity(tmp_path, "method.mu")


def test_sensitivity_to_partitions_words_and_recorded_measures(tmp_path):
    for number, partition in enumerate(
        ["dirichlet:0.1", {"name": "dirichlet", "alpha": 2, "form": "equal"}, "dirichlet:3"]
    ):
        history = rows([0.2 + number / 10], measures={"discrepancy": 5.0 * number})
        weighting = ["samples", "samples", "uniform"][number]
        run = tmp_path / str(number)
        make_run(run, "fedavg", 0, history, partition=partition, weighting=weighting)
    figure = figures.sensitivity(tmp_path, "partition.alpha", measures=["discrepancy"])
    accuracy, discrepancy = figure.axes
    by_samples = named_lines(accuracy)["FedAvg weighting=samples"]
    np.testing.assert_allclose(by_samples.get_xdata(), [0.1, 2])
    np.testing.assert_allclose(by_samples.get_ydata(), [20, 30])
    np.testing.assert_allclose(named_lines(discrepancy)["FedAvg weighting=uniform"].get_ydata(), [10])
    words = figures.sensitivity([tmp_path / "1", tmp_path / "2"], "weighting").axes[0]
    assert [tick.get_text() for tick in words.get_xticklabels()] == ["samples", "uniform"]


def test_zero_and_magnitudes_stand_side_by_side_and_settings_may_change_along(tmp_path):
    for number, (alpha, rho) in enumerate([(1000, 0.05), (0, 0.02), (0.5, 0.05)]):
        run = tmp_path / str(number)
        make_run(run, {"fedsam": {"rho": rho}}, 0, rows([0.1 * (number + 1)]), partition=f"hsu:{alpha}")
    apart = figures.sensitivity(tmp_path, "partition.alpha").axes[0]
    assert sorted(len(line.get_xdata()) for line in apart.get_lines()) == [1, 2]
    panel = figures.sensitivity(tmp_path, "partition.alpha", along_with=["method.rho"]).axes[0]
    (line,) = panel.get_lines()
    np.testing.assert_allclose(line.get_xdata(), [0, 1, 2])
    np.testing.assert_allclose(line.get_ydata(), [20, 30, 10])
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "0.5", "1000"]


# -- landscapes ----------------------------------------------------------------------------------------


def bowl(scale=1.0, points=11):
    axis = np.linspace(-1, 1, points)
    a, b = np.meshgrid(axis, axis, indexing="ij")
    return axis, scale * (a + 0.5) ** 2 + 0.2 * scale * b**2 + 0.1


def two_models():
    axis, flat = bowl()
    _, sharp = bowl(5.0)
    return Landscape((axis, axis), {"flat": {"train": flat}, "sharp": {"train": sharp}})


def contour_sets(axes):
    return [one for one in axes.collections if hasattr(one, "levels")]


def test_contours_share_levels_and_colours():
    seen = two_models()
    figure = figures.landscapes(seen)
    flat, sharp = figure.axes[:2]
    assert (flat.get_title(), sharp.get_title()) == ("flat", "sharp")
    levels = [contour_sets(axes)[0].levels for axes in (flat, sharp)]
    np.testing.assert_array_equal(*levels)
    every = np.concatenate([losses["train"].ravel() for losses in seen.losses.values()])
    assert levels[0][0] == pytest.approx(every.min()) and levels[0][-1] == pytest.approx(every.max())
    limits = [contour_sets(axes)[0].get_clim() for axes in (flat, sharp)]
    assert limits[0] == limits[1]
    assert flat.get_xlim() == sharp.get_xlim()
    np.testing.assert_allclose(
        np.diff(np.log(levels[0])), np.log(levels[0][1] / levels[0][0])
    )  # over 20 times


def test_the_first_direction_is_across_and_a_ceiling_cuts():
    seen = two_models()
    figure = figures.landscapes(Landscape(seen.axes, {"one": seen.losses["flat"]}), ceiling=0.5)
    filled = contour_sets(figure.axes[0])[0]
    assert filled.levels[-1] == 0.5 and filled.extend == "max"
    lowest = (
        np.concatenate(filled.allsegs[0]) if hasattr(filled, "allsegs") else filled.get_paths()[0].vertices
    )
    assert lowest[:, 0].mean() == pytest.approx(-0.5, abs=0.1)  # where the bowl has its bottom
    assert lowest[:, 1].mean() == pytest.approx(0.0, abs=0.1)
    assert (
        contour_sets(figures.landscapes(seen, ceiling=1e6).axes[0])[0].extend == "neither"
    )  # it cuts nothing
    with pytest.raises(FedflatError, match=r"ceiling=0.01 is below every loss; the lowest is 0.1"):
        figures.landscapes(seen, ceiling=0.01)


def test_surfaces_share_their_axes():
    seen = two_models()
    flat, sharp = figures.surfaces(seen, ceiling=2.0).axes
    lowest = min(losses["train"].min() for losses in seen.losses.values())
    assert flat.get_zlim() == sharp.get_zlim() == pytest.approx((lowest, 2.0))
    assert [axes.collections[0].get_clim() for axes in (flat, sharp)] == [(flat.get_zlim())] * 2
    line = Landscape((np.arange(3.0),), {"m": {"train": np.arange(3.0)}})
    with pytest.raises(FedflatError, match="two dimensions"):
        figures.surfaces(line)


@pytest.mark.parametrize("highest", [0.02, 2.4, 50.0])
@pytest.mark.parametrize("models", [1, 3])
def test_what_the_height_is_stands_beside_its_numbers(models, highest):
    axis = np.linspace(-1, 1, 5)
    losses = highest * (axis[:, None] ** 2 + axis[None] ** 2) / 2
    figure = figures.surfaces(Landscape((axis, axis), {str(n): {"train": losses} for n in range(models)}))
    figure.axes[0].tick_params("z", labelcolor="red")
    figure.axes[0].zaxis.label.set_color("blue")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    red, green, blue = np.moveaxis(np.asarray(canvas.buffer_rgba(), dtype=int)[..., :3], -1, 0)
    numbers = ((red > 200) & (green < 60) & (blue < 60)).any(axis=0).nonzero()[0]
    label = ((blue > 200) & (green < 60) & (red < 60)).any(axis=0).nonzero()[0]
    assert numbers.max() + 2 < label.min() < label.max() < len(blue[0]) - 2


def test_losses_that_are_not_finite_are_holes_and_a_plain_is_a_picture():
    axis, losses = bowl()
    losses[0, 0], losses[3, 3] = np.nan, np.inf
    seen = Landscape((axis, axis), {"m": {"train": losses}})
    assert np.isfinite(contour_sets(figures.landscapes(seen).axes[0])[0].levels).all()
    figures.surfaces(seen)
    figures.landscapes(Landscape((axis, axis), {"m": {"train": np.ones((11, 11))}}))
    with pytest.raises(FedflatError, match="diverged"):
        figures.landscapes(Landscape((axis, axis), {"m": {"train": np.full((11, 11), np.nan)}}))


def keep_landscape(run, axes, losses, seed=0):
    content = {"format": 1, "round": 5, "seed": seed, "axes": axes, "losses": losses, "samples": {}}
    (run / "landscape.json").write_text(json.dumps(content))


def test_landscapes_of_runs_are_put_side_by_side(tmp_path):
    a, b = (make_run(tmp_path / name, name, 0, rows([0.5])) for name in ("fedavg", "fedsam"))
    keep_landscape(a, [[0, 1, 2]], {"train": [3, None, 5], "test": [4, 4, 4]})
    with pytest.raises(
        FedflatError, match=r"fedsam has no landscape yet. Compute it: `fedflat landscape .*fedsam`"
    ):
        figures.landscapes(tmp_path)
    keep_landscape(b, [[0, 1, 2]], {"train": [1, 2, 3]})
    (axes,) = figures.landscapes(tmp_path).axes  # a line, and only the part that both have
    np.testing.assert_array_equal(named_lines(axes)["FedAvg"].get_ydata(), [3, np.nan, 5])
    np.testing.assert_array_equal(named_lines(axes)["FedSAM"].get_ydata(), [1, 2, 3])
    with pytest.raises(FedflatError, match="--part test` computes it"):
        figures.landscapes(tmp_path, parts=["test"])
    keep_landscape(b, [[0, 1, 2]], {"train": [1, 2, 3]}, seed=7)
    with pytest.raises(FedflatError, match="cannot be compared: their grids or directions differ"):
        figures.landscapes(tmp_path)


def test_trajectories_lie_on_every_panel():
    axis, local = bowl()
    world = local[::-1].copy()
    paths = {"FedAvg": np.array([[0, 0], [0.5, 0.2], [0.8, 0.9]]), "FedGMT": np.array([[0, 0], [-0.4, 0.4]])}
    seen = Plane(
        (axis, axis), {"local": local, "global": world}, np.array([[0, 0], [0.8, 0], [0, 0.9]]), paths
    )
    figure = figures.trajectories(seen)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert len(panels) == 3
    for axes in panels:
        for name, path in paths.items():
            np.testing.assert_allclose(named_lines(axes)[name].get_xydata(), path)
        np.testing.assert_allclose(named_lines(axes)["start"].get_xydata(), [[0, 0]])
    merged = contour_sets(panels[2])[0].levels
    scaled = [(one - one.min()) / np.ptp(one) for one in (local, world)]
    assert merged[0] == pytest.approx(sum(scaled).min()) and merged[-1] == pytest.approx(sum(scaled).max())
    with pytest.raises(FedflatError, match="Did you mean 'global'"):
        figures.trajectories(seen, parts=["globl"])


def test_interpolation_lines():
    t = np.linspace(-0.25, 1.25, 7)
    (axes,) = figures.interpolations({"client 3": (t, t**2)}, start="global", end="local", ceiling=1.0).axes
    np.testing.assert_allclose(named_lines(axes)["client 3"].get_xydata(), np.stack([t, t**2], axis=1))
    assert "0 (global) to 1 (local)" in axes.get_xlabel()
    assert axes.get_ylim()[1] == 1.0


# -- of trained models ---------------------------------------------------------------------------------


def profile(shift=0.0):
    estimates = tuple(
        Estimate(r + shift, r + shift - 0.5, r + shift + 0.25, draws=4) for r in (0.0, 1.0, 2.0)
    )
    return RadiusProfile((0.0, 1.0, 2.0), estimates, (0.0 + shift, 3.0 + shift, 6.0 + shift))


def plain(value):
    from fedflat.experiments.measure_run import plain

    return plain(value)


def keep_flatness(run, name, result):
    measures = {name: {"numbers": {}, "result": plain(result), "settings": {}, "seconds": 1.0}}
    (run / "flatness.json").write_text(json.dumps({"format": 1, "round": 5, "measures": measures}))


def test_loss_by_radius_with_its_interval(tmp_path):
    run = make_run(tmp_path / "a", "fedgf", 0, rows([0.5]))
    with pytest.raises(FedflatError, match=r"has no radius yet. Measure it: `fedflat flatness .*a --radius`"):
        figures.loss_by_radius(run)
    keep_flatness(run, "radius", profile())
    for given, name in (({"mine": profile()}, "mine"), (run, "FedGF")):
        axes = figures.loss_by_radius(given).axes[0]
        np.testing.assert_allclose(named_lines(axes)[name].get_xydata(), [[0, 0], [1, 1], [2, 2]])
        np.testing.assert_allclose(band(axes), ([-0.5, 0.5, 1.5], [0.25, 1.25, 2.25]))
    other = make_run(tmp_path / "b", "fedgf", 1, rows([0.5]))
    keep_flatness(other, "radius", profile(1.0))
    random, uphill = figures.loss_by_radius(tmp_path, along=["random", "gradient"]).axes
    np.testing.assert_allclose(named_lines(random)["FedGF"].get_ydata(), [0.5, 1.5, 2.5])
    half = statistics.stdev([0, 1])
    np.testing.assert_allclose(band(random)[0], [0.5 - half, 1.5 - half, 2.5 - half])
    np.testing.assert_allclose(named_lines(uphill)["FedGF"].get_ydata(), [0.5, 3.5, 6.5])
    with pytest.raises(FedflatError, match="--radius --part test"):
        figures.loss_by_radius(tmp_path, part="test")


def test_the_density_is_the_measured_one(tmp_path):
    density = SpectralDensity(8.0, -1.0, ((-1.0, 0.0, 8.0), (-0.5, 0.1, 7.0)), ((0.1, 0.8, 0.1),) * 2, 50)
    run = make_run(tmp_path / "a", "fedgf", 0, rows([0.5]))
    keep_flatness(run, "density", density)
    for given, name in (({"mine": density}, "mine"), (run, "FedGF")):
        axes = figures.spectral_densities(given, blur=0.02).axes[0]
        x, y = density.curve(width=0.02)
        np.testing.assert_allclose(named_lines(axes)[name].get_xydata(), np.stack([x, y], axis=1))
        assert axes.get_yscale() == "log"
        assert [8.0, 8.0] in [list(line.get_xdata()) for line in axes.get_lines()]
    keep_flatness(run, "density", SpectralDensity(1.0, 0.0, ((float("nan"),),), ((1.0,),), 1))
    with pytest.raises(FedflatError, match="diverged"):
        figures.spectral_densities(run)


def federation_of(*clients):
    return ff.Federation([(np.zeros((len(y), 2), dtype=np.float32), np.array(y)) for y in clients], classes=3)


def test_partition_pictures_show_counts_on_one_scale():
    small = federation_of([0, 0, 1], [2])
    large = federation_of([0] * 8, [1, 1, 2, 2])
    figure = figures.partitions({"small": small, "large": large})
    areas = {}
    for part in figure.subfigs:
        main = part.axes[0]
        dots = main.collections[0]
        places = map(tuple, dots.get_offsets().astype(int).tolist())
        areas[main.get_title(loc="left")] = dict(zip(places, dots.get_sizes(), strict=True))
    one = areas["large"][0, 0] / 8
    assert areas["small"] == {
        (0, 0): pytest.approx(2 * one),
        (0, 1): pytest.approx(one),
        (1, 2): pytest.approx(one),
    }
    assert set(areas["large"]) == {(0, 0), (1, 1), (1, 2)}
    many = federation_of(*[[n % 3] * (1 + n) for n in range(40)])
    heat = figures.partitions(many).subfigs[0].axes[0].collections[0].get_array()
    assert heat.reshape(3, 40)[39 % 3, 39] == 40 and heat.max() == 40
    regression = ff.Federation([(np.zeros((4, 2)), np.zeros((4, 1)))])
    with pytest.raises(FedflatError, match="no classes"):
        figures.partitions(regression)


# -- embeddings ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Keeps the layer that it calls last at the front, and behaves differently while training."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(2, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x))))


def blobs(each=30, seed=0):
    rng = np.random.default_rng(seed)
    centres = 20 * np.eye(3, 2) + np.array([[0, 0], [0, 0], [-20, -20]])
    x = np.concatenate([centre + rng.standard_normal((each, 2)) for centre in centres])
    return torch.tensor(x, dtype=torch.float32), torch.arange(3).repeat_interleave(each)


def test_features_are_what_the_last_called_layer_is_given():
    torch.manual_seed(0)
    model, (x, y) = Odd().train(), blobs(100)
    features = penultimate_features(model, Shard(x, y))
    by_hand = np.tanh(x.numpy() @ model.body.weight.detach().numpy().T + model.body.bias.detach().numpy())
    np.testing.assert_allclose(features, by_hand, atol=1e-6)
    assert model.training and not model.head._forward_pre_hooks


def test_features_of_a_library_model():
    federation = ff.federate("digits", ff.IID(), clients=2)
    run = ff.train(federation, "mlp", rounds=1)
    features = penultimate_features(run.model, federation.test)
    x, _ = next(federation.test.batches(10_000))
    linear = [layer for layer in run.model.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        logits = run.model.eval()(x).numpy()
    ours = features @ linear[-1].weight.detach().numpy().T + linear[-1].bias.detach().numpy()
    np.testing.assert_allclose(ours, logits, atol=1e-5)


def purity(points, labels):
    """The share of points that are nearest to the centre of their own class."""
    centres = np.stack([points[labels == label].mean(axis=0) for label in np.unique(labels)])
    return float((((points[:, None] - centres) ** 2).sum(-1).argmin(1) == labels).mean())


def test_embeddings_are_repeatable_and_keep_clusters_apart():
    x, y = blobs(20)
    first, again = (embed(x.numpy(), perplexity=8, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (60, 2)
    assert purity(first, y.numpy()) == 1.0
    noise = np.random.default_rng(0).standard_normal((60, 2))
    assert purity(embed(noise, perplexity=8), y.numpy()) < 0.8


def test_models_are_embedded_apart_or_together():
    torch.manual_seed(0)
    x, y = blobs(40)
    data = Shard(x, y)
    one, two = Odd(), Odd()
    apart = embedding({"one": one, "two": two}, data, samples=60, perplexity=8)
    assert apart.labels.tolist() == data.thinned(60).stored()[1].tolist()
    alone = embedding({"two": two}, data, samples=60, perplexity=8)
    np.testing.assert_array_equal(apart.points["two"], alone.points["two"])
    together = embedding({"one": one, "two": one}, data, samples=60, perplexity=8, together=True)
    gaps = np.linalg.norm(together.points["one"] - together.points["two"], axis=1)
    assert np.median(gaps) < 0.1 * np.ptp(together.points["one"])  # twins lie together
    wide = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
    with pytest.raises(FedflatError, match=r"different width cannot be embedded together \(one 4, wide 5\)"):
        embedding({"one": one, "wide": wide}, data, samples=60, perplexity=8, together=True)


def test_embeddings_that_cannot_be():
    x, y = blobs(5)
    with pytest.raises(
        FedflatError, match="perplexity=30: give a number above 0 and below that of the samples, 15"
    ):
        embed(x.numpy())
    with pytest.raises(FedflatError, match="diverged"):
        embed(np.full((50, 3), np.nan))
    with pytest.raises(FedflatError, match="nothing to embed"):
        embed(np.ones((50, 3)))
    with pytest.raises(FedflatError, match=r"Bilinear|Sequential calls no nn.Linear"):
        penultimate_features(nn.Sequential(nn.Conv1d(1, 1, 1)), Shard(x[:, None], y))
    with pytest.raises(FedflatError, match="no classes"):
        embedding({"m": Odd()}, Shard(x, y.float()))


def test_embedding_panels_have_the_classes_in_the_same_colours():
    labels = np.array([0, 2, 0, 2, 1])
    points = {name: np.arange(10.0).reshape(5, 2) + shift for name, shift in (("a", 0), ("b", 5))}
    figure = figures.embeddings(Embedding(points, labels), class_names=["cat", "dog", "owl"])
    assert title_of(figure) == ["a", "b"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["cat", "dog", "owl"]
    for axes, given in zip(figure.axes, points.values(), strict=True):
        owls = axes.collections[2]
        np.testing.assert_allclose(owls.get_offsets(), given[labels == 2])
        assert to_hex(owls.get_facecolor()[0]) == COLOURS[2].lower()
    many = Embedding({"a": np.random.default_rng(0).random((200, 2))}, np.arange(200) % 100)
    figure = figures.embeddings(many)
    assert not figure.legends and len(figure.axes) == 2  # a scale instead
    with pytest.raises(FedflatError, match="class_names has 2 names; the labels go up to 2"):
        figures.embeddings(Embedding(points, labels), class_names=["cat", "dog"])


# -- files ---------------------------------------------------------------------------------------------


def test_files_open_have_their_size_and_are_the_same_every_time(tmp_path):
    def draw(width):
        return figures.learning_curves({"a": rows([0.1, 0.5]), "b": rows([0.2, 0.4])}, width=width)

    for width, inches in (("one", 3.4), ("two", 7.0)):
        png = figures.save(draw(width), tmp_path / "new" / f"{width}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") == round(300 * inches)
    svg = figures.save(draw("one"), tmp_path / "a.svg").read_bytes()
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg") and root.get("width") == "244.8pt"
    pdf = figures.save(draw("one"), tmp_path / "a.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-") and pdf.rstrip().endswith(b"%%EOF") and b"/Type3" not in pdf
    for name, before in (("a.svg", svg), ("a.pdf", pdf)):
        assert figures.save(draw("one"), tmp_path / name).read_bytes() == before
    assert b"CreationDate" not in pdf and b"<dc:date>" not in svg


@pytest.mark.slow
def test_notebooks_show_figures_by_themselves():
    from IPython.core.formatters import DisplayFormatter

    history = [row(index, 0.1 * index) for index in range(3)]
    square = Landscape((np.linspace(-1, 1, 3),) * 2, {"A": {"train": np.arange(9.0).reshape(3, 3)}})
    federation = ff.Federation([(torch.zeros(2, 1), torch.tensor([0, 1]))])
    drawn = [
        figures.learning_curves({"A": history}),
        figures.surfaces(square),
        figures.partitions(federation),
    ]
    for figure in drawn:
        shown, _ = DisplayFormatter().format(figure)  # fresh: nothing has said %matplotlib inline
        width = int.from_bytes(shown["image/png"][16:20], "big")
        assert width == pytest.approx(144 * figure.get_figwidth(), abs=1)


def test_files_that_cannot_be_written(tmp_path):
    figure = figures.learning_curves({"a": rows([0.1, 0.5])})
    with pytest.raises(FedflatError, match=r"a.jpg: a figure is written to .png, .svg or .pdf"):
        figures.save(figure, tmp_path / "a.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(FedflatError, match="cannot be written"):
        figures.save(figure, tmp_path / "file" / "a.png")
    with pytest.raises(FedflatError, match="one or two columns wide, not 'three'"):
        figures.learning_curves({"a": rows([0.1, 0.5])}, width="three")
    with pytest.raises(FedflatError, match="no accuracy yet"):
        figures.learning_curves({"a": rows([None])})
    with pytest.raises(FedflatError, match=r"against 'byte'. Did you mean 'bytes'"):
        figures.learning_curves({"a": rows([0.5])}, against="byte")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"matplotlib.*fedflat\[plot\]"):
        figures.learning_curves({"a": rows([0.1, 0.5])})
    with pytest.raises(MissingExtra, match=r"matplotlib.*fedflat\[plot\]"):
        figures.partitions(federation_of([0, 1]))
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(MissingExtra, match=r"scikit-learn.*fedflat\[embedding\]"):
        embed(np.eye(40))


def test_the_style_is_not_the_persons_own_and_leaves_it_alone():
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        axes = figures.learning_curves({"a": rows([0.1, 0.5])}).axes[0]
        assert matplotlib.rcParams["font.size"] == 30
    assert axes.xaxis.label.get_size() < 9 and axes.get_facecolor() == (1, 1, 1, 1)


# -- the command line ----------------------------------------------------------------------------------

KINDS = (
    "curves", "sharpness", "traces", "target", "sensitivity", "partition", "landscape", "surface", "radius",
    "density", "trajectory", "embedding",
)  # fmt: skip


def call(line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr()
    return stop.value.code, told.out + told.err


def test_help_lists_the_kinds_without_torch():
    code = (
        "import sys; sys.argv = ['fedflat', 'figure', '--help']\n"
        "from fedflat.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "set()", result.stderr
    assert all(kind in result.stdout for kind in KINDS)


@pytest.mark.slow
def test_the_page_draws_every_kind(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "figures.md").read_text("utf-8")
    block = page.split("```sh\n")[1].split("```")[0]
    lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    monkeypatch.chdir(tmp_path)
    drawn = set()
    for line in lines:
        code, told = call(line, monkeypatch, capsys)
        assert code == 0, (line, told)
        if line.startswith("fedflat figure"):
            words = shlex.split(line)
            drawn.add(words[2])
            assert (tmp_path / words[words.index("-o") + 1]).stat().st_size > 1000
    assert drawn == set(KINDS)


def test_what_is_not_measured_yet_is_one_sentence(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", "fedavg", 0, rows([0.1, 0.5], scalars={}))
    for kind, command in (
        ("sharpness", "fedflat run --measure sharpness"),
        ("radius", f"fedflat flatness {run} --radius"),
        ("density", f"fedflat flatness {run} --density"),
        ("landscape", f"fedflat landscape {run}"),
        ("surface", f"fedflat landscape {run}"),
        ("traces", "keeps no number of its own"),
    ):
        code, told = call(f"fedflat figure {kind} {run} -o {tmp_path}/x.png", monkeypatch, capsys)
        assert code == 2 and command in told and "Traceback" not in told
    code, told = call(f"fedflat figure curves {tmp_path}/none -o x.png", monkeypatch, capsys)
    assert code == 2 and "There is no directory" in told

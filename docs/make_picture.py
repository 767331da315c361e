"""Compute and draw docs/flat.svg, what flat means: `python docs/make_picture.py`, about a minute.

Two models are trained on the digits that ship with the package, with FedAvg and FedSAM. Then the training loss is
computed on straight lines through each of them, along the same random, filter-normalised directions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedflat as ff

PICTURE = Path(__file__).resolve().parent / "flat.svg"
METHODS = {"FedAvg": "fedavg", "FedSAM": "fedsam(rho=0.2)"}
COLOURS = {"FedAvg": "#d95f02", "FedSAM": "#00897b"}
DIRECTIONS, REACH, POINTS = 20, 1.0, 41
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 330, 60, 20, 20, 55


def curves() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The distance along a direction, and each model's loss there: a row per direction."""
    federation = ff.federate("digits", ff.Dirichlet(0.3), clients=20, seed=0)
    local = ff.LocalSGD(lr=0.05, epochs=5, batch_size=20)
    models = {
        name: ff.train(federation, "mlp", method, local, participation=5, rounds=60, eval_every=60).model
        for name, method in METHODS.items()
    }
    lines = [
        ff.landscape(models, {"train": federation}, REACH, POINTS, dimensions=1, seed=seed)
        for seed in range(DIRECTIONS)
    ]
    return lines[0].axes[0], {n: np.stack([line.losses[n]["train"] for line in lines]) for n in models}


def draw(axis: np.ndarray, losses: dict[str, np.ndarray]) -> str:
    """A line for the mean over directions, a band from the lowest to the highest quarter."""
    top = 1.05 * max(float(np.quantile(values, 0.75, axis=0).max()) for values in losses.values())

    def points(xs: np.ndarray, ys: np.ndarray) -> str:
        across = LEFT + (xs - axis[0]) / (axis[-1] - axis[0]) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - ys / top * (HEIGHT - TOP - BOTTOM)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))

    ground = HEIGHT - BOTTOM
    parts = [
        f'<path class="axis" d="M{LEFT} {TOP}V{ground}H{WIDTH - RIGHT}"/>',
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "distance from the model, in lengths of its filters</text>",
        f'<text class="label" transform="translate(18 {(TOP + ground) / 2}) rotate(-90)" '
        'text-anchor="middle">training loss</text>',
    ]
    for tick in (-1, -0.5, 0, 0.5, 1):
        x = float(points(np.array([tick * REACH]), np.zeros(1)).split(",")[0])
        parts.append(
            f'<text class="tick" x="{x}" y="{ground + 21}" text-anchor="middle">{tick * REACH:g}</text>'
        )
    step = 0.2 if top < 1 else 0.5
    for value in np.arange(0, top, step):
        y = float(points(axis[:1], np.array([value])).split(",")[1])
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for name, values in losses.items():
        low, high = np.quantile(values, 0.25, axis=0), np.quantile(values, 0.75, axis=0)
        band = points(axis, high) + " " + points(axis[::-1], low[::-1])
        parts.append(f'<polygon points="{band}" fill="{COLOURS[name]}" fill-opacity="0.18"/>')
        parts.append(
            f'<polyline points="{points(axis, values.mean(0))}" fill="none" stroke="{COLOURS[name]}" '
            'stroke-width="3" stroke-linejoin="round"/>'
        )
    for number, name in enumerate(losses):
        x, y = LEFT + 170 + 190 * number, TOP + 14
        parts.append(f'<path d="M{x} {y - 5}h28" stroke="{COLOURS[name]}" stroke-width="3"/>')
        parts.append(f'<text class="name" x="{x + 36}" y="{y}">{name}</text>')
    body = "\n  ".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" \
font-family="system-ui, sans-serif">
  <style id="alone">
    svg {{ color: #222; }}
    @media (prefers-color-scheme: dark) {{ svg {{ color: #ddd; }} }}
  </style>
  <style>
    svg .label, svg .tick, svg .name {{ fill: currentColor; font-size: 18px; }}
    svg .tick {{ opacity: 0.8; font-size: 16px; }}
    svg .name {{ font-size: 20px; font-weight: 600; }}
    svg .axis {{ fill: none; stroke: currentColor; stroke-opacity: 0.5; }}
  </style>
  {body}
</svg>
"""


def main() -> None:
    axis, losses = curves()
    PICTURE.write_text(draw(axis, losses), "utf-8")
    for name, values in losses.items():
        ends = values[:, [0, -1]].mean()
        print(
            f"{name}: loss {values[:, POINTS // 2].mean():.3f} at the model, {ends:.3f} at distance {REACH:g}"
        )


if __name__ == "__main__":
    main()

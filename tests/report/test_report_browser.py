"""The report and the watch page in a real browser: headless Chromium, from disk and from the watching server."""

import json
import shutil
import threading

import pytest
from playwright.sync_api import Page, sync_playwright
from synthetic_runs import grow, made_round, made_run

from fedflat.experiments.presets import choose, find_preset
from fedflat.report.content import Content
from fedflat.report.page import write_report
from fedflat.report.server import ReportServer

METHODS = ("fedavg", "fedsam", "fedgmt")
ARGUMENTS = (
    "--no-sandbox",
    "--use-angle=swiftshader",  # 3-D without a graphics card
    "--enable-unsafe-swiftshader",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
EYE = "chart._fullLayout.scene._scene.getCamera().eye"
TURNED_ALIKE = f"""(before) => {{
    const eyes = [...document.querySelectorAll("#surfaces .chart")].map((chart) => {EYE});
    return Math.abs(eyes[0].x - before) > 0.02 && eyes.every((eye) => Math.abs(eye.x - eyes[0].x) < 1e-3);
}}"""
"""Whether all surfaces have turned away from where the first one was, and look the same way."""
EVIL = "</script><img src=x onerror=alert(1)><b>&amp;%{x}"


def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail(
            "These tests drive Chromium, which is not on this machine. Run tools/get-chromium, or install it: "
            "apt-get install chromium."
        )
    return found


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        yield browser
        browser.close()


class Visit:
    """A page, what it complained about, and what it asked of a network."""

    def __init__(self, browser, address: str, **options) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(120_000)  # on a machine that is busy with other things too
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#curves-chart .main-svg")

    def _heard(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(text)

    @property
    def outside(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]


@pytest.fixture
def visit(browser):
    visits = []

    def go(address: str, **options) -> Visit:
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield go
    for one in visits:
        complaints = one.complaints
        one.context.close()
        assert complaints == []


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Three methods with two seeds, with all that can be measured."""
    place = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        for seed in (0, 1):
            made_run(place / method / f"seed-{seed}", method, seed, flatness=True, landscape=seed == 0)
    made_run(place / "evil", EVIL, 0, done=20)
    made_run(place / "empty", "scaffold", 0, done=0)
    write_report([place], place / "report.html")
    return f"file://{place / 'report.html'}"


@pytest.fixture(scope="module")
def desk(browser, report):
    """The report on a desktop, opened once."""
    one = Visit(browser, report)
    yield one
    one.context.close()
    assert one.complaints == [] and one.outside == []


@pytest.fixture
def page(desk) -> Page:
    """The report with nothing chosen yet."""
    page = desk.page
    page.fill("#filter", "")
    page.uncheck("#together")
    page.click("#show-all")
    page.select_option("#quantity", "accuracy")
    page.select_option("#axis", "rounds")
    page.locator("#smooth").fill("1")
    page.uncheck("#logarithmic")
    return page


def column(page: Page, title: str, table: str = "#table") -> list[str]:
    """The texts of a column, from the top."""
    return page.evaluate(
        """([table, title]) => {
            const heads = [...document.querySelectorAll(`${table} thead th`)].map((th) => th.innerText.trim());
            const place = heads.findIndex((head) => head.startsWith(title));
            const rows = [...document.querySelectorAll(`${table} tbody tr`)];
            return rows.map((row) => row.children[place].innerText.trim());
        }""",
        [table, title],
    )


def traces(page: Page, chart: str = "#curves-chart") -> list[dict]:
    """Lines that can be hovered."""
    return page.evaluate(
        """(chart) => document.querySelector(chart).data.filter((trace) => trace.hoverinfo !== "skip")
            .map((trace) => ({ name: trace.name, x: [...trace.x], y: [...trace.y] }))""",
        chart,
    )


def until(page: Page, expression: str, seconds: float = 120) -> None:
    """Wait for something to become true, in a way that the page's own policy has no say in."""
    for _ in range(int(10 * seconds)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{expression} did not become true.")


def head(page: Page, title: str):
    return page.locator("#table thead th", has_text=title)


def values(texts: list[str]) -> list[float]:
    return [float(text.split(" ")[0]) for text in texts if text != "–"]


def test_the_table_sorts_by_click_and_by_keyboard(page):
    head(page, "Accuracy").locator("button").click()
    assert head(page, "Accuracy").get_attribute("aria-sort") == "descending"
    texts = column(page, "Accuracy")
    assert values(texts) == sorted(values(texts), reverse=True)
    assert texts[-1] == "–"  # what has no number comes last, either way
    head(page, "Accuracy").locator("button").press("Enter")
    assert head(page, "Accuracy").get_attribute("aria-sort") == "ascending"
    texts = column(page, "Accuracy")
    assert values(texts) == sorted(values(texts)) and texts[-1] == "–"
    assert page.evaluate("document.activeElement.innerText").startswith(
        "Accuracy"
    )  # the keyboard stays there
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert head(page, "± within").get_attribute("aria-sort") == "descending"
    head(page, "Run").locator("button").click()
    names = [name.lower() for name in column(page, "Run")]
    assert names == sorted(names)


def test_the_filter_filters_everything(page):
    assert len(column(page, "Run")) == 8
    page.fill("#filter", "fedgmt seed 1")
    assert column(page, "Run") == ["fedgmt · seed 1"]
    assert [trace["name"] for trace in traces(page)] == ["fedgmt · seed 1"]
    assert page.locator("#legend button").count() == 1
    assert page.locator("#count").inner_text() == "8 runs, 1 shown."
    page.fill("#filter", "nothing like it")
    assert column(page, "Run") == [] and traces(page) == []
    assert "hidden" in page.locator("#curves-caption").inner_text()


def test_runs_are_hidden_in_the_table_and_in_the_legend(page):
    before = len(traces(page))
    page.get_by_label("Show fedavg · seed 0 in the charts").uncheck()
    assert len(traces(page)) == before - 1
    button = page.locator("#legend button", has_text="fedavg · seed 0")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert len(traces(page)) == before
    page.click("#show-none")
    assert traces(page) == []
    page.click("#show-all")
    assert len(traces(page)) == before


def test_hovering_shows_the_right_number(page):
    page.fill("#filter", "fedsam seed 1")
    page.locator("#curves-chart").scroll_into_view_if_needed()
    index = 29
    place = page.evaluate(
        """(index) => {
            const chart = document.getElementById("curves-chart"), trace = chart.data[0];
            const { left, top } = chart.getBoundingClientRect();
            const place = (axis, value) => axis._offset + axis.d2p(value);
            const { xaxis, yaxis } = chart._fullLayout;
            return [left + place(xaxis, trace.x[index]), top + place(yaxis, trace.y[index])];
        }""",
        index,
    )
    page.mouse.move(place[0] - 30, place[1])
    page.mouse.move(*place, steps=4)
    page.wait_for_selector("#curves-chart .hoverlayer text")
    text = " ".join(page.locator("#curves-chart .hoverlayer text").all_text_contents())
    expected = float(f"{made_round('fedsam', 1, index)['accuracy']:.4g}")
    assert f"{expected:.2%}" in text, text
    assert "30" in text


def test_the_slider_smooths_by_the_mean_of_the_last_rounds(page):
    page.fill("#filter", "fedsam seed 1")
    (raw,) = traces(page)
    page.locator("#smooth").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.locator("#smooth-value").inner_text() == "mean of 5"
    (smooth,) = traces(page)
    assert smooth["x"] == raw["x"]
    expected = [sum(raw["y"][max(0, n - 4) : n + 1]) / min(n + 1, 5) for n in range(50)]
    assert smooth["y"] == pytest.approx(expected)
    assert smooth["y"] != pytest.approx(raw["y"])


def test_axes_and_quantities_can_be_chosen(page):
    page.fill("#filter", "fedsam seed 1")
    page.select_option("#axis", "bytes")
    assert traces(page)[0]["x"][9] == 10 * 1_500_000
    page.select_option("#axis", "passes")
    assert traces(page)[0]["x"][9] == 10 * 300
    page.select_option("#axis", "seconds")
    assert traces(page)[0]["x"][9] == 2.5
    page.select_option("#quantity", "measures.distance")
    assert traces(page)[0]["y"][9] == pytest.approx(0.3)
    page.check("#logarithmic")
    assert page.evaluate("document.getElementById('curves-chart').layout.yaxis.type") == "log"


def test_seeds_together_are_means(page):
    page.check("#together")
    page.fill("#filter", "fedgmt")
    assert column(page, "Experiment") == ["fedgmt"] and column(page, "Seeds") == ["2"]
    assert " ± " in column(page, "Accuracy")[0]
    (mean,) = traces(page)
    both = [made_round("fedgmt", seed, 19)["accuracy"] for seed in (0, 1)]
    assert mean["y"][19] == pytest.approx(sum(both) / 2, rel=1e-3)


def drag_until(page: Page, expression: str) -> None:
    """Drag the first surface, again if need be: a busy machine draws too slowly to see the first time."""
    for _ in range(8):
        box = page.locator("#surfaces .chart").first.bounding_box()
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 70, middle[1] + 10, steps=6)
        page.mouse.up()
        for _ in range(100):
            if page.evaluate(expression):
                return
            page.wait_for_timeout(100)
    raise AssertionError(f"{expression} did not become true.")


@pytest.mark.slow
def test_surfaces_turn_together(page):
    page.locator("#surfaces").scroll_into_view_if_needed()
    until(page, "document.querySelectorAll('#surfaces canvas').length >= 3")
    eyes = f"() => [...document.querySelectorAll('#surfaces .chart')].map((chart) => {EYE})"
    ranges = page.evaluate(
        "[...document.querySelectorAll('#surfaces .chart')].map((chart) => chart.layout.scene.zaxis.range)"
    )
    assert len(ranges) == 3 and ranges[0] == ranges[1] == ranges[2]
    before = page.evaluate(eyes)
    drag_until(page, f"({TURNED_ALIKE})({before[0]['x']})")
    after = page.evaluate(eyes)
    assert abs(after[0]["x"] - before[0]["x"]) > 0.05
    for eye in after[1:]:
        assert [eye[axis] for axis in "xyz"] == pytest.approx([after[0][axis] for axis in "xyz"], abs=1e-3)
    page.click("#surface-reset")  # from straight above, where a slow drag may end, keys do not move the eye
    until(page, f"({eyes})().every((eye) => Math.abs(eye.x - {before[0]['x']}) < 1e-3)")
    page.locator("#surfaces .chart").nth(1).focus()
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(3000)
        if page.evaluate(f"({TURNED_ALIKE})({before[0]['x']})"):
            break
    turned = page.evaluate(eyes)
    assert abs(turned[0]["x"] - before[0]["x"]) > 0.02
    assert turned[0]["x"] == pytest.approx(turned[2]["x"], abs=1e-3)
    page.select_option("#surface-part", "test")
    page.check("#surface-log")
    page.wait_for_timeout(300)
    kept = page.evaluate(eyes)
    assert kept[0]["x"] == pytest.approx(turned[0]["x"], abs=1e-2)  # the view stays as it was turned
    titles = page.evaluate(
        "document.querySelector('#surfaces .chart').layout.scene.zaxis.ticktext.every((text) => Number(text) > 0)"
    )
    assert titles


def test_flatness_beside_accuracy(page):
    assert "sharpness" in page.locator("#flatness-table thead").inner_text()
    page.select_option("#measure", "sharpness")
    points = page.evaluate("document.getElementById('scatter').data.map((trace) => [trace.x[0], trace.y[0]])")
    assert len(points) == 6 and min(x for x, _ in points) == pytest.approx(0.06)
    widths = page.evaluate(
        """["scatter", "radius", "density"].map((id) => document.getElementById(id))
            .map((chart) => Math.abs(chart._fullLayout.width - chart.clientWidth))"""
    )
    assert max(widths) <= 1  # each keeps to its place
    assert page.locator("#radius-figure").is_visible() and page.locator("#density-figure").is_visible()


def test_names_stay_names(page):
    assert page.locator("#table").get_by_text(EVIL, exact=False).count() >= 1
    assert page.locator("img").count() == 0
    assert "&lt;/script&gt;" in next(trace["name"] for trace in traces(page) if "script" in trace["name"])


def test_what_is_missing_is_on_the_page(page):
    notes = page.locator("#notes").inner_text()
    assert "Not finished: 20 of 50 rounds." in notes and "No round is finished yet." in notes


@pytest.mark.slow
def test_what_makes_runs_unlike_a_papers_is_on_the_page(visit, tmp_path):
    (cell,) = choose(find_preset("fedwmsam/table1").cells(), ["fashion-mnist/dirichlet-0.1"], ["FedAvg"])
    settings = {key: value for key, value in cell.content.items() if key != "rounds"}
    for seed, notes in enumerate([["This copy is a part."], []]):
        run = made_run(tmp_path / str(seed), seed=seed, rounds=500, **settings)
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"notes": notes}))
    write_report([tmp_path], tmp_path / "report.html", splits=False)
    page = visit(f"file://{tmp_path / 'report.html'}").page
    notes = page.locator("#notes").inner_text()
    assert "1 run with data or settings unlike a paper's" in notes and "This copy is a part." in notes
    assert [gap.endswith(" ‡") for gap in column(page, "Difference", "#papers-table")] == [True]
    assert "‡ The data or the protocol are not the paper's: This copy is a part." in (
        page.locator("#papers-hint").inner_text()
    )


@pytest.mark.slow
def test_a_phone_needs_no_sideways_scrolling(visit, report):
    one = visit(
        report, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2
    )
    one.page.locator("#surfaces").scroll_into_view_if_needed()
    one.page.wait_for_selector("#surfaces canvas")
    for opened in one.page.locator("#repeat summary").all()[:2]:
        opened.click()
    widths = one.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert widths == [390, 390] and one.outside == []
    small = one.page.evaluate(
        "[...document.querySelectorAll('#curves .chart, #surfaces .chart')].map((chart) => chart.clientWidth)"
    )
    assert all(250 < width <= 390 for width in small)
    one.page.locator("#table thead button").nth(2).tap()
    assert one.page.locator("#table th[aria-sort=descending]").count() == 1


@pytest.mark.slow
def test_dark_follows_the_system_and_the_button(visit, report):
    page = visit(report, color_scheme="dark").page
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    assert max(map(int, dark[4:-1].split(","))) < 60
    line = page.evaluate("document.getElementById('curves-chart').data.at(-1).line.color")
    page.click("#theme")
    assert min(map(int, page.evaluate(ground)[4:-1].split(","))) > 230
    assert page.evaluate("document.getElementById('curves-chart').data.at(-1).line.color") != line


@pytest.mark.slow
def test_sixty_runs_stay_usable(visit, tmp_path):
    methods = ["fedavg", "fedsam", "fedgmt", "fedwmsam", "fednsam", "scaffold"]
    for number in range(60):
        made_run(tmp_path / f"{number:02d}", methods[number % 6], number // 6, rounds=100)
    write_report([tmp_path], tmp_path / "report.html", splits=False)
    page = visit(f"file://{tmp_path / 'report.html'}").page
    assert page.is_checked("#together") and len(traces(page)) == 6
    page.uncheck("#together")
    assert len(traces(page)) == 60
    assert page.locator("#legend button").count() == 13
    page.locator("#legend button", has_text="All 60").click()
    assert page.locator("#legend button").count() == 61


@pytest.mark.slow
def test_watching_keeps_choices_while_a_run_grows(visit, tmp_path):
    run = made_run(tmp_path / "a", "fedsam", 0, done=10, landscape=True)
    made_run(tmp_path / "b", "fedavg", 0, landscape=True)
    with ReportServer(Content([tmp_path], splits=False), "127.0.0.1", 0, 0.3) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            one = visit(server.address)
            page = one.page
            page.locator("#surfaces").scroll_into_view_if_needed()
            page.wait_for_selector("#surfaces canvas")
            page.locator("#surfaces .chart").first.focus()
            page.keyboard.press("ArrowLeft")
            page.select_option("#axis", "seconds")
            page.fill("#filter", "fed")
            page.locator("#smooth").fill("3")
            head(page, "Accuracy").locator("button").click()
            page.get_by_label("Show fedavg in the charts").uncheck()
            eye = f"((chart) => {EYE}.x)(document.querySelector('#surfaces .chart'))"
            turned = page.evaluate(eye)
            grow(run, "fedsam", 0, range(10, 25))
            made_run(tmp_path / "new" / "c", "fedgmt", 0, done=5)
            until(page, "document.querySelectorAll('#table tbody tr').length === 3")
            until(page, "document.getElementById('table').innerText.includes('25 of 50')")
            assert {trace["name"]: len(trace["x"]) for trace in traces(page)} == {"fedsam": 25, "fedgmt": 5}
            assert traces(page)[0]["x"][9] == 2.5
            assert page.input_value("#filter") == "fed" and page.input_value("#smooth") == "3"
            assert head(page, "Accuracy").get_attribute("aria-sort") == "descending"
            assert page.evaluate(eye) == pytest.approx(turned, abs=1e-3)
            assert page.locator("#live").inner_text() == "live"
            assert all(url.startswith((server.address, "data:", "blob:")) for url in one.requests)
        finally:
            server.shutdown()
            thread.join()
        server.server_close()
        until(page, "document.getElementById('live').innerText.includes('no answer')")
        one.complaints.clear()  # the browser itself complains about a server that is gone
        page.goto("about:blank")
        one.complaints.clear()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 3, 5, 12])
def test_ticks_of_few_rounds_are_distinct_whole_numbers(rounds: int, tmp_path, visit):
    write_report([made_run(tmp_path / "run", rounds=rounds)], tmp_path / "report.html")
    page = visit(f"file://{tmp_path / 'report.html'}").page
    ticks = page.locator("#curves-chart .xtick").all_text_contents()
    assert len(ticks) > 1 and len(set(ticks)) == len(ticks)
    assert all(tick.isdecimal() for tick in ticks)


@pytest.mark.slow
def test_what_clients_reported_is_named_so(tmp_path, visit):
    """Of a real federation whose server has no test set; beside it, later, a run whose server has one."""
    place = made_run(tmp_path / "runs" / "clinics", "scaffold", rounds=3, dataset="on-nodes")
    about = json.loads((place / "run.json").read_text())
    about |= {
        "model": "mlp",
        "how": {"engine": "flower"},
        "federation": {"clients": 2, "shape": [3], "classes": 2},
    }
    (place / "run.json").write_text(json.dumps(about))
    each = {
        "0": {"accuracy": 0.5, "loss": 1.0, "samples": 10.0},
        "1": {"accuracy": 0.7, "loss": 0.8, "samples": 10.0},
    }
    reported = {"samples": 20.0, "accuracy": 0.6, "loss": 0.9, "worst_accuracy": 0.5, "clients": each}
    none = {"accuracy": None, "loss": None, "client_accuracy": None, "measures": {}, "reported": reported}
    rows = [{**made_round("scaffold", 0, index), **none} for index in range(3)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    page = visit(f"file://{tmp_path / 'report.html'}").page
    assert column(page, "Accuracy reported by clients, last 10") == ["60.00"]
    assert column(page, "Loss reported by clients") == ["0.9"]
    assert page.locator("#curves-chart .ytitle").text_content() == "accuracy reported by clients"
    assert "each client tests the model that it receives" in page.inner_text("#legend-hint")
    for section in ("#flatness-body", "#surfaces-body", "#splits-body"):
        assert "on the clients' own nodes" in page.inner_text(section)
    assert "flwr run . federation" in page.inner_text("#repeat-body")
    assert page.locator("#notes li").count() == 0
    made_run(tmp_path / "runs" / "simulated", "fedavg", rounds=3)
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    page = visit(f"file://{tmp_path / 'report.html'}").page
    assert "60.00" in column(page, "Accuracy, last 10")
    assert page.locator("#curves-chart .ytitle").text_content() == "accuracy"
    hint = page.inner_text("#legend-hint")
    assert "of scaffold" in hint and "are reported by clients" in hint

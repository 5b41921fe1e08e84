"""The page in a real browser: it fits any width and any light, draws its charts, and asks nobody for anything."""

import json
import re

import pytest
from chromium import running_browser
from made_runs import add_evaluation, add_timing, add_verification, add_video, make_group, make_run, summary_of

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from lockstep.report.page import write_report
from lockstep.runs.curves import METRIC

WIDTHS = (320, 360, 800, 1280)
PAPER = 688
"""Of a sheet of A4 between its margins, in pixels of 1/96 inch."""
TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
DRAWN = """[...document.querySelectorAll('figure[data-chart]')].filter(figure => {
    const canvas = figure.querySelector('.plot canvas'), picture = figure.querySelector('.static svg');
    const seen = [canvas, picture].filter(each => each && each.getBoundingClientRect().width > 150
        && each.getBoundingClientRect().height > 80);
    return seen.length == 1;
}).length"""
INKED = """[...document.querySelectorAll('.plot canvas')].filter(canvas => {
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.some((value, at) => at % 4 == 3 && value > 200);
}).length"""
CONTRAST = """(() => {
    const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const numbers = color => {
        paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1);
        return [...paint.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = each => {
        for (; each; each = each.parentElement) {
            const back = numbers(getComputedStyle(each).backgroundColor);
            if (back[3] > 250) return back;
        }
        return [255, 255, 255];
    };
    const out = [];
    for (const each of document.querySelectorAll('h1,h2,h3,p,dt,dd,td,th,a,small,code,li,figcaption,summary,.pill')) {
        if (!each.textContent.trim() || !each.getClientRects().length || each.matches('.skip')) continue;
        const [a, b] = [light(numbers(getComputedStyle(each).color)), light(behind(each))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) out.push(`${each.tagName}.${each.className} ${each.textContent.trim().slice(0, 20)} ${ratio}`);
    }
    return out;
})()"""


@pytest.fixture(scope="module")
def browser():
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page about one run with everything, one about several, and one about a run that has next to nothing."""
    place = tmp_path_factory.mktemp("pages")
    long = "a_rather_long_name_of_a_run_that_somebody_has_made_up_from_all_its_settings_lr0.0003_seed17"
    restart = {"time": "2026-01-31T13:00:00+00:00", "why": "rank 1 was killed " * 5, "ranks_before": 2}
    run = make_run(place / long, summary_of(restarts=[restart], missing_rows=[[4, 6]]), env={"kwargs": {"a": "b" * 90}})
    add_evaluation(run, [1.0, 2.0, 2.0, 9.5])
    add_timing(run)
    add_video(run, 256)
    add_verification(run, config={"seed": 1})
    other, group = make_run(place / "<script>console.error(1)", scale=2.0, seed=3), make_group(place / "many")
    bare = make_run(place / "bare", {})
    longest = make_run(place / ("a" * 200))
    (bare / "metrics.jsonl").unlink()
    asked = {"one": [run], "several": [run, other, group], "bare": [bare], "longest": [longest, other]}
    return {
        name: write_report([(path, path.name) for path in runs], place / f"{name}.html") for name, runs in asked.items()
    }


@pytest.mark.parametrize("name", ["one", "several", "bare"])
def test_it_fits_every_width_asks_nobody_and_says_nothing(name, pages, browser):
    with browser.visit(pages[name]) as visit:
        for width in WIDTHS:
            visit.resize(width)
            assert not visit.ask(TOO_WIDE), width
            figures = visit.ask("document.querySelectorAll('figure[data-chart]').length")
            assert visit.ask(DRAWN) == figures == (0 if name == "bare" else visit.ask(INKED))
        visit.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
        for width in WIDTHS:
            visit.resize(width)
            assert not visit.ask(TOO_WIDE), width
        assert visit.requests == []
        assert [error for error in visit.errors if "willReadFrequently" not in error] == []  # which INKED is told


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_by_any_light(scheme, pages, browser):
    with browser.visit(pages["several"], prefers_color_scheme=scheme) as visit:
        visit.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert visit.ask(CONTRAST) == []
        back = visit.ask("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, re.findall(r"\d+", back))) < 150
        assert dark == (scheme == "dark")


def test_a_long_name_leaves_room_for_results(pages, browser):
    with browser.visit(pages["longest"]) as visit:
        visit.resize(1280)
        names = "[...document.querySelectorAll('#results tbody th')].map(each => each.getBoundingClientRect().width)"
        assert 200 < max(visit.ask(names)) < 400
        assert visit.ask("document.querySelector('#results td .pill').getBoundingClientRect().right") < 1280


def test_charts_follow_the_light(pages, browser):
    ink = "getComputedStyle(document.querySelector('.legend .swatch')).backgroundColor"
    pixels = "document.querySelector('.plot canvas').toDataURL()"
    with browser.visit(pages["one"], prefers_color_scheme="light") as visit:
        before = visit.ask(ink), visit.ask(pixels)
        visit.emulate(prefers_color_scheme="dark")
        after = visit.ask(ink), visit.ask(pixels)
        assert before[0] != after[0]
        assert before[1] != after[1]


def test_without_scripts_and_on_paper_there_are_pictures(pages, browser):
    size = "(({width, height}) => [width, height])(document.querySelector('.static svg').getBoundingClientRect())"
    with browser.visit(pages["one"], scripts=False) as visit:
        picture = visit.browser.call("DOM.getDocument", {"depth": 0}, visit.session)["root"]["nodeId"]
        words = {"nodeId": picture, "selector": ".static svg"}
        node = visit.browser.call("DOM.querySelector", words, visit.session)["nodeId"]
        box = visit.browser.call("DOM.getBoxModel", {"nodeId": node}, visit.session)["model"]
        assert min(box["width"], box["height"]) > 100
    with browser.visit(pages["one"]) as visit:
        assert visit.ask(size) == [0, 0]
        visit.emulate("print")
        assert min(visit.ask(size)) > 100
        assert visit.ask("document.querySelector('.plot').getBoundingClientRect().height") == 0


@pytest.mark.parametrize("name", ["one", "several"])
def test_tables_are_whole_on_paper(name, pages, browser):
    """On a screen a wide table is scrolled; what stands outside of a sheet is lost."""
    cut = """[...document.querySelectorAll('.scroll')].filter(each =>
        each.scrollWidth > each.clientWidth + 1 || getComputedStyle(each).overflowX !== 'visible').length"""
    with browser.visit(pages[name]) as visit:
        visit.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
        visit.resize(PAPER)
        assert visit.ask(cut) > 0
        visit.emulate("print")
        assert visit.ask(cut) == 0


def test_a_chart_zooms_tells_values_and_changes_what_it_is_over(pages, browser):
    plot = "document.querySelector('figure[data-chart]').plot"
    span = f"[{plot}.scales.x.min, {plot}.scales.x.max]"
    with browser.visit(pages["several"]) as visit:
        assert visit.ask(span) == [256, 10240]
        visit.ask("document.querySelector('[data-do=in]').click()")
        visit.settle()
        assert visit.ask(span) == [2752, 7744]
        visit.ask("document.querySelector('[data-do=all]').click()")
        visit.settle()
        assert visit.ask(span) == [256, 10240]
        visit.ask(f"{plot}.setCursor({{left: {plot}.valToPos(2560, 'x'), top: 10}})")
        told = visit.ask(
            "[...document.querySelector('.legend').querySelectorAll('.value')].map(each => each.textContent)"
        )
        assert told == ["10", "20", "20"]
        assert visit.ask("document.querySelector('.at').textContent") == "environment steps: 2,560"
        visit.ask("document.getElementById('over').value = 'iterations'")
        visit.ask("document.getElementById('over').dispatchEvent(new Event('change'))")
        assert visit.ask(span) == [1, 40]
        assert visit.errors == []


def test_charts_line_up_and_words_are_broken_between_spaces(pages, browser):
    ends = "[...document.querySelectorAll('figure.large')].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
    torn = """[...document.querySelectorAll('.word')].filter(word =>
        word.getClientRects().length > 1 || (word.textContent.length < 20
            && word.getBoundingClientRect().height > 1.9 * parseFloat(getComputedStyle(word).fontSize))).length"""
    with browser.visit(pages["one"]) as visit:
        assert visit.ask(ends) == [[256, 10240]] * 2
        assert visit.ask(f"{torn} + document.querySelectorAll('.word').length") > 5
        for width in WIDTHS:
            visit.resize(width)
            assert visit.ask(torn) == 0, width
        visit.ask("document.querySelectorAll('.word').forEach(word => { word.style.display = 'inline' })")
        found = 0
        for width in range(320, 420, 10):
            visit.resize(width)
            found += visit.ask(torn)
        assert found > 0


LABELS = """[...document.querySelectorAll('figure[data-chart]')].map(({plot}) => {
    plot.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    const {_values: labels, _size: size} = plot.axes[1];
    const widths = labels.map(label => plot.ctx.measureText(label).width / devicePixelRatio);
    return [labels, size - Math.max(...widths), plot.bbox.left / devicePixelRatio - size];
})"""


@pytest.mark.parametrize("scale", [1e12, -1e12, 1e-7, 1e18, 1.0])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_labels_of_an_axis_are_whole_and_differ(tmp_path, browser, scale, offset):
    run = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for n, row in enumerate(rows):
        row[METRIC] = offset + (1.0 + 0.001 * n) * scale
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with browser.visit(write_report([(run, "run")], tmp_path / "page.html")) as visit:
        labels, room, left = visit.ask(LABELS)[0]
        assert len(set(labels)) == len(labels) > 2
        assert room >= 10
        assert left >= -1
        assert visit.errors == []


def test_no_two_of_many_runs_look_alike(tmp_path, browser):
    runs = [(make_run(tmp_path / f"run{n}", scale=1.0 + n), f"run{n}") for n in range(30)]
    lines = """document.querySelector('figure[data-chart]').plot.series.slice(1)
        .map(({stroke, dash, _stroke}) => [stroke(), dash])"""
    swatches = """[...document.querySelectorAll('figure[data-chart]')[0].querySelectorAll('.swatch')].map(each =>
        (({backgroundColor: color, backgroundImage: image, backgroundSize: size}) => [color, image, size])(
            getComputedStyle(each)))"""
    page = write_report(runs, tmp_path / "page.html")
    with browser.visit(page) as visit:
        assert len(set(map(str, visit.ask(lines)))) == 30
        assert len(set(map(str, visit.ask(swatches)))) == 30
        assert visit.errors == []
    picture = re.search(r"<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert picture is not None
    strokes = re.findall(r'style="fill: none; (stroke(?:-dasharray[^;]*; stroke)?[^"]*var\(--c\d\)[^"]*)"', picture[0])
    assert len(set(strokes)) == 30


def test_a_line_has_no_value_behind_its_end(tmp_path, browser):
    long, short = make_run(tmp_path / "long"), make_run(tmp_path / "short")
    rows = (short / "metrics.jsonl").read_text().splitlines()
    (short / "metrics.jsonl").write_text("\n".join(rows[:20]) + "\n")
    plot = "document.querySelector('figure[data-chart]').plot"
    values = "[...document.querySelector('.legend').querySelectorAll('.value')].map(each => each.textContent)"
    with browser.visit(write_report([(long, "long"), (short, "short")], tmp_path / "page.html")) as visit:
        for step, told in ((5120, ["20", "20"]), (5376, ["21", "–"])):
            visit.ask(f"{plot}.setCursor({{left: {plot}.valToPos({step}, 'x'), top: 10}})")
            assert visit.ask(values) == told


# --- what the checks find ---------------------------------------------------------------------------------------------


@pytest.fixture
def spoilt(pages, tmp_path):
    """A page of one run with something put before the end of its body, without its policy if that is asked for."""

    def make(more="", policy=True, replaced=("", "")):
        text = pages["one"].read_text().replace("</body>", f"{more}</body>").replace(*replaced)
        if not policy:
            text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        (tmp_path / "spoilt.html").write_text(text)
        return tmp_path / "spoilt.html"

    return make


def test_an_image_from_outside_is_found_and_the_policy_stops_it(spoilt, browser):
    image = '<img src="https://example.com/pixel.png" alt="">'
    with browser.visit(spoilt(image, policy=False)) as visit:
        assert visit.requests == ["https://example.com/pixel.png"]
    with browser.visit(spoilt(image)) as visit:
        assert any("Content Security Policy" in error for error in visit.errors)


def test_a_foreign_script_does_not_run(spoilt, browser):
    script = "<script>document.title = 'taken'</script>"
    with browser.visit(spoilt(script)) as visit:
        assert visit.ask("document.title") != "taken"
        assert visit.errors
    with browser.visit(spoilt(script, policy=False)) as visit:
        assert visit.ask("document.title") == "taken"


def test_a_page_that_is_too_wide_pale_or_broken_is_found(spoilt, browser):
    with browser.visit(
        spoilt('<p style="min-width: 2000px; color: #ccc; background: #fff">pale</p>'), width=1280
    ) as visit:
        assert visit.ask(TOO_WIDE)
        assert [line.split()[1] for line in visit.ask(CONTRAST)] == ["pale"]
    with browser.visit(spoilt(replaced=("uPlot.join", "uPlot.jion"), policy=False)) as visit:
        assert visit.errors
        assert visit.ask(INKED) == 0
    hidden = "<style>.plot canvas { display: none !important }</style>"
    with browser.visit(spoilt(hidden)) as visit:
        assert visit.ask(DRAWN) == 0

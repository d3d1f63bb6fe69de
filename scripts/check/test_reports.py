"""Makes the three report pages of larder on the demo model and checks them in a real Chromium.

    pip install playwright axe-playwright-python
    python scripts/check/test_reports.py --pictures /tmp

At widths of 1200 and 390 px, light and dark: nothing is cut off, every column sorts by click and by key, charts and heat maps say
values by pointer and by key, axe finds nothing, the console stays empty, nothing is requested, and each number equals that of the
CSV or JSON that the same command wrote. Names of models and texts that hold HTML stay text. Prints `ok` for each check; exits with 1 if
one fails.
"""

import argparse
import csv
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / "models/demo", ROOT / "models/demo/held-out.txt"
TRACE = ROOT / "tests/traces/gpt-oss-slice.safetensors"
WIDTHS, SCHEMES = (1200, 390), ("light", "dark")
PAPER_WIDTH = 1032  # A4 across, without margins
HOSTILE = "<img src=x onerror=window.harmed=1>'\" & “x”"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--larder", type=pathlib.Path, default=ROOT / "target/release/larder")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", type=pathlib.Path, help="folder for the screenshots REPORT-WIDTH-SCHEME.png")
    parser.add_argument("--runs", type=int, default=6, help="runs of `larder report`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        larder = Larder(args.larder, pathlib.Path(folder))
        pages = {"speed": larder.speed(args.runs), "tradeoffs": larder.tradeoffs(), "sweep": larder.sweep()}
        for name, (path, numbers) in pages.items():
            check(browser, name, path, numbers, args.pictures)
        hostile(browser, larder)
        browser.close()


class Larder:
    """Runs larder; each method returns the path of a page and the numbers that the command wrote beside it."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def __call__(self, *args):
        return subprocess.run([self.program, *map(str, args)], check=True, capture_output=True, text=True).stdout

    def speed(self, runs, model=MODEL, name="speed.html"):
        path = self.folder / name
        out = self("report", f"{model}=8", "-r", runs, "-n", 16, "--html", path, "--json", "--force")
        rows = [{"routing": setting["routing"]} | {key: found["value"] for key, found in setting["summary"].items()}
                for store in json.loads(out)["stores"] for setting in store["settings"]]
        return path, rows

    def tradeoffs(self, model=MODEL, text=TEXT, name="tradeoffs.html", tokens=256):
        path, table = self.folder / name, self.folder / (name + ".csv")
        self("eval", "sweep", text, "-m", model, "--tokens", tokens, "--chunk", 64, "--sizes", "8,16", "--lambda", "0.1,0.4",
             "--budget", "0.01", "--cumsum", "0.7", "--prune", "2", "--csv", table, "--html", path, "--force")
        return path, [row for row in read(table) if row["perplexity"]]

    def sweep(self):
        path, table = self.folder / "sweep.html", self.folder / "sweep.csv"
        self("lab", "sweep", TRACE, "--csv", table, "--html", path, "--expert-bytes", "13M", "--force")
        return path, read(table)


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Report:
    """A report in a new window; at the end its console must be empty, and only the file itself may have been requested."""

    def __init__(self, browser, path, width, scheme):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page, self.wrong = self.context.new_page(), []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: request.url == path.as_uri() or self.wrong.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self):
        return self.page

    def __exit__(self, kind, *_):
        self.context.close()
        assert kind or not self.wrong, self.wrong


def check(browser, name, path, numbers, pictures):
    for width in WIDTHS:
        for scheme in SCHEMES:
            with Report(browser, path, width, scheme) as page:
                fits(page)
                accessible(page)
                if pictures:
                    page.screenshot(path=pictures / f"{name}-{width}-{scheme}.png", full_page=True)
        with Report(browser, path, width, "light") as page:
            equal(page, numbers)
            sorts(page)
            says_by_pointer(page)
            says_by_key(page)
            legends(page)
            heat_maps(page)
            folds(page)
        print(f"ok {name} at {width} px", flush=True)
    prints(browser, path, pictures and pictures / f"{name}.pdf")
    print(f"ok {name} on paper", flush=True)


CUT_OFF = """() => {
    const wrong = [];
    const name = (e) => e.tagName + '.' + (e.getAttribute('class') ?? '') + ': ' + e.textContent.trim().slice(0, 40);
    if (document.scrollingElement.scrollWidth > innerWidth) wrong.push('the document is wider than the window');
    for (const e of document.querySelectorAll('body *')) {
        if (e.closest('caption, script, svg, title') || !e.checkVisibility()) continue;
        const scrolls = e.classList.contains('scroll');
        if (!scrolls && getComputedStyle(e).display !== 'inline' && e.scrollWidth > e.clientWidth + 1) wrong.push(name(e));
        const box = e.getBoundingClientRect();
        if (!e.closest('.scroll') && (box.left < 0 || box.right > innerWidth + 0.5)) wrong.push('beside the window: ' + name(e));
    }
    for (const cell of document.querySelectorAll('th, td')) if (cell.offsetHeight > 100) wrong.push('squeezed: ' + name(cell));
    for (const text of document.querySelectorAll('svg text')) {
        const [inner, outer] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
        const beyond = Math.max(outer.left - inner.left, inner.right - outer.right, outer.top - inner.top, inner.bottom - outer.bottom);
        if (beyond > 1) wrong.push('beyond its figure: ' + name(text));
        if (inner.height < 9) wrong.push('too small: ' + name(text));
    }
    return wrong;
}"""


def fits(page):
    wrong = page.evaluate(CUT_OFF)
    assert not wrong, wrong[:10]
    for box in page.locator(".scroll:has(table)").all():
        inner = box.evaluate("box => { box.scrollLeft = 1e6; const first = box.querySelector('tbody th'), x = first.getBoundingClientRect().x"
                             " - box.getBoundingClientRect().x; box.scrollLeft = 0; return x; }")
        assert abs(inner) <= 2, "the first column does not stay"


def accessible(page):
    found = Axe().run(page)
    wrong = [(v["id"], v["nodes"][0]["html"][:120]) for v in found.response["violations"]]
    assert not wrong, wrong


def equal(page, numbers):
    """Every cell of a column with a key equals the number in the CSV or JSON, exactly where it is sorted by and rounded where it is shown."""
    tables = page.evaluate("""() => [...document.querySelectorAll('table')].filter((t) => t.querySelector('th[data-key=tokens_per_second], th[data-key=hit_rate]'))
        .flatMap((table) => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell, at) => ({
            key: table.tHead.rows[0].cells[at].dataset.key, value: cell.dataset.v,
            text: [...cell.childNodes].filter((n) => n.nodeName !== 'SMALL').map((n) => n.textContent).join('').trim() }))))""")
    assert len(tables) == len(numbers), (len(tables), len(numbers))
    compared = 0
    for cells, row in zip(tables, ordered(numbers)):
        for cell in filter(lambda cell: cell["key"], cells):
            want = row[cell["key"]]
            compared += 1
            if cell["value"] is None:
                assert cell["text"] == want or (cell["text"], want) == ("–", ""), (cell, want)
            elif cell["text"] == "exact":
                assert want in ("", 0, 1, "0.000000", "1.000000"), (cell, want)
            else:
                value, decimals = float(cell["value"]), len(str(want).partition(".")[2])
                assert abs(value - float(want)) <= 0.5 * 10.0 ** -min(decimals, 12) + 1e-11 * abs(value), (cell, want)
                assert shows(cell["text"], value), cell
    assert compared > 3 * len(numbers), compared


def ordered(numbers):
    """Rows in the order of the page: by scope or size, otherwise as written."""
    scopes = list(dict.fromkeys(row.get("scope") for row in numbers))
    sizes = sorted({int(row["slots"]) for row in numbers if "slots" in row and "scope" not in row})
    group = lambda row: scopes.index(row["scope"]) if "scope" in row else sizes.index(int(row["slots"])) if "slots" in row else 0
    return sorted(numbers, key=group)


def shows(text, value):
    """Whether a text such as `12.3 %`, `1,234` or `4.56 kB` is a value, rounded."""
    number, unit = re.fullmatch(r"([+-]?[\d,]*\.?\d+)\s*(.*)", text).groups()
    scale = {"%": 0.01, "kB": 1e3, "MB": 1e6, "GB": 1e9}.get(unit, 1)
    decimals = len(number.partition(".")[2])
    return abs(float(number.replace(",", "")) * scale - value) <= 0.50001 * scale * 10.0**-decimals + (scale == 1 and unit in ("B", "bytes")) * 0.5


SORTED = """(header) => {
    const rows = [...header.closest('table').tBodies[0].rows].map((row) => row.cells[header.cellIndex]);
    if (!header.classList.contains('n')) return rows.map((cell) => cell.textContent.trim());
    return rows.map((cell) => ('v' in cell.dataset ? Number(cell.dataset.v) : null));
}"""


def sorts(page):
    for table in page.locator("table").all():
        headers = table.locator("thead th").all()
        for header in headers:
            button = header.locator("button")
            before = sorted(map(str, header.evaluate(SORTED)))
            button.click()
            in_order(header, "ascending", before)
            button.press("Enter")
            in_order(header, "descending", before)
        states = [header.get_attribute("aria-sort") for header in headers]
        assert states == ["none"] * (len(headers) - 1) + ["descending"], states
    for legend in page.locator("details.columns").all():
        legend.locator("summary").press("Enter")
        assert legend.locator("dt").first.is_visible() and legend.locator("dd").first.inner_text()


def in_order(header, order, before):
    assert header.get_attribute("aria-sort") == order
    found = header.evaluate(SORTED)
    assert sorted(map(str, found)) == before, "rows were lost"
    if header.get_attribute("class") == "n":
        values = [value for value in found if value is not None]
        assert found[: len(values)] == values, "a missing number comes first"
        assert values == sorted(values, reverse=order == "descending"), (header.inner_text(), values)


def says_by_pointer(page):
    for figure in page.locator("figure.chart").all():
        figure.scroll_into_view_if_needed()
        mark = figure.locator(".mark").first
        mark.hover(force=True)
        said, titles = figure.locator(".readout").inner_text(), figure.locator(".mark title").all_text_contents()
        assert said in titles and re.search(r"\d", said), said
        assert figure.locator(".mark.on").count() == 1


def says_by_key(page):
    for figure in page.locator("figure.chart").all():
        stops = figure.locator(".mark[tabindex='0']")
        assert stops.count() == 1
        stops.focus()
        heard = [figure.locator(".readout").inner_text()]
        for _ in range(min(2, figure.locator(".mark").count() - 1)):
            page.keyboard.press("ArrowRight")
            heard.append(figure.locator(".readout").inner_text())
            assert stops.count() == 1
        titles = figure.locator(".mark title").all_text_contents()
        assert heard == titles[: len(heard)], heard


def legends(page):
    for legend in page.locator(".legend").all():
        button = legend.locator("button").first
        button.click()
        assert button.get_attribute("aria-pressed") == "true" and page.locator("svg .dim").count() > 0
        button.press("Enter")
        assert button.get_attribute("aria-pressed") == "false" and page.locator("svg .dim").count() == 0


def heat_maps(page):
    for figure in page.locator("figure.heat").all():
        svg, readout = figure.locator("svg[data-cells]"), figure.locator(".readout")
        cells = svg.get_attribute("data-cells").split("|")
        first = int(svg.get_attribute("data-first"))
        words = {".": "not resident", "x": "not resident, evicted", "s": "resident, not requested", "h": "hit", "m": "miss"}
        svg.focus()
        for step, (x, y) in ((None, (0, 0)), ("ArrowRight", (1, 0)), ("ArrowDown", (1, 1))):
            if step:
                page.keyboard.press(step)
            cell = cells[y][x]
            want = words[cell] if cell in words else words[cell.lower()] + ", evicted"
            assert readout.inner_text() == f"pass {first + x}, expert {y}: {want}", readout.inner_text()
        svg.hover(position={"x": 60, "y": 60})
        assert re.match(r"pass \d+, expert \d+: ", readout.inner_text())


def folds(page):
    group = page.locator("details.group").first
    group.locator("summary").first.click()
    assert group.get_attribute("open") is None
    assert page.evaluate(CUT_OFF) == []


def prints(browser, path, pdf):
    with Report(browser, path, PAPER_WIDTH, "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        colors = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
        assert colors == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"], colors
        assert page.evaluate("document.scrollingElement.scrollWidth") <= PAPER_WIDTH, "wider than the paper"
        made = page.pdf(prefer_css_page_size=True, **({"path": pdf} if pdf else {}))
        assert made.count(b"/Type /Page\n") >= 1


def hostile(browser, larder):
    """HTML in the names of a model, a text and a trace stays text."""
    model, text, rows = larder.folder / HOSTILE, larder.folder / f"{HOSTILE}.txt", larder.folder / f"{HOSTILE}.csv"
    model.symlink_to(MODEL)
    shutil.copy(TEXT, text)
    rows.write_text("token,layer,expert\n" + "".join(f"{t},0,{t % 3}\n" for t in range(9)))
    pages = [larder.speed(1, model, "hostile-speed.html")[0], larder.tradeoffs(model, text, "hostile-tradeoffs.html", 16)[0]]
    pages.append(larder.folder / "hostile-sweep.html")
    larder("lab", "sweep", rows, "--html", pages[-1])
    for path in pages:
        for width in WIDTHS:
            with Report(browser, path, width, "light") as page:
                assert page.evaluate("window.harmed") is None and page.locator("img, iframe, [onerror], [src], [href]").count() == 0
                assert "<img src=x" in page.locator("body").inner_text()
                fits(page)
                accessible(page)
    print("ok hostile names", flush=True)


if __name__ == "__main__":
    main()

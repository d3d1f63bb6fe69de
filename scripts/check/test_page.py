"""Drives the page of a running `larder serve` in a real Chromium, and takes screenshots.

    pip install playwright
    larder serve -m models/demo --cache-experts 8 --context 4096
    python scripts/check/test_page.py --url http://127.0.0.1:8080 --pictures docs

Sends, streams, stops, changes λ, watches the grid, shows hostile markdown, enters a key, and fails on any error in the
browser's console. Prints `ok` for each check; exits with 1 if one fails.
"""

import argparse
import json
import pathlib
import time

from playwright.sync_api import sync_playwright

HOSTILE = """# Loaves <script>window.harmed = 1</script>

A **bold** one, *lean*, `let x = 1 < 2;`, snake_case_name, 2 * 3 * 4, [here](https:example.org/a?b=c),
[not here](javascript:window.harmed=2), <img src=x onerror="window.harmed=3">

- one
  - nested
- two

1. first
2. second

> quoted **well**

| loaf | price |
|------|------:|
| rye  | `3`   |

```rust
fn main() { println!("<b>{}</b>", 1); }
```
""" + "\n" + ">" * 4000 + " deep\n\n" + "*[`_" * 4000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", type=pathlib.Path, help="folder for the screenshots page-light.png and page-dark.png")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        for check in (chat, keyboard, context, engine, lambda_slider, markdown, phone, many_experts, key, lost):
            with Page(browser, args.url) as page:
                check(page)
            print(f"ok {check.__name__}", flush=True)
        if args.pictures:
            for scheme in ("light", "dark"):
                with Page(browser, args.url, color_scheme=scheme) as page:
                    picture(page, args.pictures / f"page-{scheme}.png")
        browser.close()


class Page:
    """A new page; at the end its console must hold no errors or warnings."""

    def __init__(self, browser, url, **options):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.page, self.url, self.messages, self.allowed = self.context.new_page(), url, [], ()
        self.page.on("console", lambda message: self.messages.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", self.requested)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.context.close()
        if kind is None:
            wrong = [text for text in self.messages if not any(part in text for part in self.allowed)]
            assert not wrong, wrong

    def requested(self, request):
        if not request.url.startswith((self.url, "data:")):
            self.messages.append(f"a request to {request.url}")

    def open(self):
        self.page.request.post(f"{self.url}/engine", data={"lambda": 0})
        self.page.goto(self.url)
        self.until("document.querySelector('#state').textContent === 'ready'")
        return self.page

    def until(self, expression, seconds=15):
        """Waits until the expression is true. Playwright's own wait needs eval, which the page's policy forbids."""
        start = time.monotonic()
        while not self.page.evaluate(expression):
            assert time.monotonic() - start < seconds, f"never: {expression}"
            self.page.wait_for_timeout(20)

    def send(self, text, max_tokens=None):
        if max_tokens is not None:
            self.set(max_tokens=max_tokens)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def set(self, **settings):
        if self.page.locator("#settings").is_hidden():
            self.page.click("#settings-button")
        for name, value in settings.items():
            self.page.fill("#" + name.replace("_", "-"), str(value))
        self.page.click("#settings-button")

    def answer(self):
        return self.page.locator(".message:not(.user)").last

    def wait_until_written(self):
        self.page.wait_for_selector(".message:not(.user):last-child:not(.busy) .tools")

    def answered(self, text, **last):
        """From now on, every answer of the server is `text`; `last` are further fields of the last chunk."""
        chunks = [{"choices": [{"delta": {"content": text}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]} | last]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))

    def grid(self):
        return self.page.evaluate("document.querySelector('#grid').toDataURL()")


def chat(test):
    page = test.open()
    test.set(temperature=0.7, top_p=0.9, system="You tell stories.")
    with page.expect_request("**/v1/chat/completions") as sent:
        test.send("Tell me about the old house.", 40)
    body = sent.value.post_data_json
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 40), body
    assert [message["role"] for message in body["messages"]] == ["system", "user"], body
    test.wait_until_written()
    assert "stopped at the token limit · 40 tokens" in test.answer().inner_text(), test.answer().inner_text()
    # It comes in pieces, and stops when told.
    test.send("And then?", "")
    lengths = set()
    while len(lengths) < 5:
        lengths.add(len(test.answer().inner_text()))
        page.wait_for_timeout(20)
    page.click("#stop")
    test.wait_until_written()
    text = test.answer().inner_text()
    assert "stopped" in text and page.locator("#send").is_visible(), text
    page.wait_for_timeout(300)
    assert test.answer().inner_text() == text
    test.answer().get_by_role("button", name="Copy this answer").click()
    test.until("document.querySelector('.message:last-child .tools button').textContent === 'Copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() and copied.split()[:5] == text.split()[:5], (copied, text)
    # A request carries the conversation so far, and an answer can be regenerated.
    with page.expect_request("**/v1/chat/completions") as sent:
        test.answer().get_by_role("button", name="Regenerate").click()
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["system", "user", "assistant", "user"], roles
    page.click("#new-chat")
    assert page.locator(".message").count() == 0 and page.locator("#welcome").is_visible()


def keyboard(test):
    page = test.open()
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    test.until("document.querySelector('.message:last-child .text').textContent.length > 60")
    assert page.locator(".message.user").inner_text() == "One line\nand another"
    page.keyboard.press("Escape")
    test.wait_until_written()
    assert "stopped" in test.answer().inner_text()
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
        if page.evaluate("document.activeElement.id") == "grid":
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            assert "expert 1:" in page.locator("#cell").inner_text(), page.locator("#cell").inner_text()
    assert {"new-chat", "settings-button", "engine-button", "log", "prompt", "grid", "lambda"} <= reached, reached


def context(test):
    """The meter moves while an answer streams, and what was cut is said."""
    page = test.open()
    meter = page.get_by_role("meter", name="Context in use")
    assert meter.count() == 0, "hidden before the first answer"
    test.send("Tell me about the lighthouse.", 120)
    shown = set()
    for _ in range(40):
        shown.add(meter.get_attribute("aria-valuenow") if meter.count() else None)
        page.wait_for_timeout(20)
    test.wait_until_written()
    assert len(shown - {None}) >= 2, shown
    size = state(test)["context"]
    tokens = int(meter.get_attribute("aria-valuenow"))
    assert tokens > 120 and meter.get_attribute("aria-valuetext") == f"{tokens} of {size} tokens"
    assert page.locator("#context-text").inner_text() == f"context {tokens} of {size}"
    assert test.answer().locator(".notice").count() == 0
    use = {"tokens": 4000, "size": 4096, "dropped_turns": 3, "dropped_tokens": 900, "shifts": 1}
    test.answered("Yes.", context_use=use)
    test.send("And then?")
    test.wait_until_written()
    notice = test.answer().locator(".notice").inner_text()
    assert notice == "The context is full. The 3 oldest turns were left out. Older tokens were dropped during the answer, once.", notice
    assert "high" in meter.get_attribute("class") and meter.get_attribute("aria-valuenow") == "4000"
    page.click("#new-chat")
    assert meter.count() == 0


def engine(test):
    page = test.open()
    still = test.grid()
    test.send("Tell me about the sea.")
    pictures = set()
    for _ in range(12):
        pictures.add(test.grid())
        page.wait_for_timeout(60)
    assert len(pictures - {still}) >= 6, "the grid does not move"
    test.until("parseFloat(document.querySelector('#speed').textContent) > 0")
    for id in ("hit-rate", "ssd"):
        test.until(f"parseFloat(document.querySelector('#{id}').textContent) > 0")
    assert page.evaluate("document.querySelector('#speed-line .line').getAttribute('d').length") > 10
    page.keyboard.press("Escape")
    test.until("document.querySelector('#state').textContent === 'ready'")
    page.wait_for_timeout(1500)
    resting = test.grid()
    page.wait_for_timeout(300)
    assert test.grid() == resting, "the grid does not come to rest"
    there = sum(map(len, state(test)["resident"].values()))
    assert page.locator("#cell").inner_text().startswith(f"{there} of "), page.locator("#cell").inner_text()


def lambda_slider(test):
    page = test.open()
    set_lambda(test, 0)
    test.send("Tell me about the road.")
    test.until("document.querySelector('#agreement-now').textContent === '100.0 %'")
    before = float(page.locator("#hit-rate").inner_text().split()[0])
    set_lambda(test, 0.4)
    assert state(test)["routing"] == "prior:lambda=0.4", state(test)["routing"]
    test.until("parseFloat(document.querySelector('#agreement-now').textContent) < 99.5")
    page.wait_for_timeout(2500)
    after = float(page.locator("#hit-rate").inner_text().split()[0])
    assert after > before + 5, (before, after)
    assert "V40" in page.evaluate("document.querySelector('#speed-line .mark').getAttribute('d')")
    page.keyboard.press("Escape")
    set_lambda(test, 0)


def markdown(test):
    page = test.open()
    test.answered(HOSTILE)
    start = time.monotonic()
    test.send("Anything")
    test.wait_until_written()
    assert time.monotonic() - start < 5
    text = test.answer().locator(".text")
    for selector, count in (("h3", 1), ("strong", 2), ('em:text-is("lean")', 1), ("ul ul li", 1), ("ol > li", 2), ("td", 2), ("pre code", 1),
                            ("a", 1), ("img, script, iframe, [onerror]", 0)):
        assert text.locator(selector).count() == count, (selector, text.locator(selector).count())
    assert text.locator("a").get_attribute("rel").startswith("noopener")
    assert "snake_case_name, 2 * 3 * 4" in text.inner_text()
    assert page.evaluate("window.harmed") is None
    text.get_by_role("button", name="Copy this code").click()
    test.until("document.querySelector('.code button').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == 'fn main() { println!("<b>{}</b>", 1); }'


def phone(test):
    test.page.set_viewport_size({"width": 360, "height": 720})
    page = test.open()
    assert page.locator("#engine").is_hidden()
    test.send("Tell me about the harbour.", 60)
    page.click("#engine-button")
    assert page.locator("#engine").is_visible() and page.locator("#grid").bounding_box()["width"] > 250
    test.wait_until_written()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#prompt").bounding_box()
    assert box["y"] + box["height"] < 720, box


def many_experts(test):
    """48 layers of 128 experts, and events as fast as a browser can take them."""
    page, (layers, experts) = test.page, (48, 128)
    state = {"model": "large", "layers": list(range(layers)), "experts": experts, "experts_per_token": 8, "streams": True,
             "active": 0, "resident": {str(l): list(range(0, experts, 3)) for l in range(layers)}, "routing": "original",
             "lambda": 0.0, "agreement": 1.0}
    event = lambda step: {
        "step": step, "kind": "token", "queued": 0, "tokens_per_second": 100.0, "bytes_per_second": 1e9, "hit_rate": 0.5,
        "lambda": 0.0, "agreement": 1.0, "layers": [{
            "layer": l, "hit": [(step * 7 + l + k * 17) % experts for k in range(4)], "awaited": [],
            "miss": [(step * 11 + l + k * 29) % experts for k in range(4)],
            "evicted": [[l, (step * 13 + l + k * 31) % experts] for k in range(4)]} for l in range(layers)]}
    told = "".join(f"data: {json.dumps(event(step))}\n\n" for step in range(1, 61))
    page.route("**/engine", lambda route: route.fulfill(json=state))
    # All events come at once, sixty times the load of a frame; then the connection ends and is opened again.
    page.route("**/events", lambda route: route.fulfill(content_type="text/event-stream", body=told))
    page.add_init_script("""window.frames_ms = []; let before = 0;
        const next = (now) => { if (before) frames_ms.push(now - before); before = now; requestAnimationFrame(next); };
        requestAnimationFrame(next);""")
    page.goto(test.url)
    test.until("document.querySelector('#cell').textContent.includes('of 6144')")
    page.wait_for_timeout(1500)
    frames = sorted(page.evaluate("frames_ms"))
    print(f"   48 x 128: a frame takes {frames[len(frames) // 2]:.0f} ms (median), {frames[-1]:.0f} ms (max)")
    assert frames[len(frames) // 2] < 50, frames


def key(test):
    """The page with a server that requires a key."""
    page, given = test.page, []
    test.allowed = ("401",)

    def guard(route):
        given.append(route.request.headers.get("authorization"))
        if given[-1] == "Bearer bread":
            return route.continue_()
        route.fulfill(status=401, json={"error": {"message": "no"}})

    for path in ("**/events", "**/engine", "**/v1/**"):
        page.route(path, guard)
    page.goto(test.url)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "water")
    page.press("#key", "Enter")
    test.until("document.querySelector('#key-wrong').textContent !== ''")
    page.fill("#key", "bread")
    page.press("#key", "Enter")
    test.until("document.querySelector('#state').textContent === 'ready'")
    assert page.locator("#key-dialog").is_hidden() and None in given and "Bearer water" in given
    kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "bread" not in kept, kept


def lost(test):
    """A refusal of the server is shown, and the request can be repeated."""
    page = test.open()
    test.allowed = ("429",)
    refuse = lambda route: route.fulfill(status=429, json={"error": {"message": "The server is busy."}})
    page.route("**/v1/chat/completions", refuse)
    test.send("Hello", 8)
    page.wait_for_selector(".message [role=alert]")
    assert test.answer().locator("[role=alert]").inner_text() == "The server is busy."
    page.unroute("**/v1/chat/completions")
    test.answer().get_by_role("button", name="Try again").click()
    test.wait_until_written()
    assert page.locator(".message").count() == 2 and "8 tokens" in test.answer().inner_text()


def picture(test, path):
    """Takes a screenshot during an answer, just after a change of λ."""
    page = test.open()
    test.set(temperature=0.7, top_p=0.9)
    test.send("What did the captain find?", 450)
    test.wait_until_written()
    page.click("#new-chat")
    test.send("Tell me about the old house by the sea.", 700)
    page.wait_for_timeout(500)
    set_lambda(test, 0.1)
    page.wait_for_timeout(700)
    page.mouse.move(440, 660)
    page.screenshot(path=path)
    assert path.stat().st_size < 300_000, path.stat().st_size
    page.keyboard.press("Escape")
    set_lambda(test, 0)


def set_lambda(test, value):
    with test.page.expect_response(lambda response: response.url.endswith("/engine") and response.request.method == "POST"):
        test.page.locator("#lambda").evaluate("(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", value)
    test.until(f"document.querySelector('#lambda-value').textContent === '{value:.2f}'")


def state(test):
    return test.page.request.get(f"{test.url}/engine").json()


if __name__ == "__main__":
    main()

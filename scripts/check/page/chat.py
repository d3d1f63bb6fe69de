"""A conversation: sending, stopping, markdown, keys, errors, the meter of the context, and turns beyond the context."""

import json
import time

from .browser import records

HOSTILE = """# Loaves <script>window.harmed = 1</script> ##

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

### About C#

""" + "\n#### wide" + " " * 50_000 + "heading\n\n" + ">" * 4000 + " deep\n\n" + "*[`_" * 4000


def chat(test):
    page = test.open()
    test.set(temperature=0.7, top_p=0.9, system="You tell stories.")
    with page.expect_request("**/v1/chat/completions") as sent:
        test.send("Tell me about the old house.", 40)
    body = sent.value.post_data_json
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 40), body
    assert [message["role"] for message in body["messages"]] == ["system", "user"], body
    assert body["stream"] and body["return_progress"], body
    test.wait_until_written()
    assert "token limit · 40 tokens" in test.answer().inner_text(), test.answer().inner_text()
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
    assert test.copied().strip() and test.copied().split()[:5] == text.split()[:5], (test.copied(), text)
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
    test.wait_until_streaming()
    assert page.locator(".message.user .text").inner_text() == "One line\nand another"
    page.keyboard.press("Escape")
    test.wait_until_written()
    assert "stopped" in test.answer().inner_text()
    reached = set()
    for _ in range(50):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
        if page.evaluate("document.activeElement.id") == "grid":
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            assert "expert 1:" in page.locator("#cell").inner_text(), page.locator("#cell").inner_text()
    assert {"side-button", "search", "new-chat", "settings-button", "engine-button", "log", "prompt", "grid", "lambda"} <= reached, reached


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
    size = test.state()["context"]
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


def markdown(test):
    page = test.open()
    test.answered(HOSTILE)
    start = time.monotonic()
    test.send("Anything")
    test.wait_until_written()
    assert time.monotonic() - start < 5
    text = test.answer().locator(".text")
    for selector, count in (("h3", 1), ("h5", 1), ("h6", 1), ("strong", 2), ('em:text-is("lean")', 1), ("ul ul li", 1), ("ol > li", 2), ("td", 2), ("pre code", 1),
                            ("a", 1), ("img, script, iframe, [onerror]", 0)):
        assert text.locator(selector).count() == count, (selector, text.locator(selector).count())
    assert text.locator("h3, h5").all_inner_texts() == ["Loaves <script>window.harmed = 1</script>", "About C#"]
    assert text.locator("a").get_attribute("rel").startswith("noopener")
    assert "snake_case_name, 2 * 3 * 4" in text.inner_text()
    assert page.evaluate("window.harmed") is None
    text.get_by_role("button", name="Copy this code").click()
    test.until("document.querySelector('.code button').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == 'fn main() { println!("<b>{}</b>", 1); }'


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
    test.ask("Hello", 8)
    kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
    assert "bread" not in kept and "bread" not in json.dumps(records(page)), kept


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
    test.until("document.querySelector('.answer:last-child [role=alert]') === null")
    test.wait_until_written()
    assert page.locator(".message").count() == 2 and "8 tokens" in test.answer().inner_text()


def beyond_the_context(test):
    """A chat goes on for eight turns after the first that was cut, and says and marks what was left out."""
    page = test.open()
    size = test.state()["context"]
    words = " ".join(["the old house by the sea and the road behind it"] * (size // 40))
    uses = []
    while len([use for use in uses if use["dropped_turns"]]) < 8:
        assert len(uses) < 20, uses
        with page.expect_response("**/v1/chat/completions") as got:
            text = test.ask(f"{len(uses)}: {words}", 32)
        assert got.value.request.post_data_json["context_full"] == "drop-turns" and text.strip()
        uses.append(last_chunk(got.value)["context_use"])
        assert uses[-1]["tokens"] <= size
    dropped = uses[-1]["dropped_turns"]
    assert dropped > uses[0]["dropped_turns"] == 0, uses
    assert f"The {dropped} oldest turns were left out." in test.answer().locator(".notice").inner_text()
    mark = page.locator(".dropped:not(:empty)")
    assert mark.inner_text() == f"The {dropped} turns above were left out of the context"
    kept = page.locator(".message.user").filter(has=mark).locator(".text").inner_text()
    assert kept.startswith(f"{dropped}: "), kept[:20]
    # The behaviour can be chosen; a chat that is to end says so.
    test.choose("context-full", "stop")
    test.allowed = ("400",)
    test.send("And now?")
    page.wait_for_selector(".answer:last-child [role=alert]")
    assert "context" in test.answer().locator("[role=alert]").inner_text()
    page.reload()
    test.until("document.querySelector('#context-full').value === 'stop'")
    test.choose("context-full", "shift")
    with page.expect_response("**/v1/chat/completions") as got:
        test.answer().get_by_role("button", name="Try again").click()
    assert got.value.request.post_data_json["context_full"] == "shift"
    test.wait_until_written()
    assert test.text().strip()


def last_chunk(response):
    """The chunk of a stream that says how full the context is."""
    chunks = [json.loads(line[6:]) for line in response.text().splitlines() if line.startswith("data: {")]
    return next(chunk for chunk in reversed(chunks) if "context_use" in chunk)

"""The engine panel: what λ costs, its warning and its lock, the experts of a chat, and the lines of the last minutes."""

from .engine import set_lambda
from .views import clean


def changed_state(test, change):
    """From now on, the page gets the engine's state with `change` applied to it."""
    def answer(route):
        response = route.fetch()
        state = response.json()
        if response.ok:
            change(state)
        route.fulfill(response=response, json=state)

    test.page.route("**/engine", answer)


def lambda_cost(test):
    """The cost of each λ is that of the file, measured or between two measurements."""
    page = test.open()
    costs = test.state()["lambda_costs"]
    text = lambda id: page.locator(f"#{id}").inner_text()
    assert text("lambda-source") == costs["source"] and costs["text"] in costs["source"], text("lambda-source")
    assert float(page.get_attribute("#lambda", "max")) == costs["measured"][-1]["lambda"]
    for measured in costs["measured"]:
        set_lambda(test, measured["lambda"])
        shown = text("lambda-cost")
        assert f"perplexity {100 * measured['rise']:+.1f}" in shown.lower(), (measured, shown)
        assert f"{100 * measured['agreement']:.0f} % of the model's own experts" in shown, (measured, shown)
        assert (text("lambda-warning") != "") == (measured["rise"] > 0.15), measured
        assert "between" not in shown, shown
        # What the server says of the λ that it has is the same.
        assert shown[1:-1] == test.state()["lambda_cost"]["cost"][1:]
    low, high = costs["measured"][0]["lambda"], costs["measured"][1]["lambda"]
    set_lambda(test, round((low + high) / 2, 2))
    assert f"between λ = {low:g} and {high:g}" in text("lambda-cost"), text("lambda-cost")
    set_lambda(test, 0)
    assert "own choice" in text("lambda-cost"), text("lambda-cost")
    assert test.state()["routing"] == "original"
    changed_state(test, lambda state: state.update(lambda_costs=None, lambda_cost=None))
    page.reload()
    test.until("document.querySelector('#lambda-source').textContent.includes('larder tune')")
    assert text("lambda-cost") == "" and text("lambda-warning") == ""


def lambda_warning(test):
    """Where text breaks, a sentence says so before the slider is let go, in all colours and widths."""
    page = test.page

    def breaks_at_the_end(state):
        text = "Text breaks at this λ: perplexity is 90 % above."
        for step in state["lambda_costs"]["scale"]:
            step["warning"] = text if step["lambda"] > 0.5 else None
        if state["lambda"] > 0.5:
            state["lambda_cost"]["warning"] = text

    changed_state(test, breaks_at_the_end)
    page = test.open()
    warning = page.locator("#lambda-warning")
    assert warning.get_attribute("role") == "status" and warning.is_hidden()
    slide = "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }"
    page.locator("#lambda").evaluate(slide, 0.7)
    assert warning.inner_text() == "Warning: Text breaks at this λ: perplexity is 90 % above."
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        clean(page, f"{scheme} warning")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if page.locator("#engine").is_visible():
                assert warning.is_visible(), width
    page.locator("#lambda").evaluate(slide, 0.3)
    test.until("document.querySelector('#lambda-warning').textContent === ''")
    set_lambda(test, 0)


def lambda_lock(test):
    """The lock holds for the slider of this browser, also after a reload and in another tab."""
    page = test.open()
    lock = page.get_by_role("button", name="Lock λ")
    pressed = lambda: lock.get_attribute("aria-pressed") == "true"
    assert not pressed() and page.locator("#lambda").is_enabled()
    lock.focus()
    page.keyboard.press("Enter")
    assert pressed() and page.locator("#lambda").is_disabled()
    before = test.state()["routing"]
    box = page.locator("#lambda").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2)
    page.wait_for_timeout(300)
    assert test.state()["routing"] == before, "a locked slider was moved"
    clean(page, "locked")
    page = test.open()
    test.until("document.querySelector('#lambda-lock').getAttribute('aria-pressed') === 'true'")
    assert page.locator("#lambda").is_disabled()
    with test.another_tab() as other:
        other.open()
        other.until("document.querySelector('#lambda').disabled")
        other.page.get_by_role("button", name="Lock λ").click()
        test.until("!document.querySelector('#lambda').disabled")


def locked_server(test):
    """Where the server refuses changes of λ, the page says so and has no lock of its own."""
    changed_state(test, lambda state: state.update(routing_locked=True))
    page = test.page
    page.goto(test.url)
    test.until("document.querySelector('#lambda-locked').textContent.includes('--lock-routing')")
    assert page.locator("#lambda").is_disabled() and page.locator("#lambda-lock").is_hidden()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        if page.locator("#engine").is_visible():
            assert page.locator("#lambda-locked").is_visible()
    clean(page, "locked by the server")


def chat_experts(test):
    """The grid of a chat counts the experts of its own answers, and keeps them while the page is open."""
    page = test.open()
    cell = lambda: page.locator("#cell").inner_text()
    page.get_by_role("button", name="This chat").click()
    assert "no expert visited" in cell(), cell()
    empty = test.grid()
    assert page.locator("#legend").is_hidden() and page.locator("#legend-chat").is_visible()
    test.ask("Tell me about the sea.", 40)
    test.until("document.querySelector('#cell').textContent.includes('visited by this chat')")
    test.until("document.querySelector('#state').textContent === 'ready'")
    page.wait_for_timeout(400)
    first, picture = cell(), test.grid()
    visited, most = int(first.split()[0]), int(first.split("(")[1].split()[0])
    # 40 tokens with 4 of 32 experts in each of 8 layers, and the steps of the prompt.
    assert 32 < visited <= 256 and 3 < most <= 60, first
    assert picture != empty
    # Another client's traffic is not of this chat.
    page.request.post(f"{test.url}/v1/completions", data={"prompt": "The road", "max_tokens": 20})
    page.wait_for_timeout(400)
    assert cell() == first and test.grid() == picture
    page.locator("#grid").focus()
    page.keyboard.press("ArrowRight")
    assert "by this chat" in cell() and "layer" in cell(), cell()
    page.locator("#prompt").focus()
    clean(page, "experts of a chat")
    page.click("#new-chat")
    test.until("document.querySelector('#cell').textContent.includes('no expert visited')")
    page.get_by_role("button", name="Tell me about the sea.").first.click()
    test.until("document.querySelector('#cell').textContent.includes('visited by this chat')")
    assert cell() == first
    page.get_by_role("button", name="All traffic").click()
    assert "in memory" in cell(), cell()


def lines(test):
    """Lines of the last minutes, with a text for each, in both colours; what is old leaves them."""
    page = test.page
    page.clock.install()
    page = test.open()
    page.clock.resume()
    label = lambda id: page.get_attribute(f"#{id}-line", "aria-label")
    length = lambda id: len(page.get_attribute(f"#{id}-line .line", "d") or "")
    test.ask("Tell me about the harbour.", 150)
    for id, unit in (("speed", "tokens/s"), ("hits", "%"), ("reads", "MB/s"), ("agreement", "%")):
        assert length(id) > 5, id
        assert page.locator(f"#{id}-line").get_attribute("role") == "img"
        assert "over the last 3 minutes: last " in label(id) and f" {unit}, lowest " in label(id), label(id)
        assert page.locator(f"#{id}-now").inner_text().endswith(unit)
    hits = float(page.locator("#hits-now").inner_text().split()[0])
    assert 0 < hits < 100, hits
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        clean(page, f"{scheme} lines")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": 1280, "height": 800})
    page.clock.fast_forward(185_000)
    test.until("document.querySelector('#hits-line').getAttribute('aria-label').endsWith('no answer')")
    assert length("hits") == 0

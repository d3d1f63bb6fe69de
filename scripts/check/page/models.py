"""A server of two models, demo and twin: the choice of a conversation, the panel of its model, and what is shown until it is loaded."""

import json
import re

from .conversations import EXPORT
from .engine import set_lambda
from .views import clean


def choice(test):
    """A model is chosen for a conversation, which loads it; the choice is kept, and another conversation has its own."""
    page = open_unloaded(test)
    shows_unloaded(test, "demo")
    assert not page.locator("#grid").is_visible() and not page.locator("#lambda").is_visible()
    clean(page, "not loaded")
    choose(test, "twin")
    shows_unloaded(test, "twin")
    before = generated(test)
    with page.expect_request("**/v1/chat/completions") as sent:
        text = test.ask("Tell me about the sea.", 24)
    assert sent.value.post_data_json["model"] == "twin" and text.strip()
    after = generated(test)
    assert (after["twin"] - before["twin"], after["demo"] - before["demo"]) == (24, 0), (before, after)
    assert notes(test).startswith("twin · "), notes(test)
    shows_loaded(test, "twin")
    assert phases(test) == {"demo": "unloaded", "twin": "loaded"}
    assert page.get_attribute("#temperature", "placeholder") != "", "the model's defaults"
    page.reload()
    shows_loaded(test, "twin")
    assert page.input_value("#model-choice") == "twin" and notes(test).startswith("twin · ")
    page.click("#new-chat")
    shows_unloaded(test, "demo")
    assert page.get_attribute("#temperature", "placeholder") == ""
    test.ask("Tell me about the harbour.", 24)
    assert notes(test).startswith("demo · "), notes(test)
    shows_loaded(test, "demo")
    clean(page, "two models")


def panel(test):
    """Grid, rates, λ and visits are those of the conversation's model, whatever the other one does."""
    page = open_unloaded(test)
    titles = {"demo": "Tell me about the harbour.", "twin": "Tell me about the sea."}
    seen = {}
    for name, title in titles.items():
        page.click("#new-chat")
        choose(test, name)
        test.ask(title, 60)
        shows_loaded(test, name)
        page.get_by_role("button", name="This chat").click()
        test.until("document.querySelector('#cell').textContent.includes('visited by this chat')")
        seen[name] = page.locator("#cell").inner_text()
        page.get_by_role("button", name="All traffic").click()
    assert seen["demo"] != seen["twin"], seen
    locked = state(test, "twin")["routing_locked"]
    if locked:
        is_locked(test)
    else:
        set_lambda(test, 0.3)
        assert (state(test, "twin")["lambda"], state(test, "demo")["lambda"]) == (0.3, 0)
    grid, before = test.grid(), state(test, "demo")["total"]
    page.request.post(f"{test.url}/v1/completions", data={"model": "demo", "prompt": "The road", "max_tokens": 200})
    assert state(test, "demo")["total"] != before
    assert test.grid() == grid, "the other model's traffic moved the grid"
    assert page.locator("#speed").inner_text() != "–"
    for name in ("demo", "twin", "demo"):
        page.get_by_role("button", name=titles[name]).first.click()
        shows_loaded(test, name)
        assert page.locator("#speed").inner_text() == "–" and page.get_attribute("#hits-line .line", "d") == ""
        if locked:
            is_locked(test)
        else:
            test.until(f"document.querySelector('#lambda-value').textContent === '{0.3 if name == 'twin' else 0:.2f}'")
        page.get_by_role("button", name="This chat").click()
        assert page.locator("#cell").inner_text() == seen[name], "the visits of a chat are kept"
        page.get_by_role("button", name="All traffic").click()
    for name in titles:
        page.request.post(f"{test.url}/engine?model={name}", data={"lambda": 0})


def waiting(test):
    """Until a model is loaded, answer, status and panel say what is waited for."""
    page = open_unloaded(test)
    choose(test, "twin")
    held = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    test.send("Tell me about the sea.", 24)
    until_answer(test, "Waiting for twin to be loaded …")
    test.until("document.querySelector('#engine-note').textContent === 'twin is waiting to be loaded.'")
    loading = {"data": [{"id": "demo", "status": {"value": "unloaded"}}, {"id": "twin", "status": {"value": "loading"}}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=loading))
    until_answer(test, "Loading twin …")
    test.until("document.querySelector('#state').textContent === 'loading'")
    test.until("document.querySelector('#engine-note').textContent === 'twin is being loaded.'")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        clean(page, f"loading {width}")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.unroute("**/v1/models")
    held[0].continue_()
    test.wait_until_written()
    assert "Loading" not in test.text() and "24 tokens" in notes(test), (test.text(), notes(test))
    shows_loaded(test, "twin")
    # The server unloads it without this page.
    unload(test)
    shows_unloaded(test, "twin")
    page.unroute("**/v1/chat/completions")


def another_server(test):
    """A conversation of a model that this server does not have can be read, and says so."""
    page = open_unloaded(test)
    test.allowed = ("404",)
    gone = json.loads(json.dumps(EXPORT))
    gone["conversations"][0]["settings"] = {"model": "gone"}
    file = {"name": "gone.json", "mimeType": "application/json", "buffer": json.dumps(gone).encode()}
    page.set_input_files("#import-file", files=[file])
    page.get_by_role("button", name="A loaf", exact=True).click()
    test.until("document.querySelector('#engine-note').textContent === 'gone is not on this server.'")
    test.send("And now?")
    page.wait_for_selector(".answer:last-child [role=alert]")
    assert "'gone' does not exist" in test.answer().locator("[role=alert]").inner_text()
    choose(test, "demo")
    test.answer().get_by_role("button", name="Try again").click()
    test.wait_until_written()
    assert notes(test).startswith("demo · "), notes(test)
    shows_loaded(test, "demo")


def open_unloaded(test):
    # The first state is asked for before the models are known; one that is not loaded has none, which browsers report.
    test.allowed = ("404",)
    unload(test)
    test.page.goto(test.url)
    test.until("document.querySelector('#state').textContent === 'not loaded'")
    test.until("!document.querySelector('#model-field').hidden")
    return test.page


def unload(test):
    for name in ("demo", "twin"):
        test.page.request.post(f"{test.url}/api/generate", data={"model": name, "keep_alive": 0})
    for _ in range(100):
        if set(phases(test).values()) == {"unloaded"}:
            return
        test.page.wait_for_timeout(50)
    raise AssertionError(f"not unloaded: {phases(test)}")


def choose(test, model):
    test.page.click("#settings-button")
    test.page.select_option("#model-choice", model)
    test.page.click("#settings-button")


def phases(test):
    return {model["id"]: model["status"]["value"] for model in test.page.request.get(f"{test.url}/v1/models").json()["data"]}


def state(test, model):
    return test.page.request.get(f"{test.url}/engine?model={model}").json()


def generated(test):
    """Tokens that each model has generated since the server's start."""
    text = test.page.request.get(f"{test.url}/metrics").text()
    counts = re.findall(r'^larder_generated_tokens_total\{model="(\w+)"\} (\d+)$', text, re.MULTILINE)
    return {name: int(count) for name, count in counts}


def notes(test):
    return test.answer().locator(".tools .quiet").inner_text()


def until_answer(test, text):
    test.until(f"document.querySelector('.answer:last-child .text').textContent === {json.dumps(text)}")


def shows_unloaded(test, model):
    test.until(f"document.querySelector('#engine-note').checkVisibility() && document.querySelector('#engine-note').textContent === '{model} is not loaded; the next message loads it.'")
    test.until("document.querySelector('#state').textContent === 'not loaded'")
    assert test.page.locator("#model").inner_text() == model and test.page.title() == f"{model} · larder"


def shows_loaded(test, model):
    test.until(f"document.querySelector('#state').textContent === 'ready' && document.querySelector('#model').textContent === '{model}'")
    assert test.page.locator("#engine-note").is_hidden() and test.page.locator("#grid").is_visible()
    there = sum(map(len, state(test, model)["resident"].values()))
    test.until(f"document.querySelector('#cell').textContent.startsWith('{there} of ')")


def is_locked(test):
    test.until("document.querySelector('#lambda-locked').textContent.includes('--lock-routing')")
    assert test.page.locator("#lambda").is_disabled() and test.page.locator("#lambda-lock").is_hidden()

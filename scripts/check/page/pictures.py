"""The screenshots of the docs."""

from .engine import set_lambda

# The demo model continues stories. Each with a seed, and the number of tokens after which a sentence of that answer ends.
STORIES = (
    ("The old house by the sea had been empty for years, and", 5, 70),
    ("“I have something to tell you,” said the captain,", 1, 48),
    ("The children ran down to the river,", 4, 52),
    ("The light of the lighthouse went out, and", 6, 27),
    ("It was a cold evening in November when the stranger came to the inn.", 2, 44),
)
# The second version has the next seed.
MORE = ("At night she went up to the lighthouse, and", 12, 64)
SAMPLING = {"temperature": 0.7, "top_p": 0.9}


def take(test, folder, scheme):
    """During an answer, just after a change of λ, with other conversations in the list."""
    page = test.open()
    for story in reversed(STORIES[1:]):
        tell(test, *story)
    page.click("#new-chat")
    text, seed, _ = STORIES[0]
    test.set(**SAMPLING, seed=seed, max_tokens=1600)
    test.send(text)
    page.wait_for_timeout(500)
    set_lambda(test, 0.1)
    page.wait_for_timeout(700)
    page.mouse.move(560, 660)
    save(page, folder / f"page-{scheme}.png")
    page.keyboard.press("Escape")
    set_lambda(test, 0)


def conversations(test, folder):
    """Versions of messages and a search, without the engine panel."""
    page = test.open()
    page.click("#engine-button")
    for story in reversed(STORIES):
        tell(test, *story)
    text, seed, tokens = MORE
    test.set(seed=seed)
    test.ask(text, tokens)
    test.answer().get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".answer.busy")
    test.wait_until_written()
    page.fill("#search", "lighthouse")
    page.wait_for_selector("#list mark")
    page.locator(".message.user").last.hover()
    test.until("document.querySelector('#state').textContent === 'ready'")
    save(page, folder / "page-conversations.png")
    page.fill("#search", "")
    page.set_viewport_size({"width": 390, "height": 780})
    page.reload()
    page.wait_for_selector(".answer")
    test.until("document.querySelector('#state').textContent === 'ready'")
    page.wait_for_timeout(200)
    save(page, folder / "page-phone.png")


def tell(test, text, seed, tokens):
    """A new conversation of a message and its answer."""
    test.page.click("#new-chat")
    test.set(**SAMPLING, seed=seed)
    test.ask(text, tokens)


def save(page, path):
    page.screenshot(path=path)
    assert path.stat().st_size < 300_000, path.stat().st_size
